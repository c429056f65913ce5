// What attention_prefill.cu reads beside q, k and v of the call, as BF16 rows that the copy engine can take.
//
// seen:   (2 (K, V), S, J, E) what queries of later pages see: INT4 pages decoded, sinks exact. (q - 7.5) s f has at
// most
//         eight significant bits: BF16 loses nothing. Token-wise formats: every token, then zeros to a whole tile.
// edges:  (2, B, 2 (first, last), 64, J, E) the exact first and last page of the call's rows. The first may have begun
//         before the call, in the tail; the last ends in zeros, because what follows in k and v belongs to others, and
//         a weight of zero times their NaN is NaN.
#pragma once

#include "cuda/attention_prefill.h"
#include "cuda/ptx.cuh"

namespace fut::cuda {

struct UnpackArgs {
  AttentionPrefill call;
  Bf16 *seen, *edges;  ///< keys; values `seen_half`, `edge_half` elements on
  int64_t seen_half, edge_half;
  OwnPages own;
  unsigned* next_item;  ///< to be zero when this kernel has ended
};

/// Rows in shared memory are a little longer than E: the columns of INT4's V tiles fall into different banks.
inline constexpr int kUnpackPitch = 128 + 8;

/// 64 rows from shared memory: to + i * stride.
template <int E>
__device__ inline void store_page(Bf16* to, int64_t stride, const Bf16* rows) {
  for (int i = threadIdx.x; i < kKvPageTokens * E / 8; i += blockDim.x) {
    const int row = i / (E / 8), unit = i % (E / 8);
    *reinterpret_cast<uint4*>(to + row * stride + 8 * unit) =
        *reinterpret_cast<const uint4*>(rows + row * kUnpackPitch + 8 * unit);
  }
}

/// A page of codes; the inverse of quantise_page().
template <int E>
__device__ inline void decode_page(Bf16* rows, const uint8_t* page, int which, float factor) {
  constexpr KvPageLayout layout{Dtype::int4, E};
  const uint32_t* words = reinterpret_cast<const uint32_t*>(page + (which ? layout.value_offset() : 0));
  const uint8_t* scales = page + (which ? layout.value_scale_offset() : layout.key_scale_offset());
  for (int i = threadIdx.x; i < kKvPageTokens * E / 8; i += blockDim.x) {
    const int tile = i / 128, lane = i / 4 % 32, word = i % 4;
    const uint32_t packed = words[i];
    Bf16 value[8];  // all read before the first is stored, or the compiler reads each scale again and again
    const auto place = [&](int nibble) {
      const Int4Coordinate c = int4_coordinate({lane, word, nibble});
      return which ? int2{c.k, tile * 16 + c.row}
                   : int2{tile / (E / 64) * 16 + c.row, tile % (E / 64) * 64 + c.k};  // token, channel
    };
#pragma unroll
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int2 at = place(nibble);
      const float scale = to_f32(E4m3{scales[layout.scale_index(at.x, at.y)]}) * factor;
      value[nibble] = to_bf16(kv_value(packed >> (4 * nibble) & 15, scale));
    }
#pragma unroll
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int2 at = place(nibble);
      rows[at.x * kUnpackPitch + at.y] = value[nibble];
    }
  }
}

/// A page as queries of later pages see it; token-wise formats: `count` tokens of it.
template <int E>
__device__ inline void read_page(Bf16* rows, const KvCache& c, int64_t b, int64_t page, int64_t count, int head,
                                 int which) {
  const KvPageLayout layout{c.layout.dtype, E};
  const uint8_t* data =
      c.pages + (count > 0 ? c.page_table[b * c.table_width + page] * c.kv_heads + head : 0) * layout.page_bytes();
  if (layout.dtype == Dtype::int4) {
    decode_page<E>(rows, data, which, (which ? c.value_factor : c.key_factor)[head]);
    if (page > 0) return;
    __syncthreads();  // closes: sinks overwritten by codes
    const Bf16* sinks = c.sinks + ((c.slot[b] * c.kv_heads + head) * 2 + which) * kKvSinkTokens * E;
    for (int i = threadIdx.x; i < kKvSinkTokens * E; i += blockDim.x) rows[i / E * kUnpackPitch + i % E] = sinks[i];
    return;
  }
  const uint8_t* codes = data + (which ? layout.value_offset() : 0);
  const float* scales =
      reinterpret_cast<const float*>(data + (which ? layout.value_scale_offset() : layout.key_scale_offset()));
  for (int i = threadIdx.x; i < kKvPageTokens * E; i += blockDim.x) {
    const int token = i / E;
    Bf16& to = rows[token * kUnpackPitch + i % E];
    to = Bf16{0};
    if (token >= count) continue;
    to = layout.dtype == Dtype::bf16 ? reinterpret_cast<const Bf16*>(codes)[i]
                                     : to_bf16(to_f32(E4m3{codes[i]}) * scales[token]);
  }
}

/// The exact rows of one of the call's pages, zeros where it has none.
template <int E>
__device__ inline void gather_page(Bf16* rows, const AttentionPrefill& a, int64_t b, int64_t page, int head,
                                   int which) {
  const KvCache& c = a.cache;
  const int64_t past = a.past[b], end = past + a.start[b + 1] - a.start[b];
  const Bf16* now = (which ? a.v : a.k) + head * E;
  const Bf16* tail = nullptr;
  if (c.layout.dtype == Dtype::int4)
    tail = c.tails + (((c.slot[b] * 2 + c.tail_in[b]) * c.kv_heads + head) * 2 + which) * kKvPageTokens * E;
  for (int i = threadIdx.x; i < kKvPageTokens * E; i += blockDim.x) {
    const int64_t p = page * kKvPageTokens + i / E;
    rows[i / E * kUnpackPitch + i % E] = p >= end    ? Bf16{0}
                                         : p >= past ? now[(a.start[b] + p - past) * c.kv_heads * E + i % E]
                                         : tail      ? tail[i]
                                                     : Bf16{0};
  }
}

/// Block (x, 2 j + which, b): x = 0, 1: the call's first and last page; then what is seen, page by page.
template <int E>
__global__ void attention_unpack_kernel(const __grid_constant__ UnpackArgs args) {
  __shared__ __align__(16) Bf16 rows[kKvPageTokens * kUnpackPitch];
  const AttentionPrefill& a = args.call;
  const KvCache& c = a.cache;
  const int which = blockIdx.y & 1, head = blockIdx.y >> 1;
  const int64_t b = blockIdx.z, stride = int64_t{c.kv_heads} * E;
  release_next_kernel();
  wait_for_previous_kernel();
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && b == 0) *args.next_item = 0;
  const int64_t end = a.past[b] + a.start[b + 1] - a.start[b];
  if (a.start[b + 1] == a.start[b]) return;
  Bf16* to;
  if (blockIdx.x < 2) {
    if (args.own == OwnPages::stored) return;
    const int64_t page = blockIdx.x ? (end - 1) / kKvPageTokens : a.past[b] / kKvPageTokens;
    gather_page<E>(rows, a, b, page, head, which);
    to = args.edges + which * args.edge_half + (2 * b + blockIdx.x) * kKvPageTokens * stride;
  } else {
    const int64_t page = blockIdx.x - 2, first = page * kKvPageTokens;
    const int64_t pages = args.own == OwnPages::apart
                              ? (end - 1) / kKvPageTokens
                              : (end + kAttentionTile - 1) / kAttentionTile * (kAttentionTile / kKvPageTokens);
    if (page >= pages) return;
    read_page<E>(rows, c, b, page, min(end - first, int64_t{kKvPageTokens}), head, which);
    to = args.seen + which * args.seen_half + (a.seen_start[b] + first) * stride;
  }
  __syncthreads();  // closes: rows read before they are written
  store_page<E>(to + head * E, stride, rows);
}

}  // namespace fut::cuda
