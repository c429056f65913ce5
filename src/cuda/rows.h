// Row-wise work beside the matrix products, one block a row: embedding, the head's operand, and what can be rounded
// only when a row is whole. Beyond embed_rows() it is for what is rare or exact: see gemm_prefill.h for prefill and
// normalise_rows() of gemm_decode.h for decode.
#pragma once

#include <cuda_runtime.h>

#include "ops/ops.h"

namespace fut::cuda {

/// x[t] = embedding[token[t]]; embedding in tiles (weight_tile.cuh). A bf16 residual gets its sums of squares too,
/// and the e4m3 copy, always exact.
void embed_rows(const Residual& residual, const Weight& embedding, const int32_t* tokens, int rows,
                cudaStream_t stream);

/// GEMM operand (rows, K) f16 or bf16 of the residual itself, and row factors, as ops.h and cpu/operand.h pair them
/// with a weight.
void residual_operand(const Residual& residual, const Weight& weight, const int64_t* row, int rows, void* out,
                      float* row_factor, cudaStream_t stream);

/// y (rows, cols) f32, or y (rows, 2 cols) = [gate | up] with `swiglu`, rounded into an operand.
void store_operand(const Operand& operand, const float* y, bool swiglu, int rows, int cols, cudaStream_t stream);

/// The e4m3 copy of every row under its own largest magnitude.
void copy_to_e4m3(const Residual& residual, int rows, int width, cudaStream_t stream);

}  // namespace fut::cuda
