// softmax(q K) V over the paged cache, one query row at a time. Kernel and schedule: attention.cuh.
#pragma once

#include <cuda_runtime.h>

#include "ops/ops.h"

namespace fut::cuda {

/// What kernels know about the rows of a batch; all in device memory.
struct RowMap {
  const int32_t* sequence = nullptr;  // (T) b
  const int64_t* position = nullptr;  // (T)
  const int64_t* past = nullptr;      // (B)
};

struct AttentionLaunch {
  const Bf16* q = nullptr;  // (T, H, E)
  const Bf16* k = nullptr;  // (T, J, E) of this call, or null: the own page is in the tail (decode)
  const Bf16* v = nullptr;
  KvCache cache;  ///< its arrays in device memory
  RowMap map;
  int rows = 0, heads = 0;  ///< T, H
  void* out = nullptr;      // (T, H, E) f16, bf16 or f32
  Dtype out_type = Dtype::f16;
  float out_scale = 1.0f;  ///< f16: out = value / out_scale, saturated
  unsigned long long* saturated = nullptr;
  int splits = 1;               ///< a row's pages are cut into at most this many pieces
  int pieces = 1;               ///< of the row with most of them
  int pieces_a_block = 1;       ///< attention_pieces_a_block(); changes nothing in the result
  float* partial = nullptr;     // attention_partial_bytes(), where splits > 1
  unsigned* arrived = nullptr;  // (T, J) zeros; left as zeros
};

inline constexpr int kPairs = 4;  ///< of warps in a block; an item is a pair's

/// How the pages of a row are cut into pieces, all but the last of `length` pages, at least two an item's pair: a
/// piece's warps are merged once, whatever its length (docs/PERF.md). `own`: index of the query's page.
struct AttentionCut {
  int length, pieces;
  FUT_HD AttentionCut(int own, int splits) {
    const int wanted = splits * kPairs;
    length = ((own > 1 ? own : 1) + wanted - 1) / wanted * kPairs;
    if (length < 2 * kPairs) length = 2 * kPairs;
    pieces = own / length + 1 < splits ? own / length + 1 : splits;
  }
};

/// Pieces that a row's pages are cut into, at most. It depends on the number of KV heads and the card alone, so that a
/// sequence gives the same bits alone and in a batch.
int attention_splits(int kv_heads);
/// As many as leave every SM something to do: the fewer blocks a row and head has, the fewer begin, merge and end.
int attention_pieces_a_block(int rows, int kv_heads, int pieces);
size_t attention_partial_bytes(int rows, int heads, int head_dim, int splits);

void attention(const char* op, const AttentionLaunch& args, cudaStream_t stream);

}  // namespace fut::cuda
