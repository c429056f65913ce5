// attention_prefill on the card against a softmax in FP64 over the values that a query must see (kv_page.h). Cases rise
// from one token to ragged batches with a past, each for itself, so that the first that fails says which part is wrong:
// with q = 0 all weights are equal, and only masks, V and the sums are at work. NaN in every slot that is not written,
// and in every row of another sequence (`alone`). With --time: TFLOP/s.
#include <algorithm>

#include "base/parallel.h"
#include "cuda/replay.h"
#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

struct Heads {
  int H, J, E;
};

float log2_scale(int E) { return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(E))); }

/// A batch whose cache is as qkv_rope_cache leaves it.
struct World {
  World(Backend& backend, Dtype dtype, Heads shape, std::vector<int64_t> before, std::vector<int64_t> rows,
        float query_size = 1.5f)
      : gpu(backend), kv(dtype), heads(shape), past(std::move(before)), layout{dtype, shape.E} {
    B = static_cast<int64_t>(past.size());
    const int64_t J = heads.J, E = heads.E;
    start.push_back(0);
    for (int64_t r : rows) start.push_back(start.back() + r);
    int64_t pages_needed = 0;
    for (int64_t b = 0; b < B; ++b) {
      width = std::max(width, (end(b) + 63) / 64);
      pages_needed += (end(b) + 63) / 64;
    }
    page_count = pages_needed + 3;
    table.assign(B * width, 0);
    int64_t next = page_count;  // from the top
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t p = 0; p < (end(b) + 63) / 64; ++p) table[b * width + p] = --next;
      slot.push_back(B - 1 - b);
      tail_in.push_back(static_cast<int8_t>(b % 2));
      tail_out.push_back(static_cast<int8_t>(past[b] / 64 == end(b) / 64 ? b % 2 : 1 - b % 2));
    }
    const int64_t T = start.back();
    std::vector<Bf16> queries(T * heads.H * E);
    for (Bf16& x : queries) x = to_bf16(normal() * query_size * log2_scale(heads.E));
    q = std::make_unique<Twin<Bf16>>(gpu, queries);
    k = std::make_unique<Twin<Bf16>>(gpu, T * J * E, 0xff);
    v = std::make_unique<Twin<Bf16>>(gpu, T * J * E, 0xff);
    pages = std::make_unique<Twin<uint8_t>>(gpu, page_count * J * layout.page_bytes(), 0xff);
    tails = std::make_unique<Twin<Bf16>>(gpu, std::max<int64_t>(B, 1) * 2 * J * 2 * 64 * E, 0xff);
    sinks = std::make_unique<Twin<Bf16>>(gpu, std::max<int64_t>(B, 1) * J * 2 * kKvSinkTokens * E, 0xff);
    std::vector<float> factors(J);
    for (float& f : factors) f = std::ldexp(1.0f, static_cast<int>(below(4)) - 4);
    key_factor = std::make_unique<Twin<float>>(gpu, factors);
    value_factor = std::make_unique<Twin<float>>(gpu, factors);
    exact.resize(B), seen.resize(B);
    for (int64_t b = 0; b < B; ++b) {
      for (int which = 0; which < 2; ++which) {
        exact[b][which].resize(end(b) * J * E);
        for (float& x : exact[b][which]) x = to_f32(to_bf16(normal() * (which ? 0.5f : 1.0f)));
        seen[b][which] = exact[b][which];
      }
      if (end(b) > past[b])
        parallel_for(J, 1, [&](int64_t first, int64_t last) {
          for (int64_t j = first; j < last; ++j) fill(b, static_cast<int>(j));
        });
    }
    for (Twin<Bf16>* twin : {k.get(), v.get(), tails.get(), sinks.get()}) twin->send();
    pages->send();
  }

  int64_t end(int64_t b) const { return past[b] + start[b + 1] - start[b]; }

  /// Everything that is stored of one sequence and head, and what is seen of it.
  void fill(int64_t b, int j) {
    const int64_t J = heads.J, E = heads.E;
    std::vector<Bf16> rows[2] = {std::vector<Bf16>(64 * E), std::vector<Bf16>(64 * E)};
    std::vector<float> token[2] = {std::vector<float>(E), std::vector<float>(E)};
    for (int64_t first = 0; first < end(b); first += 64) {
      uint8_t* page = pages->host.data() + (table[b * width + first / 64] * J + j) * layout.page_bytes();
      const int64_t count = std::min<int64_t>(64, end(b) - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t p = first + i;
        for (int which = 0; which < 2; ++which) {
          const float* from = exact[b][which].data() + (p * J + j) * E;
          std::copy_n(from, E, token[which].begin());
          for (int64_t c = 0; c < E; ++c) rows[which][i * E + c] = to_bf16(from[c]);
          const Bf16* row = rows[which].data() + i * E;
          if (p >= past[b]) std::copy_n(row, E, (which ? v : k)->host.data() + ((start[b] + p - past[b]) * J + j) * E);
          if (kv != Dtype::int4) continue;
          if (p < past[b] && p / 64 == past[b] / 64)
            std::copy_n(row, E, tails->host.data() + ((((slot[b] * 2 + tail_in[b]) * J + j) * 2 + which) * 64 + i) * E);
          if (p < kKvSinkTokens)
            std::copy_n(row, E, sinks->host.data() + (((slot[b] * J + j) * 2 + which) * kKvSinkTokens + i) * E);
        }
        if (kv != Dtype::int4) {
          kv_store_token(page, layout, static_cast<int>(i), token[0].data(), token[1].data());
          kv_load_token(page, layout, static_cast<int>(i), token[0].data(), token[1].data());
          for (int which = 0; which < 2; ++which) {
            for (int64_t c = 0; c < E; ++c)
              seen[b][which][(p * J + j) * E + c] = exact[b][which][(p * J + j) * E + c] =
                  to_f32(to_bf16(token[which][c]));
          }
        }
      }
      if (kv != Dtype::int4 || count < 64) continue;
      kv_quantise_page(page, layout, rows[0].data(), rows[1].data(), key_factor->host[j], value_factor->host[j]);
      for (int i = first == 0 ? kKvSinkTokens : 0; i < 64; ++i) {
        for (int c = 0; c < E; ++c) {
          const int64_t at = ((first + i) * J + j) * E + c;
          seen[b][0][at] = kv_int4_key(page, layout, i, c, key_factor->host[j]);
          seen[b][1][at] = kv_int4_value(page, layout, i, c, value_factor->host[j]);
        }
      }
    }
  }

  AttentionArgs args(void* out, Dtype type, float scale = 1.0f) const {
    AttentionArgs a;
    a.out.dtype = type;
    a.out.data = out;
    a.out.scale = scale;
    a.q = q->gpu(), a.k = k->gpu(), a.v = v->gpu();
    a.heads = heads.H;
    a.batch = {B, start.back(), start.data(), past.data()};
    KvCache& c = a.cache;
    c.layout = layout;
    c.kv_heads = heads.J;
    c.page_count = page_count;
    c.page_table = table.data();
    c.table_width = width;
    c.slot = slot.data(), c.tail_in = tail_in.data(), c.tail_out = tail_out.data();
    c.pages = pages->gpu(), c.tails = tails->gpu(), c.sinks = sinks->gpu();
    c.key_factor = key_factor->gpu(), c.value_factor = value_factor->gpu();
    return a;
  }

  /// o and the sum of |weight * value|, of one query head of the query at position p of sequence b.
  void expected(int64_t b, int64_t p, int h, std::vector<double>& o, std::vector<double>& size) const {
    const int64_t J = heads.J, E = heads.E, j = h / (heads.H / heads.J);
    const Bf16* query = q->host.data() + ((start[b] + p - past[b]) * heads.H + h) * E;
    const auto source = [&](int which, int64_t t) {
      return (t / 64 == p / 64 ? exact : seen)[b][which].data() + (t * J + j) * E;
    };
    std::vector<double> weight(p + 1);
    double top = -INFINITY, sum = 0;
    for (int64_t t = 0; t <= p; ++t) {
      const float* key = source(0, t);
      double s = 0;
      for (int64_t c = 0; c < E; ++c) s += double{to_f32(query[c])} * key[c];
      top = std::max(top, weight[t] = s);
    }
    o.assign(E, 0), size.assign(E, 0);
    for (int64_t t = 0; t <= p; ++t) {
      const double w = std::exp2(weight[t] - top);
      const float* value = source(1, t);
      sum += w;
      for (int64_t c = 0; c < E; ++c) o[c] += w * value[c], size[c] += w * std::fabs(value[c]);
    }
    for (int64_t c = 0; c < E; ++c) o[c] /= sum, size[c] /= sum;
  }

  Backend& gpu;
  Dtype kv;
  Heads heads;
  std::vector<int64_t> past, start, table, slot;
  std::vector<int8_t> tail_in, tail_out;
  KvPageLayout layout;
  int64_t B = 0, width = 1, page_count = 0;
  std::unique_ptr<Twin<Bf16>> q, k, v, tails, sinks;
  std::unique_ptr<Twin<uint8_t>> pages;
  std::unique_ptr<Twin<float>> key_factor, value_factor;
  struct Pair {
    std::vector<float> of[2];
    std::vector<float>& operator[](int i) { return of[i]; }
    const std::vector<float>& operator[](int i) const { return of[i]; }
  };
  std::vector<Pair> exact, seen;  // (end, J, E), keys and values
};

/// What is wrong where: enough to see which page, row group, head or channel.
struct Findings {
  double worst = 0, got = 0, want = 0;
  int64_t count = 0, sequence = 0, position = 0, first_position = INT64_MAX, last_position = -1;
  int head = 0, channel = 0;
};

float stored(const std::vector<uint8_t>& out, Dtype type, int64_t i, float scale) {
  if (type == Dtype::bf16) return to_f32(reinterpret_cast<const Bf16*>(out.data())[i]);
  if (type == Dtype::e4m3) return to_f32(reinterpret_cast<const E4m3*>(out.data())[i]) * scale;
  return reinterpret_cast<const float*>(out.data())[i];
}

/// The card's rows against FP64; where that would take too long, a sample of them. Every element is looked at for NaN.
void check(const std::string& name, const World& w, Dtype type, float scale = 1.0f) {
  const int64_t T = w.start.back(), H = w.heads.H, E = w.heads.E;
  Twin<uint8_t> out(w.gpu, T * H * E * bits_per_element(type) / 8, 0xff);
  w.gpu.attention_prefill(w.args(out.gpu(), type, scale));
  const std::vector<uint8_t> got = out.fetch("o");
  std::vector<std::pair<int64_t, int64_t>> rows;  // sequence, position
  double work = 0;
  for (int64_t b = 0; b < w.B; ++b) {
    for (int64_t p = w.past[b]; p < w.end(b); ++p) {
      rows.emplace_back(b, p);
      work += static_cast<double>(p) * H * E;
    }
  }
  if (work > 2e9) {  // borders of pages, and some others
    std::erase_if(rows, [&](const auto& row) {
      const int64_t near = std::min((row.second + 2) % 128, (row.second + 66) % 128);
      return near < 5 ? below(100) >= 1e12 / work : below(1000) >= 1e12 / work;
    });
  }
  std::vector<Findings> found(rows.size());
  parallel_for(static_cast<int64_t>(rows.size()), 1, [&](int64_t first, int64_t last) {
    std::vector<double> o, size;
    for (int64_t i = first; i < last; ++i) {
      const auto [b, p] = rows[i];
      Findings& f = found[i];
      for (int h = 0; h < H; ++h) {
        w.expected(b, p, h, o, size);
        for (int64_t c = 0; c < E; ++c) {
          const double value = stored(got, type, ((w.start[b] + p - w.past[b]) * H + h) * E + c, scale);
          // A weight is rounded to BF16 (by 2^-8 at most), and so may the result be.
          const double result_error = type == Dtype::bf16   ? std::fabs(o[c]) * 0x1.1p-8
                                      : type == Dtype::e4m3 ? std::max(std::fabs(o[c]) * 0x1.1p-4, scale * 0x1p-10)
                                                            : 0;
          const double share = std::fabs(value - o[c]) / (size[c] * 0x1.1p-8 + result_error + 1e-5);
          if (!(share <= 1.0)) ++f.count;
          if (!(share <= f.worst) && !std::isnan(f.worst))
            f = {share, value, o[c], f.count, b, p, p, p, h, static_cast<int>(c)};
        }
      }
    }
  });
  Findings all;
  for (const Findings& f : found) {
    all.count += f.count;
    if (f.count) {
      all.first_position = std::min(all.first_position, f.position);
      all.last_position = std::max(all.last_position, f.position);
    }
    if (f.worst <= all.worst || std::isnan(all.worst)) continue;
    const Findings before = all;
    all = f;
    all.count = before.count, all.first_position = before.first_position, all.last_position = before.last_position;
  }
  int64_t nan = 0;
  for (int64_t i = 0; i < T * H * E; ++i) nan += std::isnan(stored(got, type, i, scale));
  if (all.count == 0 && nan == 0) {
    printf("ok     %-74s worst %.3f of the tolerance, %zu rows\n", name.c_str(), all.worst, rows.size());
    return;
  }
  ++failures;
  printf(
      "FAILED %s: %lld wrong values in %zu rows (positions %lld to %lld), %lld NaN of %lld; worst %.3g of the "
      "tolerance: sequence %lld, position %lld (page row %lld), head %d, channel %d: got %.6g, expected %.6g\n",
      name.c_str(), static_cast<long long>(all.count), rows.size(), static_cast<long long>(all.first_position),
      static_cast<long long>(all.last_position), static_cast<long long>(nan), static_cast<long long>(T * H * E),
      all.worst, static_cast<long long>(all.sequence), static_cast<long long>(all.position),
      static_cast<long long>(all.position % 128), all.head, all.channel, all.got, all.want);
  fflush(stdout);
}

void one(Backend& gpu, const char* what, Dtype kv, Heads heads, std::vector<int64_t> past, std::vector<int64_t> rows,
         Dtype out = Dtype::bf16, float query_size = 1.5f) {
  const World w(gpu, kv, heads, past, rows, query_size);
  check(cat(what, " ", name_of(kv), " ", heads.H, "/", heads.J, " E=", heads.E, " -> ", name_of(out)), w, out,
        out == Dtype::e4m3 ? 1.0f / 256 : 1.0f);
}

/// From the simplest on.
void ladder(Backend& gpu, Dtype kv, int E) {
  const Heads alone{1, 1, E};
  one(gpu, "one page, equal weights", kv, alone, {0}, {64}, Dtype::f32, 0.0f);
  one(gpu, "one page", kv, alone, {0}, {64}, Dtype::f32);
  one(gpu, "one tile, equal weights", kv, alone, {0}, {128}, Dtype::f32, 0.0f);
  one(gpu, "one tile", kv, alone, {0}, {128}, Dtype::f32);
  one(gpu, "one tile, bf16 rows", kv, alone, {0}, {128});
  one(gpu, "two tiles, equal weights", kv, alone, {0}, {256}, Dtype::f32, 0.0f);
  one(gpu, "two tiles", kv, alone, {0}, {256}, Dtype::f32);
  one(gpu, "three tiles", kv, alone, {0}, {384}, Dtype::f32);
  one(gpu, "eight tiles: rings come round", kv, alone, {0}, {1024}, Dtype::f32);
  for (int64_t n : {1, 15, 16, 17, 63, 65, 127, 129, 200}) one(gpu, cat("length ", n).c_str(), kv, alone, {0}, {n});
  one(gpu, "two heads, one KV head", kv, {2, 1, E}, {0}, {200});
  one(gpu, "two KV heads", kv, {2, 2, E}, {0}, {200});
  one(gpu, "two sequences", kv, alone, {0, 0}, {70, 200});
  for (int64_t past : {5, 64, 100, 128, 192, 1000})
    one(gpu, cat("past ", past).c_str(), kv, alone, {past}, {150}, Dtype::f32);
  one(gpu, "one row after 1000", kv, alone, {1000}, {1});
  one(gpu, "e4m3 rows", kv, alone, {0}, {300}, Dtype::e4m3);
}

/// Values that do not fit are clamped and counted.
void saturation(Backend& gpu) {
  const World w(gpu, Dtype::bf16, {2, 1, 128}, {0}, {150});
  const int64_t count = 150 * 2 * 128;
  Twin<E4m3> o(gpu, count, 0xff);
  Twin<float> exact(gpu, count, 0xff);
  const float scale = 0x1p-12f;
  int64_t saturated = 0, want = 0, wrong = 0;
  AttentionArgs a = w.args(o.gpu(), Dtype::e4m3, scale);
  a.out.saturated = &saturated;
  gpu.attention_prefill(a);
  gpu.attention_prefill(w.args(exact.gpu(), Dtype::f32));
  const std::vector<E4m3> got = o.fetch("o");
  const std::vector<float> rows = exact.fetch("exact");
  for (int64_t i = 0; i < count; ++i) {
    want += std::fabs(rows[i] / scale) > kE4m3Max;
    wrong += got[i].bits != to_e4m3(rows[i] / scale).bits;
  }
  expect(wrong == 0, cat("e4m3 rows: ", wrong, " codes are not the rounded f32 rows"));
  expect(saturated == want && want > 0, cat("saturated: counted ", saturated, ", expected ", want));
}

/// NaN in one sequence stays there.
void no_leak(Backend& gpu, Dtype kv) {
  World w(gpu, kv, {4, 2, 128}, {0, 0, 0}, {200, 90, 77});
  for (Twin<Bf16>* twin : {w.q.get(), w.k.get(), w.v.get()}) {
    const int64_t row = static_cast<int64_t>(twin->host.size()) / w.start.back();
    std::fill(twin->host.begin() + 200 * row, twin->host.begin() + 290 * row, Bf16{0x7fff});
    twin->send();
  }
  Twin<Bf16> o(gpu, w.start.back() * 4 * 128, 0xff);
  gpu.attention_prefill(w.args(o.gpu(), Dtype::bf16));
  const std::vector<Bf16> got = o.fetch("o");
  int64_t nan = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    const int64_t t = i / (4 * 128);
    nan += (t < 200 || t >= 290) && std::isnan(to_f32(got[i]));
  }
  expect(nan == 0, cat("NaN of a neighbour, ", name_of(kv), ": ", nan, " values of others are NaN"));
}

void time_it(Backend& gpu, Dtype kv, int64_t sequences, int64_t length) {
  const Heads heads{32, 8, 128};
  const World w(gpu, kv, heads, std::vector<int64_t>(sequences, 0), std::vector<int64_t>(sequences, length));
  Twin<Bf16> o(gpu, w.start.back() * heads.H * heads.E, 0xff);
  const AttentionArgs args = w.args(o.gpu(), Dtype::bf16);
  std::vector<double> seconds = time_on_card(
      gpu, [&] { gpu.attention_prefill(args); }, 20, 0.1);
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double flops = 4.0 * heads.E * heads.H * sequences * double(length) * double(length) / 2;
  printf("%s %lld x %lld: %.1f us, %.0f TFLOP/s\n", name_of(kv), static_cast<long long>(sequences),
         static_cast<long long>(length), median * 1e6, flops / median * 1e-12);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string option = argc > 1 ? argv[1] : "";
  return run_on_card([&](Backend& gpu) {
    if (option == "--time") {
      for (Dtype kv : {Dtype::bf16, Dtype::int4}) {
        time_it(gpu, kv, 1, 4096);
        time_it(gpu, kv, 4, 4096);
        time_it(gpu, kv, 1, 16384);
      }
      return;
    }
    for (Dtype kv : {Dtype::bf16, Dtype::int4, Dtype::e4m3}) {
      for (int E : {128, 64}) ladder(gpu, kv, E);
    }
    saturation(gpu);
    for (Dtype kv : {Dtype::bf16, Dtype::int4, Dtype::e4m3}) {
      no_leak(gpu, kv);
      const std::vector<int64_t> none(6, 0), rows = {200, 0, 1, 1000, 64, 17};
      for (Heads heads : {Heads{9, 3, 64}, Heads{32, 8, 128}, Heads{8, 8, 64}, Heads{16, 1, 128}}) {
        one(gpu, "ragged", kv, heads, none, rows);
        one(gpu, "ragged, with pasts", kv, heads, {5, 64, 100, 0, 1000, 63}, rows);
      }
      one(gpu, "4096", kv, {32, 8, 128}, {0}, {4096});
    }
  });
}
