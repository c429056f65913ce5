// decode_step() on the card: the logits and the cache of a step made by one kernel, bit for bit what the same backend's
// operations leave one by one, and the same from run to run. Random models, one to eight rows of ragged lengths,
// several steps in a row across the edges of pages, NaN in everything that was not written. And what it refuses,
// untouched.
//
//   step_gpu [--quick]     --quick: few cases, for compute-sanitizer
#include <algorithm>
#include <cstdlib>
#include <functional>

#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

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

constexpr Shape kShapes[] = {
    {576, 1536, 9, 3, 64, 1021, 64, 3},
    {4096, 1536, 32, 8, 128, 1003, 128},
    {128, 192, 2, 2, 64, 17, 64},     // fewer tiles than multiprocessors
    {576, 1536, 9, 3, 64, 997, 128},  // a short last group
    {576, 4096, 9, 9, 64, 131, 32, 3},
    {1536, 4096, 12, 12, 128, 509, 64},
    {4096, 576, 32, 8, 128, 2111, 32},
    {512, 4096, 8, 1, 64, 333, 32},
    {1024, 576, 16, 2, 128, 515, 64},
    {512, 14336, 4, 1, 128, 129, 64},  // from three rows on, the down product's activations come in pieces
    {1536, 576, 12, 4, 64, 301, 64, 2, Dtype::bf16},
    {576, 1536, 9, 3, 64, 77, 32, 2, Dtype::e4m3},
};
const std::vector<int64_t> kLengths = {0, 14, 15, 16, 62, 63, 64, 65, 127, 1023, 2015};

std::vector<uint8_t> random_bytes(int64_t count) {
  std::vector<uint8_t> bytes((count + 3) / 4 * 4);
  for (size_t i = 0; i < bytes.size(); i += 4) {
    const uint32_t bits = random_bits()();
    memcpy(bytes.data() + i, &bits, 4);
  }
  bytes.resize(count);
  return bytes;
}

/// Codes anywhere, scales of both signs under which a normalised row gives outputs of about one.
PlacedWeight random_weight(Backend& gpu, const Shape& s, Dtype dtype, int64_t N, int64_t K) {
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
      layer.qkv = random_weight(gpu, s, Dtype::int4, int64_t{s.H + 2 * s.J} * s.E, s.D);
      layer.o = random_weight(gpu, s, Dtype::int4, s.D, int64_t{s.H} * s.E);
      layer.gate_up = random_weight(gpu, s, Dtype::int4, 2 * s.F, s.D);
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
        std::vector<uint8_t> page = random_bytes(bytes);
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

void same_outcome(const std::string& name, const Outcome& want, const Outcome& got) {
  same_bits(name + " logits", want.logits, got.logits);
  same_bits(name + " pages", want.pages, got.pages);
  same_bits(name + " tails", want.tails, got.tails);
  same_bits(name + " sinks", want.sinks, got.sinks);
  expect(want.saturated == got.saturated, cat(name, ": ", got.saturated, " values clamped, expected ", want.saturated));
}

int64_t clamped = 0;  ///< values, in all cases: that counter must have been seen at work

/// `steps` steps by operations, then three times the same by decode_step().
void check_world(World& w, int64_t steps) {
  const int before = failures;
  std::vector<std::vector<int32_t>> tokens;
  std::vector<Outcome> want;
  for (int64_t i = 0; i < steps; ++i) {
    tokens.push_back(w.random_tokens());
    want.push_back(w.by_operations(tokens[i]));
    w.cache.advance();
    const auto& logits = want[i].logits;
    expect(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }),
           w.name() + ": logits that are no numbers");
    clamped += want[i].saturated;
  }
  for (int turn = 0; turn < 3; ++turn) {
    w.cache.restart();
    for (int64_t i = 0; i < steps; ++i) {
      Outcome got;
      const std::string name = cat(w.name(), ", step ", i, ", run ", turn);
      expect(w.whole(tokens[i], got), name + ": refused");
      same_outcome(name, want[i], got);
      w.cache.advance();
    }
  }
  if (failures == before) printf("ok     %s: %lld steps\n", w.name().c_str(), static_cast<long long>(steps));
  fflush(stdout);
}

void check(Backend& gpu, const Shape& s, const std::vector<int64_t>& past, int64_t steps) {
  World w(gpu, s, past, steps);
  check_world(w, steps);
}

std::unique_ptr<Backend> backend_of(const char* rows) {
  struct Setting {
    ~Setting() { unsetenv("FUT_STEP_ROWS"); }
  } setting;
  setenv("FUT_STEP_ROWS", rows, 1);
  return make_cuda_backend();
}

/// decode_step() returns false and leaves logits and cache alone.
void refuses(World& w, const std::string& what, const World::Change& change = {}) {
  w.cache.restart();
  Outcome got;
  const bool taken = w.whole(w.random_tokens(), got, change);
  expect(!taken, what + " was not refused");
  const Outcome untouched{w.logits.host, w.cache.pages->host, w.cache.tails->host, w.cache.sinks->host};
  same_outcome("refused: " + what, untouched, got);
  printf("ok     refused: %s\n", what.c_str());
}

template <class Run>
void throws(const std::string& what, const std::vector<std::string>& words, Run run) {
  try {
    run();
  } catch (const Error& error) {
    const std::string said = error.what();
    for (const std::string& word : words)
      expect(said.find(word) != said.npos, cat(what, ": no word of ", word, " in: ", said));
    printf("ok     %s: %s\n", what.c_str(), said.c_str());
    return;
  }
  expect(false, what + " was no error");
}

void check_refusals(Backend& eight) {
  const Shape plain{128, 192, 2, 2, 64, 17, 64};
  World w(eight, plain, {20, 70}, 1);
  using Layers = std::vector<DecodeLayer>;
  const auto all_weights = [](Layers& layers, Dtype dtype, const float* scale) {
    for (DecodeLayer& l : layers) {
      for (Weight* x : {&l.qkv, &l.o, &l.gate_up, &l.down}) x->dtype = dtype, x->group = 0, x->scale = scale;
    }
  };
  for (const Dtype kv : {Dtype::bf16, Dtype::e4m3}) {
    refuses(w, cat("a cache in ", name_of(kv)), [&](DecodeStepArgs&, Layers& layers) {
      for (DecodeLayer& l : layers) l.cache.layout.dtype = kv;
    });
    refuses(w, cat("weights in ", name_of(kv)), [&](DecodeStepArgs& args, Layers& layers) {
      all_weights(layers, kv, w.model.cos->gpu());
      args.head = layers[0].qkv;
      args.head.rows = plain.V;
    });
  }
  refuses(w, "one layer's cache in bf16",
          [](DecodeStepArgs&, Layers& layers) { layers[1].cache.layout.dtype = Dtype::bf16; });
  refuses(w, "one weight in bf16", [](DecodeStepArgs&, Layers& l) { l[1].o.dtype = Dtype::bf16, l[1].o.group = 0; });
  refuses(w, "one weight in groups of 32", [](DecodeStepArgs&, Layers& layers) { layers[1].down.group = 32; });
  refuses(w, "half the rotary width", [](DecodeStepArgs& args, Layers&) { args.rope.rotary_dim = 32; });
  refuses(w, "no layers", [](DecodeStepArgs& args, Layers&) { args.layer_count = 0; });
  const std::vector<int64_t> behind = {0, 0, 1}, none = {0, 0, 0};
  refuses(w, "a sequence without a row", [&](DecodeStepArgs& args, Layers&) {
    args.batch = {2, 1, behind.data(), w.cache.past.data()};
  });
  refuses(w, "no rows", [&](DecodeStepArgs& args, Layers&) { args.batch = {2, 0, none.data(), w.cache.past.data()}; });
  const std::vector<int64_t> other_slots = {1, 0};
  refuses(w, "layers with slots of their own",
          [&](DecodeStepArgs&, Layers& layers) { layers[1].cache.slot = other_slots.data(); });

  const auto shape = [](Backend& gpu, const Shape& s, int rows, const char* what) {
    World other(gpu, s, std::vector<int64_t>(rows, 5), 1);
    refuses(other, what);
  };
  shape(eight, plain, 9, "nine rows");
  shape(eight, {128, 192, 9, 1, 64, 17, 64}, 1, "nine query heads a KV head");
  shape(eight, {128, 192, 4, 2, 32, 17, 64}, 1, "heads of 32");
  shape(eight, {8192, 64, 2, 1, 64, 33, 64}, 8, "activations that leave no room for weights");
  shape(*backend_of("99"), plain, 9, "nine rows, where 99 are allowed");
  shape(*make_cuda_backend(), plain, 2, "two rows, where one is allowed");
  shape(*backend_of("0"), plain, 1, "one row, where none is allowed");

  Outcome out;
  const std::vector<int32_t> tokens = {3, 4}, outside = {3, 17};
  const std::vector<int64_t> far = {20, 700};
  throws("a token outside the vocabulary", {"token id 17", "17"}, [&] { w.whole(outside, out); });
  throws("a position beyond the rotary table", {"decode_step", "sequence 1 reaches 701"},
         [&] { w.whole(tokens, out, [&](DecodeStepArgs& args, Layers&) { args.batch.past = far.data(); }); });
  throws("a page that is not there", {"decode_step", "names page", "of 1"}, [&] {
    w.whole(tokens, out, [](DecodeStepArgs&, Layers& layers) {
      for (DecodeLayer& l : layers) l.cache.page_count = 1;
    });
  });
  throws("a weight of another shape", {"decode_step", "down"},
         [&] { w.whole(tokens, out, [](DecodeStepArgs&, Layers& layers) { layers[1].down = layers[1].o; }); });
  for (const char* rows : {"", "eight", "-1", "100"})
    throws(cat("FUT_STEP_ROWS=", rows), {"FUT_STEP_ROWS", "0 to 99"}, [&] { backend_of(rows); });
}

/// A step whose blocks wait for what never comes ends with an error that says for what, and the next one is right.
void check_hangs(Backend& one) {
  const Shape s = kShapes[0];
  check(one, kShapes[1], {5}, 1);  // tags that are no multiple of this model's
  World w(one, s, {63}, 2);
  const std::vector<int32_t> tokens = w.random_tokens();
  Outcome out;
  const std::pair<LostRow, std::vector<std::string>> cases[] = {
      {LostRow::qkv, {"decode step", "for y of layer 0"}}, {LostRow::down, {"decode step", "for x_in of layer 1"}}};
  for (const auto& [row, words] : cases) {
    w.cache.restart();
    throws("a row that never arrives", words, [&] {
      lose_row(one, row);
      w.whole(tokens, out);
    });
    w.cache.restart();
    check_world(w, 2);
  }
}

/// `count` lengths out of kLengths, from `first` on, in turn.
std::vector<int64_t> lengths(int count, size_t first) {
  std::vector<int64_t> all;
  for (int i = 0; i < count; ++i) all.push_back(kLengths[(first + i) % kLengths.size()]);
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  return run_on_card([quick](Backend& one) {
    const std::unique_ptr<Backend> eight = backend_of("8");
    if (quick) {
      check(one, kShapes[0], {63}, 2);
      check(*eight, kShapes[2], {62, 130, 0}, 3);
      return;
    }
    for (const int64_t past : kLengths) {
      check(one, kShapes[0], {past}, 3);
      check(one, kShapes[1], {past}, 3);
    }
    size_t turn = 0;
    for (const Shape& s : kShapes) {
      check(one, s, {lengths(1, 4 + turn)[0]}, 2);  // 62 and on
      check(one, s, {1900 + below(200)}, 2);
      check(*eight, s, lengths(8, turn++), 3);
    }
    for (int rows = 1; rows <= 8; ++rows) {
      check(*eight, kShapes[0], lengths(rows, 3 * static_cast<size_t>(rows)), 4);
      check(*eight, kShapes[1], lengths(rows, 5 * static_cast<size_t>(rows)), 2);
    }
    for (const int rows : {2, 6}) check(*eight, {8192, 64, 2, 1, 64, 33, 64}, lengths(rows, 3), 2);
    expect(clamped > 0, "no value was ever clamped: the counter was not tested");
    check_refusals(*eight);
    check_hangs(one);
  });
}
