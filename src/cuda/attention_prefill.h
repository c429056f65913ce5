// softmax(q K) V of whole prompts on the tensor cores. Kernels and schedule: attention_prefill.cu.
#pragma once

#include <cuda_runtime.h>

#include "cuda/attention_plan.h"
#include "cuda/device_memory.cuh"

namespace fut::cuda {

struct AttentionPrefill {
  explicit AttentionPrefill(const AttentionArgs& a)  ///< what of it is in device memory
      : q(static_cast<const Bf16*>(a.q)),
        k(static_cast<const Bf16*>(a.k)),
        v(static_cast<const Bf16*>(a.v)),
        sequences(static_cast<int>(a.batch.sequences)),
        rows(static_cast<int>(a.batch.rows)),
        heads(a.heads) {}

  const Bf16* q = nullptr;  // (T, H, E)
  const Bf16* k = nullptr;  // (T, J, E)
  const Bf16* v = nullptr;
  KvCache cache;                           ///< its arrays in device memory, like everything here
  const int64_t* start = nullptr;          // (B + 1)
  const int64_t* past = nullptr;           // (B)
  const int64_t* seen_start = nullptr;     // (B) of the plan
  const AttentionTile* tiles = nullptr;    // of the plan
  int sequences = 0, rows = 0, heads = 0;  ///< B, T, H
  void* out = nullptr;                     // (T, H, E) bf16, e4m3 or f32
  Dtype out_type = Dtype::bf16;
  float out_scale = 1.0f;                   ///< e4m3: out = value / out_scale, saturated
  unsigned long long* saturated = nullptr;  ///< raised by the values that were, or null
};

/// The kernels with the plan of a call and their scratch, which are kept from call to call.
class PrefillAttention {
 public:
  /// `host`: the batch in host memory. args: all but what the plan says.
  void operator()(const char* op, const Batch& host, AttentionPrefill args, cudaStream_t stream);

 private:
  Mirror plan_;
  Scratch scratch_;
};

}  // namespace fut::cuda
