// Rows of GEMM operands and of the residual: reading them as floats, and rounding floats into them.
#pragma once

#include <vector>

#include "ops/ops.h"

namespace fut::cpu {

/// What a GEMM multiplies, as floats that already have the operand's precision, and what its result is multiplied by.
struct GemmInput {
  std::vector<float> values;      // (T, K)
  std::vector<float> row_factor;  // (T)
};

/// Operand elements without their scales, and the scales as row factors.
GemmInput gemm_input(const Operand& operand, int64_t rows, int64_t cols);

/// The normalised residual for `weight`, times its input scale if it has one. Where the stored row is an operand itself
/// (bf16 against bf16 weights, the e4m3 copy against e4m3 weights) the result is multiplied by 1 / rms; otherwise the
/// row is normalised first and then rounded to the operand's type. `row` picks residual rows, null: 0 .. rows - 1.
GemmInput gemm_input(const Residual& residual, const Weight& weight, const int64_t* row, int64_t rows);

/// Rounds one row into the operand, counting what saturates. Rows may be written by several threads at once.
void store_operand_row(const Operand& operand, int64_t t, const float* values, int64_t cols);

/// x[t] (as floats, in place of the row) -> residual: rounding, sum of squares, e4m3 copy. `embedding`: there is no
/// earlier norm, so the copy is scaled exactly.
void store_residual_row(const Residual& residual, int64_t t, float* values, int64_t width, bool embedding);

/// x[t] as floats.
void load_residual_row(const Residual& residual, int64_t t, float* values, int64_t width);

/// Values of a (rows, cols) array of f32 or bf16.
inline float load_element(const void* data, Dtype dtype, int64_t i) {
  return dtype == Dtype::f32 ? static_cast<const float*>(data)[i] : to_f32(static_cast<const Bf16*>(data)[i]);
}

inline void store_element(void* data, Dtype dtype, int64_t i, float value) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<Bf16*>(data)[i] = to_bf16(value);
  }
}

}  // namespace fut::cpu
