// The operations of the CPU backend against plain double loops that read the same stored bytes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/parallel.h"
#include "cpu/cpu_backend.h"
#include "layout/hadamard.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

using test::expect_refused;

using Floats = std::vector<float>;

constexpr Dtype kCacheTypes[] = {Dtype::f32, Dtype::bf16, Dtype::e4m3, Dtype::int4};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Floats normal_values(size_t count, uint32_t seed, float sigma = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

/// One weight on the backend and its exact values.
struct Matrix {
  PlacedWeight placed;
  Floats values;  // (N, K)

  Matrix(Backend& backend, Dtype dtype, int64_t rows, int64_t cols, const Floats& w) : values(w) {
    const HostWeight host = encode_weight(dtype, dtype == Dtype::int4 ? 64 : 0, w.data(), rows, cols, "w");
    placed = backend.place(host);
    for (int64_t n = 0; n < rows; ++n) decode_weight_row(host, n, values.data() + n * cols);
  }
  const Weight& weight() const { return placed.weight; }
};

// ---- qkv, cache and attention

struct HeadShape {
  int heads, kv_heads, head_dim;
  int64_t width = 40;
};

struct Sequence {
  Floats x;  // (n, D) what the layer is given
  int64_t slot = 0;
  std::vector<int64_t> pages;
  int64_t length = 0;
  int8_t tail = 0;
  Floats q, k, v, o;  // rows of all tokens so far, as the ops gave them
};

/// Memory of a cache: poisoned, so that what was never written shows.
struct CacheMemory {
  static constexpr int64_t kPages = 48, kSlots = 7;
  std::vector<uint8_t> pages;
  std::vector<Bf16> tails, sinks;

  CacheMemory(const KvPageLayout& layout, int kv_heads)
      : pages(kPages * kv_heads * layout.page_bytes(), 0xff),
        tails(kSlots * 2 * kv_heads * 2 * kKvPageTokens * layout.head_dim, Bf16{0xffff}),
        sinks(kSlots * kv_heads * 2 * kKvSinkTokens * layout.head_dim, Bf16{0xffff}) {}
};

/// One attention layer in F32 weights: qkv, cache, attention.
class Layer {
 public:
  static constexpr int64_t kPositions = 256;

  Layer(Dtype kv, const HeadShape& shape, bool with_mean = true)
      : shape_(shape),
        layout_{kv, shape.head_dim},
        weight_(*backend_, Dtype::f32, outputs(), shape.width,
                normal_values(outputs() * shape.width, 1, 1.0f / std::sqrt(static_cast<float>(shape.width)))),
        memory_(layout_, shape.kv_heads),
        key_factor_(shape.kv_heads, 1.0f / 32),
        value_factor_(shape.kv_heads, 1.0f / 16) {
    if (with_mean) key_mean_ = normal_values(shape.kv_heads * shape.head_dim, 2);
    for (int64_t p = 0; p < kPositions; ++p) {
      for (int i = 0; i < shape.head_dim / 2; ++i) {
        const double angle = static_cast<double>(p) * std::pow(100.0, -2.0 * i / shape.head_dim);
        cos_.push_back(static_cast<float>(std::cos(angle)));
        sin_.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    free_pages_.resize(CacheMemory::kPages);
    std::iota(free_pages_.begin(), free_pages_.end(), 0);
    std::shuffle(free_pages_.begin(), free_pages_.end(), std::mt19937(3));
  }

  const HeadShape& shape() const { return shape_; }
  const KvPageLayout& layout() const { return layout_; }
  int64_t outputs() const { return int64_t{shape_.heads + 2 * shape_.kv_heads} * shape_.head_dim; }
  Dtype exact_type() const { return layout_.dtype == Dtype::f32 ? Dtype::f32 : Dtype::bf16; }
  const Floats& weights() const { return weight_.values; }
  const Floats& key_mean() const { return key_mean_; }
  int64_t page_count = CacheMemory::kPages;
  uint8_t* pages = nullptr;  ///< other memory than the layer's own

  Sequence make_sequence(int64_t tokens, uint32_t seed, int64_t slot) {
    Sequence s;
    s.x = normal_values(tokens * shape_.width, seed);
    s.slot = slot;
    for (int64_t p = 0; p * kKvPageTokens < tokens; ++p) {
      s.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
    return s;
  }

  /// The next rows[i] tokens of each sequence in one call.
  void run(const std::vector<Sequence*>& sequences, const std::vector<int64_t>& rows, bool decode) {
    std::vector<int64_t> start{0}, past, table, slot;
    std::vector<int8_t> tail_in, tail_out;
    size_t table_width = 1;
    Floats x, sums;
    x.reserve(1), sums.reserve(1), table.reserve(1);  // a call without rows has buffers too
    for (const Sequence* s : sequences) table_width = std::max(table_width, s->pages.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = *sequences[i];
      x.insert(x.end(), s.x.begin() + s.length * shape_.width, s.x.begin() + (s.length + rows[i]) * shape_.width);
      start.push_back(start.back() + rows[i]);
      past.push_back(s.length);
      slot.push_back(s.slot);
      tail_in.push_back(s.tail);
      tail_out.push_back(next_tail(s, rows[i]));
      table.insert(table.end(), s.pages.begin(), s.pages.end());
      table.resize((i + 1) * table_width, -1);  // a page that nobody may look at
    }
    const int64_t T = start.back(), H = shape_.heads, J = shape_.kv_heads, E = shape_.head_dim;
    for (int64_t t = 0; t < T; ++t) {
      sums.push_back(
          std::inner_product(&x[t * shape_.width], &x[t * shape_.width] + shape_.width, &x[t * shape_.width], 0.0f));
    }
    KvCache cache{layout_,    shape_.kv_heads, pages ? pages : memory_.pages.data(),
                  page_count, table.data(),    static_cast<int64_t>(table_width)};
    cache.tails = memory_.tails.data();
    cache.sinks = memory_.sinks.data();
    cache.slot = slot.data();
    cache.tail_in = tail_in.data();
    cache.tail_out = tail_out.data();
    cache.key_factor = key_factor_.data();
    cache.value_factor = value_factor_.data();
    cache.key_mean = key_mean_.empty() ? nullptr : key_mean_.data();
    const Batch batch{static_cast<int64_t>(sequences.size()), T, start.data(), past.data()};
    Residual residual;
    residual.x = x.data();
    residual.sum_squares = sums.data();
    // Room for one row more than there is, poisoned: nothing may be written there.
    Floats q((T + 1) * H * E, kNan), k((T + 1) * J * E, kNan), v((T + 1) * J * E, kNan), o((T + 1) * H * E, kNan);
    const Rope rope{cos_.data(), sin_.data(), shape_.head_dim, kPositions};
    const QkvArgs qkv{q.data(),         k.data(), v.data(), cache,        residual,
                      weight_.weight(), rope,     batch,    shape_.heads, shape_.width};
    Operand out;
    out.data = o.data();
    AttentionArgs attention{out, q.data(), k.data(), v.data(), cache, batch, shape_.heads};
    if (decode) {
      attention.k = attention.v = nullptr;
      backend_->qkv_rope_append(qkv);
      backend_->attention_decode(attention);
    } else {
      backend_->qkv_rope_cache(qkv);
      backend_->attention_prefill(attention);
    }
    for (int64_t i = T * H * E; i < (T + 1) * H * E; ++i) ASSERT_TRUE(std::isnan(o[i])) << "written past the last row";
    for (size_t i = 0; i < sequences.size(); ++i) {
      Sequence& s = *sequences[i];
      append(s.q, q, start[i], start[i + 1], H * E, exact_type());
      append(s.k, k, start[i], start[i + 1], J * E, exact_type());
      append(s.v, v, start[i], start[i + 1], J * E, exact_type());
      append(s.o, o, start[i], start[i + 1], H * E, Dtype::f32);
      s.tail = next_tail(s, rows[i]);
      s.length += rows[i];
    }
  }

  const uint8_t* page(const Sequence& s, int64_t token, int head) const {
    const uint8_t* base = pages ? pages : memory_.pages.data();
    return base + (s.pages[token / kKvPageTokens] * shape_.kv_heads + head) * layout_.page_bytes();
  }

  /// What is stored of a sequence and may be read again, in one list.
  Floats stored(const Sequence& s) const {
    Floats all;
    const int64_t E = shape_.head_dim;
    for (int head = 0; head < shape_.kv_heads; ++head) {
      for (int64_t token = 0; token < s.length; ++token) {
        if (layout_.dtype != Dtype::int4) {
          Floats row(2 * E);
          kv_load_token(page(s, token, head), layout_, static_cast<int>(token % kKvPageTokens), row.data(),
                        row.data() + E);
          all.insert(all.end(), row.begin(), row.end());
          continue;
        }
        const bool in_tail = token >= s.length / kKvPageTokens * kKvPageTokens;
        for (int which = 0; which < 2; ++which) {
          for (int64_t c = 0; c < E; ++c) {
            if (in_tail) all.push_back(tail(s, head, which, token, c));
            if (!in_tail) all.push_back(code(s, head, which, token, c));
            if (token < kKvSinkTokens) all.push_back(sink(s, head, which, token, c));
          }
        }
      }
    }
    return all;
  }

  /// Key (which 0) or value (1) of `token` as the query at `position` sees it.
  double seen(const Sequence& s, int head, int which, int64_t position, int64_t token, int64_t c) const {
    const int64_t E = shape_.head_dim;
    if (layout_.dtype != Dtype::int4) {
      Floats row(2 * E);
      kv_load_token(page(s, token, head), layout_, static_cast<int>(token % kKvPageTokens), row.data(), row.data() + E);
      return row[which * E + c];
    }
    const bool exact = token < kKvSinkTokens || token / kKvPageTokens == position / kKvPageTokens;
    return exact ? (which ? s.v : s.k)[(token * shape_.kv_heads + head) * E + c] : code(s, head, which, token, c);
  }

 private:
  static int8_t next_tail(const Sequence& s, int64_t rows) {
    return static_cast<int8_t>((s.length + rows) / kKvPageTokens == s.length / kKvPageTokens ? s.tail : 1 - s.tail);
  }

  static void append(Floats& to, const Floats& from, int64_t first, int64_t last, int64_t width, Dtype type) {
    for (int64_t i = first * width; i < last * width; ++i) {
      to.push_back(type == Dtype::f32 ? from[i] : to_f32(reinterpret_cast<const Bf16*>(from.data())[i]));
    }
  }

  float tail(const Sequence& s, int head, int which, int64_t token, int64_t c) const {
    const int64_t row =
        ((((s.slot * 2 + s.tail) * shape_.kv_heads + head) * 2 + which) * kKvPageTokens + token % kKvPageTokens);
    return to_f32(memory_.tails[row * shape_.head_dim + c]);
  }
  float sink(const Sequence& s, int head, int which, int64_t token, int64_t c) const {
    const int64_t row = ((s.slot * shape_.kv_heads + head) * 2 + which) * kKvSinkTokens + token;
    return to_f32(memory_.sinks[row * shape_.head_dim + c]);
  }
  float code(const Sequence& s, int head, int which, int64_t token, int64_t c) const {
    const int in_page = static_cast<int>(token % kKvPageTokens), channel = static_cast<int>(c);
    return which ? kv_int4_value(page(s, token, head), layout_, in_page, channel, value_factor_[head])
                 : kv_int4_key(page(s, token, head), layout_, in_page, channel, key_factor_[head]);
  }

  std::unique_ptr<Backend> backend_ = make_cpu_backend();
  HeadShape shape_;
  KvPageLayout layout_;
  Matrix weight_;
  CacheMemory memory_;
  Floats key_factor_, value_factor_, key_mean_, cos_, sin_;
  std::vector<int64_t> free_pages_;
};

/// How many rows each call takes, in a circle, until the sequence is through; and whether decode steps take them.
struct Chunking {
  const char* name;
  std::vector<int64_t> rows;
  int64_t decode_from = Layer::kPositions;  ///< from this position on, one row at a time by the decode ops
};

void run_all(Layer& layer, Sequence& s, int64_t tokens, const Chunking& chunking) {
  for (size_t i = 0; s.length < tokens; ++i) {
    const bool decode = s.length >= chunking.decode_from;
    int64_t rows = decode ? 1 : std::min(chunking.rows[i % chunking.rows.size()], tokens - s.length);
    if (!decode) rows = std::min(rows, std::max<int64_t>(1, chunking.decode_from - s.length));
    layer.run({&s}, {rows}, decode);
  }
}

/// Bits, so that a NaN is a difference.
bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::none_of(a.begin(), a.end(), [](float x) { return std::isnan(x); }) &&
         memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(AttentionTest, ChunksAndDecodeStepsEqualTheWholePromptBitForBit) {
  const Chunking chunkings[] = {{"one by one", {1}},
                                {"sevens", {7}},
                                {"sixteens", {16}},
                                {"a page at a time", {64}},
                                {"63 and 1", {63, 1}},
                                {"ragged", {3, 61, 17, 1, 65}},
                                {"decode from the start", {1}, 0},
                                {"decode after 20", {20}, 20},
                                {"decode after 64", {64}, 64}};
  for (Dtype kv : kCacheTypes) {
    for (int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200}) {
      Layer layer(kv, {4, 2, 16});
      Sequence whole = layer.make_sequence(tokens, 5, 6);
      layer.run({&whole}, {tokens}, false);
      const Floats stored = layer.stored(whole);
      for (const Chunking& chunking : chunkings) {
        Layer other(kv, {4, 2, 16});
        Sequence s = other.make_sequence(tokens, 5, 2);
        run_all(other, s, tokens, chunking);
        EXPECT_TRUE(same_bits(s.o, whole.o))
            << name_of(kv) << ", " << tokens << " tokens, " << chunking.name << ": outputs";
        EXPECT_TRUE(same_bits(other.stored(s), stored))
            << name_of(kv) << ", " << tokens << " tokens, " << chunking.name << ": cache";
      }
    }
  }
}

void expect_attention_right(const Layer& layer, const Sequence& s, const std::string& what) {
  const HeadShape& shape = layer.shape();
  const int64_t E = shape.head_dim;
  for (int64_t p = 0; p < s.length; ++p) {
    for (int h = 0; h < shape.heads; ++h) {
      const int head = h / (shape.heads / shape.kv_heads);
      std::vector<double> weight(p + 1), out(E, 0.0);
      double sum = 0, largest_value = 0;
      for (int64_t j = 0; j <= p; ++j) {
        double score = 0;
        for (int64_t c = 0; c < E; ++c) score += s.q[(p * shape.heads + h) * E + c] * layer.seen(s, head, 0, p, j, c);
        sum += weight[j] = std::exp2(score);
      }
      for (int64_t j = 0; j <= p; ++j) {
        for (int64_t c = 0; c < E; ++c) {
          const double value = layer.seen(s, head, 1, p, j, c);
          out[c] += weight[j] / sum * value;
          largest_value = std::max(largest_value, std::fabs(value));
        }
      }
      for (int64_t c = 0; c < E; ++c) {
        ASSERT_NEAR(s.o[(p * shape.heads + h) * E + c], out[c], 3e-6 * largest_value)
            << what << ", position " << p << ", head " << h << ", channel " << c;
      }
    }
  }
}

TEST(AttentionTest, EqualsTheDoubleReferenceOverTheSameBytes) {
  constexpr HeadShape kShapes[] = {{4, 2, 16}, {6, 2, 16}, {3, 3, 8}, {3, 1, 20}, {2, 1, 64}, {2, 1, 96}, {1, 1, 128}};
  for (Dtype kv : kCacheTypes) {
    for (const HeadShape& shape : kShapes) {
      Layer layer(kv, shape);
      Sequence s = layer.make_sequence(140, 6, 1);
      run_all(layer, s, 140, {"", {70, 33}, 120});
      expect_attention_right(layer, s,
                             cat(name_of(kv), ", ", shape.heads, "/", shape.kv_heads, " heads of ", shape.head_dim));
    }
  }
}

TEST(AttentionTest, FullInt4PagesHoldTheCodesOfTheirTail) {
  Layer layer(Dtype::int4, {4, 2, 20});
  Sequence s = layer.make_sequence(150, 7, 3);
  run_all(layer, s, 150, {"", {40}, 100});
  for (int64_t page = 0; page < 2; ++page) {
    for (int head = 0; head < 2; ++head) {
      std::vector<Bf16> keys, values;
      for (int64_t token = page * 64; token < page * 64 + 64; ++token) {
        for (int64_t c = 0; c < 20; ++c) {
          keys.push_back(to_bf16(s.k[(token * 2 + head) * 20 + c]));
          values.push_back(to_bf16(s.v[(token * 2 + head) * 20 + c]));
        }
      }
      std::vector<uint8_t> expected(layer.layout().page_bytes());
      kv_quantise_page(expected.data(), layer.layout(), keys.data(), values.data(), 1.0f / 32, 1.0f / 16);
      EXPECT_EQ(memcmp(expected.data(), layer.page(s, page * 64, head), expected.size()), 0) << page << ", " << head;
    }
  }
}

/// q, k and v of one layer from their definition.
TEST(QkvTest, EqualsTheDoubleReference) {
  for (Dtype kv : kCacheTypes) {
    const HeadShape shape{6, 2, 16};
    Layer layer(kv, shape);
    Sequence s = layer.make_sequence(70, 8, 0);
    run_all(layer, s, 70, {"", {30}, 60});
    const int64_t E = shape.head_dim, D = shape.width;
    const double unit = kv == Dtype::f32 ? 2e-6 : 0x1p-8;  // BF16 rounds by at most 2^-9
    for (int64_t p = 0; p < 70; ++p) {
      const float* x = &s.x[p * D];
      const double rstd = 1.0 / std::sqrt(std::inner_product(x, x + D, x, 0.0) / static_cast<double>(D) + 1e-5);
      for (int h = 0; h < 6 + 2 + 2; ++h) {
        std::vector<double> y(E, 0.0);
        for (int64_t i = 0; i < E; ++i) {
          for (int64_t d = 0; d < D; ++d) y[i] += rstd * x[d] * layer.weights()[(h * E + i) * D + d];
        }
        if (h < 8) {  // halves: channel i turns with channel i + E / 2
          for (int64_t i = 0; i < E / 2; ++i) {
            const double angle =
                static_cast<double>(p) * std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(E));
            const double a = y[i], b = y[i + E / 2];
            y[i] = a * std::cos(angle) - b * std::sin(angle);
            y[i + E / 2] = b * std::cos(angle) + a * std::sin(angle);
          }
          for (int64_t i = 0; i < E && h >= 6; ++i) y[i] -= layer.key_mean()[(h - 6) * E + i];
          if (kv == Dtype::int4) {
            Floats turned(y.begin(), y.end());
            hadamard_rotate(turned.data(), static_cast<int>(E));
            y.assign(turned.begin(), turned.end());
          }
        }
        double largest = 0;
        for (double value : y) largest = std::max(largest, std::fabs(value));
        const double q_scale = h < 6 ? std::log2(std::exp(1.0)) / std::sqrt(static_cast<double>(E)) : 1.0;
        for (int64_t i = 0; i < E; ++i) {
          const float got = h < 6   ? s.q[(p * 6 + h) * E + i]
                            : h < 8 ? s.k[(p * 2 + h - 6) * E + i]
                                    : s.v[(p * 2 + h - 8) * E + i];
          ASSERT_NEAR(got, y[i] * q_scale, (unit * std::fabs(y[i]) + 2e-6 * largest) * q_scale)
              << name_of(kv) << " row " << p << " head " << h << " channel " << i;
        }
      }
    }
  }
}

/// The rotation changes no score; neither does it matter which head width it is cut into.
TEST(QkvTest, RotatedScoresAreTheUnrotatedOnes) {
  for (const HeadShape& shape : {HeadShape{4, 2, 16}, HeadShape{2, 1, 64}, HeadShape{2, 2, 20}}) {
    Layer plain(Dtype::bf16, shape, false), rotated(Dtype::int4, shape, false);
    Sequence a = plain.make_sequence(40, 9, 0), b = rotated.make_sequence(40, 9, 0);
    plain.run({&a}, {40}, false);
    rotated.run({&b}, {40}, false);
    const int64_t E = shape.head_dim;
    for (int64_t p = 0; p < 40; ++p) {
      for (int h = 0; h < shape.heads; ++h) {
        for (int64_t j = 0; j <= p; ++j) {
          const int64_t q = (p * shape.heads + h) * E,
                        k = (j * shape.kv_heads + h / (shape.heads / shape.kv_heads)) * E;
          double before = 0, after = 0, size = 0;
          for (int64_t c = 0; c < E; ++c) {
            before += double{a.q[q + c]} * a.k[k + c];
            after += double{b.q[q + c]} * b.k[k + c];
            size += std::fabs(double{a.q[q + c]} * a.k[k + c]) + std::fabs(double{b.q[q + c]} * b.k[k + c]);
          }
          ASSERT_NEAR(before, after, size * 0x1p-8);  // both sides in BF16
        }
      }
    }
  }
}

TEST(AttentionTest, RaggedBatchesEqualEachSequenceAlone) {
  for (Dtype kv : kCacheTypes) {
    Layer together(kv, {6, 2, 16}), alone(kv, {6, 2, 16});
    const int64_t lengths[] = {1, 17, 64, 65, 130, 90};
    std::vector<Sequence> batch, single;
    for (int i = 0; i < 6; ++i) batch.push_back(together.make_sequence(lengths[i], 10 + i, i));
    for (int i = 5; i >= 0; --i) single.push_back(alone.make_sequence(lengths[i], 10 + i, i));  // other pages
    std::reverse(single.begin(), single.end());
    const std::vector<std::vector<int64_t>> calls = {
        {1, 10, 63, 1, 0, 40}, {0, 0, 1, 0, 100, 25}, {0, 7, 0, 64, 30, 25}};
    std::vector<Sequence*> members;
    for (Sequence& s : batch) members.push_back(&s);
    for (const std::vector<int64_t>& rows : calls) together.run(members, rows, false);
    for (int i = 0; i < 6; ++i) {
      alone.run({&single[i]}, {lengths[i]}, false);
      EXPECT_TRUE(same_bits(batch[i].o, single[i].o)) << name_of(kv) << ", sequence " << i;
      EXPECT_TRUE(same_bits(together.stored(batch[i]), alone.stored(single[i]))) << name_of(kv) << ", sequence " << i;
    }
  }
}

TEST(AttentionTest, SequencesWithoutRowsAreNotTouched) {
  for (Dtype kv : kCacheTypes) {
    for (bool decode : {false, true}) {
      Layer layer(kv, {2, 1, 16}), alone(kv, {2, 1, 16});
      std::vector<Sequence> batch;
      for (int i = 0; i < 4; ++i) batch.push_back(layer.make_sequence(20, 30 + i, i));
      layer.run({&batch[0]}, {3}, false);  // kv 3, q 0; kv 5, q 5; nothing at all; kv 4, q 4
      const Floats before = layer.stored(batch[0]);
      const std::vector<int64_t> rows = decode ? std::vector<int64_t>{0, 1, 0, 1} : std::vector<int64_t>{0, 5, 0, 4};
      layer.run({&batch[0], &batch[1], &batch[2], &batch[3]}, rows, decode);
      EXPECT_TRUE(same_bits(layer.stored(batch[0]), before));
      EXPECT_TRUE(batch[2].o.empty());
      for (int i : {1, 3}) {
        Sequence s = alone.make_sequence(20, 30 + i, i);
        alone.run({&s}, {rows[i]}, false);
        EXPECT_TRUE(same_bits(s.o, batch[i].o)) << name_of(kv);
      }
      layer.run({&batch[0], &batch[2]}, {0, 0}, decode);
      layer.run({}, {}, decode);
      EXPECT_TRUE(same_bits(layer.stored(batch[0]), before));
    }
  }
}

TEST(AttentionTest, ThreadsDoNotChangeABit) {
  Floats first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Layer layer(Dtype::int4, {4, 2, 16});
    Sequence s = layer.make_sequence(150, 11, 0);
    run_all(layer, s, 150, {"", {100}, 130});
    if (threads == 1) first = s.o;
    EXPECT_TRUE(same_bits(s.o, first)) << threads;
  }
  set_thread_count(0);
}

/// Page ids whose byte offset needs more than 32 bits, in memory that is reserved but never touched elsewhere.
TEST(AttentionTest, PagesBeyondFourGigabytes) {
  for (Dtype kv : kCacheTypes) {
    Layer low(kv, {2, 2, 64}), high(kv, {2, 2, 64});
    Sequence expected = low.make_sequence(130, 12, 0), s = high.make_sequence(130, 12, 0);
    const int64_t page_bytes = 2 * high.layout().page_bytes(), id = (int64_t{5} << 30) / page_bytes;
    const size_t size = static_cast<size_t>((id + 4) * page_bytes);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) GTEST_SKIP() << "5 GiB of address space could not be reserved";
    high.pages = static_cast<uint8_t*>(memory);
    high.page_count = id + 4;
    s.pages = {id + 3, id, id + 1};
    low.run({&expected}, {130}, false);
    run_all(high, s, 130, {"", {100}, 120});
    EXPECT_TRUE(same_bits(s.o, expected.o)) << name_of(kv);
    munmap(memory, size);
  }
}

// ---- GEMMs and their epilogues

constexpr int64_t kRows = 5, kIn = 96, kOut = 52;

/// A residual of kRows rows of `width`, filled from floats.
struct ResidualRows {
  Floats values;  ///< as stored
  std::vector<Bf16> bf16;
  Floats f32, sums, x8_scale;
  std::vector<E4m3> x8;
  int64_t requantised = 0;
  Residual residual;

  ResidualRows(const Floats& x, int64_t width, Dtype dtype, bool with_x8) : values(x), f32(x) {
    const int64_t rows = static_cast<int64_t>(x.size()) / width;
    for (float& value : values) {
      bf16.push_back(to_bf16(value));
      if (dtype == Dtype::bf16) value = to_f32(bf16.back());
    }
    residual.dtype = dtype;
    residual.x = dtype == Dtype::bf16 ? static_cast<void*>(bf16.data()) : f32.data();
    for (int64_t t = 0; t < rows; ++t) {
      sums.push_back(std::inner_product(&values[t * width], &values[t * width] + width, &values[t * width], 0.0f));
    }
    residual.sum_squares = sums.data();
    x8.resize(x.size());
    x8_scale.resize(rows);
    residual.requantised = &requantised;
    if (!with_x8) return;
    residual.x8 = x8.data();
    residual.x8_scale = x8_scale.data();
    for (int64_t t = 0; t < rows; ++t) {
      x8_scale[t] = e4m3_scale(largest_magnitude(&values[t * width], width));
      for (int64_t i = 0; i < width; ++i) x8[t * width + i] = to_e4m3(values[t * width + i] / x8_scale[t]);
    }
  }

  float at(int64_t i) const { return residual.dtype == Dtype::bf16 ? to_f32(bf16[i]) : f32[i]; }
};

class OpsTest : public testing::Test {
 protected:
  Matrix matrix(Dtype dtype, int64_t rows, int64_t cols, uint32_t seed) {
    return Matrix(*backend_, dtype, rows, cols,
                  normal_values(rows * cols, seed, 1.0f / std::sqrt(static_cast<float>(cols))));
  }
  std::unique_ptr<Backend> backend_ = make_cpu_backend();
};

TEST_F(OpsTest, LogitsOfEveryWeightAndResidualType) {
  struct Case {
    Dtype weight, residual;
    bool x8;
    double unit;  ///< largest relative rounding error of an operand element
  };
  constexpr Case kCases[] = {{Dtype::f32, Dtype::f32, false, 0},       {Dtype::bf16, Dtype::f32, false, 0x1p-9},
                             {Dtype::bf16, Dtype::bf16, false, 0},     {Dtype::e4m3, Dtype::f32, false, 0x1p-11},
                             {Dtype::e4m3, Dtype::bf16, true, 0x1p-4}, {Dtype::int4, Dtype::f32, false, 0x1p-11}};
  for (const Case& c : kCases) {
    const Matrix w = matrix(c.weight, kOut, kIn, 40);
    Floats x = normal_values(kRows * kIn, 41);
    for (int64_t i = 0; i < kIn; ++i) x[2 * kIn + i] *= 1000.0f;
    ResidualRows rows(x, kIn, c.residual, c.x8);
    const std::vector<int64_t> picked = {4, 2, 2, 0};
    Floats logits(picked.size() * kOut + 1, kNan);
    backend_->lm_head({logits.data(), rows.residual, w.weight(), picked.data(), 4});
    EXPECT_TRUE(std::isnan(logits.back()));
    for (size_t i = 0; i < picked.size(); ++i) {
      const float* row = &rows.values[picked[i] * kIn];
      const double rstd = 1 / std::sqrt(std::inner_product(row, row + kIn, row, 0.0) / kIn + 1e-5);
      for (int64_t n = 0; n < kOut; ++n) {
        double sum = 0, absolute = 0;
        for (int64_t k = 0; k < kIn; ++k) {
          sum += rstd * row[k] * w.values[n * kIn + k];
          absolute += std::fabs(rstd * row[k] * w.values[n * kIn + k]);
        }
        ASSERT_NEAR(logits[i * kOut + n], sum, (c.unit * 1.01 + 2e-6) * absolute + (c.x8 ? 1e-3 : 0))
            << name_of(c.weight) << ", row " << i;
      }
    }
  }
}

/// x += a W^T over exactly the stored operand values, with the sum of squares of what was stored.
TEST_F(OpsTest, ResidualGemmOfEveryOperandType) {
  struct Case {
    Dtype weight, operand;
    bool row_scale;
  };
  constexpr Case kCases[] = {{Dtype::f32, Dtype::f32, false},   {Dtype::bf16, Dtype::bf16, false},
                             {Dtype::int4, Dtype::f16, false},  {Dtype::e4m3, Dtype::f16, false},
                             {Dtype::e4m3, Dtype::e4m3, false}, {Dtype::e4m3, Dtype::e4m3, true}};
  for (const Case& c : kCases) {
    for (Dtype residual_type : {Dtype::f32, Dtype::bf16}) {
      const Matrix w = matrix(c.weight, kOut, kIn, 42);
      const Floats source = normal_values(kRows * kIn, 43);
      Floats f32 = source, scales(kRows, 1.0f), a(kRows * kIn);
      std::vector<Bf16> bf16(f32.size());
      std::vector<Half> f16(f32.size());
      std::vector<E4m3> e4m3(f32.size());
      Operand operand;
      operand.dtype = c.operand;
      operand.scale = c.operand == Dtype::f16 ? 4.0f : c.operand == Dtype::e4m3 && !c.row_scale ? 0.02f : 1.0f;
      for (int64_t i = 0; i < kRows * kIn; ++i) {
        if (c.row_scale) scales[i / kIn] = 0.01f + 0.01f * static_cast<float>(i / kIn);
        const float factor = operand.scale * scales[i / kIn], x = source[i] / factor;
        bf16[i] = to_bf16(x), f16[i] = to_half(x), e4m3[i] = to_e4m3(x);
        a[i] = factor * (c.operand == Dtype::f32    ? x
                         : c.operand == Dtype::bf16 ? to_f32(bf16[i])
                         : c.operand == Dtype::f16  ? to_f32(f16[i])
                                                    : to_f32(e4m3[i]));
      }
      operand.data = c.operand == Dtype::f32    ? static_cast<void*>(f32.data())
                     : c.operand == Dtype::bf16 ? static_cast<void*>(bf16.data())
                     : c.operand == Dtype::f16  ? static_cast<void*>(f16.data())
                                                : e4m3.data();
      if (c.row_scale) operand.row_scale = scales.data();
      ResidualRows rows(normal_values(kRows * kOut, 44), kOut, residual_type, false);
      const Floats before = rows.values;
      backend_->down_residual({rows.residual, operand, w.weight(), kRows});
      for (int64_t t = 0; t < kRows; ++t) {
        double squares = 0;
        for (int64_t n = 0; n < kOut; ++n) {
          double sum = before[t * kOut + n];
          for (int64_t k = 0; k < kIn; ++k) sum += double{a[t * kIn + k]} * w.values[n * kIn + k];
          const float got = rows.at(t * kOut + n);
          ASSERT_NEAR(got, sum, residual_type == Dtype::f32 ? 2e-5 : 2e-5 + std::fabs(sum) * 0x1p-8)
              << name_of(c.weight) << ", " << name_of(c.operand);
          squares += double{got} * got;
        }
        EXPECT_NEAR(rows.sums[t], squares, squares * 1e-6);
      }
    }
  }
}

/// Gate and up weights that give one wanted (g, u) in column 0: x is all ones, so that its root mean square is 1.
struct SwigluCase {
  Floats x = Floats(64, 1.0f);
  Floats w = Floats(2 * 3 * 64, 0.0f);
  SwigluCase(float g, float u) {
    w[0] = g;
    w[3 * 64] = u;
  }
};

TEST_F(OpsTest, SwigluBeyondHalfPrecision) {
  const SwigluCase c(255.875f, 261.75f);  // 66975.28, more than an FP16 can hold
  const Matrix w(*backend_, Dtype::f32, 6, 64, c.w);
  ResidualRows rows(c.x, 64, Dtype::f32, false);
  rows.residual.eps = 0;
  int64_t saturated = 0;
  float row_scale = 0, amax = 0;
  Floats f32(3);
  std::vector<Half> f16(3);
  std::vector<E4m3> e4m3(3);
  Operand out;
  out.saturated = &saturated;
  out.amax = &amax;
  const auto run = [&](Dtype dtype, void* data, float scale) {
    out.dtype = dtype;
    out.data = data;
    out.scale = scale;
    backend_->gate_up_swiglu({out, rows.residual, w.weight(), 1});
  };
  run(Dtype::f32, f32.data(), 1.0f);
  EXPECT_NEAR(f32[0], 66975.28, 0.01);
  EXPECT_EQ(f32[1], 0.0f);
  EXPECT_NEAR(amax, 66975.28, 0.01);
  run(Dtype::f16, f16.data(), 2.0f);  // the guard
  EXPECT_NEAR(to_f32(f16[0]) * 2.0f, 66975.28, 32.0);
  EXPECT_EQ(saturated, 0);
  run(Dtype::f16, f16.data(), 1.0f);
  EXPECT_EQ(to_f32(f16[0]), kHalfMax);
  EXPECT_EQ(saturated, 1);
  run(Dtype::e4m3, e4m3.data(), 1.0f);
  EXPECT_EQ(to_f32(e4m3[0]), kE4m3Max);
  EXPECT_EQ(saturated, 2);
  out.row_scale = &row_scale;
  run(Dtype::e4m3, e4m3.data(), 1.0f);
  EXPECT_NEAR(to_f32(e4m3[0]) * row_scale, 66975.28, 0.01);
  EXPECT_EQ(saturated, 2);
}

TEST_F(OpsTest, SwigluEqualsTheDoubleReference) {
  const Matrix w = matrix(Dtype::f32, 2 * kOut, kIn, 45);
  Floats x = normal_values(kRows * kIn, 46);
  ResidualRows rows(x, kIn, Dtype::f32, false);
  Floats out_rows(kRows * kOut);
  Operand out;
  out.data = out_rows.data();
  backend_->gate_up_swiglu({out, rows.residual, w.weight(), kRows});
  for (int64_t t = 0; t < kRows; ++t) {
    const double rstd = 1 / std::sqrt(rows.sums[t] / double{kIn} + 1e-5);
    for (int64_t f = 0; f < kOut; ++f) {
      double g = 0, u = 0;
      for (int64_t k = 0; k < kIn; ++k) {
        g += rstd * x[t * kIn + k] * w.values[f * kIn + k];
        u += rstd * x[t * kIn + k] * w.values[(kOut + f) * kIn + k];
      }
      ASSERT_NEAR(out_rows[t * kOut + f], g / (1 + std::exp(-g)) * u, 1e-5);
    }
  }
}

/// Gates whose exponential overflows or vanishes give numbers.
TEST_F(OpsTest, SwigluOfExtremeGates) {
  for (float g : {-1e4f, -200.0f, -88.0f, 88.0f, 1e4f}) {
    const SwigluCase c(g, 2.0f);
    const Matrix w(*backend_, Dtype::f32, 6, 64, c.w);
    ResidualRows rows(c.x, 64, Dtype::f32, false);
    rows.residual.eps = 0;
    Floats out_rows(3);
    Operand out;
    out.data = out_rows.data();
    backend_->gate_up_swiglu({out, rows.residual, w.weight(), 1});
    EXPECT_NEAR(out_rows[0], g > 0 ? 2.0 * g : 0.0, 1e-3) << g;
  }
}

// ---- the e4m3 copy of the residual

/// Adds `update` to rows of ones through a GEMM with the identity, and returns what became of the residual.
ResidualRows updated(Backend& backend, const Floats& update, Fp8Scaling scaling) {
  const int64_t width = 64, rows = static_cast<int64_t>(update.size()) / width;
  Floats identity(width * width, 0.0f);
  for (int64_t i = 0; i < width; ++i) identity[i * width + i] = 1.0f;
  const Matrix w(backend, Dtype::f32, width, width, identity);
  ResidualRows state(Floats(rows * width, 1.0f), width, Dtype::f32, true);
  state.residual.x8_scaling = scaling;
  Floats a = update;
  Operand operand;
  operand.data = a.data();
  backend.o_proj_residual({state.residual, operand, w.weight(), rows});
  return state;
}

TEST_F(OpsTest, ExactScalesTakeEachRowsOwnMaximum) {
  Floats update = normal_values(3 * 64, 47);
  for (int i = 0; i < 64; ++i) update[64 + i] *= 1e4f;
  const ResidualRows got = updated(*backend_, update, Fp8Scaling::exact);
  for (int64_t t = 0; t < 3; ++t) {
    const float largest = largest_magnitude(&got.f32[t * 64], 64);
    EXPECT_EQ(got.x8_scale[t], e4m3_scale(largest));
    for (int64_t i = t * 64; i < (t + 1) * 64; ++i) {
      EXPECT_NEAR(to_f32(got.x8[i]) * got.x8_scale[t], got.f32[i],
                  std::fabs(got.f32[i]) / 16 * 1.001f + largest / 448 * 0x1p-9f);
    }
  }
  EXPECT_EQ(got.requantised, 0);
}

TEST_F(OpsTest, PreviousNormScalesARowByWhatItWas) {
  const Floats update = normal_values(3 * 64, 48);
  for (Fp8Scaling scaling : {Fp8Scaling::frozen, Fp8Scaling::delayed}) {
    const ResidualRows got = updated(*backend_, update, scaling);
    for (int64_t t = 0; t < 3; ++t) EXPECT_NEAR(got.x8_scale[t], 1.0f / kResidualHeadroom, 1e-5);  // rows were ones
    EXPECT_EQ(got.requantised, 0);
    for (int i = 0; i < 3 * 64; ++i)
      EXPECT_NEAR(to_f32(got.x8[i]) / kResidualHeadroom, got.f32[i], std::fabs(got.f32[i]) / 16 * 1.001f + 1e-3f);
  }
}

/// A row with a massive activation neither saturates nor changes a bit of its neighbours.
TEST_F(OpsTest, AMassiveActivationStaysInItsRow) {
  Floats update = normal_values(3 * 64, 48);
  const ResidualRows quiet = updated(*backend_, update, Fp8Scaling::frozen);
  update[64 + 7] = 3000.0f;
  const ResidualRows loud = updated(*backend_, update, Fp8Scaling::frozen);
  EXPECT_EQ(loud.requantised, 1);
  EXPECT_NEAR(to_f32(loud.x8[64 + 7]) * loud.x8_scale[1], 3001.0, 1.0);
  for (int64_t t : {0, 2}) {
    EXPECT_EQ(loud.x8_scale[t], quiet.x8_scale[t]);
    EXPECT_EQ(memcmp(&loud.x8[t * 64], &quiet.x8[t * 64], 64), 0);
  }
}

TEST_F(OpsTest, EmbeddingRowsAndTheirCopies) {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Matrix table = matrix(dtype, 10, kIn, 49);
    ResidualRows rows(Floats(3 * kIn, kNan), kIn, dtype, true);
    rows.residual.x8_scaling = Fp8Scaling::frozen;
    const int32_t tokens[] = {9, 0, 9};
    backend_->embed({rows.residual, table.weight(), tokens, 3, kIn});
    for (int64_t t = 0; t < 3; ++t) {
      double squares = 0;
      for (int64_t i = 0; i < kIn; ++i) {
        EXPECT_EQ(rows.at(t * kIn + i), table.values[tokens[t] * kIn + i]);
        squares += double{rows.at(t * kIn + i)} * rows.at(t * kIn + i);
      }
      EXPECT_NEAR(rows.sums[t], squares, squares * 1e-6);
      EXPECT_EQ(rows.x8_scale[t], e4m3_scale(largest_magnitude(&table.values[tokens[t] * kIn], kIn)));
    }
    for (int32_t bad : {-1, 10, 1 << 30}) {
      const int32_t unknown[] = {bad};
      expect_refused(
          [&] {
            backend_->embed({rows.residual, table.weight(), unknown, 1, kIn});
          },
          {"token id", cat(bad), "10"});
    }
  }
}

// ---- what is refused, one message after another

/// Arguments that are right, for a test to break one of.
struct ValidArgs {
  float data[64 * 64] = {};
  uint8_t bytes[4096] = {};
  int64_t start[2] = {0, 2}, past[1] = {0}, table[2] = {0, 1}, slot[1] = {0};
  int8_t tail_in[1] = {0}, tail_out[1] = {0};
  int32_t tokens[2] = {};
  Residual residual;
  Weight weight{Dtype::f32, 32, 16, 0, Phase::decode, data, nullptr, 0};
  Operand operand;
  QkvArgs qkv;
  AttentionArgs attention;

  ValidArgs() {
    residual.x = residual.sum_squares = data;
    operand.data = data;
    const Batch batch{1, 2, start, past};
    KvCache cache{{Dtype::int4, 8}, 1, bytes, 2, table, 2};
    cache.tails = cache.sinks = reinterpret_cast<Bf16*>(bytes);
    cache.slot = slot, cache.tail_in = tail_in, cache.tail_out = tail_out;
    cache.key_factor = cache.value_factor = data;
    qkv = {data, data, data, cache, residual, weight, {data, data, 8, 100}, batch, 2, 16};
    attention = {operand, data, data, data, cache, batch, 2};
  }
};

TEST(ValidateTest, Qkv) {
  struct Case {
    std::function<void(ValidArgs&)> damage;
    std::vector<std::string> words;
    bool decode = false;
  };
  const Case cases[] = {
      {[](ValidArgs& a) { a.qkv.residual.x = nullptr; }, {"qkv_rope_cache", "residual has no data"}},
      {[](ValidArgs& a) { a.qkv.residual.dtype = Dtype::f16; }, {"residual is f16"}},
      {[](ValidArgs& a) { a.qkv.residual.x8 = reinterpret_cast<E4m3*>(a.bytes); }, {"e4m3 copy has no scales"}},
      {[](ValidArgs& a) { a.qkv.batch.rows = -1; }, {"-1 rows"}},
      {[](ValidArgs& a) { a.qkv.batch.start = nullptr; }, {"no starts"}},
      {[](ValidArgs& a) { a.start[1] = 3; }, {"0 to 3", "0 to 2"}},
      {[](ValidArgs& a) { a.past[0] = -4; }, {"sequence 0", "-4 cached"}},
      {[](ValidArgs&) {}, {"qkv_rope_append", "2 rows in a decode step"}, true},
      {[](ValidArgs& a) { a.qkv.cache.layout.dtype = Dtype::f16; }, {"cache is f16"}},
      {[](ValidArgs& a) { a.qkv.cache.layout.head_dim = 0; }, {"width 0"}},
      {[](ValidArgs& a) { a.qkv.cache.pages = nullptr; }, {"no pages"}},
      {[](ValidArgs& a) { a.qkv.cache.sinks = nullptr; }, {"tails and sinks"}},
      {[](ValidArgs& a) { a.qkv.cache.key_factor = nullptr; }, {"scale factors"}},
      {[](ValidArgs& a) { a.past[0] = 127; }, {"needs 3 pages", "holds 2"}},
      {[](ValidArgs& a) { a.table[0] = 2; }, {"page 2 of 2"}},
      {[](ValidArgs& a) { a.table[0] = -1; }, {"page -1"}},
      {[](ValidArgs& a) { a.qkv.heads = 0; }, {"0 query heads"}},
      {[](ValidArgs& a) { a.qkv.cache.kv_heads = 3; }, {"2 query heads", "3 KV heads"}},
      {[](ValidArgs& a) { a.qkv.qkv.data = nullptr; }, {"qkv has no data"}},
      {[](ValidArgs& a) { a.qkv.qkv.rows = 31; }, {"(31, 16)", "(32, 16)"}},
      {[](ValidArgs& a) { a.qkv.qkv.dtype = Dtype::f16; }, {"qkv is f16"}},
      {[](ValidArgs& a) { a.qkv.qkv.dtype = Dtype::e4m3; }, {"e4m3 and has no scales"}},
      {[](ValidArgs& a) { a.qkv.qkv.dtype = Dtype::e4m3, a.qkv.qkv.scale = a.data; }, {"need the e4m3 residual"}},
      {[](ValidArgs& a) { a.qkv.qkv.dtype = Dtype::int4, a.qkv.qkv.group = 48; }, {"group size 48"}},
      {[](ValidArgs& a) { a.qkv.qkv.dtype = Dtype::int4, a.qkv.qkv.group = 64; }, {"INT4 weights are for decode"}},
      {[](ValidArgs& a) { a.qkv.rope.rotary_dim = 10; }, {"rotary width 10", "8"}},
      {[](ValidArgs& a) { a.qkv.q_norm = a.data; }, {"heads' norm", "q alone"}},
      {[](ValidArgs& a) { a.qkv.k_norm = a.data; }, {"heads' norm", "k alone"}},
      {[](ValidArgs& a) { a.qkv.rope.positions = 1; }, {"reaches 2 tokens", "limit is 1"}}};
  ValidArgs right;
  validate_qkv(right.qkv, false);
  for (const Case& c : cases) {
    ValidArgs args;
    c.damage(args);
    expect_refused([&] { validate_qkv(args.qkv, c.decode); }, c.words);
  }
}

TEST(ValidateTest, Attention) {
  struct Case {
    std::function<void(ValidArgs&)> damage;
    std::vector<std::string> words;
    bool decode = false;
  };
  const Case cases[] = {
      {[](ValidArgs& a) { a.attention.q = nullptr; }, {"attention_prefill", "q has no data"}},
      {[](ValidArgs& a) { a.attention.k = nullptr; }, {"k or v"}},
      {[](ValidArgs& a) { a.attention.out.data = nullptr; }, {"out has no data"}},
      {[](ValidArgs& a) { a.attention.out.dtype = Dtype::int4; }, {"out is int4"}},
      {[](ValidArgs& a) { a.attention.out.scale = 0; }, {"out has scale 0"}},
      {[](ValidArgs& a) { a.attention.out.scale = kNan; }, {"out has scale"}},
      {[](ValidArgs& a) { a.attention.heads = 3, a.attention.cache.kv_heads = 2; }, {"3 query heads", "2 KV heads"}},
      {[](ValidArgs& a) { a.start[1] = -2; }, {"expected 0 to 2"}},
      {[](ValidArgs&) {}, {"attention_decode", "2 rows"}, true}};
  ValidArgs right;
  validate_attention(right.attention, false);
  for (const Case& c : cases) {
    ValidArgs args;
    c.damage(args);
    expect_refused([&] { validate_attention(args.attention, c.decode); }, c.words);
  }
}

TEST(ValidateTest, GemmsAndTables) {
  const ValidArgs right;
  const ResidualGemmArgs residual_gemm{right.residual, right.operand, right.weight, 2};
  const GateUpArgs gate_up{right.operand, right.residual, right.weight, 2};
  validate_residual_gemm(residual_gemm, "down_residual");
  validate(gate_up);
  constexpr std::pair<Dtype, Dtype> kWrongPairs[] = {{Dtype::f32, Dtype::bf16},  {Dtype::bf16, Dtype::f32},
                                                     {Dtype::bf16, Dtype::f16},  {Dtype::int4, Dtype::bf16},
                                                     {Dtype::int4, Dtype::e4m3}, {Dtype::e4m3, Dtype::bf16}};
  for (const auto& [weight, operand] : kWrongPairs) {
    ResidualGemmArgs args = residual_gemm;
    args.weight.dtype = weight;
    args.weight.scale = right.data;
    args.weight.group = 64;
    args.a.dtype = operand;
    expect_refused([&] { validate_residual_gemm(args, "down_residual"); },
                   {"down_residual", cat("weight in ", name_of(weight)), name_of(operand)});
  }
  ResidualGemmArgs no_operand = residual_gemm;
  no_operand.a.data = nullptr;
  expect_refused([&] { validate_residual_gemm(no_operand, "o_proj_residual"); }, {"o_proj_residual", "a has no data"});
  GateUpArgs odd = gate_up;
  odd.gate_up.rows = 31;
  expect_refused([&] { validate(odd); }, {"gate_up_swiglu", "31 rows"});
  EmbedArgs embed{right.residual, right.weight, right.tokens, 2, 16};
  validate(embed);
  embed.tokens = nullptr;
  expect_refused([&] { validate(embed); }, {"embed", "no tokens"});
  embed = {right.residual, right.weight, right.tokens, 2, 17};
  expect_refused([&] { validate(embed); }, {"embed", "(32, 16)", "(32, 17)"});
  embed = {right.residual, right.weight, right.tokens, 2, 16};
  embed.embedding.dtype = Dtype::int4, embed.embedding.group = 64;
  expect_refused([&] { validate(embed); }, {"embedding is int4"});
  embed.embedding = right.weight;
  embed.embedding.bias = right.data;
  expect_refused([&] { validate(embed); }, {"embedding has a bias"});
  LmHeadArgs head;
  head.residual = right.residual;
  head.head = right.weight;
  head.rows = 1;
  expect_refused([&] { validate(head); }, {"lm_head", "no room"});
  head.head.bias = right.data;
  expect_refused([&] { validate(head); }, {"lm_head", "head has a bias"});
}

}  // namespace
}  // namespace fut
