// A decode step of 2 to 32 sequences in one kernel: arguments, and what the host must keep for it. Kernel:
// step_batch.cuh.
#pragma once

#include "cuda/step.h"

namespace fut::cuda {

/// What blocks wait for: counters, one of each a layer. Layer L has the first two for the head.
enum class Handed { x_in, normed_in, y, a, x_mid, normed_mid, h };
inline constexpr int kHanded = 7, kFlagWords = 8;  ///< a flag has 32 bytes to itself
inline constexpr int kStepBatchRows = 32;

struct StepBatchArgs : StepModel {
  int row_pairs[kProducts] = {};  ///< that a consumer warp takes at a time: 1, 2 or the most
  float* y = nullptr;             // (B, H E + 2 J E)
  float* partial = nullptr;       // attention_partial_bytes()
  unsigned* arrived = nullptr;    // (B, J) zeros: pieces of attention
  uint8_t* rows_x = nullptr;      // packed (gemm_decode.h): normalised residual
  uint8_t* rows_a = nullptr;      // attention's output
  uint8_t* rows_h = nullptr;
  unsigned* flags = nullptr;  // (L + 1, kHanded) of kFlagWords; zeros, and zeros again behind the step
  int lost = -1;              ///< for tests: of this Handed, layer 0 never hears of one block
};

struct StepBatchPlan {
  StepBatchArgs args;
  int head_dim = 128;
};

/// Fills in shapes and ring; empty, or why this kernel cannot run the plan. INT4 weights in groups of 64 or 128, INT4
/// cache.
std::string plan_step_batch(StepBatchPlan& plan);

void decode_step_batch(const StepBatchPlan& plan, cudaStream_t stream);

}  // namespace fut::cuda
