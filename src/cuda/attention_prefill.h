// softmax(q K) V of whole prompts on the tensor cores. Kernels and schedule: attention_prefill.cu.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "ops/ops.h"

namespace fut::cuda {

inline constexpr int kAttentionTile = 2 * kKvPageTokens;  ///< queries of an item, and keys of a block

/// Where the keys of the queries' own pages are.
enum class OwnPages {
  call,    ///< in k and v of this call, which also are all that was before: a BF16 cache without a past
  apart,   ///< there too, but later pages see them otherwise: INT4
  stored,  ///< in the cache, like all others
};

/// Two pages of queries of one sequence, from an even page on. Rows are packed rows; those of k, v and scratch too.
struct AttentionTile {
  int32_t row;          ///< of the tile's first position; may lie before `first`
  int32_t first, last;  ///< the sequence has rows first .. last - 1
  int32_t seen;         ///< row, among what is seen, of the sequence's position 0
  int32_t blocks;       ///< of kAttentionTile tokens before the tile
  int32_t own[2];       ///< row of the page in k and v of this call (stored: among what is seen)
  int32_t edges;        ///< bit w: page w is `own[w]` in the edges instead
};

/// The tiles of a call, longest first, and the scratch that it needs.
struct AttentionPlan {
  OwnPages own = OwnPages::call;
  std::vector<AttentionTile> tiles;
  std::vector<int64_t> seen_start;  ///< (B) row of position 0
  int64_t seen_rows = 0;            ///< to be unpacked; 0 where k and v of this call serve
  int64_t seen_pages = 0;           ///< to be unpacked, of the sequence with most of them

  AttentionPlan(const Batch& batch, Dtype kv);
};

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
