// What the roles of the step kernel share: the map of shared memory, the ring's cursor, tags.
#pragma once

#include "cuda/attention_warp.cuh"
#include "cuda/handover.cuh"
#include "cuda/ptx.cuh"
#include "cuda/step.h"
#include "cuda/weight_tile.cuh"

namespace fut::cuda {

inline constexpr int kStepWarps = 8, kStepConsumers = kStepWarps * 32;
inline constexpr int kStepFinishWarps = 3, kStepFinishThreads = kStepFinishWarps * 32;
inline constexpr int kStepThreads = kStepConsumers + 32 + kStepFinishThreads;
inline constexpr int kStepMaxStages = 12, kStepMaxHeads = 8;  ///< query heads a KV head
inline constexpr int kStepRowTiles = 2;                       ///< at a time, at most
inline constexpr int kSumsFloats = kStepWarps * kStepRowTiles * 128, kSumsBytes = 2 * kSumsFloats * 4;
enum NamedBarrier { kBarrierConsumers = 1 };

template <class Tile_, class Attention_>
struct StepTypes {
  using Tile = Tile_;
  using Attention = Attention_;
  static constexpr int kStartBytes = 4;  ///< of a group's start value
  static constexpr int E = Attention::E;
  /// k-tiles of a chunk, a multiple of kClasses.
  static constexpr int kChunk = Tile::kChunkTiles / kStepRowTiles;
  static constexpr int kChunkBytes = kStepRowTiles * kChunk * Tile::kBytes;
  static constexpr int kItemBytes = kPairs * Attention::kSlotBytes;
  static constexpr int kSlotBytes = kChunkBytes > kItemBytes ? kChunkBytes : kItemBytes;
  static constexpr int kQueryBytes = kStepMaxHeads * E * 2, kNewBytes = 2 * E * 2;
  static constexpr int kHalfQueryBytes = kStepMaxHeads * (E * 2 + 4);  ///< FP16 queries and their factors
  static constexpr int kFixedBytes =
      kSumsBytes + kQueryBytes + kNewBytes + kStepWarps * AttentionWarp<Attention>::kStartFloats * 4;
  static_assert(Attention::NB == 1 && Attention::kInt4);
};

/// Shared memory: ring | activations | sums | queries | new keys and values | starts | layers. Attention merges over
/// activations and sums, which are idle then, and has its FP16 queries at their end. The table of layers is here
/// because the weights wash everything that is not touched for ten microseconds out of the L2 cache, and a pointer that
/// comes from memory would stall its reader for one.
template <class Types>
struct StepMemory {
  const StepArgs& args;
  uint8_t* base;
  __device__ uint8_t* ring() const { return base; }
  __device__ uint8_t* activations() const { return base + args.stages * Types::kSlotBytes; }
  __device__ float* sums() const { return reinterpret_cast<float*>(activations() + args.staged_bytes); }
  __device__ uint8_t* half_queries() const { return queries() - Types::kHalfQueryBytes; }
  __device__ uint8_t* queries() const { return activations() + args.staged_bytes + kSumsBytes; }
  __device__ uint8_t* fresh() const { return queries() + Types::kQueryBytes; }
  __device__ float* starts() const { return reinterpret_cast<float*>(fresh() + Types::kNewBytes); }
  __device__ StepLayer* layers() const {
    return reinterpret_cast<StepLayer*>(starts() + kStepWarps * AttentionWarp<typename Types::Attention>::kStartFloats);
  }
};

struct StepBarriers {
  uint64_t full[kStepMaxStages], empty[kStepMaxStages], summed[2], drained[2];
};

/// A consumer warp's place in the ring.
struct RingCursor {
  uint32_t slot = 0, parity = 0;
  __device__ void advance(int stages) {
    if (++slot == static_cast<uint32_t>(stages)) {
      slot = 0;
      parity ^= 1;
    }
  }
};

/// The row tiles (or pairs) of this block, and how many of them are taken at a time: two tiles, or one pair.
struct StepLot {
  int first, end;
  bool pairs;
  __device__ StepLot(const StepShape& p, bool swiglu) : pairs(swiglu) {
    const int block = blockIdx.x;
    first = block * p.each + min(block, p.extra);
    end = first + p.each + (block < p.extra);
  }
  __device__ int stride() const { return pairs ? 1 : kStepRowTiles; }
  /// Row tile r of what is taken at `at`; whether there is one.
  __device__ int row_tile(const StepShape& p, int at, int r) const { return pairs ? at + r * p.row_units : at + r; }
  __device__ bool real(int at, int r) const { return pairs || at + r < end; }
};

/// Unit (8 columns) of a column, and its place there.
__device__ inline int unit_of(int k) { return (k >> 5) * 4 + (k >> 1 & 3); }
__device__ inline int place_in_unit(int k) { return (k >> 3 & 3) * 2 + (k & 1); }

/// Where word w of unit u lies in a row of units of kWords words: two words of 32 units side by side, so that what a
/// warp loads at once is whole sectors of memory, each loaded once (row_words() of them: step.h).
template <int kWords>
__device__ inline int word_at(int u, int w) {
  return ((u >> 5) * (kWords / 2) + (w >> 1)) * 64 + (u & 31) * 2 + (w & 1);
}

}  // namespace fut::cuda
