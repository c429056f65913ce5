// A page of 64 BF16 keys or values as INT4 codes and scales: the codes of kv_page.h, bit for bit.
#pragma once

#include "layout/kv_page.h"

namespace fut::cuda {

/// kv_code() as a float, without a conversion: floor by adding 1.5 * 2^23 and rounding down.
__device__ inline float code_level(float x, float inverse) {
  constexpr float kMagic = 12582912.0f;
  return fminf(fmaxf(__fadd_rd(x * inverse, kMagic) - (kMagic - 8.0f), 0.0f), 15.0f);
}

/// kv_group_error for a quad that holds a group: lane t has channels 8 j + 2 t and + 1, j rising.
__device__ inline float group_error(const float (&x)[8], float scale) {
  const float inverse = __frcp_rn(scale);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float d = x[i] - (code_level(x[i], inverse) - 7.5f) * scale;
    sum = fmaf(d, d, sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

/// kv_choose_scale for a quad.
__device__ inline E4m3 choose_scale(const float (&x)[8], float factor) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const int nearest = to_e4m3(largest * (1.0f / 7.5f) * __frcp_rn(factor)).bits;
  int best = 0;
  float best_error = 0.0f;
#pragma unroll 1
  for (int step = 1; step > 1 - kKvScaleCandidates; --step) {
    const int bits = nearest + step;
    const bool known = bits >= 1 && bits <= 0x7e;
    const E4m3 candidate{static_cast<uint8_t>(known ? bits : 0x38)};  // all lanes of the warp take part in the sums
    const float error = group_error(x, to_f32(candidate) * factor);
    if (known && largest > 0.0f && (best == 0 || error < best_error)) {
      best = bits;
      best_error = error;
    }
  }
  return E4m3{static_cast<uint8_t>(best)};
}

/// Codes and scales of one half (0 keys, 1 values) of an INT4 page. row(token) -> its E BF16 elements. All `threads`
/// threads from 0 take part, whole warps of them, and meet at sync(); `codes` is (64, E) of shared memory.
template <class Row, class Sync>
__device__ void quantise_page(uint8_t* page, const KvPageLayout& layout, int which, float factor, uint8_t* codes,
                              int thread, int threads, Row row, Sync sync) {
  const int E = layout.head_dim, groups = layout.groups(), lanes = kKvPageTokens * groups * 4;
  for (int i = thread; i < lanes; i += threads) {
    const int t = i & 3, group = i / 4 % groups, token = i / (4 * groups);
    const Bf16* from = row(token) + group * kKvGroup + 2 * t;
    float x[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[2 * j] = to_f32(from[8 * j]), x[2 * j + 1] = to_f32(from[8 * j + 1]);
    const E4m3 scale = choose_scale(x, factor);
    const float inverse = scale.bits ? __frcp_rn(to_f32(scale) * factor) : 0.0f;
    uint8_t* to = codes + token * E + group * kKvGroup + 2 * t;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[8 * j] = static_cast<uint8_t>(code_level(x[2 * j], inverse));
      to[8 * j + 1] = static_cast<uint8_t>(code_level(x[2 * j + 1], inverse));
    }
    const int64_t scales = which ? layout.value_scale_offset() : layout.key_scale_offset();
    if (t == 0) page[scales + layout.scale_index(token, group * kKvGroup)] = scale.bits;
  }
  sync();  // closes: codes read before they are written
  uint32_t* words = reinterpret_cast<uint32_t*>(page + (which ? layout.value_offset() : 0));
  for (int i = thread; i < kKvPageTokens * E / 8; i += threads) {
    const int tile = i / 128, lane = i / 4 % 32, word = i % 4;
    uint32_t packed = 0;
    for (int nibble = 0; nibble < 8; ++nibble) {
      const Int4Coordinate c = int4_coordinate({lane, word, nibble});
      const int token = which ? c.k : tile / (E / 64) * 16 + c.row,
                channel = which ? tile * 16 + c.row : tile % (E / 64) * 64 + c.k;
      packed |= uint32_t{codes[token * E + channel]} << (4 * nibble);
    }
    words[i] = packed;
  }
  sync();  // closes: codes of the next page written while these are read
}

}  // namespace fut::cuda
