// The products of ops.h in prefill, in terms of gemm_prefill.h: which kernel, which operand, and what scaling rules
// that need a whole row leave to a pass behind it.
#pragma once

#include "cuda/cache.h"
#include "cuda/device_memory.cuh"
#include "cuda/gemm_prefill.h"

namespace fut::cuda {

/// With scratch that is kept from call to call. Arguments are the operation's; `on_device`: with its counters there.
class PrefillProducts {
 public:
  /// y (T, N) f32 of the normalised residual.
  void plain(const char* op, const Residual& residual, const Weight& weight, int rows, float* y, cudaStream_t stream);

  /// Queries, keys and values where `finish` wants them; false, and nothing done, where heads turn in part.
  bool qkv(const char* op, const QkvArgs& args, const QkvFinish& finish, cudaStream_t stream);

  void gate_up(const char* op, const GateUpArgs& args, const Operand& on_device, cudaStream_t stream);

  void residual(const char* op, const ResidualGemmArgs& args, const Residual& on_device, cudaStream_t stream);

 private:
  Scratch h_, sums_, bands_;
};

}  // namespace fut::cuda
