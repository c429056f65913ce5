// softmax(q K) V of whole prompts on the tensor cores. Kernels and schedule: attention_prefill.cu.
#pragma once

#include <cuda_runtime.h>

#include "cuda/attention_plan.h"

namespace fut::cuda {

struct AttentionPrefill {
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
  Bf16* scratch = nullptr;                  ///< attention_prefill_bytes(), aligned to 16 bytes
};

size_t attention_prefill_bytes(const AttentionPlan& plan, int sequences, int kv_heads, int head_dim);

void attention_prefill(const char* op, const AttentionPlan& plan, const AttentionPrefill& args, cudaStream_t stream);

}  // namespace fut::cuda
