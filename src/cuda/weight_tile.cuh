// How a warp reads a tile of 16 x 64 weights out of shared memory and multiplies it: one struct a weight format.
//
//   INT4   int4_fragment.h. Rows 0-7 are multiplied as q * 2^-24, FP16 subnormals, exact in the product; rows 8-15 with
//          the code below them still there, as (16 q + q') * 2^-24, from which the accumulators take q' away again:
//          four operations for eight codes instead of five. row_unit() takes the powers of two out at the end, and -8
//          sum(a) is the accumulator's start value.
//   E4M3   [k-step pair][lane] of 16 bytes: the fragments a0 a1 a2 a3 of two k-steps, two codes each. 1024 bytes.
//   BF16   [k-step][lane] of 16 bytes: a0 a1 a2 a3. 2048 bytes.
#pragma once

#include <cuda_fp16.h>

#include "base/dtype.h"
#include "cuda/ptx.cuh"
#include "layout/int4_fragment.h"

namespace fut::cuda {

/// Two floats as FP16, saturated, the first in the low half; NaN stays NaN.
__device__ inline uint32_t half_pair(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
/// to_half_saturated() in one instruction.
__device__ inline Half half_saturated(float x) { return {static_cast<uint16_t>(half_pair(x, 0.0f))}; }

// How a product over K is summed, whatever kernel makes it and however large the batch is: k-tile j belongs to class
// j % 8, a class is summed in the order of k, and the classes are added by pairs of neighbours. So warps, or blocks,
// may share the classes of a row in any aligned way and give the same bits.
inline constexpr int kClasses = 8;

/// ((c0 + c1) + (c2 + c3)) + ..
template <int kCount>
__device__ inline float add_classes(const float (&c)[kCount]) {
  if constexpr (kCount == 1) {
    return c[0];
  } else {
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) sums[i] = c[2 * i] + c[2 * i + 1];
    return add_classes(sums);
  }
}

/// Unit u of a row of activations is what lane t = u % 4 of every quad multiplies in two k-steps (half u / 4 % 2 of
/// k-tile u / 8): the columns fragment_column(u) + 0, 1, 8, 9, 16, 17, 24, 25.
__device__ inline int fragment_column(int u) { return (u >> 2) * 32 + (u & 3) * 2; }

/// Weight::input_scale of columns k and k + 1; ones where there is none.
__device__ inline float2 input_scale_of(const float* scale, int k) {
  return scale ? *reinterpret_cast<const float2*>(scale + k) : make_float2(1.0f, 1.0f);
}

/// Sums of squares of a row run over its units: thread i of 512 takes units i, i + 512, .., then lanes, then warps.
__device__ inline void add_squares(float& sum, float2 x) { sum = fmaf(x.y, x.y, fmaf(x.x, x.x, sum)); }

/// 1 / rms of a row of K values. FP32 throughout: an ulp beside the CPU's double, and no subroutine in the middle of a
/// kernel.
__device__ inline float inverse_rms_of(float sum_of_squares, int K, float eps) {
  return __frsqrt_rn(fmaf(sum_of_squares, __frcp_rn(static_cast<float>(K)), eps));
}

/// silu(gate) * up, by the special function unit: a few ulp, and no subroutine. All kernels round h alike.
__device__ inline float swiglu_of(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

/// Two codes a mask, as FP16 subnormals: registers a0 .. a3 of the word's k-step.
__device__ inline void unpack_int4(uint32_t (&a)[4], uint32_t word) {
  const uint32_t upper = word >> 8;
  a[0] = word & 0x000f000fu;
  a[1] = word & 0x00f000f0u;
  a[2] = upper & 0x000f000fu;
  a[3] = upper & 0x00f000f0u;
}

/// The same, but a1 and a3 are bytes: 16 times their code, and the code of a0 or a2.
__device__ inline void unpack_int4_bytes(uint32_t (&a)[4], uint32_t word) {
  a[0] = word & 0x000f000fu;
  a[1] = word & 0x00ff00ffu;
  a[3] = __byte_perm(word, 0, 0x4341);
  a[2] = a[3] & 0x000f000fu;
}

template <int kGroups_>
struct Int4Tile {
  using Operand = HalfOperand;
  static constexpr bool kHalfOperand = true;
  static constexpr int kGroups = kGroups_;  ///< groups of a tile: 2 where G = 32
  static constexpr int kBytes = kInt4TileCodeBytes + 32 * kGroups;
  static constexpr int kChunkTiles = 64;   ///< 34 KB
  static constexpr int kMostRowPairs = 4;  ///< of a warp of gemm_wide.cuh
  struct Words {
    uint32_t code[4], scale[kGroups];
  };
  struct Start {
    float2 sum[kGroups];  // start_value() of columns 2t and 2t + 1
  };

  __device__ static uint32_t round_pair(float x, float y) { return half_pair(x, y); }
  __device__ static float row_unit(int row) { return row < 8 ? 16777216.0f : 1048576.0f; }

  __device__ static Words load(uint32_t tile, int lane) {
    Words w;
    const uint4 v = load_shared_16(tile + lane * 16);
    w.code[0] = v.x, w.code[1] = v.y, w.code[2] = v.z, w.code[3] = v.w;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) w.scale[i] = load_shared_4(tile + kInt4TileCodeBytes + i * 32 + (lane >> 2) * 4);
    return w;
  }

  __device__ static void load_start(Start& start, uint32_t sums, int t) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) start.sum[i] = load_shared_f2(sums + i * 32 + t * 8);
  }

  /// Of a k-tile's starts (groups), the only row's, for all columns.
  __device__ static void load_lone_start(Start& start, uint32_t sums) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) start.sum[i].x = start.sum[i].y = float_of(load_shared_4(sums + i * 4));
  }

  /// Of a k-tile's starts (groups, rows), those of columns n and n + 1.
  __device__ static void load_column_start(Start& start, uint32_t starts, int rows, int n) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) start.sum[i] = load_shared_f2(starts + (i * rows + n) * 4);
  }

  /// Of this lane's group, whose units (fragment_column()) 8 / kGroups lanes in a row hold as pairs of FP16. All lanes
  /// of a warp; every kernel that makes an operand makes its start values with this, so that they are the same bits.
  __device__ static float start_value(const uint32_t (&pair)[4]) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pair[i]));
      sums[i] = v.x + v.y;
    }
    float sum = add_classes(sums);
#pragma unroll
    for (int step = 1; step < 8 / kGroups; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum * (-8.0f / 16777216.0f);
  }
  /// Unit u of a row is its group's first.
  __device__ static bool begins_group(int u) { return u % (8 / kGroups) == 0; }
  __device__ static int group_of(int u) { return u / (8 / kGroups); }

  /// One weight tile and kColumns column tiles, their products in turn: a chain of dependent products alone would wait
  /// 24 cycles for every one of them.
  template <int kColumns>
  __device__ static void multiply(float (&acc)[kColumns][4], const Words& w, const uint32_t (&b)[kColumns][8],
                                  const Start (&start)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float d[kColumns][4];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        const float2 s = start[n].sum[i];
        d[n][0] = s.x, d[n][1] = s.y, d[n][2] = 17.0f * s.x, d[n][3] = 17.0f * s.y;
      }
#pragma unroll
      for (int step = i * 4 / kGroups; step < (i + 1) * 4 / kGroups; ++step) {
        uint32_t a[4];
        unpack_int4_bytes(a, w.code[step]);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) mma(Operand{}, d[n], a, b[n][2 * step], b[n][2 * step + 1]);
      }
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&w.scale[i]));
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        acc[n][0] = fmaf(scale.x, d[n][0], acc[n][0]);
        acc[n][1] = fmaf(scale.x, d[n][1], acc[n][1]);
        acc[n][2] = fmaf(scale.y, d[n][2] - d[n][0], acc[n][2]);
        acc[n][3] = fmaf(scale.y, d[n][3] - d[n][1], acc[n][3]);
      }
    }
  }
};

struct E4m3Tile {
  using Operand = HalfOperand;
  static constexpr bool kHalfOperand = true;
  static constexpr int kGroups = 0, kBytes = 1024, kChunkTiles = 32, kMostRowPairs = 2;
  struct Words {
    uint4 pair[2];
  };
  struct Start {};

  __device__ static uint32_t round_pair(float x, float y) { return half_pair(x, y); }
  __device__ static float row_unit(int) { return 1.0f; }
  __device__ static Words load(uint32_t tile, int lane) {
    return {{load_shared_16(tile + lane * 16), load_shared_16(tile + 512 + lane * 16)}};
  }
  __device__ static void load_start(Start&, uint32_t, int) {}
  __device__ static void load_lone_start(Start&, uint32_t) {}
  __device__ static void load_column_start(Start&, uint32_t, int, int) {}

  template <int kColumns>
  __device__ static void multiply(float (&acc)[kColumns][4], const Words& w, const uint32_t (&b)[kColumns][8],
                                  const Start (&)[kColumns]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 pair = w.pair[step / 2];
      const uint32_t low = step & 1 ? pair.z : pair.x, high = step & 1 ? pair.w : pair.y;
      const uint32_t a[4] = {e4m3x2_to_half2(low), e4m3x2_to_half2(low >> 16), e4m3x2_to_half2(high),
                             e4m3x2_to_half2(high >> 16)};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) mma(Operand{}, acc[n], a, b[n][2 * step], b[n][2 * step + 1]);
    }
  }
};

struct Bf16Tile {
  using Operand = Bf16Operand;
  static constexpr bool kHalfOperand = false;
  static constexpr int kGroups = 0, kBytes = 2048, kChunkTiles = 16, kMostRowPairs = 1;
  struct Words {
    uint4 step[4];
  };
  struct Start {};

  __device__ static uint32_t round_pair(float x, float y) { return bf16_pair(x, y); }
  __device__ static float row_unit(int) { return 1.0f; }
  __device__ static Words load(uint32_t tile, int lane) {
    Words w;
#pragma unroll
    for (int s = 0; s < 4; ++s) w.step[s] = load_shared_16(tile + s * 512 + lane * 16);
    return w;
  }
  __device__ static void load_start(Start&, uint32_t, int) {}
  __device__ static void load_lone_start(Start&, uint32_t) {}
  __device__ static void load_column_start(Start&, uint32_t, int, int) {}

  template <int kColumns>
  __device__ static void multiply(float (&acc)[kColumns][4], const Words& w, const uint32_t (&b)[kColumns][8],
                                  const Start (&)[kColumns]) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t a[4] = {w.step[s].x, w.step[s].y, w.step[s].z, w.step[s].w};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) mma(Operand{}, acc[n], a, b[n][2 * s], b[n][2 * s + 1]);
    }
  }
};

/// Element (n, k) of a BF16 weight in tiles.
__device__ inline Bf16 bf16_tile_element(const Bf16* tiles, int64_t cols, int64_t n, int64_t k) {
  const Int4Place place = int4_place(static_cast<int>(n % 16), static_cast<int>(k % 64));
  const int64_t tile = n / 16 * (cols / 64) + k / 64;
  const int part = (place.nibble & 3) * 2 + (place.nibble >> 2);  // register a0 .. a3, then its half
  return tiles[tile * 1024 + place.word * 256 + place.lane * 8 + part];
}

}  // namespace fut::cuda
