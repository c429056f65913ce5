// MATH       o[t, h] = sum_j p_j v_j / sum_j p_j,  p_j = 2^(q[t, h] . k_j): q carries log2(e) / sqrt(E).
// SHAPES     E = 64, 128; 1 to 16 query heads a KV head; caches INT4, BF16, E4M3; any length. Refused: f32 caches.
// LAYOUT     kv_page.h. Keys are operand A (16 tokens x 16 channels), the group's query heads are n = 8 (two column
// tiles
//            beyond 8 heads); O^T = V^T P^T likewise, with P turned by movmatrix.
// SCHEDULE   A split is (row, KV head, s): an even share of the row's pages (AttentionPiece). A block takes one or, in
//            large batches, several splits of a row and head one after another. Its eight warps work in pairs: every
//            fourth item is a pair's own, fetched by its warps in turn into two slots of their own, and each warp
//            takes half of a page. Items are INT4 pages by one bulk copy each, or tiles of 16 tokens row by row
//            (BF16, E4M3, and an INT4 sequence's sinks and own page). The last block of a row and KV head to arrive
//            merges the splits, in their order.
// NUMERICS   Scores and sums FP32. INT4: scales of keys multiply accumulators; scales of values multiply P, rounded to
//            FP16 after that, P times 2^15 (so that 2^-9 of a scale and 2^-14 of a weight stay normal numbers). BF16: P
//            is split into two BF16. Unwritten slots never reach a sum: their scores are replaced, their values zeroed.
// ROOFLINE   Page bytes over the read rate: 136 bytes a token and KV head at INT4, E = 128; docs/PERF.md.
// REFERENCE  Keys as operand A, split over pages: DESIGN section 6.
#pragma once

#include <climits>

#include "cuda/attention.h"
#include "cuda/attention_warp.cuh"
#include "cuda/launch.cuh"

namespace fut::cuda {

/// A split and its piece. In shared memory, as what follows: it is looked at once an item, and registers are scarce.
template <class Shape>
struct alignas(16) AttentionAt {
  AttentionPiece<Shape> piece;
  int split, end;  ///< of this block's splits
  int row, head, group, sequence;
};

/// What a warp fetches next.
template <class Shape>
struct alignas(16) AttentionAhead {
  AttentionAt<Shape> at;
  int item;
  int fetched;     ///< items so far, by both warps of the pair
  int window;      ///< page id of index window + lane, or 4 lane: AttentionBlock::id_
  int slot, tail;  ///< of the sequence, INT4
};

template <class Shape>
class AttentionBlock {
 public:
  static constexpr int E = Shape::E, NB = Shape::NB;
  using At = AttentionAt<Shape>;
  using Ahead = AttentionAhead<Shape>;

  __device__ AttentionBlock(const AttentionLaunch& args, uint64_t* full, uint64_t* empty, float* starts, At* at,
                            Ahead* ahead)
      : args_(args), at_(at[threadIdx.x >> 5]), ahead_(ahead[threadIdx.x >> 5]), starts_(starts) {
    slots_ = shared_address(memory()) + pair() * kPairSlots * Shape::kSlotBytes;
    full_ = shared_address(full);
    empty_ = shared_address(empty);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kPairs * kPairSlots; ++i) {
        barrier_init(full_ + 8 * i, 1);
        barrier_init(empty_ + 8 * i, 2);
      }
      barrier_init_fence();
    }
    __syncthreads();  // closes: barriers used before they are initialised
    full_ += 8 * pair() * kPairSlots;
    empty_ += 8 * pair() * kPairSlots;
  }

  /// Where the row and its pages are.
  __device__ void locate() {
    const int blocks = (args_.pieces + args_.pieces_a_block - 1) / args_.pieces_a_block, J = args_.cache.kv_heads;
    const int unit = blockIdx.x / blocks;
    At at;
    at.split = blockIdx.x % blocks * args_.pieces_a_block;
    at.head = unit % J;
    at.row = unit / J;
    at.group = args_.heads / J;
    at.sequence = args_.map.sequence[at.row];
    at.piece.locate(args_.map.position[at.row], args_.splits, at.split);
    at.end = min(at.split + args_.pieces_a_block, at.piece.pieces);
    keep(at_, at);
    Ahead next = {at, pair(), 0, INT_MIN / 2, 0, 0};
    if (Shape::kInt4)
      next.slot = static_cast<int>(args_.cache.slot[at_.sequence]), next.tail = args_.cache.tail_in[at_.sequence];
    skip_empty(next);
    keep(ahead_, next);
  }

  /// The pair's first items, where earlier steps wrote them: the previous kernel need not have finished.
  __device__ void fetch_early() {
    while (ahead_.fetched < kPairSlots && ahead_.at.split < ahead_.at.end && is_old(ahead_.item)) fetch_next();
  }

  __device__ void run() {
    if (at_.split >= at_.end) return;
    if (ahead_.fetched == 0) fetch_next();
    const KvCache& cache = args_.cache;
    AttentionWarp<Shape> core;
    core.begin(args_.q + (int64_t{at_.row} * args_.heads + at_.head * at_.group) * E, at_.group,
               Shape::kInt4 ? cache.key_factor[at_.head] : 1.0f, Shape::kInt4 ? cache.value_factor[at_.head] : 1.0f,
               starts_ + warp() * AttentionWarp<Shape>::kStartFloats);
    for (int taken = 0;;) {  // items of the pair so far
#pragma unroll 1
      for (int item = pair(); item < at_.piece.items; item += kPairs, ++taken) {
        const uint32_t slot = taken % kPairSlots;
        if (ahead_.fetched < taken + 2) fetch_next();
        barrier_wait(full_ + 8 * slot, taken / kPairSlots & 1);
        if (at_.piece.takes(warp(), item)) core.attend(at_.piece, item, warp(), slots_ + slot * Shape::kSlotBytes);
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty_ + 8 * slot);  // closes: the slot overwritten while lanes still read it
      }
      merge_warps(core);
      At at = at_;
      if (++at.split == at.end) break;
      at.piece.move_to(at.split);
      keep(at_, at);
      core.restart();
    }
    if (at_.piece.pieces > 1) merge_splits();
  }

 private:
  /// Page ids come 32 at a time, one a lane: a load for every page would keep its warp waiting for as long as the page.
  __device__ const uint8_t* page(Ahead& next, int index) {
    const KvCache& c = args_.cache;
    constexpr int kStride = Shape::kInt4 ? kPairs : 1;  // a pair's items are that many pages apart
    const int at = index - next.window;
    if (at < 0 || at % kStride != 0 || at >= 32 * kStride) {
      next.window = index;
      const int mine = index + lane() * kStride, pages = next.at.piece.position / kKvPageTokens + 1;
      id_ = mine < pages ? static_cast<int>(c.page_table[int64_t{at_.sequence} * c.table_width + mine]) : 0;
    }
    const KvPageLayout layout{Shape::kDtype, E};
    const int64_t id = __shfl_sync(~0u, id_, (index - next.window) / kStride);
    return c.pages + (id * c.kv_heads + at_.head) * layout.page_bytes();
  }

  /// Where the BF16 row (which: 0 key, 1 value) of a token lies: this call's rows, the tail, or the sinks.
  __device__ const Bf16* exact_row(const Ahead& next, int token, int which, bool sink) const {
    const KvCache& c = args_.cache;
    if (sink) return c.sinks + (((int64_t{next.slot} * c.kv_heads + at_.head) * 2 + which) * kKvSinkTokens + token) * E;
    if (args_.k && token >= args_.map.past[at_.sequence]) {
      return (which ? args_.v : args_.k) +
             (int64_t{at_.row - (at_.piece.position - token)} * c.kv_heads + at_.head) * E;
    }
    const int64_t tail = (int64_t{next.slot} * 2 + next.tail) * c.kv_heads + at_.head;
    return c.tails + ((tail * 2 + which) * kKvPageTokens + token % kKvPageTokens) * E;
  }

  __device__ static int warp() { return thread_index() >> 5; }
  __device__ static int lane() { return thread_index() & 31; }
  __device__ static int pair() { return thread_index() >> 6; }
  __device__ static uint8_t* memory() {
    extern __shared__ __align__(128) uint8_t bytes[];
    return bytes;
  }

  __device__ bool is_old(int item) const {
    if (args_.k) return false;  // prefill: rows and pages of this call
    return Shape::kInt4 ? ahead_.at.piece.is_page(item) || ahead_.at.piece.is_sink(item)
                        : ahead_.at.piece.tile_start(item) + 16 <= ahead_.at.piece.position;
  }

  /// To the next split of this block that holds an item for this pair.
  __device__ void skip_empty(Ahead& next) const {
    while (next.item >= next.at.piece.items && next.at.split < next.at.end) {
      next.item = pair();
      if (++next.at.split < next.at.end) next.at.piece.move_to(next.at.split);
    }
  }
  /// All lanes.
  template <class What>
  __device__ static void keep(What& what, const What& value) {
    __syncwarp();  // closes: overwritten while other lanes still read
    what = value;
    __syncwarp();  // closes: read before it is written
  }

  /// The pair's next item into its slot; its two warps take turns.
  __device__ void fetch_next() {
    Ahead next = ahead_;
    if (next.at.split >= next.at.end) return;
    if (next.fetched % 2 == (warp() & 1)) fetch(next);
    ++next.fetched;
    next.item += kPairs;
    skip_empty(next);
    keep(ahead_, next);
  }

  __device__ void fetch(Ahead& next) {
    const int item = next.item, slot = next.fetched % kPairSlots, round = next.fetched / kPairSlots;
    const uint32_t data = slots_ + slot * Shape::kSlotBytes, barrier = full_ + 8 * slot;
    if (round > 0) barrier_wait(empty_ + 8 * slot, (round - 1) & 1);
    if (!next.at.piece.is_page(item)) return fetch_tile(next, data, barrier);
    const uint32_t bytes = static_cast<uint32_t>(KvPageLayout{Shape::kDtype, E}.page_bytes());
    const uint8_t* from = page(next, next.at.piece.page(item));
    if (lane() == 0) {
      barrier_expect(barrier, bytes);
      bulk_copy_once(data, from, bytes, barrier);
    }
  }

  /// Sixteen tokens: lanes 0-15 their keys, lanes 16-31 their values. Rows beyond the query are not there. A copy takes
  /// the engine 80 cycles, whatever it brings, so rows that lie side by side come by one; their reader pays with bank
  /// conflicts, which are less.
  __device__ void fetch_tile(Ahead& next, uint32_t data, uint32_t barrier) {
    const int start = next.at.piece.tile_start(next.item);
    const int valid = next.at.piece.tile_tokens(next.item);
    const int which = lane() >> 4, row = lane() & 15;
    const uint32_t to = data + which * Shape::kValueRows + row * Shape::kRowBytes;
    if (row >= valid) {
      const uint32_t zeros[4] = {};
      for (int i = 0; i < Shape::kRowBytes; i += 16) store_shared_16(to + i, zeros);
      copy_engine_fence();  // the slot's next contents come by the copy engine
    }
    __syncwarp();  // closes: zeros read before they are written
    if (lane() == 0) barrier_expect(barrier, 2 * valid * Shape::kRowBytes + (Shape::kE4m3 ? 128 : 0));
    __syncwarp();  // closes: bytes that land before they are expected
    const KvPageLayout layout{Shape::kDtype, E};
    const int token = start % kKvPageTokens;
    const uint8_t* whole = Shape::kInt4 ? nullptr : page(next, start / kKvPageTokens);
    const bool together = !Shape::kInt4 || !args_.k;
    if (row < (together ? 1 : valid)) {
      const void* from;
      if constexpr (Shape::kInt4) {
        from = exact_row(next, start + row, which, next.at.piece.is_sink(next.item));
      } else {
        from = whole + which * layout.value_offset() + (token + row) * Shape::kRowBytes;
      }
      bulk_copy(to, from, (together ? valid : 1) * Shape::kRowBytes, barrier);
    }
    if (Shape::kE4m3 && row == 0) {
      const int64_t scales = which ? layout.value_scale_offset() : layout.key_scale_offset();
      bulk_copy(data + Shape::kScales + which * 64, whole + scales + token * 4, 64, barrier);
    }
  }

  /// Adds the warps' sums, in their order; the row's only piece is stored, others are left for merge_splits().
  __device__ void merge_warps(AttentionWarp<Shape>& core) {
    float* sums = reinterpret_cast<float*>(memory() + Shape::kRing);
    float* ends = sums + kAttentionWarps * NB * 8 * E;
    __syncthreads();  // closes: sums of the last piece overwritten while read
    core.publish(warp(), at_.group, sums, ends);
    __syncthreads();  // closes: sums read before all warps have written theirs
    float* parts = partials();
    for (int i = thread_index(); i < at_.group * E / 2; i += kAttentionThreads) {
      const int h = i / (E / 2), c = i % (E / 2) * 2;
      const WarpsMerged<Shape> m(sums, ends, h, c);
      if (at_.piece.pieces == 1) {
        store(h, c, m.x / m.sum), store(h, c + 1, m.y / m.sum);
        continue;
      }
      float* part = parts + (at_.split * at_.group + h) * (E + 4);
      __stcg(reinterpret_cast<float2*>(part + c), make_float2(m.x, m.y));
      if (c == 0) __stcg(reinterpret_cast<float2*>(part + E), make_float2(m.top, m.sum));
    }
  }

  __device__ float* partials() const {
    const int64_t unit = int64_t{at_.row} * args_.cache.kv_heads + at_.head;
    return args_.partial + unit * args_.splits * at_.group * (E + 4);
  }

  /// The last block to arrive adds all pieces, in their order. Loads do not wait for one another: the ends first, then
  /// four channels a thread over all pieces.
  __device__ void merge_splits() {
    __shared__ bool last;
    const float* parts = partials();
    const unsigned blocks = (at_.piece.pieces + args_.pieces_a_block - 1) / args_.pieces_a_block;
    __threadfence();  // the parts before the arrival
    __syncthreads();
    if (thread_index() == 0)
      last =
          blocks == 1 || atomicInc(args_.arrived + at_.row * args_.cache.kv_heads + at_.head, blocks - 1) == blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();                                     // the arrivals before their parts
    float2* ends = reinterpret_cast<float2*>(memory());  // [head][piece]: factor and sum
    for (int i = thread_index(); i < at_.group * at_.piece.pieces; i += kAttentionThreads) {
      ends[i] = __ldcg(reinterpret_cast<const float2*>(
          parts + (i % at_.piece.pieces * at_.group + i / at_.piece.pieces) * (E + 4) + E));
    }
    __syncthreads();  // closes: ends read before they are there
    for (int i = thread_index(); i < at_.group * E / 4; i += kAttentionThreads) {
      const int h = i / (E / 4), c = i % (E / 4) * 4;
      const float2* end = ends + h * at_.piece.pieces;
      float top = -INFINITY, sum = 0.0f;
      for (int s = 0; s < at_.piece.pieces; ++s) top = fmaxf(top, end[s].x);
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
      for (int s = 0; s < at_.piece.pieces; ++s) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(parts + (s * at_.group + h) * (E + 4) + c));
        const float factor = fast_exp2(end[s].x - top);
        sum += end[s].y * factor;
        value.x += v.x * factor, value.y += v.y * factor, value.z += v.z * factor, value.w += v.w * factor;
      }
      const float inverse = 1.0f / sum;
      store(h, c, value.x * inverse), store(h, c + 1, value.y * inverse);
      store(h, c + 2, value.z * inverse), store(h, c + 3, value.w * inverse);
    }
  }

  __device__ void store(int h, int c, float value) const {
    const int64_t at = (int64_t{at_.row} * args_.heads + at_.head * at_.group + h) * E + c;
    if (args_.out_type == Dtype::f32) {
      static_cast<float*>(args_.out)[at] = value;
    } else if (args_.out_type == Dtype::bf16) {
      static_cast<Bf16*>(args_.out)[at] = to_bf16(value);
    } else {
      const float scaled = value * __frcp_rn(args_.out_scale);  // a power of two
      static_cast<Half*>(args_.out)[at] = half_saturated(scaled);
      if (args_.saturated && fabsf(scaled) > kHalfMax) atomicAdd(args_.saturated, 1ull);
    }
  }

  const AttentionLaunch& args_;
  At& at_;  ///< this warp's
  Ahead& ahead_;
  uint32_t slots_, full_, empty_;
  float* starts_;
  int id_ = 0;  ///< of AttentionAhead::window
};

template <class Shape>
__global__ void __launch_bounds__(kAttentionThreads, Shape::NB == 1 ? 2 : 1)
    attention_kernel(const __grid_constant__ AttentionLaunch args) {
  __shared__ uint64_t full[kPairs * kPairSlots], empty[kPairs * kPairSlots];
  __shared__ __align__(8) float starts[kAttentionWarps * AttentionWarp<Shape>::kStartFloats];
  __shared__ AttentionAt<Shape> at[kAttentionWarps];
  __shared__ AttentionAhead<Shape> ahead[kAttentionWarps];

  release_next_kernel();
  AttentionBlock<Shape> block(args, full, empty, starts, at, ahead);
  block.locate();  // what the host has sent
  block.fetch_early();
  wait_for_previous_kernel();
  copy_engine_fence();  // rows that the previous kernel wrote, the copy engine reads
  block.run();
}

template <Dtype kDtype, int E>
void launch_attention(const char* op, const AttentionLaunch& args, cudaStream_t stream) {
  const int64_t blocks =
      int64_t{args.rows} * args.cache.kv_heads * ((args.pieces + args.pieces_a_block - 1) / args.pieces_a_block);
  FUT_CHECK(blocks < 1ll << 31, op, ": ", args.rows, " rows in one launch are too many");
  const auto run = [&](auto shape) {
    using Shape = decltype(shape);
    launch(op, attention_kernel<Shape>, dim3(static_cast<unsigned>(blocks)), dim3(kAttentionThreads),
           Shape::kSharedBytes, stream, args);
  };
  if (args.heads / args.cache.kv_heads <= 8) return run(AttentionShape<kDtype, E, 1>{});
  run(AttentionShape<kDtype, E, 2>{});
}

}  // namespace fut::cuda
