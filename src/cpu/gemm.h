// y = a W^T on the CPU, for every weight format: once in plain double loops, once vectorised.
#pragma once

#include "cpu/simd.h"
#include "ops/ops.h"

namespace fut::cpu {

/// y (T, N) f32 = a (T, K) f32 times W (N, K), W's scales applied. Element (t, n) is one dot product in an order that
/// depends on K and the format alone: never on T, on threads, or on what else is in the batch.
void gemm(float* y, const float* a, int64_t rows, const Weight& weight);

/// The same in double, straight from the formats' definitions: what gemm() is tested against.
void gemm_reference(double* y, const float* a, int64_t rows, const Weight& weight);

}  // namespace fut::cpu
