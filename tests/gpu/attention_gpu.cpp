// The cache on the card: qkv_rope_append and qkv_rope_cache against the CPU's, pages bit for bit from the same rounded
// rows; attention_decode and attention_prefill against the CPU's over the very same cache. Ragged batches, lengths
// around page and tile borders, pages handed out from the top, NaN in every slot that was not written.
#include <algorithm>
#include <map>

#include "base/parallel.h"
#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

struct Heads {
  int H, J, E;
};

constexpr int64_t kPositions = 140000;

/// cos and sin (kPositions, E / 2), made once: it takes longer than the card's part of a case.
const std::vector<float> (&rope_tables(int E))[2] {
  static std::map<int, std::vector<float>[2]> made;
  std::vector<float>(&tables)[2] = made[E];
  if (!tables[0].empty()) return tables;
  for (std::vector<float>& table : tables) table.resize(kPositions * E / 2);
  parallel_for(kPositions, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < E / 2; ++i) {
      const double frequency = std::pow(10000.0, -2.0 * static_cast<double>(i) / E);
      for (int64_t p = begin; p < end; ++p) {
        tables[0][p * E / 2 + i] = static_cast<float>(std::cos(static_cast<double>(p) * frequency));
        tables[1][p * E / 2 + i] = static_cast<float>(std::sin(static_cast<double>(p) * frequency));
      }
    }
  });
  return tables;
}

/// A batch with its cache, on host and card: `past` random tokens of every sequence are there already. The pool has
/// `spare` pages that nobody uses, below all others.
struct World {
  World(Backend& gpu, Dtype kv, Heads shape, std::vector<int64_t> lengths, std::vector<int64_t> rows, int64_t spare = 5)
      : dtype(kv), heads(shape), past(std::move(lengths)), layout{kv, shape.E}, B(static_cast<int64_t>(past.size())) {
    start.push_back(0);
    for (int64_t r : rows) start.push_back(start.back() + r);
    width = 1;
    int64_t pages_needed = 0;
    for (int64_t b = 0; b < B; ++b) {
      const int64_t needed = (past[b] + rows[b] + 63) / 64;
      width = std::max(width, needed);
      pages_needed += needed;
    }
    page_count = pages_needed + spare;
    table.assign(B * width, 0);
    int64_t next = page_count;  // from the top
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t p = 0; p < (past[b] + rows[b] + 63) / 64; ++p) table[b * width + p] = --next;
    }
    for (int64_t b = 0; b < B; ++b) {
      slot.push_back(B - 1 - b);
      tail_in.push_back(static_cast<int8_t>(b % 2));
      const bool same = past[b] / 64 == (past[b] + rows[b]) / 64;
      tail_out.push_back(static_cast<int8_t>(same ? b % 2 : 1 - b % 2));
    }
    const int64_t J = heads.J, E = heads.E;
    pages = std::make_unique<Twin<uint8_t>>(gpu, page_count * J * layout.page_bytes(), 0xff);
    tails = std::make_unique<Twin<Bf16>>(gpu, B * 2 * J * 2 * 64 * E, 0xff);
    sinks = std::make_unique<Twin<Bf16>>(gpu, B * J * 2 * kKvSinkTokens * E, 0xff);
    std::vector<float> factors(J);
    for (float& f : factors) f = std::ldexp(1.0f, static_cast<int>(below(4)) - 4);
    key_factor = std::make_unique<Twin<float>>(gpu, factors);
    value_factor = std::make_unique<Twin<float>>(gpu, factors);
    key_mean = std::make_unique<Twin<float>>(gpu, normals(J * E, 0.2f));
    for (int64_t b = 0; b < B; ++b) {
      for (int j = 0; j < J; ++j) fill(b, j);
    }
    pages->send();
    tails->send();
    sinks->send();
  }

  /// The sequence's past tokens, as earlier steps would have left them.
  void fill(int64_t b, int j) {
    const int64_t J = heads.J, E = heads.E;
    std::vector<Bf16> rows[2] = {std::vector<Bf16>(64 * E), std::vector<Bf16>(64 * E)};
    std::vector<float> k(E), v(E);
    for (int64_t first = 0; first < past[b]; first += 64) {
      uint8_t* page = pages->host.data() + (table[b * width + first / 64] * J + j) * layout.page_bytes();
      const int64_t count = std::min<int64_t>(64, past[b] - first);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t c = 0; c < E; ++c) {
          rows[0][i * E + c] = to_bf16(normal());
          rows[1][i * E + c] = to_bf16(normal() * 0.5f);
          k[c] = to_f32(rows[0][i * E + c]);
          v[c] = to_f32(rows[1][i * E + c]);
        }
        if (dtype != Dtype::int4) kv_store_token(page, layout, static_cast<int>(i), k.data(), v.data());
      }
      if (dtype != Dtype::int4) continue;
      if (count == 64)
        kv_quantise_page(page, layout, rows[0].data(), rows[1].data(), key_factor->host[j], value_factor->host[j]);
      for (int which = 0; which < 2; ++which) {
        if (first == 0) {
          Bf16* sink = sinks->host.data() + ((slot[b] * J + j) * 2 + which) * kKvSinkTokens * E;
          std::copy_n(rows[which].begin(), std::min<int64_t>(count, kKvSinkTokens) * E, sink);
        }
        if (first / 64 == past[b] / 64) {
          Bf16* tail = tails->host.data() + (((slot[b] * 2 + tail_in[b]) * J + j) * 2 + which) * 64 * E;
          std::copy_n(rows[which].begin(), count * E, tail);
        }
      }
    }
  }

  Batch batch() const { return {B, start.back(), start.data(), past.data()}; }
  KvCache cache(bool on_card) const {
    KvCache c;
    c.layout = layout;
    c.kv_heads = heads.J;
    c.page_count = page_count;
    c.page_table = table.data();
    c.table_width = width;
    c.slot = slot.data();
    c.tail_in = tail_in.data();
    c.tail_out = tail_out.data();
    c.pages = on_card ? pages->gpu() : pages->host.data();
    c.tails = on_card ? tails->gpu() : tails->host.data();
    c.sinks = on_card ? sinks->gpu() : sinks->host.data();
    c.key_factor = on_card ? key_factor->gpu() : key_factor->host.data();
    c.value_factor = on_card ? value_factor->gpu() : value_factor->host.data();
    c.key_mean = on_card ? key_mean->gpu() : key_mean->host.data();
    return c;
  }

  Dtype dtype;
  Heads heads;
  std::vector<int64_t> past, start, table, slot;
  std::vector<int8_t> tail_in, tail_out;
  KvPageLayout layout;
  int64_t B, width = 1, page_count = 0;
  std::unique_ptr<Twin<uint8_t>> pages;
  std::unique_ptr<Twin<Bf16>> tails, sinks;
  std::unique_ptr<Twin<float>> key_factor, value_factor, key_mean;
};

/// Rows near one another: equal up to a rounding to BF16 that went the other way, after sums of a head's length.
void compare_bf16(const std::string& name, const std::vector<Bf16>& got, const std::vector<Bf16>& want, int64_t width) {
  compare(
      name, static_cast<int64_t>(got.size()), width, [&](int64_t i) { return to_f32(got[i]); },
      [&](int64_t i) { return to_f32(want[i]); },
      [&](int64_t i) { return std::fabs(to_f32(want[i])) * 0x1.1p-7 + 2e-3; });
}

/// The card's cache after a step whose rounded keys and values were k and v.
void check_cache(const World& w, const std::string& name, const std::vector<Bf16>& k_rows,
                 const std::vector<Bf16>& v_rows) {
  const int64_t J = w.heads.J, E = w.heads.E;
  const std::vector<uint8_t> pages = w.pages->fetch("pages");
  const std::vector<Bf16> tails = w.tails->fetch("tails"), sinks = w.sinks->fetch("sinks");
  if (w.dtype != Dtype::int4) {  // values of every stored token; the CPU wrote the same positions
    std::vector<float> k(E), v(E), k2(E), v2(E);
    double worst = 0;
    for (int64_t b = 0; b < w.B; ++b) {
      const int64_t end = w.past[b] + w.start[b + 1] - w.start[b];
      for (int64_t p = 0; p < end; ++p) {
        for (int64_t j = 0; j < J; ++j) {
          const int64_t at = (w.table[b * w.width + p / 64] * J + j) * w.layout.page_bytes();
          kv_load_token(pages.data() + at, w.layout, static_cast<int>(p % 64), k.data(), v.data());
          kv_load_token(w.pages->host.data() + at, w.layout, static_cast<int>(p % 64), k2.data(), v2.data());
          for (int64_t c = 0; c < E; ++c) {
            const double unit = w.dtype == Dtype::bf16 ? 0x1.1p-7 : 0x1.1p-3;
            worst = std::max({worst, std::fabs(k[c] - k2[c]) / (std::fabs(k2[c]) * unit + 0.01),
                              std::fabs(v[c] - v2[c]) / (std::fabs(v2[c]) * unit + 0.01)});
          }
        }
      }
    }
    expect(worst <= 1.0, cat(name, ": a stored token is off by ", worst, " of the tolerance"));
    return;
  }
  // INT4: the pages that this step filled hold the codes that the CPU makes of the card's own rows.
  int64_t full = 0;
  for (int64_t b = 0; b < w.B; ++b) {
    const int64_t end = w.past[b] + w.start[b + 1] - w.start[b];
    for (int64_t page = w.past[b] / 64; page < end / 64; ++page) {
      for (int64_t j = 0; j < J; ++j, ++full) {
        std::vector<Bf16> rows[2] = {std::vector<Bf16>(64 * E), std::vector<Bf16>(64 * E)};
        for (int64_t p = page * 64; p < page * 64 + 64; ++p) {
          for (int which = 0; which < 2; ++which) {
            const Bf16* tail =
                tails.data() + (((w.slot[b] * 2 + w.tail_in[b]) * J + j) * 2 + which) * 64 * E + p % 64 * E;
            const std::vector<Bf16>& now = which ? v_rows : k_rows;
            std::copy_n(p < w.past[b] ? tail : now.data() + ((w.start[b] + p - w.past[b]) * J + j) * E, E,
                        rows[which].data() + p % 64 * E);
          }
        }
        std::vector<uint8_t> want(w.layout.page_bytes());
        kv_quantise_page(want.data(), w.layout, rows[0].data(), rows[1].data(), w.key_factor->host[j],
                         w.value_factor->host[j]);
        const uint8_t* got = pages.data() + (w.table[b * w.width + page] * J + j) * w.layout.page_bytes();
        expect(memcmp(got, want.data(), want.size()) == 0,
               cat(name, ": page ", page, " of sequence ", b, ", head ", j, " differs from the CPU's codes"));
      }
    }
  }
  // Sinks and tails: compare what is a number on the CPU's side; everything else must still be poison.
  for (const auto& [what, got, want] :
       {std::tuple{"tails", &tails, &w.tails->host}, std::tuple{"sinks", &sinks, &w.sinks->host}}) {
    double worst = 0;
    for (size_t i = 0; i < got->size(); ++i) {
      const float g = to_f32((*got)[i]), h = to_f32((*want)[i]);
      if (std::isnan(h) != std::isnan(g)) worst = INFINITY;
      if (!std::isnan(h)) worst = std::max(worst, std::fabs(double{g} - h) / (std::fabs(h) * 0x1.1p-7 + 4e-3));
    }
    expect(worst <= 1.0, cat(name, ": ", what, " off by ", worst, " of the tolerance"));
  }
  printf("ok     %s (%lld pages compared bit for bit)\n", name.c_str(), static_cast<long long>(full));
}

/// What a model may have beside the products: biases and norms over heads, and heads that turn whole or by half.
enum class Extras { none, whole_turn, half_turn };

/// qkv on both, then attention on both over the card's cache.
void step(Backend& gpu, Backend& cpu, Dtype kv, Heads heads, Dtype weight, std::vector<int64_t> past,
          std::vector<int64_t> rows, bool decode, const char* what, int64_t spare = 5, Extras extras = Extras::none) {
  World w(gpu, kv, heads, past, rows, spare);
  const int64_t T = w.start.back(), H = heads.H, J = heads.J, E = heads.E, D = 192, N = (H + 2 * J) * E;
  const std::string name = cat(what, " ", name_of(kv), " H=", H, " J=", J, " E=", E, " weights ", name_of(weight));
  HostWeight host = encode_weight(weight, 64, normals(N * D, 0.07f).data(), N, D, "qkv");
  if (extras != Extras::none) host.bias = normals(N);
  const Phase phase = decode ? Phase::decode : Phase::prefill;
  const PlacedWeight on_card = gpu.place(host, phase), on_host = cpu.place(host, phase);
  const int turned = extras == Extras::half_turn ? heads.E / 2 : heads.E;
  const auto& [cos, sin] = rope_tables(turned);
  Twin<float> q_norm(gpu, normals(E)), k_norm(gpu, normals(E));
  Twin<float> cos_table(gpu, cos), sin_table(gpu, sin), x(gpu, normals(T * D)), squares(gpu, T, 0);
  Twin<Bf16> short_x(gpu, T * D, 0);
  Twin<E4m3> x8(gpu, T * D, 0);
  Twin<float> x8_scale(gpu, T, 0);
  for (int64_t t = 0; t < T; ++t) {
    double sum = 0;
    x8_scale.host[t] = e4m3_scale(largest_magnitude(&x.host[t * D], D));
    for (int64_t i = t * D; i < (t + 1) * D; ++i) {
      short_x.host[i] = to_bf16(x.host[i]);
      x8.host[i] = to_e4m3(x.host[i] / x8_scale.host[t]);
      sum += std::pow(decode ? double{x.host[i]} : double{to_f32(short_x.host[i])}, 2);
    }
    squares.host[t] = static_cast<float>(sum);
  }
  squares.send(), short_x.send(), x8.send(), x8_scale.send();
  Twin<Bf16> q(gpu, T * H * E, 0xff), k(gpu, T * J * E, 0xff), v(gpu, T * J * E, 0xff);
  const auto qkv_args = [&](bool card) {
    QkvArgs a;
    a.q = card ? q.gpu() : q.host.data();
    a.k = card ? k.gpu() : k.host.data();
    a.v = card ? v.gpu() : v.host.data();
    a.cache = w.cache(card);
    a.residual.x = card ? x.gpu() : x.host.data();
    if (!decode) {
      a.residual.dtype = Dtype::bf16;
      a.residual.x = card ? short_x.gpu() : short_x.host.data();
      a.residual.x8 = card ? x8.gpu() : x8.host.data();
      a.residual.x8_scale = card ? x8_scale.gpu() : x8_scale.host.data();
    }
    a.residual.sum_squares = card ? squares.gpu() : squares.host.data();
    a.qkv = card ? on_card.weight : on_host.weight;
    a.rope = {card ? cos_table.gpu() : cos_table.host.data(), card ? sin_table.gpu() : sin_table.host.data(), turned,
              kPositions};
    if (extras != Extras::none) {
      a.q_norm = card ? q_norm.gpu() : q_norm.host.data();
      a.k_norm = card ? k_norm.gpu() : k_norm.host.data();
    }
    a.batch = w.batch();
    a.heads = heads.H;
    a.width = D;
    return a;
  };
  if (decode) {
    gpu.qkv_rope_append(qkv_args(true));
    cpu.qkv_rope_append(qkv_args(false));
  } else {
    gpu.qkv_rope_cache(qkv_args(true));
    cpu.qkv_rope_cache(qkv_args(false));
  }
  const std::vector<Bf16> got_q = q.fetch("q"), got_k = k.fetch("k"), got_v = v.fetch("v");
  compare_bf16(name + " q", got_q, q.host, H * E);
  compare_bf16(name + " k", got_k, k.host, J * E);
  compare_bf16(name + " v", got_v, v.host, J * E);
  check_cache(w, name + " cache", got_k, got_v);

  // The same inputs for both from here on: the card's.
  q.host = got_q, k.host = got_k, v.host = got_v;
  w.pages->host = w.pages->fetch("pages"), w.tails->host = w.tails->fetch("tails"),
  w.sinks->host = w.sinks->fetch("sinks");
  Twin<Half> o(gpu, T * H * E, 0xff);
  Twin<float> exact(gpu, T * H * E, 0xff);
  const auto attention_args = [&](bool card) {
    AttentionArgs a;
    a.out.dtype = card ? Dtype::f16 : Dtype::f32;
    a.out.data = card ? static_cast<void*>(o.gpu()) : exact.host.data();
    a.out.scale = card ? 0.5f : 1.0f;
    a.q = card ? q.gpu() : q.host.data();
    a.k = card ? k.gpu() : k.host.data();
    a.v = card ? v.gpu() : v.host.data();
    a.cache = w.cache(card);
    a.batch = w.batch();
    a.heads = heads.H;
    return a;
  };
  if (decode) {
    gpu.attention_decode(attention_args(true));
    cpu.attention_decode(attention_args(false));
  } else {
    gpu.attention_prefill(attention_args(true));
    cpu.attention_prefill(attention_args(false));
  }
  const std::vector<Half> got = o.fetch("o");
  // A softmax weight is rounded to FP16 (2^-12; BF16 rows: 2^-17), and so is the result. Values are 0.5 in size and 2.5
  // at most; over n tokens the errors average out as 1 / sqrt(n). INT4 meets FP16 weights only after 64 tokens, E4M3 at
  // once.
  // Prefill: a weight is rounded to BF16 (2^-9), and so is an E4M3 key times its scale.
  const double decode_error = kv == Dtype::e4m3 ? 2.5 * 0x1p-12 : 2e-4, weight_error = decode ? decode_error
                                                                                       : kv == Dtype::e4m3
                                                                                           ? 2.5 * 0x1p-8
                                                                                           : 2.5 * 0x1p-9;
  compare(
      name + " attention", T * H * E, H * E, [&](int64_t i) { return to_f32(got[i]) * 0.5f; },
      [&](int64_t i) { return exact.host[i]; },
      [&](int64_t i) { return std::fabs(exact.host[i]) * 0x1p-10 + weight_error; });
  if (decode) {
    o.send();
    gpu.attention_decode(attention_args(true));
    expect(memcmp(o.fetch("o").data(), got.data(), o.bytes()) == 0, name + ": the same bits again");
  }
}

/// A sequence alone gives the bits that it gives in a batch.
void alone_and_together(Backend& gpu, Dtype dtype) {
  const Heads heads{8, 2, 128};
  const std::vector<int64_t> past = {700, 63, 130};
  World w(gpu, dtype, heads, past, {1, 1, 1});
  const int64_t row = int64_t{heads.H} * heads.E;
  std::vector<Bf16> queries(3 * row);
  for (Bf16& x : queries) x = to_bf16(normal() * 0.1f);
  Twin<Bf16> q(gpu, queries);
  Twin<Half> o(gpu, 3 * row, 0xff), one(gpu, row, 0xff);
  AttentionArgs a;
  a.q = q.gpu();
  a.cache = w.cache(true);
  a.heads = heads.H;
  a.out.dtype = Dtype::f16;
  std::vector<int64_t> past_before = {700, 62, 129};  // the row itself is in the cache already
  a.batch = w.batch();
  a.batch.past = past_before.data();
  past_before[0] = 699;
  a.out.data = o.gpu();
  gpu.attention_decode(a);
  const std::vector<Half> together = o.fetch("o");
  const int64_t start[2] = {0, 1};
  for (int64_t b = 0; b < 3; ++b) {
    a.batch = {1, 1, start, past_before.data() + b};
    a.q = q.gpu() + b * row;
    a.out.data = one.gpu();
    a.cache.page_table = w.table.data() + b * w.width;
    a.cache.slot = w.slot.data() + b;
    a.cache.tail_in = w.tail_in.data() + b;
    a.cache.tail_out = w.tail_out.data() + b;
    gpu.attention_decode(a);
    expect(memcmp(one.fetch("one").data(), together.data() + b * row, one.bytes()) == 0,
           cat("attention ", name_of(dtype), ": sequence ", b, " alone differs from the batch"));
  }
  printf("ok     attention %s alone and in a batch\n", name_of(dtype));
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";  // under compute-sanitizer
  return run_on_card([quick](Backend& gpu) {
    const std::unique_ptr<Backend> cpu = make_cpu_backend();
    const std::vector<int64_t> ragged =
        quick ? std::vector<int64_t>{0, 15, 63, 130}
              : std::vector<int64_t>{0, 1, 14, 15, 16, 62, 63, 64, 65, 127, 128, 129, 500, 1000, 4095, 8192};
    std::vector<int64_t> ones(ragged.size(), 1);
    if (!quick) ones[3] = 0;  // a sequence without a row
    for (Dtype kv : {Dtype::int4, Dtype::bf16, Dtype::e4m3}) {
      for (Heads heads : {Heads{4, 4, 64}, Heads{9, 3, 64}, Heads{8, 2, 128}, Heads{8, 1, 128}, Heads{16, 1, 64},
                          Heads{12, 1, 128}}) {
        if (quick && heads.E == 128 && heads.J == 1 && heads.H == 8) continue;
        step(gpu, *cpu, kv, heads, Dtype::int4, ragged, ones, true, "decode");
      }
      step(gpu, *cpu, kv, {8, 2, 128}, Dtype::bf16, {0, 0, 5, 60, 64, 100, 130},
           quick ? std::vector<int64_t>{1, 17, 3, 9, 1, 30, 5} : std::vector<int64_t>{1, 17, 130, 9, 64, 300, 0}, false,
           "prefill");
      for (Dtype weight : {Dtype::bf16, Dtype::e4m3}) {
        if (quick) continue;
        step(gpu, *cpu, kv, {9, 3, 64}, weight, {0, 63, 20}, {200, 1, 44}, false, "prefill");
        step(gpu, *cpu, kv, {8, 2, 128}, weight, {0, 7}, {250, 9}, false, "prefill");
        step(gpu, *cpu, kv, {6, 2, 128}, weight, {0, 60, 100}, {17, 9, 200}, false, "prefill, biases, norms", 5,
             Extras::whole_turn);
      }
      if (!quick) step(gpu, *cpu, kv, {8, 2, 128}, Dtype::e4m3, {131071, 40000}, {1, 1}, true, "decode, long");
      alone_and_together(gpu, kv);
    }
    for (Dtype kv : {Dtype::int4, Dtype::bf16}) {
      for (int E : {64, 128})
        step(gpu, *cpu, kv, {6, 2, E}, Dtype::int4, {0, 15, 63, 130}, {1, 1, 1, 1}, true,
             "decode, with biases and norms", 5, Extras::half_turn);
      step(gpu, *cpu, kv, {6, 2, 128}, Dtype::bf16, {0, 60, 100}, {17, 9, 200}, false, "prefill, with biases and norms",
           5, Extras::half_turn);
    }
    // Case F06: pages that lie beyond 2^32 bytes of the pool.
    const int64_t pages = (1ll << 32) / (8 * KvPageLayout{Dtype::int4, 128}.page_bytes()) + 1;
    if (!quick) step(gpu, *cpu, Dtype::int4, {16, 8, 128}, Dtype::int4, {700, 63, 8191}, {1, 1, 1}, true, "F06", pages);
  });
}
