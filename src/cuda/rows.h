// Row-wise work beside the matrix products: embedding, operands made of the residual, results rounded into operands and
// residuals. One block a row. Prefill runs on these and on gemm_decode(), whole rows at a time; a decode step needs
// only embed_rows() of them, and normalise_rows() of gemm_decode.h.
#pragma once

#include <cuda_runtime.h>

#include "ops/ops.h"

namespace fut::cuda {

/// x[t] = embedding[token[t]]; embedding in tiles (weight_tile.cuh). With the e4m3 copy, always exact.
void embed_rows(const Residual& residual, const Weight& embedding, const int32_t* tokens, int rows,
                cudaStream_t stream);

/// GEMM operand (rows, K) f16 or bf16 and row factors, as ops.h and cpu/operand.h pair them with a weight.
void residual_operand(const Residual& residual, const Weight& weight, const int64_t* row, int rows, void* out,
                      float* row_factor, cudaStream_t stream);

/// An e4m3 operand as f16 (exact) and its row factors.
void widen_operand(const Operand& operand, int rows, int cols, Half* out, float* row_factor, cudaStream_t stream);

/// y (rows, cols) f32, or y (rows, 2 cols) = [gate | up] with `swiglu`, rounded into an operand.
void store_operand(const Operand& operand, const float* y, bool swiglu, int rows, int cols, cudaStream_t stream);

/// x += y, and the e4m3 copy.
void add_to_residual(const Residual& residual, const float* y, int rows, int width, cudaStream_t stream);

}  // namespace fut::cuda
