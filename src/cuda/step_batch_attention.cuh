// Attention in step_batch.cuh, INT4 cache. The pieces of all rows and heads (AttentionCut), in their order, are cut
// into one run a block of about the same number of pages, so ragged lengths share the work. Pages come through the
// ring, four items a slot, long before the queries are known. A block finishes a head's queries by itself, once for all
// of its pieces; the last block to finish a piece of a row and head adds them up, in their order, as attention.cuh
// does.
#pragma once

#include "cuda/step_batch_products.cuh"

namespace fut::cuda {

/// Which pieces this block has; the same in all layers.
template <class Shape>
struct BatchPieces {
  struct Row {
    int position, slot, tail_in;
    int length, pieces;  ///< AttentionCut
    int cost, before;    ///< of a head's pieces, in pages; of all rows before this one
  };
  struct Place {
    int b, head, split;
    __device__ bool operator==(const Place& o) const { return b == o.b && head == o.head && split == o.split; }
  };
  Row row[kStepBatchRows];
  Place first, end;

  /// All threads of the block; they meet in it and afterwards.
  __device__ void locate(const StepModel& args) {
    const int n = threadIdx.x;
    if (n < args.batch) {
      Row& r = row[n];
      r.position = static_cast<int>(args.position[n]);
      r.slot = static_cast<int>(args.slot[n]);
      r.tail_in = args.tail_in[n];
      const int own = r.position / kKvPageTokens;
      const AttentionCut cut(own, args.splits);
      r.length = cut.length, r.pieces = cut.pieces;
      r.cost = own + 3;  // its own page and sinks; queries and merge
    }
    __syncthreads();
    if (n != 0) return;
    int all = 0;
    for (int i = 0; i < args.batch; ++i) {
      row[i].before = all;
      all += row[i].cost * args.kv_heads;
    }
    const int64_t grid = gridDim.x, block = blockIdx.x;
    first = at(args, static_cast<int>(all * block / grid));
    end = at(args, static_cast<int>(all * (block + 1) / grid));
  }

  __device__ Place next(const Place& at, int heads) const {
    if (at.split + 1 < row[at.b].pieces) return {at.b, at.head, at.split + 1};
    return at.head + 1 < heads ? Place{at.b, at.head + 1, 0} : Place{at.b + 1, 0, 0};
  }
  __device__ void unit(StepUnit<Shape>& unit, const Place& at) const {
    const Row& r = row[at.b];
    unit.b = at.b, unit.head = at.head, unit.split = at.split, unit.slot = r.slot, unit.tail_in = r.tail_in;
    unit.piece.position = r.position, unit.piece.length = r.length, unit.piece.pieces = r.pieces;
    unit.piece.move_to(at.split);
  }

 private:
  /// The first piece that begins at `cost` or later.
  __device__ Place at(const StepModel& args, int cost) const {
    int b = 0;
    while (b < args.batch && row[b].before + row[b].cost * args.kv_heads <= cost) ++b;
    if (b == args.batch) return {b, 0, 0};
    const Row& r = row[b];
    const int rest = cost - r.before, split = (rest % r.cost + r.length - 1) / r.length;
    const Place start{b, rest / r.cost, split};
    return split < r.pieces ? start : next({b, start.head, r.pieces - 1}, args.kv_heads);
  }
};

/// Calls use(unit, more) for every piece of this block; more: what follows is of the same row and head.
template <class Shape, class Use>
__device__ __forceinline__ void for_pieces(const BatchPieces<Shape>& pieces, int heads, Use use) {
  const typename BatchPieces<Shape>::Place end = pieces.end;
  typename BatchPieces<Shape>::Place at = pieces.first;
#pragma unroll 1
  while (!(at == end)) {
    StepUnit<Shape> unit;
    pieces.unit(unit, at);
    const int last = at.b == end.b && at.head == end.head ? end.split : unit.piece.pieces;
#pragma unroll 1
    for (;;) {
      const bool more = unit.split + 1 < last;
      use(unit, more);
      if (!more) break;
      unit.piece.move_to(++unit.split);
    }
    if (last < unit.piece.pieces) break;  // the run ends within a head
    at = pieces.next({at.b, at.head, last - 1}, heads);
  }
}

/// The producer warp's part: all lanes.
template <class Types>
__device__ __forceinline__ void send_pieces(const StepBatchArgs& args,
                                            const BatchPieces<typename Types::Attention>& pieces,
                                            BatchProducer<Types>& producer, const StepLayer& layer) {
  using Shape = typename Types::Attention;
  const int lane = threadIdx.x & 31;
  for_pieces(pieces, args.kv_heads, [&](const StepUnit<Shape>& unit, bool) {
    for (int k = 0; k < unit.slots(); ++k) {
      const StepItems<Shape> items{args, layer, unit, k * kPairs};
      const uint8_t* page = items.page(lane);
      const uint32_t bytes = items.bytes(), full = producer.acquire();
      if (lane == 0) barrier_expect(full, bytes);
      __syncwarp();  // closes: bytes that land before they are expected
      items.send(page, producer.ring().at(), full, lane);
      producer.ring().advance();
    }
  });
}

/// The consumers' part.
template <class Types>
class BatchAttend {
 public:
  using Shape = typename Types::Attention;
  using Unit = StepUnit<Shape>;
  using Core = AttentionWarp<Shape>;
  static constexpr int E = Types::E, kParts = E / 32;

  __device__ BatchAttend(BatchConsumer<Types>& c, const BatchPieces<Shape>& pieces, int layer)
      : c_(c), args_(c.args), pieces_(pieces), layer_(c.memory.layers()[layer]), index_(layer) {}

  __device__ void run() {
    const int group = args_.heads / args_.kv_heads;
    c_.flags.await(Handed::y, index_);
    Core core;
    int taken = 0;  // pieces of the row and head
    for_pieces(pieces_, args_.kv_heads, [&](const Unit& unit, bool more) {
      if (taken == 0) {
        begin(core, unit, group);
      } else {
        core.restart();
      }
      take(core, unit);
      merge_warps(core, unit, group);
      ++taken;
      if (more) return;
      merge_pieces(unit, group, taken);
      if (unit.appends()) {  // over the mail, which nobody uses until all consumers are through with attention
        fill_page(args_, layer_, unit, reinterpret_cast<uint8_t*>(merge()), c_.thread(), kBatchConsumers,
                  [&] { c_.sync(); });
      }
      taken = 0;
    });
  }

 private:
  __device__ StepHeads<Shape> heads() const {
    Half* half_queries = reinterpret_cast<Half*>(c_.memory.half_queries());
    return {reinterpret_cast<Bf16*>(c_.memory.queries()), half_queries,
            reinterpret_cast<float*>(half_queries + kBatchMaxHeads * E), reinterpret_cast<Bf16*>(c_.memory.fresh())};
  }
  __device__ float* merge() const { return reinterpret_cast<float*>(c_.memory.mail()); }
  __device__ float* ends() const { return merge() + kAttentionWarps * 8 * E; }
  __device__ float* partials(const Unit& unit, int group) const {
    return args_.partial + (int64_t{unit.b} * args_.kv_heads + unit.head) * args_.splits * group * (E + 4);
  }

  /// The head's queries, and its new key and value where this block has the last piece too, which appends them.
  __device__ void begin(Core& core, const Unit& unit, int group) const {
    const float key_factor = layer_.key_factor[unit.head], value_factor = layer_.value_factor[unit.head];
    c_.sync();  // closes: queries, and what is merged, overwritten while read
    Unit whole = unit;
    if (ends_here(unit)) whole.split = unit.piece.pieces - 1;
    heads().finish(args_, layer_, whole, c_.warp, c_.lane, [&](int head, float(&x)[kParts]) {
      const float* y = args_.y + int64_t{unit.b} * (args_.heads + 2 * args_.kv_heads) * E + head * E + c_.lane;
#pragma unroll
      for (int part = 0; part < kParts; ++part) x[part] = __ldcg(y + 32 * part);
    });
    c_.sync();  // closes: queries and new rows read before they are written
    c_.has_inputs();
    core.begin_ready(heads().queries, shared_address(heads().half_queries), shared_address(heads().query_factors),
                     group, key_factor, value_factor,
                     c_.memory.starts() + c_.warp * AttentionWarp<Shape>::kStartFloats);
  }
  __device__ bool ends_here(const Unit& unit) const {
    const auto& end = pieces_.end;
    return end.b > unit.b || (end.b == unit.b && end.head > unit.head);
  }

  __device__ void take(Core& core, const Unit& unit) {
#pragma unroll 1
    for (int item = c_.warp / 2, left = unit.slots(); left > 0; --left, item += kPairs) {
      wait_slot();
      const uint32_t data = c_.ring.at() + c_.warp / 2 * Shape::kSlotBytes;
      if (item < unit.piece.items && unit.piece.takes(c_.warp, item)) {
        const int old = old_rows(unit.piece, item);
        if (!unit.piece.is_page(item) && old < 16)
          complete_tile<Shape>(data, old, shared_address(heads().fresh), c_.lane);
        core.attend(unit.piece, item, c_.warp, data);
      }
      c_.ring.release();
    }
  }

  __device__ void wait_slot() {
    c_.wait_slot(c_.ring.started());
    barrier_wait(c_.ring.full(), c_.ring.parity);
  }

  /// The warps' sums of a piece into one: stored where it is the row's only one, else left for merge_pieces().
  __device__ void merge_warps(Core& core, const Unit& unit, int group) const {
    c_.sync();  // closes: sums of the last piece overwritten while read
    core.publish(c_.warp, group, merge(), ends());
    c_.sync();  // closes: sums read before all warps have written theirs
    float* parts = partials(unit, group);
#pragma unroll 1
    for (int i = c_.thread(); i < group * E / 2; i += kBatchConsumers) {
      const int h = i / (E / 2), c = i % (E / 2) * 2;
      const WarpsMerged<Shape> m(merge(), ends(), h, c);
      if (unit.piece.pieces == 1) {
        store(unit, group, h, c, m.x / m.sum, m.y / m.sum);
        continue;
      }
      float* part = parts + (unit.split * group + h) * (E + 4);
      __stcg(reinterpret_cast<float2*>(part + c), make_float2(m.x, m.y));
      if (c == 0) __stcg(reinterpret_cast<float2*>(part + E), make_float2(m.top, m.sum));
    }
  }

  /// Behind the last of this block's `taken` pieces of a row and head.
  __device__ void merge_pieces(const Unit& unit, int group, int taken) const {
    __shared__ unsigned done;
    const int pieces = unit.piece.pieces;
    if (pieces > 1) {
      unsigned* const arrived = args_.arrived + unit.b * args_.kv_heads + unit.head;
      if (taken < pieces) {
        __threadfence();  // the parts before the arrival
        c_.sync();
        if (threadIdx.x == 0) done = atomicAdd(arrived, taken) + taken;
        c_.sync();
        if (done != static_cast<unsigned>(pieces)) return;
        __threadfence();  // the arrivals before their parts
        if (threadIdx.x == 0) *arrived = 0;
      } else {
        c_.sync();
      }
      add_pieces(unit, group);
    }
    c_.hand_over(Handed::a, index_);
  }

  __device__ void add_pieces(const Unit& unit, int group) const {
    const int pieces = unit.piece.pieces;
    const float* parts = partials(unit, group);
    float2* all = reinterpret_cast<float2*>(merge());  // [head][piece]: factor and sum
    for (int i = c_.thread(); i < group * pieces; i += kBatchConsumers) {
      all[i] = __ldcg(reinterpret_cast<const float2*>(parts + (i % pieces * group + i / pieces) * (E + 4) + E));
    }
    c_.sync();  // closes: ends read before they are there
    for (int i = c_.thread(); i < group * E / 4; i += kBatchConsumers) {
      const int h = i / (E / 4), c = i % (E / 4) * 4;
      const float2* end = all + h * pieces;
      float top = -INFINITY, sum = 0.0f;
      for (int s = 0; s < pieces; ++s) top = fmaxf(top, end[s].x);
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
      for (int s = 0; s < pieces; ++s) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(parts + (s * group + h) * (E + 4) + c));
        const float factor = fast_exp2(end[s].x - top);
        sum += end[s].y * factor;
        value.x += v.x * factor, value.y += v.y * factor, value.z += v.z * factor, value.w += v.w * factor;
      }
      const float inverse = 1.0f / sum;
      store(unit, group, h, c, value.x * inverse, value.y * inverse);
      store(unit, group, h, c + 2, value.z * inverse, value.w * inverse);
    }
  }

  /// Channels c and c + 1, c even.
  __device__ void store(const Unit& unit, int group, int h, int c, float x, float y) const {
    const float guard = __frcp_rn(layer_.attention_scale);  // a power of two
    const float first = x * guard, second = y * guard;
    const int clamped = (fabsf(first) > kHalfMax) + (fabsf(second) > kHalfMax);
    if (args_.saturated && clamped) atomicAdd(args_.saturated, static_cast<unsigned long long>(clamped));
    *reinterpret_cast<uint32_t*>(args_.rows_a +
                                 2 * packed_place(args_.batch, unit.b, (unit.head * group + h) * E + c)) =
        half_pair(first, second);
  }

  BatchConsumer<Types>& c_;
  const StepBatchArgs& args_;
  const BatchPieces<Shape>& pieces_;
  const StepLayer& layer_;
  const int index_;
};

}  // namespace fut::cuda
