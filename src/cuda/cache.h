// From the QKV product to queries and cache: RoPE, key mean, rotation, rounding; tails, sinks and pages.
#pragma once

#include <cuda_runtime.h>

#include "cuda/attention.h"
#include "ops/ops.h"

namespace fut::cuda {

struct QkvFinish {
  const float* y = nullptr;  // (T, H E + 2 J E)
  Bf16* q = nullptr;         // (T, H, E)
  Bf16* k = nullptr;         // (T, J, E)
  Bf16* v = nullptr;         // (T, J, E)
  KvCache cache;             ///< its arrays in device memory
  Rope rope;
  RowMap map;
  const int64_t* start = nullptr;  // (B + 1)
  int rows = 0, heads = 0;         ///< T, H
  float q_scale = 0.0f;            ///< finish_qkv()'s: log2(e) / sqrt(E)
  const float* q_norm = nullptr;   // (E) gains of the norm over a head, or null
  const float* k_norm = nullptr;   // (E)
  float eps = 0.0f;                ///< of that norm
  bool append = false;             ///< decode: the block that finished a key or value also puts it into the cache
};

/// log2(e) / sqrt(E).
float query_scale(int head_dim);

void finish_qkv(const char* op, const QkvFinish& args, cudaStream_t stream);

/// Prefill: k and v of this call into the cache. `longest`: new rows of the longest sequence.
void store_cache(const char* op, const QkvFinish& args, int sequences, int64_t longest, cudaStream_t stream);

}  // namespace fut::cuda
