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

template <class Shape>
class AttentionBlock {
 public:
  static constexpr int E = Shape::E, NB = Shape::NB;

  __device__ AttentionBlock(const AttentionLaunch& args, uint8_t* memory, uint64_t* full, uint64_t* empty,
                            float* starts)
      : args_(args),
        warp_(threadIdx.x >> 5),
        lane_(threadIdx.x & 31),
        pair_(warp_ >> 1),
        memory_(memory),
        starts_(starts) {
    const int blocks = (args.pieces + args.pieces_a_block - 1) / args.pieces_a_block, J = args.cache.kv_heads;
    const int unit = blockIdx.x / blocks;
    first_ = blockIdx.x % blocks * args.pieces_a_block;
    head_ = unit % J;
    row_ = unit / J;
    group_ = args.heads / J;
    slots_ = shared_address(memory) + pair_ * kPairSlots * Shape::kSlotBytes;
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
    full_ += 8 * pair_ * kPairSlots;
    empty_ += 8 * pair_ * kPairSlots;
  }

  /// Where the row and its pages are.
  __device__ void locate() {
    sequence_ = args_.map.sequence[row_];
    piece_.locate(args_.map.position[row_], args_.splits, first_);
    end_ = min(first_ + args_.pieces_a_block, piece_.pieces);
    if (Shape::kInt4) slot_ = args_.cache.slot[sequence_], tail_ = args_.cache.tail_in[sequence_];
    ahead_ = piece_;
    ahead_split_ = first_;
    ahead_item_ = pair_;
    skip_empty();
  }

  /// The pair's first items, where earlier steps wrote them: the previous kernel need not have finished.
  __device__ void fetch_early() {
    while (fetched_ < kPairSlots && ahead_split_ < end_ && is_old(ahead_item_)) fetch_next();
  }

  __device__ void run() {
    if (first_ >= piece_.pieces) return;
    if (fetched_ == 0) fetch_next();
    const KvCache& cache = args_.cache;
    AttentionWarp<Shape> core;
    core.begin(args_.q + (int64_t{row_} * args_.heads + head_ * group_) * E, group_,
               Shape::kInt4 ? cache.key_factor[head_] : 1.0f, Shape::kInt4 ? cache.value_factor[head_] : 1.0f,
               starts_ + warp_ * AttentionWarp<Shape>::kStartFloats);
    uint32_t slot = 0, parity = 0;
    int taken = 0;
    for (int split = first_; split < end_; ++split) {
      if (split > first_) {
        piece_.move_to(split);
        core.restart();
      }
#pragma unroll 1
      for (int item = pair_; item < piece_.items; item += kPairs) {
        if (fetched_ < ++taken + 1) fetch_next();
        barrier_wait(full_ + 8 * slot, parity);
        if (piece_.takes(warp_, item)) core.attend(piece_, item, warp_, slots_ + slot * Shape::kSlotBytes);
        __syncwarp();
        if (lane_ == 0) barrier_arrive(empty_ + 8 * slot);  // closes: the slot overwritten while lanes still read it
        if (++slot == kPairSlots) {
          slot = 0;
          parity ^= 1;
        }
      }
      merge_warps(core, split);
    }
    if (piece_.pieces > 1) merge_splits();
  }

 private:
  /// Page ids come 32 at a time, one a lane: a load for every page would keep its warp waiting for as long as the page.
  __device__ const uint8_t* page(int index) {
    const KvCache& c = args_.cache;
    constexpr int kStride = Shape::kInt4 ? kPairs : 1;  // a pair's items are that many pages apart
    const int at = index - window_;
    if (at < 0 || at % kStride != 0 || at >= 32 * kStride) {
      window_ = index;
      const int mine = index + lane_ * kStride, pages = ahead_.position / kKvPageTokens + 1;
      id_ = mine < pages ? c.page_table[int64_t{sequence_} * c.table_width + mine] : 0;
    }
    const KvPageLayout layout{Shape::kDtype, E};
    const int64_t id = __shfl_sync(~0u, id_, (index - window_) / kStride);
    return c.pages + (id * c.kv_heads + head_) * layout.page_bytes();
  }

  /// Where the BF16 row (which: 0 key, 1 value) of a token lies: this call's rows, the tail, or the sinks.
  __device__ const Bf16* exact_row(int64_t token, int which, bool sink) const {
    const KvCache& c = args_.cache;
    if (sink) return c.sinks + (((slot_ * c.kv_heads + head_) * 2 + which) * kKvSinkTokens + token) * E;
    if (args_.k && token >= args_.map.past[sequence_]) {
      return (which ? args_.v : args_.k) + ((row_ - (piece_.position - token)) * c.kv_heads + head_) * E;
    }
    const int64_t tail = (slot_ * 2 + tail_) * c.kv_heads + head_;
    return c.tails + ((tail * 2 + which) * kKvPageTokens + token % kKvPageTokens) * E;
  }

  __device__ bool is_old(int item) const {
    if (args_.k) return false;  // prefill: rows and pages of this call
    return Shape::kInt4 ? ahead_.is_page(item) || ahead_.is_sink(item)
                        : ahead_.tile_start(item) + 16 <= ahead_.position;
  }

  /// To the next split of this block that holds an item for this pair.
  __device__ void skip_empty() {
    while (ahead_item_ >= ahead_.items && ahead_split_ < end_) {
      ahead_item_ = pair_;
      if (++ahead_split_ < end_) ahead_.move_to(ahead_split_);
    }
  }

  /// The pair's next item into its slot; its two warps take turns.
  __device__ void fetch_next() {
    if (ahead_split_ >= end_) return;
    if (fetched_ % 2 == (warp_ & 1)) fetch(ahead_item_, fetched_ % kPairSlots, fetched_ / kPairSlots);
    ++fetched_;
    ahead_item_ += kPairs;
    skip_empty();
  }

  __device__ void fetch(int item, int slot, int round) {
    const uint32_t data = slots_ + slot * Shape::kSlotBytes, barrier = full_ + 8 * slot;
    if (round > 0) barrier_wait(empty_ + 8 * slot, (round - 1) & 1);
    if (!ahead_.is_page(item)) return fetch_tile(item, data, barrier);
    const uint32_t bytes = static_cast<uint32_t>(KvPageLayout{Shape::kDtype, E}.page_bytes());
    const uint8_t* from = page(ahead_.page(item));
    if (lane_ == 0) {
      barrier_expect(barrier, bytes);
      bulk_copy_once(data, from, bytes, barrier);
    }
  }

  /// Sixteen tokens, row by row: lanes 0-15 their keys, lanes 16-31 their values. Rows beyond the query are not there.
  __device__ void fetch_tile(int item, uint32_t data, uint32_t barrier) {
    const int start = ahead_.tile_start(item);
    const int valid = ahead_.tile_tokens(item);
    const int which = lane_ >> 4, row = lane_ & 15;
    const uint32_t to = data + which * Shape::kValueRows + row * Shape::kPitch;
    if (row >= valid) {
      uint8_t* empty = memory_ + (to - shared_address(memory_));
      for (int i = 0; i < Shape::kRowBytes; i += 16) *reinterpret_cast<uint4*>(empty + i) = make_uint4(0, 0, 0, 0);
      copy_engine_fence();  // the slot's next contents come by the copy engine
    }
    __syncwarp();  // closes: zeros read before they are written
    if (lane_ == 0) barrier_expect(barrier, 2 * valid * Shape::kRowBytes + (Shape::kE4m3 ? 128 : 0));
    __syncwarp();  // closes: bytes that land before they are expected
    const KvPageLayout layout{Shape::kDtype, E};
    const int token = start % kKvPageTokens;
    const uint8_t* whole = Shape::kInt4 ? nullptr : page(start / kKvPageTokens);
    if (row < valid) {
      const void* from;
      if constexpr (Shape::kInt4) {
        from = exact_row(start + row, which, ahead_.is_sink(item));
      } else {
        from = whole + which * layout.value_offset() + (token + row) * Shape::kRowBytes;
      }
      bulk_copy(to, from, Shape::kRowBytes, barrier);
    }
    if (Shape::kE4m3 && row == 0) {
      const int64_t scales = which ? layout.value_scale_offset() : layout.key_scale_offset();
      bulk_copy(data + Shape::kScales + which * 64, whole + scales + token * 4, 64, barrier);
    }
  }

  /// Adds the warps' sums, in their order; the row's only piece is stored, others are left for merge_splits().
  __device__ void merge_warps(AttentionWarp<Shape>& core, int split) {
    float* sums = reinterpret_cast<float*>(memory_ + Shape::kRing);
    float* ends = sums + kAttentionWarps * NB * 8 * E;
    __syncthreads();  // closes: sums of the last piece overwritten while read
    core.publish(warp_, sums, ends);
    __syncthreads();  // closes: sums read before all warps have written theirs
    float* parts = partials();
    for (int i = threadIdx.x; i < group_ * E / 2; i += kAttentionThreads) {
      const int h = i / (E / 2), c = i % (E / 2) * 2;
      const WarpsMerged<Shape> m(sums, ends, h, c);
      if (piece_.pieces == 1) {
        store(h, c, m.x / m.sum), store(h, c + 1, m.y / m.sum);
        continue;
      }
      float* part = parts + (split * group_ + h) * (E + 4);
      __stcg(reinterpret_cast<float2*>(part + c), make_float2(m.x, m.y));
      if (c == 0) __stcg(reinterpret_cast<float2*>(part + E), make_float2(m.top, m.sum));
    }
  }

  __device__ float* partials() const {
    const int64_t unit = int64_t{row_} * args_.cache.kv_heads + head_;
    return args_.partial + unit * args_.splits * group_ * (E + 4);
  }

  /// The last block to arrive adds all pieces, in their order. Loads do not wait for one another: the ends first, then
  /// four channels a thread over all pieces.
  __device__ void merge_splits() {
    __shared__ bool last;
    const float* parts = partials();
    const unsigned blocks = (piece_.pieces + args_.pieces_a_block - 1) / args_.pieces_a_block;
    __threadfence();  // the parts before the arrival
    __syncthreads();
    if (threadIdx.x == 0)
      last = blocks == 1 || atomicInc(args_.arrived + row_ * args_.cache.kv_heads + head_, blocks - 1) == blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();                                    // the arrivals before their parts
    float2* ends = reinterpret_cast<float2*>(memory_);  // [head][piece]: factor and sum
    for (int i = threadIdx.x; i < group_ * piece_.pieces; i += kAttentionThreads) {
      ends[i] = __ldcg(
          reinterpret_cast<const float2*>(parts + (i % piece_.pieces * group_ + i / piece_.pieces) * (E + 4) + E));
    }
    __syncthreads();  // closes: ends read before they are there
    for (int i = threadIdx.x; i < group_ * E / 4; i += kAttentionThreads) {
      const int h = i / (E / 4), c = i % (E / 4) * 4;
      const float2* end = ends + h * piece_.pieces;
      float top = -INFINITY, sum = 0.0f;
      for (int s = 0; s < piece_.pieces; ++s) top = fmaxf(top, end[s].x);
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
      for (int s = 0; s < piece_.pieces; ++s) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(parts + (s * group_ + h) * (E + 4) + c));
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
    const int64_t at = (int64_t{row_} * args_.heads + head_ * group_ + h) * E + c;
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
  int warp_, lane_, pair_, first_, end_ = 0, head_, row_, group_, sequence_ = 0;  ///< splits first_ .. end_ - 1
  uint8_t* memory_;
  uint32_t slots_, full_, empty_;
  float* starts_;
  AttentionPiece<Shape> piece_, ahead_;  ///< of the item at hand, and of the next to be fetched
  int ahead_split_ = 0, ahead_item_ = 0, fetched_ = 0;
  int window_ = INT_MIN / 2;  ///< page id of index window_ + lane, or 4 lane: id_
  int64_t id_ = 0;
  int slot_ = 0, tail_ = 0;  ///< of the sequence
};

template <class Shape>
__global__ void __launch_bounds__(kAttentionThreads, Shape::NB == 1 ? 2 : 1)
    attention_kernel(const __grid_constant__ AttentionLaunch args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[kPairs * kPairSlots], empty[kPairs * kPairSlots];
  __shared__ __align__(8) float starts[kAttentionWarps * AttentionWarp<Shape>::kStartFloats];
  release_next_kernel();
  AttentionBlock<Shape> block(args, memory, full, empty, starts);
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
