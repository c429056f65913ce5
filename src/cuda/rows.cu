// MATH       rows.h; the arithmetic of cpu/operand.cpp, element by element.
// SHAPES     any number of rows, any width.
// SCHEDULE   one block of 512 threads a row, two or three passes over it.
// NUMERICS   sums of squares and 1 / rms FP32, in the order of weight_tile.cuh.
// ROOFLINE   bytes; not optimised.
#include "cuda/block.cuh"
#include "cuda/gemm_decode.h"
#include "cuda/launch.cuh"
#include "cuda/ptx.cuh"
#include "cuda/rows.h"
#include "cuda/weight_tile.cuh"

namespace fut::cuda {
namespace {

__device__ float load(const void* data, Dtype type, int64_t i) {
  return type == Dtype::f32 ? static_cast<const float*>(data)[i] : to_f32(static_cast<const Bf16*>(data)[i]);
}

/// Stores a residual element and returns it as stored.
__device__ float store(void* data, Dtype type, int64_t i, float value) {
  if (type == Dtype::f32) return static_cast<float*>(data)[i] = value;
  const Bf16 rounded = to_bf16(value);
  static_cast<Bf16*>(data)[i] = rounded;
  return to_f32(rounded);
}

/// The order of sums is that of gemm_decode.cuh, so that both round a row alike.
__device__ float sum_of_squares(const Residual& r, int64_t t, int width) {
  float sum = 0.0f;
  for (int u = threadIdx.x; u < width / 8; u += blockDim.x) {
    for (int i = 0; i < 4; ++i) {
      const int64_t at = t * width + fragment_column(u) + 8 * i;
      add_squares(sum, make_float2(load(r.x, r.dtype, at), load(r.x, r.dtype, at + 1)));
    }
  }
  return sum_block(sum);
}

/// The e4m3 copy of a row as it now is, under its own largest magnitude.
__device__ void copy_row_to_e4m3(const Residual& r, int64_t t, int width) {
  float largest = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    largest = fmaxf(largest, fabsf(load(r.x, r.dtype, t * width + i)));
  const float scale = e4m3_scale(max_block(largest));
  if (threadIdx.x == 0) r.x8_scale[t] = scale;
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    r.x8[t * width + i] = to_e4m3(load(r.x, r.dtype, t * width + i) / scale);
}

__global__ void embed_kernel(const __grid_constant__ Residual r, const __grid_constant__ Weight w,
                             const int32_t* tokens) {
  wait_for_previous_kernel();
  const int64_t t = blockIdx.x, token = tokens[t];
  const int width = static_cast<int>(w.cols);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    store(r.x, r.dtype, t * width + i, to_f32(bf16_tile_element(static_cast<const Bf16*>(w.data), width, token, i)));
  if (r.dtype == Dtype::f32) return;
  __syncthreads();  // closes: the row read by other threads before it is written
  const float sum = sum_of_squares(r, t, width);
  if (threadIdx.x == 0) r.sum_squares[t] = sum;
  if (r.x8) copy_row_to_e4m3(r, t, width);
}

__global__ void copy_to_e4m3_kernel(const __grid_constant__ Residual r, int width) {
  release_next_kernel();
  wait_for_previous_kernel();
  copy_row_to_e4m3(r, blockIdx.x, width);
}

__global__ void residual_operand_kernel(const __grid_constant__ Residual r, Dtype weight, const float* input_scale,
                                        const int64_t* row, int width, void* out, float* row_factor) {
  wait_for_previous_kernel();
  const int64_t i = blockIdx.x, t = row ? row[i] : i;
  const float rstd = inverse_rms_of(sum_of_squares(r, t, width), width, r.eps);
  const bool as_stored = weight == Dtype::bf16 && r.dtype == Dtype::bf16;
  if (threadIdx.x == 0) row_factor[i] = as_stored ? rstd : 1.0f;
  for (int k = threadIdx.x; k < width; k += blockDim.x) {
    const int64_t to = i * width + k, from = t * width + k;
    const float x = load(r.x, r.dtype, from);
    if (weight == Dtype::bf16) {
      static_cast<Bf16*>(out)[to] = to_bf16(as_stored ? x : x * rstd);
    } else {
      static_cast<Half*>(out)[to] = half_saturated(input_scale ? x * rstd * input_scale[k] : x * rstd);
    }
  }
}

__device__ float operand_value(const float* y, bool swiglu, int64_t t, int cols, int i) {
  if (!swiglu) return y[t * cols + i];
  const float g = y[t * 2 * cols + i], u = y[t * 2 * cols + cols + i];
  return swiglu_of(g, u);
}

__global__ void store_operand_kernel(const __grid_constant__ Operand a, const float* y, bool swiglu, int cols) {
  wait_for_previous_kernel();
  const int64_t t = blockIdx.x;
  float scale = a.scale;
  if (a.amax || a.row_scale) {
    float largest = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x)
      largest = fmaxf(largest, fabsf(operand_value(y, swiglu, t, cols, i)));
    largest = max_block(largest);
    // Magnitudes are not negative: as integers they are ordered as they are as floats.
    if (a.amax && threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(a.amax), bits_of(largest));
    if (a.row_scale) {
      if (threadIdx.x == 0) a.row_scale[t] = e4m3_scale(largest);
      scale *= e4m3_scale(largest);
    }
  }
  unsigned clamped = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) {
    const float value = operand_value(y, swiglu, t, cols, i);
    const int64_t at = t * cols + i;
    if (a.dtype == Dtype::bf16) {
      static_cast<Bf16*>(a.data)[at] = to_bf16(value);
    } else if (a.dtype == Dtype::f16) {
      static_cast<Half*>(a.data)[at] = half_saturated(value / scale);
      clamped += fabsf(value / scale) > kHalfMax;
    } else {
      static_cast<E4m3*>(a.data)[at] = to_e4m3(value / scale);
      clamped += fabsf(value / scale) > kE4m3Max;
    }
  }
  if (clamped && a.saturated) atomicAdd(reinterpret_cast<unsigned long long*>(a.saturated), clamped);
}

/// The start value that belongs to unit u of row n, from all lanes of a warp; u may be beyond the row.
__device__ void store_start(const uint32_t (&pair)[4], int u, int units, const PackedRows& to, int rows, int n) {
  const auto store = [&]<class Tile>(Tile) {
    const float start = Tile::start_value(pair);
    if (u < units && Tile::begins_group(u)) to.starts[int64_t{Tile::group_of(u)} * padded_rows(rows) + n] = start;
  };
  to.groups == 1 ? store(Int4Tile<1>{}) : store(Int4Tile<2>{});
}

/// A row stays in registers between its norm and its rounding, where it is not too wide for that. packed.a is null for
/// row-major rows.
__global__ void __launch_bounds__(kRowThreads)
    normalise_rows_kernel(const float* x, const int64_t* row, int width, float eps, const float* input_scale, bool bf16,
                          const __grid_constant__ PackedRows packed, uint32_t* out) {
  constexpr int kKept = 4;
  release_next_kernel();
  wait_for_previous_kernel();
  const int n = blockIdx.x, rows = gridDim.x, units = width / 8;
  const float2* from = reinterpret_cast<const float2*>(x + (row ? row[n] : n) * width);
  const auto load = [&](int u, int i) { return from[fragment_column(u) / 2 + 4 * i]; };
  const auto store = [&](int u, const float2* v, float inverse) {  // all lanes of a warp; u may be beyond the row
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = fragment_column(u) + 8 * i;
      const float2 c = u < units ? input_scale_of(input_scale, k) : make_float2(0.0f, 0.0f);
      const float first = v[i].x * inverse * c.x, second = v[i].y * inverse * c.y;
      pair[i] = bf16 ? bf16_pair(first, second) : half_pair(first, second);
      if (u < units)
        (packed.a ? static_cast<uint32_t*>(packed.a)
                  : out)[(packed.a ? packed_place(rows, n, k) : int64_t{n} * width + k) / 2] = pair[i];
    }
    if (packed.a && packed.groups > 0) store_start(pair, u, units, packed, rows, n);
  };
  float2 kept[kKept][4];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int u = threadIdx.x + j * kRowThreads;
#pragma unroll
    for (int i = 0; i < 4; ++i) kept[j][i] = u < units ? load(u, i) : make_float2(0.0f, 0.0f);
  }
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) add_squares(sum, kept[j][i]);
  }
  for (int u = threadIdx.x + kKept * kRowThreads; u < units; u += kRowThreads) {
    for (int i = 0; i < 4; ++i) add_squares(sum, load(u, i));
  }
  const float inverse = inverse_rms_of(sum_block(sum), width, eps);
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int u = threadIdx.x + j * kRowThreads;
    if ((u & ~31) < units) store(u, kept[j], inverse);
  }
  for (int u = threadIdx.x + kKept * kRowThreads; (u & ~31) < units; u += kRowThreads) {
    float2 v[4];
    for (int i = 0; i < 4; ++i) v[i] = u < units ? load(u, i) : make_float2(0.0f, 0.0f);
    store(u, v, inverse);
  }
}

/// Block (256 columns, row): a warp, a unit a lane.
__global__ void pack_rows_kernel(const uint32_t* a, int cols, const __grid_constant__ PackedRows packed) {
  release_next_kernel();
  wait_for_previous_kernel();
  const int n = blockIdx.y, rows = gridDim.y, u = blockIdx.x * (kGemmPackedColumns / 8) + threadIdx.x;
  if ((u & ~31) >= cols / 8) return;
  uint32_t pair[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = fragment_column(u) + 8 * i;
    if (u >= cols / 8) break;
    pair[i] = a[(int64_t{n} * cols + k) / 2];
    static_cast<uint32_t*>(packed.a)[packed_place(rows, n, k) / 2] = pair[i];
  }
  if (packed.groups > 0) store_start(pair, u, cols / 8, packed, rows, n);
}

}  // namespace

PackedRows::PackedRows(const Weight& weight, void* memory, int rows) : a(memory) {
  if (weight.dtype != Dtype::int4) return;
  groups = weight.group == 32 ? 2 : 1;
  starts = reinterpret_cast<float*>(static_cast<uint8_t*>(memory) + packed_bytes(rows, weight.cols));
}

size_t PackedRows::bytes(const Weight& weight, int rows) {
  return packed_bytes(rows, weight.cols) + weight.cols / 32 * 4 * padded_rows(rows);
}

void pack_rows(const void* a, int rows, int cols, const PackedRows& packed, cudaStream_t stream) {
  launch("pack_rows", pack_rows_kernel, dim3((cols + kGemmPackedColumns - 1) / kGemmPackedColumns, rows),
         dim3(kGemmPackedColumns / 8), 0, stream, static_cast<const uint32_t*>(a), cols, packed);
}

void normalise_rows(const float* x, const int64_t* row, int rows, float eps, const Weight& weight,
                    const PackedRows* packed, void* a, cudaStream_t stream) {
  const PackedRows to = packed ? *packed : PackedRows();
  launch("normalise_rows", normalise_rows_kernel, rows, kRowThreads, 0, stream, x, row, static_cast<int>(weight.cols),
         eps, weight.input_scale, weight.dtype == Dtype::bf16, to, static_cast<uint32_t*>(a));
}

void embed_rows(const Residual& residual, const Weight& embedding, const int32_t* tokens, int rows,
                cudaStream_t stream) {
  launch("embed", embed_kernel, rows, kRowThreads, 0, stream, residual, embedding, tokens);
}

void residual_operand(const Residual& residual, const Weight& weight, const int64_t* row, int rows, void* out,
                      float* row_factor, cudaStream_t stream) {
  launch("residual_operand", residual_operand_kernel, rows, kRowThreads, 0, stream, residual, weight.dtype,
         weight.input_scale, row, static_cast<int>(weight.cols), out, row_factor);
}

void store_operand(const Operand& operand, const float* y, bool swiglu, int rows, int cols, cudaStream_t stream) {
  launch("store_operand", store_operand_kernel, rows, kRowThreads, 0, stream, operand, y, swiglu, cols);
}

void copy_to_e4m3(const Residual& residual, int rows, int width, cudaStream_t stream) {
  launch("copy_to_e4m3", copy_to_e4m3_kernel, rows, kRowThreads, 0, stream, residual, width);
}

}  // namespace fut::cuda
