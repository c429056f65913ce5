// MATH       cpu_backend.cpp's finish_qkv_row and attention.cpp's write_cache, element by element.
// SHAPES     E = 64 or 128; INT4, BF16 and E4M3 caches. Refused: f32 caches.
// LAYOUT     kv_page.h.
// SCHEDULE   finish_qkv: a block of E threads takes a head of a row. A new key or value goes into tail and sinks, or
// its
//            page; a block whose token fills an INT4 page quantises that half of the page (keys or values).
//            store_cache: a block of 512 threads takes one page of one KV head of one sequence, keys or values.
// NUMERICS   No contraction (-fmad=false) and the order of kv_page.h: codes and scales are those of the CPU, bit for
// bit. ROOFLINE   small; a page of 64 tokens is quantised every 64 steps.
#include <cmath>
#include <numbers>

#include "cuda/block.cuh"
#include "cuda/cache.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/quantise_page.cuh"
#include "cuda/weight_tile.cuh"
#include "layout/hadamard.h"

namespace fut::cuda {
namespace {

__device__ Bf16* tail_rows(const KvCache& c, int64_t b, int8_t tail, int head, int which) {
  return c.tails + (((c.slot[b] * 2 + tail) * c.kv_heads + head) * 2 + which) * kKvPageTokens * c.layout.head_dim;
}
__device__ Bf16* sink_rows(const KvCache& c, int64_t b, int head, int which) {
  return c.sinks + ((c.slot[b] * c.kv_heads + head) * 2 + which) * kKvSinkTokens * c.layout.head_dim;
}
__device__ uint8_t* page_of(const KvCache& c, int64_t b, int64_t page, int head) {
  return c.pages + (c.page_table[b * c.table_width + page] * c.kv_heads + head) * c.layout.page_bytes();
}

/// One key or value (in shared memory, one element a thread) into its page of a token-wise cache.
__device__ void store_token(const KvCache& c, int64_t b, int64_t position, int head, int which, float x) {
  const KvPageLayout& layout = c.layout;
  const int E = layout.head_dim, token = static_cast<int>(position % kKvPageTokens), i = threadIdx.x;
  uint8_t* page = page_of(c, b, position / kKvPageTokens, head);
  uint8_t* row = page + (which ? layout.value_offset() : 0) + layout.key_bytes() / kKvPageTokens * token;
  if (layout.dtype == Dtype::bf16) {
    if (i < E) reinterpret_cast<Bf16*>(row)[i] = to_bf16(x);
    return;
  }
  const float scale = e4m3_scale(max_block(i < E ? fabsf(x) : 0.0f));
  if (i < E) row[i] = to_e4m3(x / scale).bits;
  const int64_t scales = which ? layout.value_scale_offset() : layout.key_scale_offset();
  if (i == 0) reinterpret_cast<float*>(page + scales)[token] = scale;
}

__device__ void append(const KvCache& c, int64_t b, int64_t position, int head, int which, Bf16 x, uint8_t* codes) {
  if (c.layout.dtype != Dtype::int4) return store_token(c, b, position, head, which, to_f32(x));
  const int E = c.layout.head_dim, i = threadIdx.x, token = static_cast<int>(position % kKvPageTokens);
  Bf16* tail = tail_rows(c, b, c.tail_in[b], head, which);
  tail[token * E + i] = x;
  if (position < kKvSinkTokens) sink_rows(c, b, head, which)[position * E + i] = x;
  if (token != kKvPageTokens - 1) return;
  __syncthreads();  // closes: the tail's last row read before it is written
  quantise_page(
      page_of(c, b, position / kKvPageTokens, head), c.layout, which, (which ? c.value_factor : c.key_factor)[head],
      codes, threadIdx.x, blockDim.x, [&](int row) { return tail + row * E; }, [] { __syncthreads(); });
}

/// The rotation of hadamard.h, one channel a thread: strides below 32 within a warp, then through shared memory.
__device__ float rotate(float x, float (*exchange)[128], int E) {
  const int i = threadIdx.x, block = hadamard_block(E);
  x *= hadamard_sign(i);
  for (int stride = 1; stride < 32; stride *= 2) {
    const float other = __shfl_xor_sync(~0u, x, stride);
    x = i & stride ? other - x : x + other;
  }
  for (int stride = 32, turn = 0; stride < block; stride *= 2, turn ^= 1) {
    exchange[turn][i] = x;
    __syncthreads();  // closes: a partner's value read before it is written
    const float other = exchange[turn][i ^ stride];
    x = i & stride ? other - x : x + other;
  }
  return x * (1.0f / sqrtf(static_cast<float>(block)));
}

__global__ void finish_qkv_kernel(const __grid_constant__ QkvFinish args) {
  extern __shared__ uint8_t codes[];
  __shared__ float head[128], exchange[2][128];
  const KvCache& c = args.cache;
  const int E = c.layout.head_dim, H = args.heads, J = c.kv_heads, h = blockIdx.x, i = threadIdx.x;
  const int64_t t = blockIdx.y;
  release_next_kernel();
  // Tables and what the host has sent, while the previous kernel still runs.
  const int64_t position = args.map.position[t];
  const int half = args.rope.rotary_dim / 2, pair = i < half ? i : i - half;
  const bool turns = h < H + J && i < 2 * half;
  const float cos = turns ? args.rope.cos[position * half + pair] : 0.0f,
              sin = turns ? args.rope.sin[position * half + pair] : 0.0f;
  const float mean = h >= H && h < H + J && c.key_mean ? c.key_mean[(h - H) * E + i] : 0.0f;
  const float* gains = h < H ? args.q_norm : args.k_norm;
  const float gain = h < H + J && gains ? gains[i] : 1.0f;
  wait_for_previous_kernel();
  float x = args.y[(t * (H + 2 * J) + h) * E + i];
  if (h < H + J) {
    if (gains) x = x * inverse_rms_of(sum_block(x * x), E, args.eps) * gain;
    head[i] = x;
    __syncthreads();  // closes: a partner's value read before it is written
    if (turns) x = i < half ? x * cos - head[i + half] * sin : x * cos + head[i - half] * sin;
    if (h >= H && c.key_mean) x -= mean;
    if (c.layout.dtype == Dtype::int4) x = rotate(x, exchange, E);
  }
  if (h < H) {
    args.q[(t * H + h) * E + i] = to_bf16(x * args.q_scale);
    return;
  }
  const int which = h >= H + J, j = h - H - which * J;
  const Bf16 rounded = to_bf16(x);
  (which ? args.v : args.k)[(t * J + j) * E + i] = rounded;
  if (args.append) append(c, args.map.sequence[t], position, j, which, rounded, codes);
}

/// One token of a token-wise cache, by a warp: E / 32 neighbouring elements a lane.
__device__ void store_token_by_warp(const KvCache& c, int64_t b, int64_t position, int head, int which,
                                    const Bf16* from) {
  const KvPageLayout& layout = c.layout;
  const int E = layout.head_dim, token = static_cast<int>(position % kKvPageTokens), lane = threadIdx.x % 32;
  uint8_t* page = page_of(c, b, position / kKvPageTokens, head);
  uint8_t* row = page + (which ? layout.value_offset() : 0) + layout.key_bytes() / kKvPageTokens * token;
  float largest = 0.0f;
  for (int i = lane; i < E; i += 32) {
    if (layout.dtype == Dtype::bf16) reinterpret_cast<Bf16*>(row)[i] = from[i];
    largest = fmaxf(largest, fabsf(to_f32(from[i])));
  }
  if (layout.dtype == Dtype::bf16) return;
  const float scale = e4m3_scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest))));
  for (int i = lane; i < E; i += 32) row[i] = to_e4m3(to_f32(from[i]) / scale).bits;
  const int64_t scales = which ? layout.value_scale_offset() : layout.key_scale_offset();
  if (lane == 0) reinterpret_cast<float*>(page + scales)[token] = scale;
}

/// `count` rows of kHeadDim, 16 bytes a thread; row(i) -> to and from.
template <int kHeadDim, class Row>
__device__ void copy_rows(int count, Row row) {
  constexpr int kUnits = kHeadDim / 8;
  for (int i = threadIdx.x; i < count * kUnits; i += blockDim.x) {
    const auto [to, from] = row(i / kUnits);
    reinterpret_cast<uint4*>(to)[i % kUnits] = reinterpret_cast<const uint4*>(from)[i % kUnits];
  }
}

/// Block (page, 2 j + which, b): the tokens of this call that fall into the page, and the page itself if it is now
/// full.
template <int kHeadDim>
__global__ void __launch_bounds__(kRowThreads) store_cache_kernel(const __grid_constant__ QkvFinish args) {
  extern __shared__ uint8_t codes[];
  struct Copy {
    Bf16* to;
    const Bf16* from;
  };
  const KvCache& c = args.cache;
  const int which = blockIdx.y & 1, head = blockIdx.y >> 1;
  const int64_t b = blockIdx.z;
  release_next_kernel();
  const int64_t past = args.map.past[b], start = args.start[b], end = past + args.start[b + 1] - start;
  wait_for_previous_kernel();
  const int64_t first_page = past / kKvPageTokens, page = first_page + blockIdx.x, page_start = page * kKvPageTokens;
  if (page_start >= end) return;
  // Tokens of the page: those of this call are from `first` to `last`.
  const int first = static_cast<int>(max(past - page_start, int64_t{0})),
            last = static_cast<int>(min(end - page_start, int64_t{kKvPageTokens}));
  const int64_t pitch = int64_t{c.kv_heads} * kHeadDim;
  const Bf16* rows = (which ? args.v : args.k) + (start + page_start - past) * pitch + head * kHeadDim;
  if (c.layout.dtype != Dtype::int4) {
    for (int i = first + static_cast<int>(threadIdx.x) / 32; i < last; i += kRowThreads / 32)
      store_token_by_warp(c, b, page_start + i, head, which, rows + i * pitch);
    return;
  }
  if (page == 0) {
    Bf16* sinks = sink_rows(c, b, head, which);
    copy_rows<kHeadDim>(min(last, kKvSinkTokens) - first, [&](int i) {
      return Copy{sinks + (first + i) * kHeadDim, rows + (first + i) * pitch};
    });
  }
  Bf16* tail = tail_rows(c, b, c.tail_in[b], head, which);
  if (page == first_page || last < kKvPageTokens) {
    Bf16* to = page == first_page ? tail : tail_rows(c, b, c.tail_out[b], head, which);
    copy_rows<kHeadDim>(last - first, [&](int i) {
      return Copy{to + (first + i) * kHeadDim, rows + (first + i) * pitch};
    });
  }
  if (last < kKvPageTokens) return;
  if (first > 0) __syncthreads();  // closes: the tail's rows read before they are written
  quantise_page(
      page_of(c, b, page, head), KvPageLayout{Dtype::int4, kHeadDim}, which,
      (which ? c.value_factor : c.key_factor)[head], codes, threadIdx.x, kRowThreads,
      [&](int row) { return first > 0 ? tail + row * kHeadDim : rows + row * pitch; }, [] { __syncthreads(); });
}

void check(const char* op, const KvCache& c) {
  const int E = c.layout.head_dim;
  FUT_CHECK(E == 64 || E == 128, op, ": head width ", E, ", this backend knows 64 and 128");
  FUT_CHECK(c.layout.dtype != Dtype::f32, op, ": an f32 cache is for the CPU alone (choose int4, fp8 or bf16)");
}

}  // namespace

float query_scale(int head_dim) {
  return static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(head_dim)));
}

void finish_qkv(const char* op, const QkvFinish& args, cudaStream_t stream) {
  check(op, args.cache);
  const int E = args.cache.layout.head_dim;
  for (int first = 0; first < args.rows; first += 65535) {
    QkvFinish part = args;
    part.q_scale = query_scale(E);
    const int64_t J = args.cache.kv_heads, H = args.heads;
    part.rows = args.rows - first < 65535 ? args.rows - first : 65535;
    part.y += first * (H + 2 * J) * E;
    part.q += first * H * E;
    part.k += first * J * E;
    part.v += first * J * E;
    part.map.sequence += first;
    part.map.position += first;
    launch(op, finish_qkv_kernel, dim3(static_cast<unsigned>(H + 2 * J), part.rows), dim3(E), args.append ? 64 * E : 0,
           stream, part);
  }
}

void store_cache(const char* op, const QkvFinish& args, int sequences, int64_t longest, cudaStream_t stream) {
  check(op, args.cache);
  if (sequences == 0 || longest == 0) return;
  const int E = args.cache.layout.head_dim;
  const unsigned pages = static_cast<unsigned>((longest + kKvPageTokens - 1) / kKvPageTokens + 1);
  launch(op, E == 64 ? store_cache_kernel<64> : store_cache_kernel<128>,
         dim3(pages, 2 * args.cache.kv_heads, sequences), kRowThreads, 64 * E, stream, args);
}

}  // namespace fut::cuda
