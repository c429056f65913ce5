// The compile-time side of an attention kernel, and the running softmax that a warp keeps (attention.cuh).
#pragma once

#include "base/dtype.h"
#include "cuda/attention.h"
#include "layout/kv_page.h"

namespace fut::cuda {

inline constexpr int kAttentionWarps = 8, kAttentionThreads = kAttentionWarps * 32;
inline constexpr int kPairSlots = 2;  ///< items in flight of a pair in attention.cuh
static_assert(kPairs == kAttentionWarps / 2);
inline constexpr float kWeightBias = 15.0f;  ///< softmax weights are kept times 2^15

template <Dtype kDtype_, int E_, int NB_>
struct AttentionShape {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr int E = E_, NB = NB_;
  static constexpr bool kInt4 = kDtype == Dtype::int4, kE4m3 = kDtype == Dtype::e4m3;
  static constexpr int kRowBytes = kE4m3 ? E : 2 * E;                          ///< of a row in a tile of 16 tokens
  static constexpr int kValueRows = 16 * kRowBytes, kScales = 32 * kRowBytes;  ///< offsets in the tile
  static constexpr int kTileBytes = 32 * kRowBytes + (kE4m3 ? 128 : 0);
  static constexpr int kPageBytes = kInt4 ? static_cast<int>(KvPageLayout{Dtype::int4, E}.page_bytes()) : 0;
  static constexpr int kSlotBytes = ((kTileBytes > kPageBytes ? kTileBytes : kPageBytes) + 127) / 128 * 128;
  static constexpr int kMergeBytes = kAttentionWarps * NB * 8 * (E + 2) * 4;
  static constexpr int kRing = kPairs * kPairSlots * kSlotBytes;
  static constexpr int kSharedBytes = kRing + kMergeBytes;
};

/// 2^x by the special function unit; denormals become zero, and so does minus infinity.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// One warp's running softmax over the items it has seen. Lane 4 g + t owns heads 2t and 2t + 1 of every column tile:
/// largest score and sum (its own tokens' part), and O^T of channels g and g + 8 of every tile of 16.
template <class Shape>
struct Running {
  static constexpr int NB = Shape::NB, kTiles = Shape::E / 16, kGroups = Shape::E / kKvGroup;
  float largest[NB][2], sum[NB][2];
  float o[kTiles][NB][4];
  float weights[Shape::kInt4 ? kGroups : 1][NB][2];  ///< INT4: sum of P times the values' scales, for the level 7.5

  __device__ void clear() {
    for (int nb = 0; nb < NB; ++nb) {
      for (int c = 0; c < 2; ++c) largest[nb][c] = -INFINITY, sum[nb][c] = 0.0f;
      for (int i = 0; i < kTiles; ++i) zero(o[i][nb]);
      for (auto& group : weights) group[nb][0] = group[nb][1] = 0.0f;
    }
  }
  __device__ static void zero(float (&x)[4]) { x[0] = x[1] = x[2] = x[3] = 0.0f; }

  /// Scores of kTokenTiles * 16 tokens become weights; what was summed before is brought to the new maximum.
  template <int kTokenTiles>
  __device__ void weigh(float (&s)[kTokenTiles][NB][4]) {
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      float factor[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = largest[nb][c];
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) top = fmaxf(top, fmaxf(s[i][nb][c], s[i][nb][c + 2]));
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        factor[c] = largest[nb][c] == -INFINITY ? 0.0f : fast_exp2(largest[nb][c] - top);
        largest[nb][c] = top;
        const float shift = top == -INFINITY ? 0.0f : top - kWeightBias;
        sum[nb][c] *= factor[c];
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
          s[i][nb][c] = fast_exp2(s[i][nb][c] - shift);
          s[i][nb][c + 2] = fast_exp2(s[i][nb][c + 2] - shift);
          sum[nb][c] += s[i][nb][c] + s[i][nb][c + 2];
        }
      }
      if (__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) continue;  // as most of the time
#pragma unroll
      for (int i = 0; i < kTiles; ++i) scale(o[i][nb], factor);
      if constexpr (Shape::kInt4) {
#pragma unroll
        for (auto& group : weights) group[nb][0] *= factor[0], group[nb][1] *= factor[1];
      }
    }
  }
  __device__ static void scale(float (&x)[4], const float (&factor)[2]) {
    x[0] *= factor[0], x[1] *= factor[1], x[2] *= factor[0], x[3] *= factor[1];
  }
};

}  // namespace fut::cuda
