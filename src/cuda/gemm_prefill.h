// The products of prefill, each one launch with all that follows it. Kernel: gemm_prefill.cuh; what follows:
// prefill_epilogues.cuh.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "cuda/attention.h"
#include "cuda/prefill_tiles.h"
#include "layout/host_weight.h"
#include "ops/ops.h"

namespace fut::cuda {

/// Which row of W stands at place `c` of its block of 32: a thread's eight columns of four wgmma blocks of eight are
/// then eight neighbouring outputs.
constexpr int prefill_output(int c) { return c % 8 / 2 * 8 + c / 8 * 2 + c % 2; }
static_assert(prefill_output(2) == 8 && prefill_output(9) == 3 && prefill_output(31) == 31);

/// W in that order: rows of `row_bytes` bytes; their number is a multiple of 32.
std::vector<uint8_t> prefill_rows(const HostWeight& weight);

/// The left operand (M, K) row-major, of the weight's type; row t stands for
/// element * scale * row_scale[t] * 1 / sqrt(sum_squares[t] / K + eps).
struct PrefillInput {
  const void* data = nullptr;
  float scale = 1.0f;
  const float* row_scale = nullptr;    // (M) or null
  const float* sum_squares = nullptr;  // (M) or null: no norm
  float eps = 0.0f;
  int rows = 0;  ///< M
};

/// y (M, N) f32 = a W^T + bias.
struct PlainOutput {
  float* y = nullptr;
};

/// Queries, keys and values from y: bias, norm over a head, RoPE, key mean, rotation, rounding (ops.h, QkvArgs). Whole
/// heads of 64 or 128 turn.
struct QkvOutput {
  Bf16 *q = nullptr, *k = nullptr, *v = nullptr;  // (T, H, E), (T, J, E), (T, J, E)
  int heads = 0, kv_heads = 0;
  bool rotate = false;                               ///< INT4 caches
  float q_scale = 0.0f;                              ///< query_scale()
  const float *cos = nullptr, *sin = nullptr;        // (positions, E / 2)
  const int64_t* position = nullptr;                 // (T)
  const float* key_mean = nullptr;                   // (J, E) or null
  const float *q_norm = nullptr, *k_norm = nullptr;  // (E), both or none
  float eps = 0.0f;
};

/// h (M, N / 2) = silu(gate) * up; the weight's rows are all gates, then all ups.
struct SwigluOutput {
  void* h = nullptr;
  Dtype type = Dtype::e4m3;  ///< e4m3, bf16, f32
  float scale = 1.0f;        ///< e4m3: code = h / scale, saturated
  float* amax = nullptr;     // (1) or null
  unsigned long long* saturated = nullptr;
};

/// What the tiles of a row have added up so far (prefill_epilogues.cuh).
struct alignas(16) PrefillRowSum {
  unsigned long long units;  ///< of the sum of squares
  unsigned suspect;          ///< not 0: a value may have outgrown the row's norm from before
};

/// x (M, N) bf16 += y, its sums of squares, and the e4m3 copy: under the row's norm from before, rows that have
/// outgrown it exactly. Where the copy is to be exact throughout, it is left to copy_to_e4m3().
struct ResidualOutput {
  Residual residual;
  PrefillRowSum* sums = nullptr;  // (M) zeros; left as zeros
  unsigned* arrived = nullptr;    // (row tiles) zeros; left as zeros
};

/// Whether a product of this weight has a kernel here: placed for prefill, e4m3 or bf16.
bool gemm_prefill_takes(const Weight& weight);

void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const PlainOutput& out, cudaStream_t);
void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const QkvOutput& out, int head_dim,
                  cudaStream_t);
void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const SwigluOutput& out, cudaStream_t);
void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const ResidualOutput& out, cudaStream_t);

}  // namespace fut::cuda
