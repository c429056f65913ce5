#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "cpu/operand.h"
#include "cpu/simd.h"

namespace fut::cpu {
namespace {

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

/// BF16 rows that a sequence keeps beside its INT4 pages: `which` 0 keys, 1 values; (64, E) of a tail, (16, E) of a
/// sink.
Bf16* tail_rows(const KvCache& c, int64_t b, int8_t tail, int head, int which) {
  const int64_t page_elements = int64_t{kKvPageTokens} * c.layout.head_dim;
  return c.tails + (((c.slot[b] * 2 + tail) * c.kv_heads + head) * 2 + which) * page_elements;
}

Bf16* sink_rows(const KvCache& c, int64_t b, int head, int which) {
  return c.sinks + ((c.slot[b] * c.kv_heads + head) * 2 + which) * (int64_t{kKvSinkTokens} * c.layout.head_dim);
}

uint8_t* page_of(const KvCache& c, int64_t b, int64_t page, int head) {
  return c.pages + (c.page_table[b * c.table_width + page] * c.kv_heads + head) * c.layout.page_bytes();
}

/// The keys and values of one sequence and KV head, page by page, as floats. With an INT4 cache, channels of keys and
/// tokens of values stand in the order of int4_position(), which is the order of the tiles; else in their own.
class HeadCache {
 public:
  HeadCache(const KvCache& cache, int64_t sequence, int head)
      : cache_(cache),
        b_(sequence),
        head_(head),
        E_(cache.layout.head_dim),
        permuted_(cache.layout.dtype == Dtype::int4),
        key_stride_(round_up(E_, permuted_ ? kInt4TileCols : kLanes)) {}

  int64_t key_stride() const { return key_stride_; }
  static constexpr int64_t kValueStride = kKvPageTokens;

  int64_t channel_position(int64_t channel) const {
    if (!permuted_) return channel;
    return channel / kInt4TileCols * kInt4TileCols + int4_position(static_cast<int>(channel % kInt4TileCols));
  }
  int token_position(int token) const { return permuted_ ? int4_position(token) : token; }

  /// keys (64, key_stride): a page as queries of later pages see it.
  void load_keys(int64_t page, float* keys) const {
    if (!permuted_) {
      load_token_wise(page, keys, nullptr);
      return;
    }
    const KvPageLayout& layout = cache_.layout;
    const uint8_t* data = page_of(cache_, b_, page, head_);
    const uint8_t* scales = data + layout.key_scale_offset();
    float scale[kInt4TileRows][2];
    for (int token = 0; token < kKvPageTokens; token += kInt4TileRows) {
      for (int channel = 0; channel < E_; channel += kInt4TileCols) {
        for (int row = 0; row < kInt4TileRows; ++row) {
          for (int half = 0; half < 2; ++half) {
            const int c = channel + half * kKvGroup;
            scale[row][half] = c < E_ ? to_f32(E4m3{scales[layout.scale_index(token + row, c)]}) * factor(0) : 0.0f;
          }
        }
        simd().int4_tile(data + layout.key_tile_offset(token, channel), 7.5f, scale,
                         keys + token * key_stride_ + channel, key_stride_);
      }
    }
    clear_key_padding(keys);
    if (page == 0) {
      for (int token = 0; token < kKvSinkTokens; ++token) {
        put_key(keys, token, sink_rows(cache_, b_, head_, 0) + token * E_, Dtype::bf16);
      }
    }
  }

  /// values (round_up(E, 16), 64): transposed.
  void load_values(int64_t page, float* values) const {
    if (!permuted_) {
      load_token_wise(page, nullptr, values);
      return;
    }
    const KvPageLayout& layout = cache_.layout;
    const uint8_t* data = page_of(cache_, b_, page, head_);
    const uint8_t* scales = data + layout.value_scale_offset();
    float ones[kInt4TileRows][2], scale[kKvPageTokens];
    std::fill(&ones[0][0], &ones[0][0] + 2 * kInt4TileRows, 1.0f);
    for (int channel = 0; channel < E_; channel += kInt4TileRows) {
      if (channel % kKvGroup == 0) {
        for (int token = 0; token < kKvPageTokens; ++token) {
          scale[int4_position(token)] = to_f32(E4m3{scales[layout.scale_index(token, channel)]}) * factor(1);
        }
      }
      float* tile = values + channel * kValueStride;
      simd().int4_tile(data + layout.value_tile_offset(channel), 7.5f, ones, tile, kValueStride);
      for (int row = 0; row < kInt4TileRows; ++row) {
        for (int i = 0; i < kKvPageTokens; ++i) tile[row * kValueStride + i] *= scale[i];
      }
    }
    if (page == 0) {
      for (int token = 0; token < kKvSinkTokens; ++token) {
        put_value(values, token, sink_rows(cache_, b_, head_, 1) + token * E_, Dtype::bf16);
      }
    }
  }

  void put_key(float* keys, int token, const void* row, Dtype type) const {
    for (int64_t c = 0; c < E_; ++c) keys[token * key_stride_ + channel_position(c)] = load_element(row, type, c);
  }
  void put_value(float* values, int token, const void* row, Dtype type) const {
    for (int64_t c = 0; c < E_; ++c) values[c * kValueStride + token_position(token)] = load_element(row, type, c);
  }

 private:
  float factor(int which) const { return (which ? cache_.value_factor : cache_.key_factor)[head_]; }

  /// Tiles are 64 channels wide; beyond E they hold nothing that may meet a query.
  void clear_key_padding(float* keys) const {
    for (int64_t c = E_; c < key_stride_; ++c) {
      for (int token = 0; token < kKvPageTokens; ++token) keys[token * key_stride_ + channel_position(c)] = 0.0f;
    }
  }

  void load_token_wise(int64_t page, float* keys, float* values) const {
    const uint8_t* data = page_of(cache_, b_, page, head_);
    std::vector<float> key(E_), value(E_);
    for (int token = 0; token < kKvPageTokens; ++token) {
      kv_load_token(data, cache_.layout, token, key.data(), value.data());
      if (keys) put_key(keys, token, key.data(), Dtype::f32);
      if (values) put_value(values, token, value.data(), Dtype::f32);
    }
  }

  const KvCache& cache_;
  int64_t b_;
  int head_;
  int64_t E_;
  bool permuted_;
  int64_t key_stride_;
};

/// Scores of one query over `count` tokens become softmax weights; returns 1 / their sum.
float softmax(float* scores, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < count; ++j) largest = std::max(largest, scores[j]);
  float sum = 0.0f;
  for (int64_t j = 0; j < count; ++j) {
    scores[j] = std::exp2(scores[j] - largest);
    sum += scores[j];
  }
  return 1.0f / sum;
}

/// Queries of one page of one sequence and KV head against everything they may see.
class PageOfQueries {
 public:
  PageOfQueries(const AttentionArgs& args, bool decode, int64_t b, int head, int64_t first, int64_t count)
      : args_(args),
        decode_(decode),
        cache_(args.cache),
        b_(b),
        head_(head),
        first_(first),
        count_(count),
        group_(args.heads / args.cache.kv_heads),
        E_(args.cache.layout.head_dim),
        reader_(args.cache, b, head),
        own_page_(first / kKvPageTokens),
        span_((own_page_ + 1) * kKvPageTokens) {}

  /// o: (T, H E) f32 rows of the whole batch; only this page's rows and heads are written.
  void run(float* o) {
    load_own_page();
    load_queries();
    compute_scores();
    weigh_values(o);
  }

 private:
  int64_t row_of(int64_t position) const { return args_.batch.start[b_] + position - args_.batch.past[b_]; }
  int64_t queries() const { return count_ * group_; }

  /// The page that the queries are in: BF16 rows, of this call or from the tail; or, token-wise formats, as stored.
  void load_own_page() {
    own_keys_.resize(kKvPageTokens * reader_.key_stride());
    own_values_.resize(round_up(E_, kInt4TileRows) * HeadCache::kValueStride);
    const int64_t last = first_ + count_, past = args_.batch.past[b_], page_start = own_page_ * kKvPageTokens;
    if (cache_.layout.dtype != Dtype::int4) {
      std::vector<float> key(E_), value(E_);
      for (int64_t p = page_start; p < last; ++p) {
        const int token = static_cast<int>(p - page_start);
        kv_load_token(page_of(cache_, b_, own_page_, head_), cache_.layout, token, key.data(), value.data());
        put_own(token, key.data(), value.data(), Dtype::f32);
      }
      return;
    }
    for (int64_t p = page_start; p < last; ++p) {
      const int token = static_cast<int>(p - page_start);
      if (p >= past && !decode_) {
        const int64_t at = (row_of(p) * cache_.kv_heads + head_) * E_;
        put_own(token, static_cast<const Bf16*>(args_.k) + at, static_cast<const Bf16*>(args_.v) + at, Dtype::bf16);
      } else {  // decode appends to the tail before it attends
        const int8_t tail = cache_.tail_in[b_];
        put_own(token, tail_rows(cache_, b_, tail, head_, 0) + token * E_,
                tail_rows(cache_, b_, tail, head_, 1) + token * E_, Dtype::bf16);
      }
    }
  }

  void put_own(int token, const void* key, const void* value, Dtype type) {
    reader_.put_key(own_keys_.data(), token, key, type);
    reader_.put_value(own_values_.data(), token, value, type);
  }

  void load_queries() {
    const Dtype type = cache_.layout.dtype == Dtype::f32 ? Dtype::f32 : Dtype::bf16;
    q_.resize(queries() * reader_.key_stride());
    for (int64_t i = 0; i < count_; ++i) {
      for (int r = 0; r < group_; ++r) {
        const int64_t from = (row_of(first_ + i) * args_.heads + head_ * group_ + r) * E_;
        float* to = q_.data() + (i * group_ + r) * reader_.key_stride();
        for (int64_t c = 0; c < E_; ++c) to[reader_.channel_position(c)] = load_element(args_.q, type, from + c);
      }
    }
  }

  void compute_scores() {
    scores_.resize(queries() * span_);
    const int64_t stride = reader_.key_stride();
    std::vector<float> keys(kKvPageTokens * stride);
    for (int64_t page = 0; page <= own_page_; ++page) {
      if (page < own_page_) reader_.load_keys(page, keys.data());
      const float* source = page < own_page_ ? keys.data() : own_keys_.data();
      simd().dot(source, stride, kKvPageTokens, q_.data(), stride, queries(), stride,
                 scores_.data() + page * kKvPageTokens, span_);
    }
    inverse_sum_.resize(queries());
    for (int64_t q = 0; q < queries(); ++q) {
      const int64_t visible = first_ + q / group_ + 1;
      float* row = scores_.data() + q * span_;
      inverse_sum_[q] = softmax(row, visible);
      std::fill(row + visible, row + span_, 0.0f);
      permute_tokens(row);
    }
  }

  /// Weights of a page's tokens into the order in which values stand.
  void permute_tokens(float* row) const {
    if (cache_.layout.dtype != Dtype::int4) return;
    float page[kKvPageTokens];
    for (int64_t start = 0; start < span_; start += kKvPageTokens) {
      for (int token = 0; token < kKvPageTokens; ++token) page[int4_position(token)] = row[start + token];
      memcpy(row + start, page, sizeof page);
    }
  }

  /// Page sums are added in the order of the pages: the order that makes chunked and whole prompts agree bit for bit.
  void weigh_values(float* o) const {
    const int64_t rows = round_up(E_, kInt4TileRows);
    std::vector<float> values(rows * HeadCache::kValueStride), sum(queries() * E_, 0.0f), part(queries() * E_);
    for (int64_t page = 0; page <= own_page_; ++page) {
      if (page < own_page_) reader_.load_values(page, values.data());
      const float* source = page < own_page_ ? values.data() : own_values_.data();
      simd().dot(source, HeadCache::kValueStride, E_, scores_.data() + page * kKvPageTokens, span_, queries(),
                 kKvPageTokens, part.data(), E_);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    for (int64_t q = 0; q < queries(); ++q) {
      const int64_t t = row_of(first_ + q / group_), h = head_ * group_ + q % group_;
      float* to = o + (t * args_.heads + h) * E_;
      for (int64_t c = 0; c < E_; ++c) to[c] = sum[q * E_ + c] * inverse_sum_[q];
    }
  }

  const AttentionArgs& args_;
  bool decode_;
  const KvCache& cache_;
  int64_t b_;
  int head_;
  int64_t first_, count_;  // positions
  int group_;
  int64_t E_;
  HeadCache reader_;
  int64_t own_page_, span_;
  std::vector<float> own_keys_, own_values_, q_, scores_, inverse_sum_;
};

}  // namespace

void attention(const AttentionArgs& args, bool decode) {
  struct Task {
    int64_t b, first, count;
    int head;
  };
  std::vector<Task> tasks;
  for (int64_t b = 0; b < args.batch.sequences; ++b) {
    const int64_t past = args.batch.past[b], end = past + args.batch.start[b + 1] - args.batch.start[b];
    for (int64_t first = past; first < end;) {
      const int64_t page_end = std::min(end, (first / kKvPageTokens + 1) * kKvPageTokens);
      for (int head = 0; head < args.cache.kv_heads; ++head) tasks.push_back({b, first, page_end - first, head});
      first = page_end;
    }
  }
  // Late pages see most: longest first, so that no thread is left with one at the end.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.first > y.first; });
  const int64_t width = int64_t{args.heads} * args.cache.layout.head_dim;
  std::vector<float> o(args.batch.rows * width);
  parallel_for(static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Task& task = tasks[i];
      PageOfQueries(args, decode, task.b, task.head, task.first, task.count).run(o.data());
    }
  });
  parallel_for(args.batch.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) store_operand_row(args.out, t, o.data() + t * width, width);
  });
}

namespace {

/// One sequence and head of an INT4 cache: sinks, the tail found, whole pages, the tail left.
void write_int4(const KvCache& c, const Batch& batch, int64_t b, int head, const Bf16* k, const Bf16* v) {
  const int64_t E = c.layout.head_dim, past = batch.past[b], end = past + batch.start[b + 1] - batch.start[b];
  const int64_t first_page = past / kKvPageTokens;
  const auto new_row = [&](const Bf16* from, int64_t p) {
    return from + ((batch.start[b] + p - past) * c.kv_heads + head) * E;
  };
  const auto put = [&](Bf16* rows, int64_t token, const Bf16* from) {
    memcpy(rows + token * E, from, E * sizeof(Bf16));
  };
  for (int which = 0; which < 2; ++which) {
    const Bf16* from = which ? v : k;
    for (int64_t p = past; p < std::min<int64_t>(end, kKvSinkTokens); ++p) {
      put(sink_rows(c, b, head, which), p, new_row(from, p));
    }
    for (int64_t p = past; p < std::min(end, (first_page + 1) * kKvPageTokens); ++p) {
      put(tail_rows(c, b, c.tail_in[b], head, which), p % kKvPageTokens, new_row(from, p));
    }
    const int64_t last_page = end / kKvPageTokens;
    for (int64_t p = last_page * kKvPageTokens; last_page > first_page && p < end; ++p) {
      put(tail_rows(c, b, c.tail_out[b], head, which), p % kKvPageTokens, new_row(from, p));
    }
  }
  std::vector<Bf16> keys(kKvPageTokens * E), values(kKvPageTokens * E);
  for (int64_t page = first_page; page < end / kKvPageTokens; ++page) {
    const Bf16 *page_keys = tail_rows(c, b, c.tail_in[b], head, 0),
               *page_values = tail_rows(c, b, c.tail_in[b], head, 1);
    if (page > first_page) {
      for (int64_t token = 0; token < kKvPageTokens; ++token) {
        put(keys.data(), token, new_row(k, page * kKvPageTokens + token));
        put(values.data(), token, new_row(v, page * kKvPageTokens + token));
      }
      page_keys = keys.data();
      page_values = values.data();
    }
    kv_quantise_page(page_of(c, b, page, head), c.layout, page_keys, page_values, c.key_factor[head],
                     c.value_factor[head]);
  }
}

void write_token_wise(const KvCache& c, const Batch& batch, int64_t b, int head, const void* k, const void* v) {
  const int64_t E = c.layout.head_dim, past = batch.past[b], end = past + batch.start[b + 1] - batch.start[b];
  const Dtype type = exact_type(c);
  std::vector<float> key(E), value(E);
  for (int64_t p = past; p < end; ++p) {
    const int64_t from = ((batch.start[b] + p - past) * c.kv_heads + head) * E;
    for (int64_t i = 0; i < E; ++i) {
      key[i] = load_element(k, type, from + i);
      value[i] = load_element(v, type, from + i);
    }
    kv_store_token(page_of(c, b, p / kKvPageTokens, head), c.layout, static_cast<int>(p % kKvPageTokens), key.data(),
                   value.data());
  }
}

}  // namespace

void write_cache(const KvCache& cache, const Batch& batch, const void* k, const void* v) {
  parallel_for(batch.sequences * cache.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / cache.kv_heads;
      const int head = static_cast<int>(i % cache.kv_heads);
      if (cache.layout.dtype == Dtype::int4) {
        write_int4(cache, batch, b, head, static_cast<const Bf16*>(k), static_cast<const Bf16*>(v));
      } else {
        write_token_wise(cache, batch, b, head, k, v);
      }
    }
  });
}

}  // namespace fut::cpu
