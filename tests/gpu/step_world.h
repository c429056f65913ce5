// Random models and caches for decode steps, and a step made in both ways: one decode_step(), or the operations one by
// one.
#pragma once

#include <algorithm>
#include <functional>

#include "support.h"

namespace fut::test {

struct Shape {
  int64_t D, F;
  int H, J, E;
  int64_t V;
  int group, layers = 2;
  Dtype head = Dtype::int4;

  std::string name() const {
    return cat("D=", D, " F=", F, " H=", H, " J=", J, " E=", E, " V=", V, " G=", group, " L=", layers, " head ",
               name_of(head));
  }
};

inline HostBytes random_bytes(int64_t count) {
  HostBytes bytes((count + 3) / 4 * 4);
  for (size_t i = 0; i < bytes.size(); i += 4) {
    const uint32_t bits = random_bits()();
    memcpy(bytes.data() + i, &bits, 4);
  }
  bytes.resize(count);
  return bytes;
}

/// Codes anywhere, scales of both signs under which a normalised row gives outputs of about one; `scaled`: with an
/// input scale too.
inline PlacedWeight random_weight(Backend& gpu, const Shape& s, Dtype dtype, int64_t N, int64_t K,
                                  bool scaled = false) {
  const float unit = 1.0f / std::sqrt(static_cast<float>(K));
  if (dtype != Dtype::int4) return gpu.place(encode_weight(dtype, 0, normals(N * K, unit).data(), N, K, "weight"));
  HostWeight w;
  w.dtype = dtype;
  w.rows = N;
  w.cols = K;
  w.group = s.group;
  w.data = random_bytes(N * w.row_bytes());
  w.group_scale.resize(N * w.groups());
  for (Half& scale : w.group_scale) {
    const float size = unit / 4.6f * (0.75f + static_cast<float>(below(512)) / 1024.0f);
    scale = to_half(below(2) ? size : -size);
  }
  if (scaled) {
    for (float x : normals(K, 0.5f)) w.input_scale.push_back(std::exp2(x));
  }
  return gpu.place(w);
}

struct Layer {
  PlacedWeight qkv, o, gate_up, down;
  std::unique_ptr<Twin<float>> key_factor, value_factor, key_mean;
  float attention_guard, swiglu_guard;
};

struct Model {
  Model(Backend& backend, const Shape& shape, int64_t positions_) : gpu(backend), s(shape), positions(positions_) {
    embedding = random_weight(gpu, s, Dtype::bf16, s.V, s.D);
    head = random_weight(gpu, s, s.head, s.V, s.D);
    for (int l = 0; l < s.layers; ++l) {
      Layer layer;
      layer.qkv = random_weight(gpu, s, Dtype::int4, int64_t{s.H + 2 * s.J} * s.E, s.D, l % 2 == 0);
      layer.o = random_weight(gpu, s, Dtype::int4, s.D, int64_t{s.H} * s.E);
      layer.gate_up = random_weight(gpu, s, Dtype::int4, 2 * s.F, s.D, l % 3 == 0);
      layer.down = random_weight(gpu, s, Dtype::int4, s.D, s.F);
      for (auto* factor : {&layer.key_factor, &layer.value_factor}) {
        std::vector<float> powers(s.J);
        for (float& p : powers) p = std::ldexp(1.0f, static_cast<int>(below(3)) - 4);
        *factor = std::make_unique<Twin<float>>(gpu, powers);
      }
      if (l % 2 == 0) layer.key_mean = std::make_unique<Twin<float>>(gpu, normals(int64_t{s.J} * s.E, 0.2f));
      layer.attention_guard = std::ldexp(1.0f, static_cast<int>(below(4)) - 2);
      layer.swiglu_guard = std::ldexp(1.0f, l == 0 ? -17 : 0);  // the first layer's clamps now and then
      layers.push_back(std::move(layer));
    }
    std::vector<float> c, sn;
    for (int64_t p = 0; p < positions; ++p) {
      for (int i = 0; i < s.E / 2; ++i) {
        const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * i / s.E);
        c.push_back(static_cast<float>(std::cos(angle)));
        sn.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    cos = std::make_unique<Twin<float>>(gpu, c);
    sin = std::make_unique<Twin<float>>(gpu, sn);
  }

  Backend& gpu;
  Shape s;
  int64_t positions;
  PlacedWeight embedding, head;
  std::vector<Layer> layers;
  std::unique_ptr<Twin<float>> cos, sin;
};

/// The cache of a batch, all layers, with `past` random tokens of every sequence; and room for its steps.
class Cache {
 public:
  Cache(Backend& gpu, const Shape& shape, std::vector<int64_t> lengths, int64_t steps)
      : s(shape), first_past(lengths), B(static_cast<int64_t>(lengths.size())), layout{Dtype::int4, shape.E} {
    for (int64_t p : first_past) {
      width = std::max(width, (p + steps + 63) / 64);
      page_count += (p + steps + 63) / 64;
    }
    page_count += 3;
    std::vector<int64_t> ids(page_count);
    for (int64_t i = 0; i < page_count; ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), random_bits());
    table.assign(B * width, -1);
    for (int64_t b = 0; b < B; ++b) {
      start.push_back(b);
      slot.push_back(B - 1 - b);
      for (int64_t p = 0; p < (first_past[b] + steps + 63) / 64; ++p) {
        table[b * width + p] = ids.back();
        ids.pop_back();
      }
    }
    start.push_back(B);
    pages_stride = page_count * s.J * layout.page_bytes();
    tails_stride = B * 2 * s.J * 2 * kKvPageTokens * s.E;
    sinks_stride = B * s.J * 2 * kKvSinkTokens * s.E;
    pages = std::make_unique<Twin<uint8_t>>(gpu, pages_stride * s.layers, 0xff);
    tails = std::make_unique<Twin<Bf16>>(gpu, tails_stride * s.layers, 0xff);
    sinks = std::make_unique<Twin<Bf16>>(gpu, sinks_stride * s.layers, 0xff);
    restart();
    for (int l = 0; l < s.layers; ++l) {
      for (int64_t b = 0; b < B; ++b) fill(l, b);
    }
    restart();
  }

  /// As it was at first.
  void restart() {
    past = first_past;
    tail_in.clear();
    for (int64_t b = 0; b < B; ++b) tail_in.push_back(static_cast<int8_t>(b % 2));
    find_tail_out();
    pages->send();
    tails->send();
    sinks->send();
  }
  void advance() {
    tail_in = tail_out;
    for (int64_t& p : past) ++p;
    find_tail_out();
  }

  KvCache of_layer(const Model& m, int l) const {
    KvCache c;
    c.layout = layout;
    c.kv_heads = s.J;
    c.pages = pages->gpu() + l * pages_stride;
    c.page_count = page_count;
    c.page_table = table.data();
    c.table_width = width;
    c.tails = tails->gpu() + l * tails_stride;
    c.sinks = sinks->gpu() + l * sinks_stride;
    c.slot = slot.data();
    c.tail_in = tail_in.data();
    c.tail_out = tail_out.data();
    c.key_factor = m.layers[l].key_factor->gpu();
    c.value_factor = m.layers[l].value_factor->gpu();
    c.key_mean = m.layers[l].key_mean ? m.layers[l].key_mean->gpu() : nullptr;
    return c;
  }
  Batch batch() const { return {B, B, start.data(), past.data()}; }

  Shape s;
  std::vector<int64_t> first_past, past, start, slot, table;
  std::vector<int8_t> tail_in, tail_out;
  int64_t B, width = 1, page_count = 0, pages_stride = 0, tails_stride = 0, sinks_stride = 0;
  KvPageLayout layout;
  std::unique_ptr<Twin<uint8_t>> pages;
  std::unique_ptr<Twin<Bf16>> tails, sinks;

 private:
  void find_tail_out() {
    tail_out.clear();
    for (int64_t b = 0; b < B; ++b) {
      const bool same = past[b] / 64 == (past[b] + 1) / 64;
      tail_out.push_back(static_cast<int8_t>(same ? tail_in[b] : 1 - tail_in[b]));
    }
  }

  /// Whole pages, the sinks, and the tokens of the unfinished page; the rest stays poison.
  void fill(int l, int64_t b) {
    const int64_t scales = layout.key_scale_offset(), bytes = layout.page_bytes();
    for (int j = 0; j < s.J; ++j) {
      for (int64_t p = 0; p < past[b] / 64; ++p) {
        HostBytes page = random_bytes(bytes);
        for (int64_t i = scales; i < bytes; ++i) page[i] = 0x30 + page[i] % 16;  // E4M3, 0.5 to 1.9
        std::copy(page.begin(), page.end(),
                  pages->host.begin() + l * pages_stride + (table[b * width + p] * s.J + j) * bytes);
      }
      for (int which = 0; which < 2; ++which) {
        const int64_t tail = ((slot[b] * 2 + tail_in[b]) * s.J + j) * 2 + which, sink = (slot[b] * s.J + j) * 2 + which;
        fill_rows(tails->host.data() + l * tails_stride + tail * kKvPageTokens * s.E, past[b] % 64);
        fill_rows(sinks->host.data() + l * sinks_stride + sink * kKvSinkTokens * s.E,
                  std::min<int64_t>(past[b], kKvSinkTokens));
      }
    }
  }
  void fill_rows(Bf16* to, int64_t rows) const {
    for (int64_t i = 0; i < rows * s.E; ++i) to[i] = to_bf16(normal());
  }
};

struct Outcome {
  std::vector<float> logits;
  std::vector<uint8_t> pages;
  std::vector<Bf16> tails, sinks;
  int64_t saturated = 0;
};

/// A model and a batch, and a step of it in both ways.
class World {
 public:
  World(Backend& gpu, const Shape& shape, const std::vector<int64_t>& past, int64_t steps)
      : s(shape),
        model(gpu, shape, *std::max_element(past.begin(), past.end()) + steps),
        cache(gpu, shape, past, steps),
        B(cache.B),
        logits(gpu, B * s.V, 0xff),
        gpu_(gpu),
        x_(gpu, B * s.D, 0xff),
        squares_(gpu, B, 0xff),
        q_(gpu, B * s.H * s.E, 0xff),
        k_(gpu, B * s.J * s.E, 0xff),
        v_(gpu, B * s.J * s.E, 0xff),
        o_(gpu, B * s.H * s.E, 0xff),
        h_(gpu, B * s.F, 0xff) {}

  Outcome by_operations(const std::vector<int32_t>& tokens) {
    int64_t saturated = 0;
    Residual r;
    r.dtype = Dtype::f32;
    r.x = x_.gpu();
    r.sum_squares = squares_.gpu();
    r.eps = kEps;
    logits.send();
    gpu_.embed({r, model.embedding.weight, tokens.data(), B, s.D});
    for (int l = 0; l < s.layers; ++l) {
      const Layer& layer = model.layers[l];
      const KvCache c = cache.of_layer(model, l);
      Operand o, h;
      o.dtype = h.dtype = Dtype::f16;
      o.data = o_.gpu(), h.data = h_.gpu();
      o.scale = layer.attention_guard, h.scale = layer.swiglu_guard;
      o.saturated = h.saturated = &saturated;
      gpu_.qkv_rope_append({q_.gpu(), k_.gpu(), v_.gpu(), c, r, layer.qkv.weight, rope(), cache.batch(), s.H, s.D});
      gpu_.attention_decode({o, q_.gpu(), k_.gpu(), v_.gpu(), c, cache.batch(), s.H});
      gpu_.o_proj_residual({r, o, layer.o.weight, B});
      gpu_.gate_up_swiglu({h, r, layer.gate_up.weight, B});
      gpu_.down_residual({r, h, layer.down.weight, B});
    }
    gpu_.lm_head({logits.gpu(), r, model.head.weight, nullptr, B});
    return outcome(saturated);
  }

  /// `change` may turn the arguments into others.
  using Change = std::function<void(DecodeStepArgs& args, std::vector<DecodeLayer>& layers)>;
  bool whole(const std::vector<int32_t>& tokens, Outcome& out, const Change& change = {}) {
    int64_t saturated = 0;
    std::vector<DecodeLayer> layers;
    for (int l = 0; l < s.layers; ++l) {
      const Layer& from = model.layers[l];
      layers.push_back({from.qkv.weight, from.o.weight, from.gate_up.weight, from.down.weight, cache.of_layer(model, l),
                        from.attention_guard, from.swiglu_guard});
    }
    DecodeStepArgs args;
    args.logits = logits.gpu();
    args.tokens = tokens.data();
    args.embedding = model.embedding.weight;
    args.head = model.head.weight;
    args.layers = layers.data();
    args.layer_count = s.layers;
    args.rope = rope();
    args.batch = cache.batch();
    args.heads = s.H;
    args.width = s.D;
    args.feed_forward = s.F;
    args.eps = kEps;
    args.saturated = &saturated;
    if (change) change(args, layers);
    logits.send();
    const bool taken = gpu_.decode_step(args);
    out = outcome(saturated);
    return taken;
  }

  std::vector<int32_t> random_tokens() const {
    std::vector<int32_t> tokens(B);
    for (int32_t& t : tokens) t = static_cast<int32_t>(below(s.V));
    return tokens;
  }
  std::string name() const {
    std::string lengths;
    for (int64_t p : cache.first_past) lengths += cat(lengths.empty() ? "" : ",", p);
    return cat(s.name(), ", past ", lengths);
  }

  const Shape s;
  Model model;
  Cache cache;
  const int64_t B;
  Twin<float> logits;

 private:
  static constexpr float kEps = 1e-5f;

  Rope rope() const { return {model.cos->gpu(), model.sin->gpu(), s.E, model.positions}; }
  Outcome outcome(const int64_t& saturated) const {
    Outcome o;
    o.logits = logits.fetch("logits");
    o.pages = cache.pages->fetch("pages");
    o.tails = cache.tails->fetch("tails");
    o.sinks = cache.sinks->fetch("sinks");
    o.saturated = saturated;  // by the downloads above
    return o;
  }

  Backend& gpu_;
  Twin<float> x_, squares_;
  Twin<Bf16> q_, k_, v_;
  Twin<Half> o_, h_;
};

template <class T>
void same_bits(const std::string& name, const std::vector<T>& want, const std::vector<T>& got) {
  int64_t off = 0, first = -1;
  for (size_t i = 0; i < want.size(); ++i) {
    if (memcmp(&want[i], &got[i], sizeof(T)) == 0) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    ++off;
  }
  expect(off == 0, cat(name, ": ", off, " of ", want.size(), " elements differ, first ", first));
}

inline void same_outcome(const std::string& name, const Outcome& want, const Outcome& got) {
  same_bits(name + " logits", want.logits, got.logits);
  same_bits(name + " pages", want.pages, got.pages);
  same_bits(name + " tails", want.tails, got.tails);
  same_bits(name + " sinks", want.sinks, got.sinks);
  expect(want.saturated == got.saturated, cat(name, ": ", got.saturated, " values clamped, expected ", want.saturated));
}

}  // namespace fut::test
