// Attention inside the step kernel, INT4 cache. A unit is (sequence, KV head, split), as in attention.cuh, and a quad
// of four consumer warps takes one at a time; two quads work side by side. Pages and old rows of the tail come through
// the ring, four items a slot, long before the queries are known. A unit finishes the queries of its KV head by itself
// from the QKV product's words (RoPE, rotation, rounding: cache.cu), which costs less than one more hand-over. Units
// publish their partial sums; then every unit merges its share of the channels over all pieces, in their order, and
// publishes a.
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

template <class Types>
struct StepUnit {
  static constexpr int E = Types::E;
  int b = 0, head = 0, split = 0;
  AttentionPiece<typename Types::Attention> piece;

  /// False where there is no such unit, or its piece is empty.
  __device__ bool locate(const StepArgs& args, int unit) {
    piece.items = 0;
    if (unit >= args.batch * args.kv_heads * args.splits) return false;
    split = unit % args.splits;
    head = unit / args.splits % args.kv_heads;
    b = unit / args.splits / args.kv_heads;
    piece.locate(args.position[b], args.splits, split);
    return piece.items > 0;
  }
  __device__ int slots() const { return (piece.items + kAttentionWarps - 1) / kAttentionWarps; }
  __device__ bool appends() const { return split == piece.pieces - 1; }

  __device__ Bf16* tail(const StepArgs& args, const StepLayer& layer, int which) const {
    const int64_t tail = (args.slot[b] * 2 + args.tail_in[b]) * args.kv_heads + head;
    return layer.tails + (tail * 2 + which) * kKvPageTokens * E;
  }
  __device__ Bf16* sinks(const StepArgs& args, const StepLayer& layer, int which) const {
    return layer.sinks + ((args.slot[b] * args.kv_heads + head) * 2 + which) * kKvSinkTokens * E;
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

/// The producer warp's part: all lanes.
template <class Types>
class StepPages {
 public:
  using Shape = typename Types::Attention;

  __device__ StepPages(const StepArgs& args, StepProducer<Types>& ring) : args_(args), ring_(ring) {}

  __device__ void send(const StepLayer& layer) {
    const int units = args_.batch * args_.kv_heads * args_.splits;
    for (int first = blockIdx.x; first < units; first += kQuads * gridDim.x) {
      StepUnit<Types> unit[kQuads];
      int most = 0;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        unit[q].locate(args_, first + q * gridDim.x);
        most = max(most, unit[q].slots());
      }
      for (int k = 0; k < most; ++k) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          if (k < unit[q].slots()) send_slot(unit[q], layer, k * kAttentionWarps);
        }
      }
    }
  }

 private:
  __device__ void send_slot(const StepUnit<Types>& unit, const StepLayer& layer, int first) {
    constexpr KvPageLayout layout{Dtype::int4, Types::E};
    const int lane = threadIdx.x & 31, items = min(kAttentionWarps, unit.piece.items - first);
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
    if (page) bulk_copy(data + lane * Shape::kSlotBytes, page, static_cast<uint32_t>(layout.page_bytes()), full);
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
  StepProducer<Types>& ring_;
};

/// The consumers' part.
template <class Types>
class StepAttend {
 public:
  using Shape = typename Types::Attention;
  static constexpr int E = Types::E, kParts = E / 32;

  __device__ StepAttend(StepConsumer<Types>& c, const StepLayer& layer, int index)
      : c_(c), args_(c.args), layer_(layer), index_(index) {
    c.begin_stage();
    quad_ = c.warp / kAttentionWarps;
    warp_ = c.warp % kAttentionWarps;
    thread_ = c.thread() % kAttentionThreads;
    group_ = args_.heads / args_.kv_heads;
  }

  __device__ void run() {
    const int units = args_.batch * args_.kv_heads * args_.splits;
    if (static_cast<int>(blockIdx.x) >= units) return;
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: activations, still multiplied, overwritten by merges
    c_.wait_drained();                                 // and sums, still being added up
    for (int first = blockIdx.x; first < units; first += kQuads * gridDim.x) attend_round(first);
    if (c_.traced()) c_.trace().ready = c_.now() - c_.trace().begin;
    const int stride = kQuads * gridDim.x;
    for (int unit = blockIdx.x + quad_ * gridDim.x; unit < units; unit += stride) merge_share(unit);
    for (int unit = blockIdx.x + quad_ * gridDim.x; unit < units; unit += stride) fill_page(unit);
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: merges overwritten by the next product's activations
  }

 private:
  __device__ Bf16* queries() const { return reinterpret_cast<Bf16*>(c_.memory.queries() + quad_ * Types::kQueryBytes); }
  __device__ Bf16* fresh() const { return reinterpret_cast<Bf16*>(c_.memory.fresh() + quad_ * Types::kNewBytes); }
  __device__ float* merge() const {
    return reinterpret_cast<float*>(c_.memory.activations() + quad_ * Shape::kMergeBytes);
  }
  __device__ void sync_quad() const { named_barrier(kBarrierQuad + quad_, kAttentionThreads); }

  __device__ void attend_round(int first) {
    StepUnit<Types> mine;
    AttentionWarp<Shape> core;
    int slots[kQuads], most = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      mine.locate(args_, first + q * gridDim.x);
      slots[q] = mine.slots();
      most = max(most, slots[q]);
    }
    const int index = first + quad_ * gridDim.x;
    if (mine.locate(args_, index)) {
      const float key_factor = layer_.key_factor[mine.head], value_factor = layer_.value_factor[mine.head];
      for (int i = warp_; i < group_ + (mine.appends() ? 2 : 0); i += kAttentionWarps) finish_head(mine, i);
      sync_quad();  // closes: queries and new rows read before they are written
      if (c_.traced()) c_.trace().gathered = c_.now() - c_.trace().begin;
      core.begin(queries(), group_, key_factor, value_factor,
                 c_.memory.starts() + c_.warp * AttentionWarp<Shape>::kStartFloats);
    }
    const AttentionPiece<Shape> piece = mine.piece;
    static_assert(kQuads == 2);
#pragma unroll 1
    for (int turn = 0; turn < kQuads * most; ++turn) {
      const int k = turn >> 1, q = turn & 1;
      if (k < (q ? slots[1] : slots[0])) {
        c_.wait_slot();
        if (q == quad_) {
          const int first_item = k * kAttentionWarps, items = min(kAttentionWarps, piece.items - first_item);
#pragma unroll 1
          for (int i = 0; i < items; ++i) {
            if (piece.takes(warp_, first_item + i))
              one_item(core, piece, first_item + i, c_.slot_data() + i * Shape::kSlotBytes);
          }
        }
        c_.release_slot();
      }
    }
    if (mine.locate(args_, index)) merge_warps(core, mine);
  }

  __device__ void one_item(AttentionWarp<Shape>& core, const AttentionPiece<Shape>& piece, int item, uint32_t data) {
    if (!piece.is_page(item) && old_rows(piece, item) < 16) complete_tile(data, old_rows(piece, item));
    core.attend(piece, item, warp_, data);
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

  /// Head i of the unit: queries 0 .. group - 1, then the new key and the new value, which also go to tail and sinks.
  __device__ void finish_head(const StepUnit<Types>& unit, int i) const {
    const int H = args_.heads, J = args_.kv_heads, which = i - group_;
    const int head = which < 0 ? unit.head * group_ + i : H + which * J + unit.head;
    const uint2* y = args_.y + int64_t{unit.b} * (H + 2 * J) * E + head * E + c_.lane;
    constexpr int kHalf = kParts / 2;
    float cos[kHalf], sin[kHalf], mean[kParts] = {};  // before the wait: they come from far
    if (which < 1) {
#pragma unroll
      for (int part = 0; part < kHalf; ++part) {
        const int64_t at = int64_t{unit.piece.position} * (E / 2) + c_.lane + 32 * part;
        cos[part] = args_.rope.cos[at], sin[part] = args_.rope.sin[at];
      }
      if (which == 0 && layer_.key_mean) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) mean[part] = layer_.key_mean[unit.head * E + c_.lane + 32 * part];
      }
    }
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
    Bf16* to = which < 0 ? queries() + i * E : fresh() + which * E;
    Bf16* tail = which < 0 ? nullptr : unit.tail(args_, layer_, which) + unit.piece.position % kKvPageTokens * E;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Bf16 rounded = to_bf16(which < 0 ? x[part] * args_.q_scale : x[part]);
      const int channel = c_.lane + 32 * part;
      to[channel] = rounded;
      if (which < 0) continue;
      tail[channel] = rounded;
      if (unit.piece.position < kKvSinkTokens)
        unit.sinks(args_, layer_, which)[unit.piece.position * E + channel] = rounded;
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

  /// The quad's four sums into one, published; a row's only piece is published as a.
  __device__ void merge_warps(AttentionWarp<Shape>& core, const StepUnit<Types>& unit) const {
    float* ends = merge() + kAttentionWarps * 8 * E;
    core.publish(warp_, merge(), ends);
    sync_quad();  // closes: sums read before all warps have written theirs
    uint2* to = unit.partial(args_, unit.split);
    const uint32_t tag = step_tag(c_.base(), index_, Stage::partial);
    for (int i = thread_; i < group_ * E / 4; i += kAttentionThreads) {
      const int h = i / (E / 4), c = i % (E / 4) * 4;
      float top = -INFINITY, sum = 0.0f, value[4] = {};
#pragma unroll
      for (int w = 0; w < kAttentionWarps; ++w) top = fmaxf(top, ends[(w * 8 + h) * 2]);
#pragma unroll
      for (int w = 0; w < kAttentionWarps; ++w) {
        const int at = w * 8 + h;
        const float factor = exp2f(ends[at * 2] - top);  // a warp without items has -infinity, and so no weight
        const float4 v = *reinterpret_cast<const float4*>(merge() + at * E + c);
        sum += ends[at * 2 + 1] * factor;
        value[0] += v.x * factor, value[1] += v.y * factor, value[2] += v.z * factor, value[3] += v.w * factor;
      }
      if (unit.piece.pieces == 1) {
        publish_output(unit, h, c, value[0] / sum, value[1] / sum);
        publish_output(unit, h, c + 2, value[2] / sum, value[3] / sum);
        continue;
      }
      uint2* part = to + h * (E + 2);
      publish_two(part + c, bits_of(value[0]), bits_of(value[1]), tag);
      publish_two(part + c + 2, bits_of(value[2]), bits_of(value[3]), tag);
      if (c == 0) publish_two(part + E, bits_of(top), bits_of(sum), tag);
    }
    sync_quad();  // closes: sums overwritten while read
  }

  /// Channels c and c + 1, c even.
  __device__ void publish_output(const StepUnit<Types>& unit, int h, int c, float x, float y) const {
    const float first = x / layer_.attention_scale, second = y / layer_.attention_scale;
    uint32_t pair;
    if constexpr (Types::Tile::kHalfOperand) {
      pair = to_half_saturated(first).bits | uint32_t{to_half_saturated(second).bits} << 16;
      const int clamped = (fabsf(first) > kHalfMax) + (fabsf(second) > kHalfMax);
      if (args_.saturated && clamped) atomicAdd(args_.saturated, static_cast<unsigned long long>(clamped));
    } else {
      pair = bf16_pair(x, y);
    }
    const int column = (unit.head * group_ + h) * E + c;
    publish(args_.a + int64_t{unit.b} * (args_.heads * E / 2) + unit_of(column) * 4 + place_in_unit(column) / 2, pair,
            step_tag(c_.base(), index_, Stage::a));
  }

  /// This unit's share of the merged channels: 32 at a time, gathered by the whole quad, added up by one warp.
  __device__ void merge_share(int index) {
    StepUnit<Types> unit;
    unit.locate(args_, index);
    const int pieces = unit.piece.pieces, blocks = group_ * kParts;
    if (pieces == 1) return;
    const uint32_t tag = step_tag(c_.base(), index_, Stage::partial);
    for (int block = unit.split; block < blocks; block += args_.splits) {
      const int h = block / kParts, c = block % kParts * 32;
      float2* values = reinterpret_cast<float2*>(merge());  // [piece][17]: 16 pairs of channels, then (top, sum)
      for (int i = thread_; i < pieces * 17; i += kAttentionThreads) {
        const int piece = i / 17, pair = i % 17;
        const uint2* from = unit.partial(args_, piece) + h * (E + 2) + (pair < 16 ? c + 2 * pair : E);
        uint4 words[1];
        gather(words, tag, c_.watch, args_.fault, [&](int) { return from; });
        values[i] = make_float2(float_of(words[0].x), float_of(words[0].z));
      }
      sync_quad();  // closes: values read before they are there
      if (warp_ == 0) add_pieces(unit, pieces, h, c);
      sync_quad();  // closes: values overwritten while read
    }
  }

  /// Half a warp, two channels a lane.
  __device__ void add_pieces(const StepUnit<Types>& unit, int pieces, int h, int c) const {
    const int pair = c_.lane & 15;
    const float2* values = reinterpret_cast<const float2*>(merge()) + pair;
    const float2* ends = reinterpret_cast<const float2*>(merge()) + 16;
    float top = -INFINITY, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 8
    for (int s = 0; s < pieces; ++s) top = fmaxf(top, ends[s * 17].x);
#pragma unroll 8
    for (int s = 0; s < pieces; ++s) {
      const float2 end = ends[s * 17], v = values[s * 17];
      const float factor = exp2f(end.x - top);
      sum += end.y * factor;
      x += v.x * factor, y += v.y * factor;
    }
    const float inverse = 1.0f / sum;
    if (c_.lane < 16) publish_output(unit, h, c + 2 * pair, x * inverse, y * inverse);
  }

  /// The page that this step filled: its tail as codes.
  __device__ void fill_page(int index) const {
    StepUnit<Types> unit;
    if (!unit.locate(args_, index) || !unit.appends()) return;
    if (unit.piece.position % kKvPageTokens != kKvPageTokens - 1) return;
    const KvPageLayout layout{Dtype::int4, E};
    uint8_t* page = unit.page(args_, layer_, static_cast<int>(unit.piece.position / kKvPageTokens));
    for (int which = 0; which < 2; ++which) {
      const Bf16* tail = unit.tail(args_, layer_, which);
      quantise_page(
          page, layout, which, (which ? layer_.value_factor : layer_.key_factor)[unit.head],
          reinterpret_cast<uint8_t*>(merge()), thread_, kAttentionThreads, [&](int row) { return tail + row * E; },
          [&] { sync_quad(); });
    }
  }

  StepConsumer<Types>& c_;
  const StepArgs& args_;
  const StepLayer& layer_;
  int index_, quad_, warp_, thread_, group_;
};

}  // namespace fut::cuda
