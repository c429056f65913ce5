// What follows a prefill product, one struct each, on the accumulators of 64 rows that a warpgroup has in registers
// (wgmma.cuh). kPaired: the tile's first half are gates and its second half ups. Ahead: what it asks memory for while
// the last products run.
#pragma once

#include <cuda_bf16.h>

#include "cuda/gemm_prefill.h"
#include "cuda/ptx.cuh"
#include "cuda/tensor_map.h"
#include "cuda/weight_tile.cuh"
#include "layout/hadamard.h"

namespace fut::cuda {

struct PrefillCut {
  int rows, width, steps;  ///< M, K; K in stages
  int row_tiles, col_tiles, group;
  int tile_stride;  ///< rows of W from one tile's first to the next's
  int half_stride;  ///< rows of W from a tile's first half to its second
  int half_offset;  ///< the same in outputs: 0 where the halves are gate and up
  int cols;         ///< outputs: there are no columns from there on
};

/// Where a thread's accumulators are: rows `row` and `row + 8`, of every block of 32 columns the eight from 8 t on
/// (prefill_output()).
template <int kTileCols>
struct PrefillPlace {
  const PrefillCut& cut;
  uint32_t columns;  ///< in shared memory: the tile's scales, then its biases
  bool has_bias;
  int col_tile, row_tile, row;

  __device__ int first_col() const { return col_tile * cut.tile_stride + 8 * (threadIdx.x % 4); }
  __device__ bool has_row(int half) const { return row + 8 * half < cut.rows; }

  __device__ float row_factor(const PrefillInput& in, int half) const {
    if (!has_row(half)) return 0.0f;
    const int64_t t = row + 8 * half;
    float factor = in.scale;
    if (in.row_scale) factor *= in.row_scale[t];
    if (in.sum_squares) factor *= inverse_rms_of(in.sum_squares[t], cut.width, in.eps);
    return factor;
  }

  /// Accumulators become y: all scales, and the bias. Columns and rows that there are none of become zeros.
  __device__ void finish_products(float (&acc)[kTileCols / 2], const float (&factor)[2], bool has_scale) const {
#pragma unroll
    for (int block = 0; block < kTileCols / 32; ++block) {
      float scale[8];
      if (has_scale) load_eight(scale, block, 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          acc[index(block, i, half)] *= factor[half];
          if (has_scale) acc[index(block, i, half)] *= scale[i];
        }
      }
      __syncwarp();  // here and below: or the compiler runs ahead, and out of registers
    }
    if (!has_bias) return;
#pragma unroll
    for (int block = 0; block < kTileCols / 32; ++block) {
      float bias[8];
      load_eight(bias, block, 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[index(block, i, 0)] += bias[i], acc[index(block, i, 1)] += bias[i];
    }
  }
  __device__ static constexpr int index(int block, int i, int half) {
    return 16 * block + i / 2 * 4 + half * 2 + i % 2;
  }

  /// Scales (kind 0) or biases (1) of the thread's columns of a block.
  __device__ void load_eight(float (&v)[8], int block, int kind) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = load_shared_16(columns + (kind * kTileCols + 32 * block + 8 * (threadIdx.x % 4) + 4 * i) * 4);
      v[4 * i] = __uint_as_float(x.x), v[4 * i + 1] = __uint_as_float(x.y);
      v[4 * i + 2] = __uint_as_float(x.z), v[4 * i + 3] = __uint_as_float(x.w);
    }
  }
};

/// Two floats as E4M3, saturated, the first in the low byte; NaN stays NaN.
__device__ inline uint32_t e4m3_pair(float x, float y) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
  return pair;
}
__device__ inline float2 floats_of(uint32_t bf16_pair) {
  return {__uint_as_float(bf16_pair << 16), __uint_as_float(bf16_pair & 0xffff0000u)};
}

// Eight values of a row, aligned to their own size.
__device__ inline void store_eight(Bf16* to, const float (&v)[8]) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
}
__device__ inline void store_eight(E4m3* to, const float (&v)[8]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(e4m3_pair(v[0], v[1]) | e4m3_pair(v[2], v[3]) << 16,
                                             e4m3_pair(v[4], v[5]) | e4m3_pair(v[6], v[7]) << 16);
}
__device__ inline void store_eight(float* to, const float (&v)[8]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ inline float largest_of(const float (&v)[8]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(v[i]));
  return largest;
}

/// swiglu_of() in fewer instructions: nothing is done for gates beyond +-2^126.
__device__ inline float swiglu_fast(float gate, float up) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return gate * inverse * up;
}

struct NothingAhead {
  template <class Output, class Place>
  __device__ void load(const Output&, const Place&) {}
};

/// y as it is.
struct PlainEpilogue {
  using Output = PlainOutput;
  static constexpr bool kPaired = false, kBands = false;
  static constexpr int kNarrowest = 128;
  template <int>
  using Ahead = NothingAhead;

  template <int kCols>
  __device__ static void finish(float (&y)[kCols / 2], const PlainOutput& out, const PrefillPlace<kCols>& at,
                                const NothingAhead&) {
    const int N = at.cut.cols, col = at.first_col();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!at.has_row(half)) continue;
      float* to = out.y + int64_t{at.row + 8 * half} * N + col;
#pragma unroll
      for (int block = 0; block < kCols / 32; ++block) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = y[at.index(block, i, half)];
        if (col + 32 * block < N) store_eight(to + 32 * block, v);
      }
    }
  }
};

/// silu(gate) * up.
struct SwigluEpilogue {
  using Output = SwigluOutput;
  static constexpr bool kPaired = true, kBands = false;
  static constexpr int kNarrowest = 128;
  template <int>
  using Ahead = NothingAhead;

  template <int kCols>
  __device__ static void finish(float (&y)[kCols / 2], const SwigluOutput& out, const PrefillPlace<kCols>& at,
                                const NothingAhead&) {
    constexpr int kBlocks = kCols / 64;
    const int F = at.cut.cols, col = at.first_col();
    const float inverse = out.type == Dtype::e4m3 ? __frcp_rn(out.scale) : 1.0f;
    float largest = 0.0f;
    unsigned clamped = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool row = at.has_row(half);
      const int64_t place = int64_t{at.row + 8 * half} * F + col;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float h[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          h[i] = swiglu_fast(y[at.index(block, i, half)], y[at.index(block + kBlocks, i, half)]) * inverse;
        const float here = largest_of(h);
        largest = fmaxf(largest, here);
        if (here > kE4m3Max) {
          for (int i = 0; i < 8; ++i) clamped += fabsf(h[i]) > kE4m3Max;
        }
        if (!row || col + 32 * block >= F) continue;
        if (out.type == Dtype::e4m3) {
          store_eight(static_cast<E4m3*>(out.h) + place + 32 * block, h);
        } else if (out.type == Dtype::bf16) {
          store_eight(static_cast<Bf16*>(out.h) + place + 32 * block, h);
        } else {
          store_eight(static_cast<float*>(out.h) + place + 32 * block, h);
        }
      }
    }
    if (clamped && out.type == Dtype::e4m3 && out.saturated) atomicAdd(out.saturated, clamped);
    if (!out.amax) return;
    const float scale = out.type == Dtype::e4m3 ? out.scale : 1.0f;
    const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(largest * scale));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned*>(out.amax), bits);
  }
};

/// x += y, sums of squares, e4m3 copy. A tile of x is in shared memory, brought and taken away by the copy engine while
/// products run: blocks of 32 columns, 128 rows of 64 bytes each, so that no two lanes meet in a bank.
struct ResidualEpilogue {
  using Output = ResidualOutput;
  static constexpr bool kPaired = false, kBands = true;
  static constexpr int kNarrowest = 64;  ///< columns of a tile

  /// What one unit of x is in codes, and one of a sum of squares in PrefillRowSum's.
  template <int>
  struct Ahead {
    float to_code[2], inverse_unit[2];

    template <class Place>
    __device__ void load(const ResidualOutput& out, const Place& at) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = at.has_row(half) ? out.residual.sum_squares[at.row + 8 * half] : 1.0f;
        to_code[half] = code_per_unit(out.residual, before, at.cut.cols);
        inverse_unit[half] = __fdividef(1.0f, sum_unit(before));
      }
    }
  };

  /// `tile`: of x, in shared memory. The products come without their scales: x + product * scale is one instruction,
  /// and instructions are what an epilogue costs.
  template <int kCols>
  __device__ static void finish(float (&acc)[kCols / 2], const float (&factor)[2], bool has_scale,
                                const ResidualOutput& out, const PrefillPlace<kCols>& at, const Ahead<kCols>& ahead,
                                uint32_t tile) {
    const Residual& r = out.residual;
    const int N = at.cut.cols;
    const uint32_t mine = tile + at.row % kPrefillTileRows * 64 + threadIdx.x % 4 * 16;
    const bool alike = __all_sync(~0u, factor[0] == factor[1]);
    if (!alike) {
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) acc[i] *= factor[i / 2 % 2];
    }
    float sum[2] = {};
#pragma unroll
    for (int block = 0; block < kCols / 32; ++block) {
      const int col = at.first_col() + 32 * block;
      float scale[8];
      if (has_scale) at.load_eight(scale, block, 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) scale[i] = (has_scale ? scale[i] : 1.0f) * (alike ? factor[0] : 1.0f);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t place = mine + block * (kPrefillTileRows * 64) + half * (8 * 64);
        const uint4 stored = load_shared_16(place);
        const uint32_t old[4] = {stored.x, stored.y, stored.z, stored.w};
        float x[8], code[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = floats_of(old[i]);
          x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
        if (at.has_bias) {
          float bias[8];
          at.load_eight(bias, block, 1);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i] += bias[i];
        }
        uint32_t now[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          now[i] = bf16_pair(fmaf(acc[at.index(block, 2 * i, half)], scale[2 * i], x[2 * i]),
                             fmaf(acc[at.index(block, 2 * i + 1, half)], scale[2 * i + 1], x[2 * i + 1]));
          const float2 v = floats_of(now[i]);
          add_squares(sum[half], v);
          code[2 * i] = v.x * ahead.to_code[half], code[2 * i + 1] = v.y * ahead.to_code[half];
        }
        store_shared_16(place, now);
        if (copies(r) && at.has_row(half) && col < N) store_eight(r.x8 + int64_t{at.row + 8 * half} * N + col, code);
      }
      __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      if (!at.has_row(half) || threadIdx.x % 4 != 0) continue;
      PrefillRowSum& row = out.sums[at.row + 8 * half];
      atomicAdd(&row.units, __float2ull_rn(sum[half] * ahead.inverse_unit[half]));
      // One value alone that has outgrown the codes brings the sum there, or beyond.
      if (!(sum[half] * (ahead.to_code[half] * ahead.to_code[half]) <= kE4m3Max * kE4m3Max)) row.suspect = 1;
    }
    copy_engine_fence();  // the tile before the copy engine takes it away
  }

  /// One thread's: the tile of x at (row_tile, col_tile) in, and out again.
  template <int kCols>
  __device__ static void bring(const CUtensorMap& x_map, uint32_t tile, int row_tile, int col_tile, uint32_t barrier) {
    barrier_expect(barrier, kPrefillTileRows * kCols * 2);
    for (int block = 0; block < kCols / 32; ++block)
      tensor_copy(tile + block * (kPrefillTileRows * 64), &x_map, col_tile * kCols + 32 * block,
                  row_tile * kPrefillTileRows, barrier);
  }
  template <int kCols>
  __device__ static void take_away(const CUtensorMap& x_map, uint32_t tile, int row_tile, int col_tile) {
    for (int block = 0; block < kCols / 32; ++block)
      tensor_store(&x_map, tile + block * (kPrefillTileRows * 64), col_tile * kCols + 32 * block,
                   row_tile * kPrefillTileRows);
    commit_stores();
  }

  /// By kThreads threads, beside the multiplying ones, when a tile of x is where it belongs: the last tile of a band of
  /// rows adds their sums up, and scales rows exactly that have outgrown their norm. `shared`: kBandBytes.
  static constexpr int kThreads = 96, kBandBytes = 4 * (kPrefillTileRows + 1);
  __device__ static void finish_band(const ResidualOutput& out, const PrefillCut& cut, int row_tile, float* shared) {
    const int thread = threadIdx.x - 32;
    float* suspect = shared + 1;
    if (thread == 0) {
      __threadfence();  // the tile before the arrival
      const bool last = atomicAdd(out.arrived + row_tile, 1u) + 1 == static_cast<unsigned>(cut.col_tiles);
      if (last) out.arrived[row_tile] = 0;
      shared[0] = last;
      __threadfence();  // the arrivals before the others' sums
    }
    named_barrier(1, kThreads);
    if (shared[0] != 0.0f) {
#pragma unroll 1
      for (int i = thread; i < kPrefillTileRows; i += kThreads)
        suspect[i] = finish_row(out, row_tile * kPrefillTileRows + i, cut);
      named_barrier(1, kThreads);
#pragma unroll 1
      for (int i = thread / 32; i < kPrefillTileRows; i += kThreads / 32) {
        if (suspect[i] != 0.0f)
          scale_exactly(out.residual, int64_t{row_tile} * kPrefillTileRows + i, cut.cols, suspect[i]);
      }
    }
    named_barrier(1, kThreads);  // closes: the next tile's words written while these are read
  }

 private:
  __device__ static bool copies(const Residual& r) { return r.x8 && r.x8_scaling != Fp8Scaling::exact; }

  /// What one unit of x is in codes under the row's norm from before.
  __device__ static float code_per_unit(const Residual& r, float sum_before, int N) {
    return inverse_rms_of(sum_before, N, r.eps) * kResidualHeadroom;
  }

  // Tiles add their parts of a row's sum up in no order, and yet get the same sum: in integers, whose unit is a 2^-26th
  // of the sum from before. A sum may grow 2^36 fold.
  __device__ static float sum_unit(float before) { return fmaxf(before, 1e-30f) * 0x1p-26f; }

  /// Returns the scale of a row's copy where it may not do, or 0.
  __device__ static float finish_row(const ResidualOutput& out, int64_t t, const PrefillCut& cut) {
    if (t >= cut.rows) return 0.0f;
    const Residual& r = out.residual;
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(out.sums + t));
    const float before = r.sum_squares[t];
    *reinterpret_cast<uint4*>(out.sums + t) = make_uint4(0, 0, 0, 0);
    r.sum_squares[t] = fmaf(static_cast<float>(words.y), 0x1p32f, static_cast<float>(words.x)) * sum_unit(before);
    if (!copies(r)) return 0.0f;
    const float scale = __frcp_rn(code_per_unit(r, before, cut.cols));
    r.x8_scale[t] = scale;
    return words.z ? scale : 0.0f;
  }

  /// By a warp: a row's copy anew, if its largest magnitude does not go into codes of `scale`.
  __device__ static void scale_exactly(const Residual& r, int64_t t, int N, float scale) {
    const uint32_t* x = reinterpret_cast<const uint32_t*>(static_cast<const Bf16*>(r.x) + t * N);
    float largest = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < N / 2; i += 32) {
      const float2 v = floats_of(__ldcg(x + i));
      largest = fmaxf(largest, fmaxf(fabsf(v.x), fabsf(v.y)));
    }
    largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
    if (largest <= scale * kE4m3Max) return;
    scale = e4m3_scale(largest);
    if (threadIdx.x % 32 == 0) {
      r.x8_scale[t] = scale;
      if (r.requantised) atomicAdd(reinterpret_cast<unsigned long long*>(r.requantised), 1ull);
    }
    uint16_t* codes = reinterpret_cast<uint16_t*>(r.x8 + t * N);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < N / 2; i += 32) {
      const float2 v = floats_of(__ldcg(x + i));
      codes[i] = static_cast<uint16_t>(e4m3_pair(__fdividef(v.x, scale), __fdividef(v.y, scale)));
    }
  }
};

/// Queries, keys and values of heads of kHeadDim. A thread has channels 32 block + 8 t + i of a row's head.
template <int kHeadDim>
struct QkvEpilogue {
  using Output = QkvOutput;
  static constexpr bool kPaired = false, kBands = false;
  static constexpr int kNarrowest = 128;
  static constexpr int kBlocks = kHeadDim / 32;  // of a head

  /// A row's turns, the same for all heads: of angles 32 b + 8 t + i. Ahead the first row's cosines, as registers
  /// allow.
  template <int kCols>
  struct Ahead {
    float cos[kBlocks / 2][8], sin[kBlocks / 2][8];
    uint32_t from[2];  ///< where a row's turns begin: the tables have fewer than 2^32 elements

    __device__ void load(const QkvOutput& out, const PrefillPlace<kCols>& at) {
      if (at.col_tile * (kCols / kHeadDim) >= out.heads + out.kv_heads) return;  // values alone
      for (int half = 0; half < 2; ++half)
        from[half] = at.has_row(half) ? static_cast<uint32_t>(out.position[at.row + 8 * half]) * (kHeadDim / 2) +
                                            8 * (threadIdx.x % 4)
                                      : 0;
      load_row(cos, out.cos, 0, out, at);
    }
    __device__ void load_row(float (&to)[kBlocks / 2][8], const float* table, int half, const QkvOutput& out,
                             const PrefillPlace<kCols>& at) {
      if (at.col_tile * (kCols / kHeadDim) >= out.heads + out.kv_heads) return;
#pragma unroll
      for (int b = 0; b < kBlocks / 2; ++b) load_eight(to[b], table + from[half] + 32 * b);
    }
  };

  template <int kCols>
  __device__ static void finish(float (&y)[kCols / 2], const QkvOutput& out, const PrefillPlace<kCols>& at,
                                Ahead<kCols>& turns) {
    const int lane = threadIdx.x % 4, heads = out.heads + 2 * out.kv_heads;
    const uint32_t signs = signs_of_lane(lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool row = at.has_row(half);
      const int64_t t = at.row + 8 * half;
      turns.load_row(turns.sin, out.sin, half, out, at);
#pragma unroll
      for (int i = 0; i < kCols / kHeadDim; ++i) {
        const int head = at.col_tile * (kCols / kHeadDim) + i;
        if (head >= heads) break;
        float v[kBlocks][8];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int c = 0; c < 8; ++c) v[b][c] = y[at.index(i * kBlocks + b, c, half)];
        }
        const bool query = head < out.heads, value = head >= out.heads + out.kv_heads;
        if (!value) turn(v, out, turns.cos, turns.sin, query, head - out.heads, signs, lane);
        const int kv_head = head - out.heads - (value ? out.kv_heads : 0);
        Bf16* to = query ? out.q + (t * out.heads + head) * kHeadDim
                         : (value ? out.v : out.k) + (t * out.kv_heads + kv_head) * kHeadDim;
        if (row) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) store_eight(to + 32 * b + 8 * lane, v[b]);
        }
        __syncwarp();
      }
      if (half == 0) turns.load_row(turns.cos, out.cos, 1, out, at);
    }
  }

 private:
  /// A query or key: norm, RoPE, mean, rotation, scale; in the order of cpu_backend.cpp.
  using Angles = float[kBlocks / 2][8];
  __device__ static void turn(float (&v)[kBlocks][8], const QkvOutput& out, const Angles& cos, const Angles& sin,
                              bool query, int kv_head, uint32_t signs, int lane) {
    if (out.q_norm) normalise(v, query ? out.q_norm : out.k_norm, out.eps, lane);
#pragma unroll
    for (int b = 0; b < kBlocks / 2; ++b) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float x = v[b][c], z = v[b + kBlocks / 2][c];
        v[b][c] = fmaf(x, cos[b][c], -(z * sin[b][c]));
        v[b + kBlocks / 2][c] = fmaf(z, cos[b][c], x * sin[b][c]);
      }
    }
    if (!query && out.key_mean) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float mean[8];
        load_eight(mean, out.key_mean + kv_head * kHeadDim + 32 * b + 8 * lane);
#pragma unroll
        for (int c = 0; c < 8; ++c) v[b][c] -= mean[c];
      }
    }
    __syncwarp();
    if (out.rotate) rotate(v, signs, lane);
    __syncwarp();
    const float scale = (out.rotate ? 1.0f / sqrtf(static_cast<float>(kHeadDim)) : 1.0f) * (query ? out.q_scale : 1.0f);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 8; ++c) v[b][c] *= scale;
    }
  }

  __device__ static void load_eight(float (&v)[8], const float* from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = __ldg(reinterpret_cast<const float4*>(from) + i);
      v[4 * i] = x.x, v[4 * i + 1] = x.y, v[4 * i + 2] = x.z, v[4 * i + 3] = x.w;
    }
  }

  __device__ static void normalise(float (&v)[kBlocks][8], const float* gains, float eps, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 8; ++c) sum = fmaf(v[b][c], v[b][c], sum);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float inverse = inverse_rms_of(sum, kHeadDim, eps);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float gain[8];
      load_eight(gain, gains + 32 * b + 8 * lane);
#pragma unroll
      for (int c = 0; c < 8; ++c) v[b][c] = v[b][c] * inverse * gain[c];
    }
  }

  /// Bit 8 b + c: channel 32 b + 8 t + c is negated.
  static constexpr uint32_t rotation_signs(int lane) {
    uint32_t signs = 0;
    for (int i = 0; i < 8 * kBlocks; ++i) signs |= uint32_t{hadamard_sign(i / 8 * 32 + 8 * lane + i % 8) < 0.0f} << i;
    return signs;
  }
  __device__ static uint32_t signs_of_lane(int lane) {
    constexpr uint32_t kSigns[4] = {rotation_signs(0), rotation_signs(1), rotation_signs(2), rotation_signs(3)};
    return lane & 2 ? (lane & 1 ? kSigns[3] : kSigns[2]) : lane & 1 ? kSigns[1] : kSigns[0];
  }

  /// hadamard_rotate() but for the scale: strides 1, 2, 4 within a lane's eight, 8 and 16 across the quad, then across
  /// blocks.
  __device__ static void rotate(float (&v)[kBlocks][8], uint32_t signs, int lane) {
    static_assert(hadamard_block(kHeadDim) == kHeadDim);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 8; ++c) v[b][c] = __uint_as_float(__float_as_uint(v[b][c]) ^ ((signs >> (8 * b + c)) << 31));
#pragma unroll
      for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
        for (int c = 0; c < 8; ++c)
          if (!(c & stride)) butterfly(v[b][c], v[b][c + stride]);
      }
#pragma unroll
      for (int stride = 1; stride < 4; stride *= 2) {
        const float own = lane & stride ? -1.0f : 1.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) v[b][c] = fmaf(own, v[b][c], __shfl_xor_sync(~0u, v[b][c], stride));
      }
    }
#pragma unroll
    for (int stride = 1; stride < kBlocks; stride *= 2) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (b & stride) continue;
#pragma unroll
        for (int c = 0; c < 8; ++c) butterfly(v[b][c], v[b + stride][c]);
      }
    }
  }
  __device__ static void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  }
};

}  // namespace fut::cuda
