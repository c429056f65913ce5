// Causal attention over the paged cache, for prefill and decode: one page of keys and values at a time.
#pragma once

#include "ops/ops.h"

namespace fut::cpu {

void attention(const AttentionArgs& args, bool decode);

/// Puts the new keys and values of every sequence into the cache (ops.h, QkvArgs). k, v: (T, J, E) as QkvArgs says.
void write_cache(const KvCache& cache, const Batch& batch, const void* k, const void* v);

/// Type of q, k and v beside a cache of this type.
inline Dtype exact_type(const KvCache& cache) { return cache.layout.dtype == Dtype::f32 ? Dtype::f32 : Dtype::bf16; }

}  // namespace fut::cpu
