// Attention inside the step kernel, INT4 cache. A unit is (sequence, KV head, split), as in attention.cuh; a block's
// eight consumer warps take one at a time. Pages and old rows of the tail come through the ring, four items a slot,
// long before the queries are known. A unit finishes the queries of its KV head by itself from the QKV product's words
// (RoPE, rotation, rounding: cache.cu), which costs less than one more hand-over. Units publish their partial sums;
// then every unit merges its share of the channels over all pieces, in their order, and publishes a.
//
// This code runs once a layer and is not in the instruction cache when it does: short and rolled beats unrolled.
#pragma once

#include "cuda/step_heads.cuh"
#include "cuda/step_products.cuh"

namespace fut::cuda {

/// The block's unit, where it has one: number blockIdx.x of (KV head, split). The same in all layers, so it is located
/// once, into shared memory: divisions and a position that is in no cache any more cost thousands of cycles.
template <class Types>
struct StepOwn {
  StepUnit<typename Types::Attention> unit;
  bool any;  ///< without items too a unit merges its share

  /// All threads of the block; they meet afterwards.
  __device__ void locate(const StepArgs& args) {
    const int index = blockIdx.x;
    if (threadIdx.x != 0) return;
    any = false;
    if (index >= args.kv_heads * args.splits) return;
    unit.b = 0;
    unit.split = index % args.splits;
    unit.head = index / args.splits;
    unit.slot = static_cast<int>(args.slot[0]);
    unit.tail_in = args.tail_in[0];
    unit.piece.locate(args.position[0], args.splits, unit.split);
    any = true;
  }
};

/// The producer warp's part: all lanes.
template <class Types>
class StepPages {
 public:
  using Shape = typename Types::Attention;

  __device__ StepPages(const StepArgs& args, const StepOwn<Types>& own, StepProducer<Types>& ring)
      : args_(args), own_(own), ring_(ring) {}

  __device__ void send(const StepLayer& layer) {
    if (!own_.any) return;
    for (int k = 0; k < own_.unit.slots(); ++k) send_slot(own_.unit, layer, k * kPairs);
  }

 private:
  __device__ void send_slot(const StepUnit<Shape>& unit, const StepLayer& layer, int first) {
    const int lane = threadIdx.x & 31;
    const StepItems<Shape> items{args_, layer, unit, first};
    const uint8_t* page = items.page(lane);
    const uint32_t bytes = items.bytes(), slot = ring_.acquire();
    if (lane == 0) barrier_expect(ring_.full(slot), bytes);
    __syncwarp();  // closes: bytes that land before they are expected
    items.send(page, ring_.slot_data(slot), ring_.full(slot), lane);
  }

  const StepArgs& args_;
  const StepOwn<Types>& own_;
  StepProducer<Types>& ring_;
};

/// The consumers' part.
template <class Types>
class StepAttend {
 public:
  using Shape = typename Types::Attention;
  using Unit = StepUnit<Shape>;
  static constexpr int E = Types::E, kParts = E / 32;
  static_assert(kStepWarps == kAttentionWarps);

  __device__ StepAttend(StepConsumer<Types>& c, const StepOwn<Types>& own, const StepLayer& layer, int index)
      : c_(c), args_(c.args), own_(own), layer_(layer), index_(index) {
    c.begin_stage();
    group_ = args_.heads / args_.kv_heads;
  }

  __device__ void run() {
    if (!own_.any) return;
    if (own_.unit.piece.items > 0) attend(own_.unit);
    if (c_.traced()) c_.trace().ready = c_.now() - c_.trace().begin;
    merge_share(own_.unit);
    if (own_.unit.piece.items > 0 && own_.unit.appends()) {
      fill_page(args_, layer_, own_.unit, reinterpret_cast<uint8_t*>(merge()), c_.thread(), kStepConsumers,
                [&] { sync(); });
    }
  }

 private:
  __device__ StepHeads<Shape> heads() const {
    Half* half_queries = reinterpret_cast<Half*>(c_.memory.half_queries());
    return {reinterpret_cast<Bf16*>(c_.memory.queries()), half_queries,
            reinterpret_cast<float*>(half_queries + kStepMaxHeads * E), reinterpret_cast<Bf16*>(c_.memory.fresh())};
  }
  __device__ uint2* partial(const Unit& unit, int of_split) const {
    return args_.partial + int64_t{unit.head * args_.splits + of_split} * group_ * (E + 2);
  }
  __device__ float* merge() const { return reinterpret_cast<float*>(c_.memory.activations()); }
  __device__ void sync() const { named_barrier(kBarrierConsumers, kStepConsumers); }

  __device__ void attend(const Unit& unit) {
    const float key_factor = layer_.key_factor[unit.head], value_factor = layer_.value_factor[unit.head];
    c_.wait_drained();  // as in StepMultiply::run(); and merge_warps() overwrites the finishing warps' sums
    let_words_travel();
    heads().finish(args_, layer_, unit, c_.warp, c_.lane, [&](int head, float(&x)[kParts]) {
      const uint2* y = args_.y + head * E + c_.lane;
      uint2 words[kParts];
      gather(words, step_tag(c_.base(), index_, Stage::y), c_.watch, args_.fault,
             [&](int part) { return y + 32 * part; });
#pragma unroll
      for (int part = 0; part < kParts; ++part) x[part] = float_of(words[part].x);
    });
    sync();  // closes: queries and new rows read before they are written; activations, and values of the last merge,
             // overwritten by sums while they are read
    if (c_.traced()) c_.trace().gathered = c_.now() - c_.trace().begin;
    AttentionWarp<Shape> core;
    core.begin_ready(heads().queries, shared_address(heads().half_queries), shared_address(heads().query_factors),
                     group_, key_factor, value_factor,
                     c_.memory.starts() + c_.warp * AttentionWarp<Shape>::kStartFloats);
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
    if (!piece.is_page(item) && old_rows(piece, item) < 16)
      complete_tile<Shape>(data, old_rows(piece, item), shared_address(heads().fresh), c_.lane);
    core.attend(piece, item, c_.warp, data);
  }

  /// The warps' sums into one, published; a row's only piece is published as a.
  __device__ void merge_warps(AttentionWarp<Shape>& core, const Unit& unit) const {
    float* ends = merge() + kAttentionWarps * 8 * E;
    core.publish(c_.warp, group_, merge(), ends);
    sync();  // closes: sums read before all warps have written theirs
    uint2* to = partial(unit, unit.split);
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
  __device__ void publish_output(const Unit& unit, int h, int c, float x, float y) const {
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
    publish(args_.a + word_at<4>(unit_of(column), place_in_unit(column) / 2), pair,
            step_tag(c_.base(), index_, Stage::a));
  }

  /// This unit's share of the merged channels: 32 at a time, gathered by all warps, added up by one.
  __device__ void merge_share(const Unit& unit) {
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
               [&](int i) { return partial(unit, piece) + h * (E + 2) + (i == 0 ? c + 2 * pair : E); });
        values[piece * 16 + pair] = make_float2(float_of(words[0].x), float_of(words[0].z));
        if (pair == 0) ends[piece] = make_float2(float_of(words[1].x), float_of(words[1].z));
      }
      sync();  // closes: values read before they are there
      if (c_.warp == 0) add_pieces(unit, ends, values + pair, pieces, h, c + 2 * pair);
    }
  }

  /// Half a warp, two channels a lane.
  __device__ void add_pieces(const Unit& unit, const float2* ends, const float2* values, int pieces, int h,
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

  StepConsumer<Types>& c_;
  const StepArgs& args_;
  const StepOwn<Types>& own_;
  const StepLayer& layer_;
  int index_, group_;
};

}  // namespace fut::cuda
