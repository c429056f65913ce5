// What the roles of step_batch.cuh share: the map of shared memory, the ring, flags, and how work is dealt out.
#pragma once

#include "cuda/attention_warp.cuh"
#include "cuda/gemm_decode.h"
#include "cuda/handover.cuh"
#include "cuda/ptx.cuh"
#include "cuda/step_batch.h"
#include "cuda/step_heads.cuh"
#include "cuda/weight_tile.cuh"

namespace fut::cuda {

inline constexpr int kBatchWarps = 8, kBatchConsumers = kBatchWarps * 32, kBatchStartWarps = 3;
inline constexpr int kBatchThreads = kBatchConsumers + 32 + kBatchStartWarps * 32;
inline constexpr int kBatchConsumerRegisters = 216, kBatchOtherRegisters = 72;
inline constexpr int kBatchMaxStages = 8, kBatchMaxHeads = 8;  ///< query heads a KV head
inline constexpr int kOwnClasses = kClasses / 2;               ///< of a block; the other half is its neighbour's
static_assert(kBatchThreads == 384 && kBatchWarps == kAttentionWarps);

/// kColumnTiles_: of 8 rows of the batch. W, as a parameter of what follows: row pairs that a consumer warp takes at a
/// time.
template <class Tile_, class Attention_, int kColumnTiles_>
struct BatchTypes {
  using Tile = Tile_;
  using Attention = Attention_;
  static constexpr int E = Attention::E, NB = kColumnTiles_, kRows = NB * 8;
  /// The largest W. With four column tiles, more sums than 96 leave the compiler no registers for products that do not
  /// depend on one another, and it waits 24 cycles for each (docs/PERF.md).
  static constexpr int kMostPairs = NB == 4 ? 3 : 4;
  static_assert(Tile::kGroups == 1 && Attention::NB == 1 && Attention::kInt4);

  static constexpr int kStartBytes = kRows * 4;  ///< of a k-tile
  static constexpr int kRowBytes = kRows * 128;  ///< of a k-tile, at most
  static constexpr int kSlotLimit = NB == 1 ? 43520 : 53760;
  __host__ __device__ static constexpr int weight_bytes(int W, int T) { return 4 * W * kOwnClasses * T * Tile::kBytes; }
  __host__ __device__ static constexpr int slot_bytes(int W, int T) {
    return weight_bytes(W, T) + kOwnClasses * T * (kRowBytes + kStartBytes);
  }
  /// k-tiles of a warp's class in a slot: as many as fit it.
  __host__ __device__ static constexpr int depth(int W) {
    int T = 4 / W;
    while (T > 1 && slot_bytes(W, T) > kSlotLimit) T /= 2;
    return T;
  }
  __host__ __device__ static constexpr int rows_offset(int W) {
    return W > 2    ? weight_bytes(kMostPairs, depth(kMostPairs))
           : W == 2 ? weight_bytes(2, depth(2))
                    : weight_bytes(1, depth(1));
  }
  static constexpr int kItemBytes = kPairs * Attention::kSlotBytes;
  static constexpr int largest(int a, int b) { return a > b ? a : b; }
  static constexpr int kSlotBytes =
      (largest(kItemBytes, largest(slot_bytes(1, depth(1)),
                                   largest(slot_bytes(2, depth(2)), slot_bytes(kMostPairs, depth(kMostPairs))))) +
       127) /
      128 * 128;

  static constexpr int kMailBytes = kBatchWarps * NB * 512;          ///< sums of a row tile, of every warp
  static constexpr int kPostFloats2 = 2 * kMostPairs * 2 * NB * 32;  ///< half of the sums of a pass, in pairs
  static constexpr int kPostBytes = kPostFloats2 * 8;
  static constexpr int kExchangeBytes = largest(kMailBytes + 3 * kPostBytes, Attention::kMergeBytes);
  static constexpr int kQueryBytes = kBatchMaxHeads * E * 2, kNewBytes = 2 * E * 2;
  static constexpr int kHalfQueryBytes = kBatchMaxHeads * (E * 2 + 4);
  static constexpr int kFixedBytes = kExchangeBytes + kQueryBytes + kNewBytes + kHalfQueryBytes +
                                     kBatchWarps * AttentionWarp<Attention>::kStartFloats * 4;
};

/// Shared memory: ring | sums of warps | this block's share of their sums, and the neighbour's, twice | queries | FP16
/// queries | new keys and values | starts | layers. Attention merges over the sums: the neighbour sends none while it
/// does, since it has waited for all of attention, or is waited for by it.
template <class Types>
struct BatchMemory {
  const StepBatchArgs& args;
  uint8_t* base;
  __device__ uint8_t* ring() const { return base; }
  __device__ uint8_t* mail() const { return base + args.stages * Types::kSlotBytes; }
  __device__ float2* kept() const { return reinterpret_cast<float2*>(mail() + Types::kMailBytes); }
  __device__ float2* post(int buffer) const { return kept() + (1 + buffer) * Types::kPostFloats2; }
  __device__ uint8_t* queries() const { return mail() + Types::kExchangeBytes; }
  __device__ uint8_t* half_queries() const { return queries() + Types::kQueryBytes; }
  __device__ uint8_t* fresh() const { return half_queries() + Types::kHalfQueryBytes; }
  __device__ float* starts() const { return reinterpret_cast<float*>(fresh() + Types::kNewBytes); }
  __device__ StepLayer* layers() const {
    return reinterpret_cast<StepLayer*>(starts() +
                                        kBatchWarps * AttentionWarp<typename Types::Attention>::kStartFloats);
  }
};

struct BatchBarriers {
  uint64_t full[kBatchMaxStages], started[kBatchMaxStages], empty[kBatchMaxStages];
  uint64_t post[2];
};

/// A warp's place in the ring: all warps take every slot, in turn.
template <class Types>
struct BatchRing {
  const StepBatchArgs& args;
  uint32_t data, barriers;  ///< BatchBarriers::full, and what follows
  uint32_t slot = 0, parity = 0;

  __device__ BatchRing(const BatchMemory<Types>& memory, BatchBarriers& b)
      : args(memory.args), data(shared_address(memory.ring())), barriers(shared_address(b.full)) {
    asm volatile("" : "+r"(data), "+r"(barriers));  // kept, not computed anew for every chunk
  }
  __device__ uint32_t at() const { return data + slot * Types::kSlotBytes; }
  __device__ uint32_t full() const { return barriers + 8 * slot; }
  __device__ uint32_t started() const { return full() + 8 * kBatchMaxStages; }
  __device__ uint32_t empty() const { return full() + 16 * kBatchMaxStages; }
  __device__ void advance() {
    if (++slot == static_cast<uint32_t>(args.stages)) {
      slot = 0;
      parity ^= 1;
    }
  }
  /// A consumer warp is through with the slot.
  __device__ void release() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(empty());  // closes: the slot overwritten while still read
    advance();
  }
};

/// How a product is taken: its k-tiles in chunks of T times eight, of which four times T are this block's; its row
/// tiles (SwiGLU: pairs of a gate tile and its up tile), which this block and its neighbour share, in passes, each cut
/// into two halves, for warps 0-3 and 4-7, which take at most 2 W row tiles.
struct BatchLot {
  int W, log_T, col_tiles, chunks, row_units, first, end, passes, each;
  bool pairs;

  /// In shared memory, from make() on: registers are scarce.
  __device__ static BatchLot& of(Product product) {
    __shared__ BatchLot lots[kProducts];
    return lots[static_cast<int>(product)];
  }
  template <class Types>
  __device__ static BatchLot make(const StepBatchArgs& args, Product product) {
    const StepShape& p = args.shape[static_cast<int>(product)];
    const int cluster = blockIdx.x >> 1;
    BatchLot lot;
    lot.W = args.row_pairs[static_cast<int>(product)];
    lot.log_T = lot.W > 2    ? log2(Types::depth(Types::kMostPairs))
                : lot.W == 2 ? log2(Types::depth(2))
                             : log2(Types::depth(1));
    lot.col_tiles = p.col_tiles;
    lot.chunks = (p.col_tiles + (kClasses << lot.log_T) - 1) >> (lot.log_T + 3);
    lot.pairs = product == Product::gate_up;
    lot.row_units = p.row_units;
    lot.first = cluster * p.each + min(cluster, p.extra);
    lot.end = lot.first + p.each + (cluster < p.extra);
    lot.each = lot.pairs ? 2 * lot.W : 4 * lot.W;
    lot.passes = (lot.end - lot.first + lot.each - 1) / lot.each;
    return lot;
  }
  __device__ static int rank() { return blockIdx.x & 1; }
  __device__ static int first_own(int eighth) { return eighth * kClasses + rank() * kOwnClasses; }
  /// This block's of the eight k-tiles number `eighth`.
  __device__ int own(int eighth) const { return max(0, min(kOwnClasses, col_tiles - first_own(eighth))); }

  struct Half {
    int at, count;  ///< units
  };
  __device__ Half half(int pass, int h) const {
    const int at = first + pass * each, count = max(0, min(each, end - at)), low = (count + 1) / 2;
    return h == 0 ? Half{at, low} : Half{at + low, count - low};
  }
  /// Row tile j of a half (SwiGLU: gate tile, up tile, gate tile, ..).
  __device__ int row_tile(const Half& half, int j) const {
    return pairs ? half.at + j / 2 + (j & 1) * row_units : half.at + j;
  }
  __device__ int row_tiles(const Half& half) const { return pairs ? 2 * half.count : half.count; }

 private:
  __host__ __device__ static constexpr int log2(int x) { return x == 4 ? 2 : x == 2 ? 1 : 0; }
};

/// Counters that blocks raise when they are through with their part of something, and that others wait for.
struct BatchFlags {
  const StepBatchArgs& args;
  Watch watch;

  __device__ static uint32_t& base() {
    __shared__ uint32_t tag;
    return tag;
  }
  __device__ unsigned* flag(Handed what, int layer) const {
    return args.flags + (layer * kHanded + static_cast<int>(what)) * kFlagWords;
  }
  __device__ unsigned target(Handed what) const {
    return what == Handed::normed_in || what == Handed::normed_mid ? args.batch
           : what == Handed::a                                     ? args.batch * args.kv_heads
                                                                   : gridDim.x;
  }
  /// All lanes of a warp: what all blocks wrote is there.
  __device__ void await(Handed what, int layer) const {
    if ((threadIdx.x & 31) == 0) {
      const unsigned *at = flag(what, layer), wanted = target(what);
      const uint32_t tag = step_tag(base(), layer, stage_of(what));
      for (uint32_t looks = 0; load(at) < wanted;) {
        if (!watch.patient(args.fault, looks, tag)) break;
      }
    }
    __syncwarp();
  }
  /// One thread, after a barrier behind what was written.
  __device__ void raise(Handed what, int layer) const {
    if (static_cast<int>(what) == args.lost && layer == 0 && blockIdx.x == 0) return;
    __threadfence();
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag(what, layer)) : "memory");
  }

 private:
  __device__ static unsigned load(const unsigned* at) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
  }
  /// What a wait is told as.
  __device__ static Stage stage_of(Handed what) {
    switch (what) {
      case Handed::y: return Stage::y;
      case Handed::a: return Stage::a;
      case Handed::x_mid:
      case Handed::normed_mid: return Stage::x_mid;
      case Handed::h: return Stage::h;
      default: return Stage::x_in;
    }
  }
};

}  // namespace fut::cuda
