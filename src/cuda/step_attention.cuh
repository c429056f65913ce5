// Attention inside the step kernel, INT4 cache. A unit is (sequence, KV head, split), as in attention.cuh; a block's
// eight consumer warps take one at a time. Pages and old rows of the tail come through the ring, four items a slot,
// long before the queries are known. A unit finishes the queries of its KV head by itself from the QKV product's words
// (RoPE, rotation, rounding: cache.cu), which costs less than one more hand-over. Units publish their partial sums;
// then every unit merges its share of the channels over all pieces, in their order, and publishes a.
//
// This code runs once a layer and is not in the instruction cache when it does: short and rolled beats unrolled.
#pragma once

#include "cuda/quantise_page.cuh"
#include "cuda/step_products.cuh"
#include "layout/hadamard.h"

namespace fut::cuda {

/// Rows of a tile that earlier steps wrote: all but this step's own.
template <class Shape>
__device__ inline int old_rows(const AttentionPiece<Shape>& piece, int item) {
  return piece.is_sink(item) ? 16 : min(16, piece.position - piece.tile_start(item));
}

/// The block's unit i is unit blockIdx.x + i * gridDim.x of the batch. The same in all layers, so they are located
/// once, into shared memory: divisions and a position that is in no cache any more cost thousands of cycles.
template <class Types>
struct StepUnit {
  static constexpr int E = Types::E;
  int b, head, split, slot, tail_in;
  AttentionPiece<typename Types::Attention> piece;  ///< without items where it is empty

  __device__ void locate(const StepArgs& args, int unit) {
    split = unit % args.splits;
    head = unit / args.splits % args.kv_heads;
    b = unit / args.splits / args.kv_heads;
    slot = static_cast<int>(args.slot[b]);
    tail_in = args.tail_in[b];
    piece.locate(args.position[b], args.splits, split);
  }
  __device__ int slots() const { return (piece.items + kPairs - 1) / kPairs; }
  __device__ bool appends() const { return split == piece.pieces - 1; }

  __device__ Bf16* tail(const StepArgs& args, const StepLayer& layer, int which) const {
    const int64_t tail = (int64_t{slot} * 2 + tail_in) * args.kv_heads + head;
    return layer.tails + (tail * 2 + which) * kKvPageTokens * E;
  }
  __device__ Bf16* sinks(const StepArgs& args, const StepLayer& layer, int which) const {
    return layer.sinks + ((int64_t{slot} * args.kv_heads + head) * 2 + which) * kKvSinkTokens * E;
  }
  __device__ uint8_t* page(const StepArgs& args, const StepLayer& layer, int index) const {
    constexpr KvPageLayout layout{Dtype::int4, E};
    return layer.pages + (args.page_table[b * args.table_width + index] * args.kv_heads + head) * layout.page_bytes();
  }
  __device__ uint2* partial(const StepArgs& args, int of_split) const {
    const int group = args.heads / args.kv_heads;
    return args.partial + int64_t{(b * args.kv_heads + head) * args.splits + of_split} * group * (E + 2);
  }
};

template <class Types>
struct StepUnits {
  StepUnit<Types> unit[kStepMaxUnits];
  int count;

  /// All threads of the block; they meet afterwards.
  __device__ void locate(const StepArgs& args) {
    const int all = args.batch * args.kv_heads * args.splits, grid = gridDim.x, block = blockIdx.x;
    const int mine = block < all ? (all - block + grid - 1) / grid : 0, i = threadIdx.x;
    if (i < mine) unit[i].locate(args, block + i * grid);
    if (i == 0) count = mine;
  }
};

/// The producer warp's part: all lanes.
template <class Types>
class StepPages {
 public:
  using Shape = typename Types::Attention;

  __device__ StepPages(const StepArgs& args, const StepUnits<Types>& units, StepProducer<Types>& ring)
      : args_(args), units_(units), ring_(ring) {}

  __device__ void send(const StepLayer& layer) {
    for (int i = 0; i < units_.count; ++i) {
      for (int k = 0; k < units_.unit[i].slots(); ++k) send_slot(units_.unit[i], layer, k * kPairs);
    }
  }

 private:
  __device__ void send_slot(const StepUnit<Types>& unit, const StepLayer& layer, int first) {
    constexpr KvPageLayout layout{Dtype::int4, Types::E};
    const int lane = threadIdx.x & 31, items = min(kPairs, unit.piece.items - first);
    const uint8_t* page = nullptr;
    if (lane < items && unit.piece.is_page(first + lane)) page = unit.page(args_, layer, unit.piece.page(first + lane));
    uint32_t bytes = 0;
    for (int i = 0; i < items; ++i) {
      bytes += unit.piece.is_page(first + i) ? static_cast<uint32_t>(layout.page_bytes())
                                             : 2 * old_rows(unit.piece, first + i) * Shape::kRowBytes;
    }
    const uint32_t slot = ring_.acquire(), data = ring_.slot_data(slot), full = ring_.full(slot);
    if (lane == 0) barrier_expect(full, bytes);
    __syncwarp();  // closes: bytes that land before they are expected
    if (page) bulk_copy_once(data + lane * Shape::kSlotBytes, page, static_cast<uint32_t>(layout.page_bytes()), full);
    const int which = lane >> 4, row = lane & 15;
    for (int i = 0; i < items; ++i) {
      if (unit.piece.is_page(first + i)) break;  // tiles come first
      if (row >= old_rows(unit.piece, first + i)) continue;
      const int token = unit.piece.tile_start(first + i) % kKvPageTokens + row;
      const Bf16* from =
          (unit.piece.is_sink(first + i) ? unit.sinks(args_, layer, which) : unit.tail(args_, layer, which)) +
          token * Types::E;
      bulk_copy(data + i * Shape::kSlotBytes + which * Shape::kValueRows + row * Shape::kPitch, from, Shape::kRowBytes,
                full);
    }
  }

  const StepArgs& args_;
  const StepUnits<Types>& units_;
  StepProducer<Types>& ring_;
};

/// The consumers' part.
template <class Types>
class StepAttend {
 public:
  using Shape = typename Types::Attention;
  static constexpr int E = Types::E, kParts = E / 32;
  static_assert(kStepWarps == kAttentionWarps);

  __device__ StepAttend(StepConsumer<Types>& c, const StepUnits<Types>& units, const StepLayer& layer, int index)
      : c_(c), args_(c.args), units_(units), layer_(layer), index_(index) {
    c.begin_stage();
    group_ = args_.heads / args_.kv_heads;
  }

  __device__ void run() {
    if (units_.count == 0) return;
    for (int i = 0; i < units_.count; ++i) {
      if (units_.unit[i].piece.items > 0) attend(units_.unit[i]);
    }
    if (c_.traced()) c_.trace().ready = c_.now() - c_.trace().begin;
    for (int i = 0; i < units_.count; ++i) merge_share(units_.unit[i]);
    for (int i = 0; i < units_.count; ++i) fill_page(units_.unit[i]);
  }

 private:
  __device__ Bf16* queries() const { return reinterpret_cast<Bf16*>(c_.memory.queries()); }
  __device__ Half* half_queries() const { return reinterpret_cast<Half*>(c_.memory.half_queries()); }
  __device__ float* query_factors() const { return reinterpret_cast<float*>(half_queries() + kStepMaxHeads * E); }
  __device__ Bf16* fresh() const { return reinterpret_cast<Bf16*>(c_.memory.fresh()); }
  __device__ float* merge() const { return reinterpret_cast<float*>(c_.memory.activations()); }
  __device__ void sync() const { named_barrier(kBarrierConsumers, kStepConsumers); }

  __device__ void attend(const StepUnit<Types>& unit) {
    const float key_factor = layer_.key_factor[unit.head], value_factor = layer_.value_factor[unit.head];
    c_.wait_drained();  // as in StepMultiply::run(); and merge_warps() overwrites the finishing warps' sums
    let_words_travel();
    finish_heads(unit);
    sync();  // closes: queries and new rows read before they are written; activations, and values of the last merge,
             // overwritten by sums while they are read
    if (c_.traced()) c_.trace().gathered = c_.now() - c_.trace().begin;
    AttentionWarp<Shape> core;
    core.begin_ready(queries(), shared_address(half_queries()), shared_address(query_factors()), group_, key_factor,
                     value_factor, c_.memory.starts() + c_.warp * AttentionWarp<Shape>::kStartFloats);
    const AttentionPiece<Shape>& piece = unit.piece;
#pragma unroll 1
    for (int item = c_.warp / 2, left = unit.slots(); left > 0; --left, item += kPairs) {
      c_.wait_slot();
      if (item < piece.items && piece.takes(c_.warp, item))
        one_item(core, piece, item, c_.slot_data() + c_.warp / 2 * Shape::kSlotBytes);
      c_.release_slot();
    }
    merge_warps(core, unit);
  }

  __device__ void one_item(AttentionWarp<Shape>& core, const AttentionPiece<Shape>& piece, int item, uint32_t data) {
    if (!piece.is_page(item) && old_rows(piece, item) < 16) complete_tile(data, old_rows(piece, item));
    core.attend(piece, item, c_.warp, data);
  }

  /// This step's own row, and zeros behind it.
  __device__ void complete_tile(uint32_t data, int old) const {
    const int which = c_.lane >> 4, row = c_.lane & 15;
    if (row >= old) {
      const uint32_t to = data + which * Shape::kValueRows + row * Shape::kPitch,
                     from = shared_address(fresh() + which * E);
      for (int i = 0; i < Shape::kRowBytes; i += 16) {
        uint32_t v[4] = {};
        if (row == old) {
          const uint4 x = load_shared_16(from + i);
          v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
        store_shared_16(to + i, v);
      }
      copy_engine_fence();  // the slot's next contents come by the copy engine
    }
    __syncwarp();  // closes: rows read before they are written
  }

  /// Queries 0 .. group - 1 of the unit, then, where it appends, the new key and the new value, which also go to tail
  /// and sinks.
  __device__ void finish_heads(const StepUnit<Types>& unit) const {
    constexpr int kHalf = kParts / 2;
    const int H = args_.heads, J = args_.kv_heads, position = unit.piece.position;
    float cos[kHalf], sin[kHalf];  // before the wait: they come from far
#pragma unroll
    for (int part = 0; part < kHalf; ++part) {
      const int64_t at = int64_t{position} * (E / 2) + c_.lane + 32 * part;
      cos[part] = args_.rope.cos[at], sin[part] = args_.rope.sin[at];
    }
#pragma unroll 1
    for (int i = c_.warp; i < group_ + (unit.appends() ? 2 : 0); i += kStepWarps) {
      const int which = i - group_;  // 0 key, 1 value
      const int head = which < 0 ? unit.head * group_ + i : H + which * J + unit.head;
      float mean[kParts] = {};
      if (which == 0 && layer_.key_mean) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) mean[part] = layer_.key_mean[unit.head * E + c_.lane + 32 * part];
      }
      const uint2* y = args_.y + int64_t{unit.b} * (H + 2 * J) * E + head * E + c_.lane;
      uint2 words[kParts];
      gather(words, step_tag(c_.base(), index_, Stage::y), c_.watch, args_.fault,
             [&](int part) { return y + 32 * part; });
      float x[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) x[part] = float_of(words[part].x);
      if (which < 1) {
#pragma unroll
        for (int part = 0; part < kHalf; ++part) {
          const float low = x[part], high = x[part + kHalf];
          x[part] = low * cos[part] - high * sin[part];
          x[part + kHalf] = high * cos[part] + low * sin[part];
        }
        if (which == 0 && layer_.key_mean) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) x[part] -= mean[part];
        }
        rotate(x);
      }
      which < 0 ? keep_query(i, x) : keep_row(unit, which, x);
    }
  }

  /// A query in BF16, and that in FP16.
  __device__ void keep_query(int i, const float (&x)[kParts]) const {
    float rounded[kParts];
    uint32_t largest = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Bf16 query = to_bf16(x[part] * args_.q_scale);
      queries()[i * E + c_.lane + 32 * part] = query;
      rounded[part] = to_f32(query);
      largest = max(largest, bits_of(rounded[part]) & 0x7f800000u);
    }
    const typename AttentionWarp<Shape>::HalfQuery scale(__reduce_max_sync(~0u, largest));
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      half_queries()[i * E + c_.lane + 32 * part] = half_saturated(rounded[part] * scale.down);
    if (c_.lane == 0) query_factors()[i] = scale.up;
  }

  /// A new key or value: for this step's tile, into the tail, and into the sinks.
  __device__ void keep_row(const StepUnit<Types>& unit, int which, const float (&x)[kParts]) const {
    const int position = unit.piece.position;
    Bf16* tail = unit.tail(args_, layer_, which) + position % kKvPageTokens * E;
    Bf16* sink = position >= kKvSinkTokens ? nullptr : unit.sinks(args_, layer_, which) + position * E;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Bf16 rounded = to_bf16(x[part]);
      const int channel = c_.lane + 32 * part;
      fresh()[which * E + channel] = rounded;
      tail[channel] = rounded;
      if (sink) sink[channel] = rounded;
    }
  }

  /// hadamard.h's butterflies: strides below 32 across lanes, then across this lane's parts.
  __device__ void rotate(float (&x)[kParts]) const {
    constexpr int kBlock = hadamard_block(E);
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[part] *= hadamard_sign(c_.lane + 32 * part);
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float other = __shfl_xor_sync(~0u, x[part], stride);
        x[part] = c_.lane & stride ? other - x[part] : x[part] + other;
      }
    }
#pragma unroll
    for (int stride = 1; stride < kBlock / 32; stride *= 2) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part & stride) continue;
        const float low = x[part], high = x[part + stride];
        x[part] = low + high;
        x[part + stride] = low - high;
      }
    }
    const float scale = 1.0f / sqrtf(static_cast<float>(kBlock));
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[part] *= scale;
  }

  /// The warps' sums into one, published; a row's only piece is published as a.
  __device__ void merge_warps(AttentionWarp<Shape>& core, const StepUnit<Types>& unit) const {
    float* ends = merge() + kAttentionWarps * 8 * E;
    core.publish(c_.warp, group_, merge(), ends);
    sync();  // closes: sums read before all warps have written theirs
    uint2* to = unit.partial(args_, unit.split);
    const uint32_t tag = step_tag(c_.base(), index_, Stage::partial);
#pragma unroll 1
    for (int i = c_.thread(); i < group_ * E / 2; i += kStepConsumers) {
      const int h = i / (E / 2), c = i % (E / 2) * 2;
      const WarpsMerged<Shape> m(merge(), ends, h, c);
      if (unit.piece.pieces == 1) {
        publish_output(unit, h, c, m.x / m.sum, m.y / m.sum);
        continue;
      }
      uint2* part = to + h * (E + 2);
      publish_two(part + c, bits_of(m.x), bits_of(m.y), tag);
      if (c == 0) publish_two(part + E, bits_of(m.top), bits_of(m.sum), tag);
    }
  }

  /// Channels c and c + 1, c even.
  __device__ void publish_output(const StepUnit<Types>& unit, int h, int c, float x, float y) const {
    const float guard = __frcp_rn(layer_.attention_scale);  // a power of two
    const float first = x * guard, second = y * guard;
    uint32_t pair;
    if constexpr (Types::Tile::kHalfOperand) {
      pair = half_pair(first, second);
      const int clamped = (fabsf(first) > kHalfMax) + (fabsf(second) > kHalfMax);
      if (args_.saturated && clamped) atomicAdd(args_.saturated, static_cast<unsigned long long>(clamped));
    } else {
      pair = bf16_pair(x, y);
    }
    const int column = (unit.head * group_ + h) * E + c;
    publish(args_.a + int64_t{unit.b} * row_words(args_.heads * E, 4) +
                word_at<4>(unit_of(column), place_in_unit(column) / 2),
            pair, step_tag(c_.base(), index_, Stage::a));
  }

  /// This unit's share of the merged channels: 32 at a time, gathered by all warps, added up by one.
  __device__ void merge_share(const StepUnit<Types>& unit) {
    const int pieces = unit.piece.pieces, blocks = group_ * kParts, thread = c_.thread(), pair = thread & 15;
    if (pieces == 1) return;
    const uint32_t tag = step_tag(c_.base(), index_, Stage::partial);
    float2* ends = reinterpret_cast<float2*>(merge());  // [piece], then values: [piece][16 pairs of channels]
    float2* values = ends + args_.splits;
    for (int block = unit.split; block < blocks; block += args_.splits) {
      const int h = block / kParts, c = block % kParts * 32;
      sync();  // closes: what was there before, overwritten while read
#pragma unroll 1
      for (int piece = thread >> 4; piece < pieces; piece += kStepConsumers / 16) {
        uint4 words[2];
        gather(words, tag, c_.watch, args_.fault,
               [&](int i) { return unit.partial(args_, piece) + h * (E + 2) + (i == 0 ? c + 2 * pair : E); });
        values[piece * 16 + pair] = make_float2(float_of(words[0].x), float_of(words[0].z));
        if (pair == 0) ends[piece] = make_float2(float_of(words[1].x), float_of(words[1].z));
      }
      sync();  // closes: values read before they are there
      if (c_.warp == 0) add_pieces(unit, ends, values + pair, pieces, h, c + 2 * pair);
    }
  }

  /// Half a warp, two channels a lane.
  __device__ void add_pieces(const StepUnit<Types>& unit, const float2* ends, const float2* values, int pieces, int h,
                             int c) const {
    float top = -INFINITY, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int s = 0; s < pieces; ++s) top = fmaxf(top, ends[s].x);
#pragma unroll 4
    for (int s = 0; s < pieces; ++s) {
      const float2 end = ends[s], v = values[s * 16];
      const float factor = fast_exp2(end.x - top);
      sum += end.y * factor;
      x += v.x * factor, y += v.y * factor;
    }
    const float inverse = 1.0f / sum;
    if (c_.lane < 16) publish_output(unit, h, c, x * inverse, y * inverse);
  }

  /// The page that this step filled: its tail as codes.
  __device__ void fill_page(const StepUnit<Types>& unit) const {
    if (unit.piece.items == 0 || !unit.appends()) return;
    if (unit.piece.position % kKvPageTokens != kKvPageTokens - 1) return;
    const KvPageLayout layout{Dtype::int4, E};
    uint8_t* page = unit.page(args_, layer_, unit.piece.position / kKvPageTokens);
    sync();  // closes: merges overwritten while read
    for (int which = 0; which < 2; ++which) {
      const Bf16* tail = unit.tail(args_, layer_, which);
      quantise_page(
          page, layout, which, (which ? layer_.value_factor : layer_.key_factor)[unit.head],
          reinterpret_cast<uint8_t*>(merge()), c_.thread(), kStepConsumers, [&](int row) { return tail + row * E; },
          [&] { sync(); });
    }
  }

  StepConsumer<Types>& c_;
  const StepArgs& args_;
  const StepUnits<Types>& units_;
  const StepLayer& layer_;
  int index_, group_;
};

}  // namespace fut::cuda
