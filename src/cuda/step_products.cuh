// The products of the step kernel, seen by its three roles: the producer warp sends weights, eight consumer warps
// gather activations and multiply, three finishing warps add up, apply the epilogue and publish. The arithmetic is that
// of gemm_decode.cuh, bit for bit.
#pragma once

#include "cuda/step_block.cuh"

namespace fut::cuda {

template <class Types>
class StepProducer {
 public:
  __device__ StepProducer(const StepArgs& args, const StepMemory<Types>& memory, StepBarriers& barriers)
      : args_(args),
        ring_(shared_address(memory.ring())),
        full_(shared_address(barriers.full)),
        empty_(shared_address(barriers.empty)) {}

  /// Every chunk of a product, in the order of consumption. All lanes; the first sends.
  __device__ void product(const StepShape& p, const uint8_t* tiles, bool swiglu) {
    using Tile = typename Types::Tile;
    constexpr int kChunk = Types::kChunk;
    const StepLot lot(p, swiglu);
    for (int at = lot.first; at < lot.end; at += lot.stride()) {
      const int real = lot.real(at, 1) ? 2 : 1;
      for (int first = 0; first < p.col_tiles; first += kChunk) {
        const uint32_t slot = acquire(), bytes = min(kChunk, p.col_tiles - first) * Tile::kBytes;
        if (threadIdx.x % 32 != 0) continue;
        barrier_expect(full_ + 8 * slot, real * bytes);
        for (int r = 0; r < real; ++r) {
          const int64_t tile = int64_t{lot.row_tile(p, at, r)} * p.col_tiles + first;
          bulk_copy_once(ring_ + slot * Types::kSlotBytes + r * kChunk * Tile::kBytes, tiles + tile * Tile::kBytes,
                         bytes, full_ + 8 * slot);
        }
      }
    }
  }

  /// The next slot, empty, and no more than `window` in flight with it.
  __device__ uint32_t acquire() {
    const uint32_t stages = args_.stages, slot = count_ % stages, round = count_ / stages;
    if (round > 0) barrier_wait(empty_ + 8 * slot, (round - 1) & 1);
    if (count_ >= static_cast<uint32_t>(args_.window)) {
      const uint32_t oldest = count_ - args_.window;
      barrier_wait(full_ + 8 * (oldest % stages), oldest / stages & 1);
    }
    ++count_;
    return slot;
  }
  __device__ uint32_t slot_data(uint32_t slot) const { return ring_ + slot * Types::kSlotBytes; }
  __device__ uint32_t full(uint32_t slot) const { return full_ + 8 * slot; }

 private:
  const StepArgs& args_;
  uint32_t ring_, full_, empty_;
  uint32_t count_ = 0;  ///< slots used so far
};

/// State of a consumer warp that lives through the step.
template <class Types>
struct StepConsumer {
  const StepArgs& args;
  const StepMemory<Types> memory;
  uint32_t ring, full, empty, summed, drained;
  RingCursor cursor;
  uint32_t turn = 0;     ///< groups pushed so far
  uint32_t starved = 0;  ///< cycles of this stage
  Watch watch;
  int warp, lane;

  __device__ StepConsumer(const StepArgs& step, const StepMemory<Types>& map, StepBarriers& barriers)
      : args(step), memory(map) {
    ring = shared_address(memory.ring());
    full = shared_address(barriers.full);
    empty = shared_address(barriers.empty);
    summed = shared_address(barriers.summed);
    drained = shared_address(barriers.drained);
    warp = threadIdx.x >> 5;
    lane = threadIdx.x & 31;
    asm volatile("" : "+r"(ring), "+r"(full), "+r"(empty));  // kept, not computed anew for every chunk
  }
  /// Of the first thread, where args.trace asks for it; in shared memory, since registers are scarce.
  __device__ static StepTrace& trace() {
    __shared__ StepTrace stage;
    return stage;
  }
  __device__ static int& stages_ended() {
    __shared__ int count;
    return count;
  }
  __device__ bool traced() const { return args.trace && threadIdx.x == 0; }
  __device__ static uint32_t now() { return static_cast<uint32_t>(clock64()); }
  __device__ void end_stage() {
    if (!traced()) return;
    trace().starved = starved;
    trace().end = now() - trace().begin;
    args.trace[blockIdx.x * (5 * args.layer_count + 1) + stages_ended()++] = trace();
  }

  /// A stage begins: what the compiler derives from these is computed here, not kept in registers through all others.
  __device__ void begin_stage() {
    asm volatile("" : "+r"(warp), "+r"(lane));
    starved = 0;
    if (traced()) trace() = {now(), 0, 0, 0, 0};
  }
  /// What this step's tags count from.
  __device__ static uint32_t& base() {
    __shared__ uint32_t tag;
    return tag;
  }
  __device__ int thread() const { return warp * 32 + lane; }
  __device__ void wait_slot() {
    const uint32_t from = args.trace ? now() : 0;  // the clock is slow to read
    barrier_wait(full + 8 * cursor.slot, cursor.parity);
    if (args.trace) starved += now() - from;
  }
  __device__ uint32_t slot_data() const { return ring + cursor.slot * Types::kSlotBytes; }
  /// All sums that were pushed have been read.
  __device__ void wait_drained() const {
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t uses = (turn + 1 - i) >> 1;
      if (uses > 0) barrier_wait(drained + 8 * i, (uses - 1) & 1);
    }
  }
  __device__ void release_slot() {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * cursor.slot);  // closes: the slot overwritten while still read
    cursor.advance(args.stages);
  }
};

/// Consumers: one product. Activations come as words of `tag`.
template <class Types>
class StepMultiply {
 public:
  using Tile = typename Types::Tile;

  __device__ StepMultiply(StepConsumer<Types>& c, const StepShape& shape) : c_(c), p_(shape) {
    fragments_ = shared_address(c.memory.activations());
    starts_ = fragments_ + p_.piece * 128;
  }

  /// words: x (D) to be normalised, all of K at once; or a (K / 2) as it is, piece by piece where shared memory
  /// does not hold all of K.
  __device__ void run(const uint2* words, uint32_t tag, bool normalise, bool swiglu, const float* input_scale) {
    const StepLot lot(p_, swiglu);
    c_.wait_drained();  // this block's own words come first: polling is in the way of those who make them
    let_words_travel();
    for (int at = lot.first; at < lot.end; at += lot.stride()) {
      float acc[kStepRowTiles][4] = {};
      for (int first = 0; first < p_.col_tiles; first += p_.piece) {
        const int tiles = min(p_.piece, p_.col_tiles - first);
        if (p_.piece < p_.col_tiles || at == lot.first) {
          if (normalise) {
            stage_normalised(words, tag, input_scale);
          } else if (tiles * 8 <= 2 * kStepConsumers) {
            stage_rounded<2>(words, tag, first, tiles);
          } else {
            stage_rounded<8>(words, tag, first, tiles);
          }
          if (c_.traced()) c_.trace().gathered = c_.now() - c_.trace().begin;
          named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments read before all are there
          if (c_.traced()) c_.trace().ready = c_.now() - c_.trace().begin;
        }
        chunks(acc, tiles);
      }
      push(acc);
    }
  }

 private:
  /// All lanes of a warp, eight in a row the units of a k-tile; stored where `real`.
  __device__ void store_fragment(int unit, bool real, const uint32_t (&pair)[4]) const {
    float start = 0.0f;
    if constexpr (Tile::kGroups > 0) start = Tile::start_value(pair);
    if (!real) return;
    store_shared_16(fragments_ + unit * 16, pair);
    if constexpr (Tile::kGroups > 0) {
      if (Tile::begins_group(unit)) store_shared_4(starts_ + Tile::group_of(unit) * Types::kStartBytes, bits_of(start));
    }
  }

  /// kAtOnce units a thread are under way together.
  template <int kAtOnce>
  __device__ void stage_rounded(const uint2* a, uint32_t tag, int first, int tiles) const {
    const int units = tiles * 8;
#pragma unroll 1
    for (int begin = 0; begin < units; begin += kAtOnce * kStepConsumers) {
      const int at = begin + c_.thread();
      uint4 words[2 * kAtOnce];
      const auto real = [&](int i) { return at + i * kStepConsumers < units; };
      const uint2* mine = a + word_at<4>(first * 8 + at, 0);  // the others of a thread are whole warps away
      gather(
          words, tag, c_.watch, c_.args.fault,
          [&](int i) { return mine + word_at<4>(i / 2 * kStepConsumers, i % 2 * 2); },
          [&](int i) { return real(i / 2); });
      if (begin == 0) named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments overwritten while read
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t pair[4] = {words[2 * i].x, words[2 * i].z, words[2 * i + 1].x, words[2 * i + 1].z};
        store_fragment(at + i * kStepConsumers, real(i), pair);
      }
    }
  }

  /// Two virtual threads of gemm_decode.cuh's 512 live in one here; their sums stay apart. A row that does not fit
  /// registers is read again for its norm.
  __device__ void stage_normalised(const uint2* x, uint32_t tag, const float* input_scale) const {
    constexpr int kKept = 2;
    const int units = p_.cols / 8, tid = c_.thread();
    float sum[2] = {};
    if (units <= kKept * kStepConsumers) {
      float2 scale[kKept][4];  // before the wait: it comes from far
#pragma unroll
      for (int i = 0; i < kKept; ++i) load_scale(scale[i], input_scale, min(tid + i * kStepConsumers, units - 1));
      uint4 words[4 * kKept];
      const uint2* mine = x + word_at<8>(tid, 0);
      gather(
          words, tag, c_.watch, c_.args.fault,
          [&](int i) { return mine + word_at<8>(i / 4 * kStepConsumers, i % 4 * 2); },
          [&](int i) { return tid + i / 4 * kStepConsumers < units; });
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        if (tid + i * kStepConsumers < units) add_unit(sum[i & 1], words + 4 * i);
      }
      const float inverse = inverse_rms(sum);  // its barrier closes: fragments overwritten while read
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        store_unit(tid + i * kStepConsumers, words + 4 * i, inverse, scale[i]);
      }
      return;
    }
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments overwritten while read
    uint4 words[4];
    for (int u = tid; u < units; u += 2 * kStepConsumers) {
      read_unit(words, x, u, tag);
      add_unit(sum[0], words);
      if (u + kStepConsumers >= units) break;
      read_unit(words, x, u + kStepConsumers, tag);
      add_unit(sum[1], words);
    }
    const float inverse = inverse_rms(sum);
    for (int first = tid - c_.lane; first < units; first += kStepConsumers) {
      const int u = first + c_.lane, there = min(u, units - 1);
      float2 scale[4];
      load_scale(scale, input_scale, there);
      read_unit(words, x, there, tag);
      store_unit(u, words, inverse, scale);
    }
  }

  __device__ float inverse_rms(float (&sum)[2]) const {
    __shared__ float partial[2 * kStepWarps];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum[0] += __shfl_xor_sync(~0u, sum[0], step);
      sum[1] += __shfl_xor_sync(~0u, sum[1], step);
    }
    if (c_.lane == 0) partial[c_.warp] = sum[0], partial[c_.warp + kStepWarps] = sum[1];
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: partial read before it is whole; the next row's comes
                                                       // after other barriers
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 2 * kStepWarps; ++w) total += partial[w];
    return inverse_rms_of(total, p_.cols, c_.args.eps);
  }

  __device__ void read_unit(uint4 (&words)[4], const uint2* x, int u, uint32_t tag) const {
    gather(words, tag, c_.watch, c_.args.fault, [&](int i) { return x + word_at<8>(u, i * 2); });
  }
  __device__ static void add_unit(float& sum, const uint4* words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) add_squares(sum, make_float2(float_of(words[i].x), float_of(words[i].z)));
  }
  __device__ static void load_scale(float2 (&scale)[4], const float* input_scale, int u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scale[i] = input_scale_of(input_scale, fragment_column(u) + 8 * i);
  }
  __device__ void store_unit(int u, const uint4* words, float inverse, const float2 (&scale)[4]) const {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i] =
          Tile::round_pair(float_of(words[i].x) * inverse * scale[i].x, float_of(words[i].z) * inverse * scale[i].y);
    }
    store_fragment(u, u < p_.cols / 8, pair);
  }

  /// This lane's fragments of k-tile j: of the only column, whatever the lane's is.
  __device__ uint32_t fragment_address(int j) const { return fragments_ + j * 128 + (c_.lane & 3) * 16; }
  __device__ void load_fragments(uint32_t (&b)[8], uint32_t at) const {
    const uint4 low = load_shared_16(at), high = load_shared_16(at + 64);
    b[0] = low.x, b[1] = low.y, b[2] = low.z, b[3] = low.w;
    b[4] = high.x, b[5] = high.y, b[6] = high.z, b[7] = high.w;
  }

  /// `tiles` k-tiles of what is taken, chunk by chunk.
  __device__ void chunks(float (&acc)[kStepRowTiles][4], int tiles) {
    constexpr int kChunk = Types::kChunk, T = kChunk / kStepWarps;
    for (int at = 0; at < tiles; at += kChunk) {
      c_.wait_slot();
      const uint32_t stage = c_.slot_data();
      if (at + kChunk <= tiles) {
        uint32_t fragments = fragment_address(at + c_.warp);
#pragma unroll
        for (int i = 0; i < T; ++i, fragments += kStepWarps * 128)
          tile(acc, stage, at, c_.warp + i * kStepWarps, fragments);
      } else {
#pragma unroll 1
        for (int t = c_.warp; at + t < tiles; t += kStepWarps) tile(acc, stage, at, t, fragment_address(at + t));
      }
#pragma unroll
      for (int r = 0; r < kStepRowTiles; ++r) settle(acc[r]);
      c_.release_slot();
    }
  }

  __device__ void tile(float (&acc)[kStepRowTiles][4], uint32_t stage, int at, int t, uint32_t fragments) const {
    constexpr int kChunk = Types::kChunk, R = kStepRowTiles;
    typename Tile::Words words[R];
#pragma unroll
    for (int r = 0; r < R; ++r) words[r] = Tile::load(stage + (r * kChunk + t) * Tile::kBytes, c_.lane);
    uint32_t b[1][8];
    load_fragments(b[0], fragments);
    typename Tile::Start start[1];
    const uint32_t starts = starts_ + (at + t) * Tile::kGroups * Types::kStartBytes;
    Tile::load_lone_start(start[0], starts);
#pragma unroll
    for (int r = 0; r < R; ++r) Tile::multiply(reinterpret_cast<float(&)[1][4]>(acc[r]), words[r], b, start);
  }

  /// This warp's class, to the finishing warps.
  __device__ void push(const float (&acc)[kStepRowTiles][4]) {
    constexpr int R = kStepRowTiles;
    const uint32_t buffer = c_.turn & 1, round = c_.turn >> 1;
    ++c_.turn;
    if (round > 0) barrier_wait(c_.drained + 8 * buffer, (round - 1) & 1);
    float4* to = reinterpret_cast<float4*>(c_.memory.sums() + buffer * kSumsFloats) + c_.warp * R * 32 + c_.lane;
#pragma unroll
    for (int r = 0; r < R; ++r) to[r * 32] = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    __syncwarp();
    if (c_.lane == 0) barrier_arrive(c_.summed + 8 * buffer);
  }

  StepConsumer<Types>& c_;
  const StepShape& p_;
  uint32_t fragments_, starts_;
};

/// Finishing warps: the embedding's rows, then every product's, as gemm_decode.cuh finishes them.
template <class Types>
class StepFinish {
 public:
  using Tile = typename Types::Tile;

  __device__ StepFinish(const StepArgs& args, const StepMemory<Types>& memory, StepBarriers& barriers)
      : args_(args),
        sums_(memory.sums()),
        summed_(shared_address(barriers.summed)),
        drained_(shared_address(barriers.drained)),
        thread_(threadIdx.x - kStepConsumers - 32) {}

  /// The residual's first value, by the threads that will own it.
  __device__ void embed(uint32_t tag) const {
    const StepShape& p = args_.shape[static_cast<int>(Product::o)];
    const Bf16* table = static_cast<const Bf16*>(args_.embedding.data);
    const StepLot lot(p, false);
    if (thread_ >= 32) return;
    for (int at = lot.first; at < lot.end; at += lot.stride()) {
      const int r = thread_ / 16, row = lot.row_tile(p, at, r) * 16 + thread_ % 16;
      if (!lot.real(at, r) || row >= p.rows) continue;
      const float x = to_f32(bf16_tile_element(table, args_.embedding.cols, args_.tokens[0], row));
      args_.x[row] = x;
      publish_residual(args_.x_in, row, x, tag);
    }
  }

  /// Every sum of a product: thread i of the first warp takes row i (SwiGLU: of the first half warp) of what is taken.
  __device__ void product(Product product, const StepMatrix& matrix, float scale, float swiglu_scale, uint2* to,
                          uint32_t tag) {
    const StepShape& p = args_.shape[static_cast<int>(product)];
    const bool pairs = product == Product::gate_up, adds = product == Product::o || product == Product::down;
    const StepLot lot(p, pairs);
    for (int at = lot.first; at < lot.end; at += lot.stride(), ++turn_) {
      const int r = pairs ? 0 : thread_ >> 4 & 1, row = lot.row_tile(p, at, r) * 16 + thread_ % 16;
      const bool mine = thread_ < (pairs ? 16 : 32) && lot.real(at, r) && row < p.rows;
      const float before = adds && mine ? args_.x[row] : 0.0f;  // while the sums are still to come
      const uint32_t buffer = turn_ & 1;
      barrier_wait(summed_ + 8 * buffer, turn_ >> 1 & 1);
      const float* sums = sums_ + buffer * kSumsFloats;
      if (thread_ < 32) {
        const float y = value(sums, matrix.scale, scale, r, mine ? row : 0);
        if (pairs) {
          const float up = value(sums, matrix.scale, scale, 1, mine ? row + p.rows / 2 : 0);
          swiglu(y, up, swiglu_scale, row, mine, to, tag);
        } else if (mine && product == Product::qkv) {
          publish(to + row, bits_of(y), tag);
        } else if (mine && adds) {
          publish_residual(to, row, before + y, tag);
          args_.x[row] = before + y;
        } else if (mine) {
          args_.logits[row] = y;
        }
      }
      __syncwarp();
      if ((thread_ & 31) == 0) barrier_arrive(drained_ + 8 * buffer);  // closes: sums overwritten while read
    }
  }

 private:
  /// Row thread_ % 16 of row tile r, whose only column is the first.
  __device__ float value(const float* sums, const float* row_scale, float scale, int r, int row) const {
    constexpr int R = kStepRowTiles;
    const int in_tile = thread_ % 16, lane = (in_tile & 7) * 4, part = (in_tile >> 3) * 2;
    static_assert(kStepWarps == kClasses);
    float classes[kClasses];
#pragma unroll
    for (int w = 0; w < kClasses; ++w) classes[w] = sums[((w * R + r) * 32 + lane) * 4 + part];
    float sum = add_classes(classes) * (Tile::row_unit(in_tile) * scale);
    if (row_scale) sum *= row_scale[row];
    return sum;
  }

  __device__ static void publish_residual(uint2* to, int row, float x, uint32_t tag) {
    publish(to + word_at<8>(unit_of(row), place_in_unit(row)), bits_of(x), tag);
  }

  __device__ void swiglu(float gate, float up, float scale, int row, bool valid, uint2* to, uint32_t tag) const {
    const float h = swiglu_of(gate, up), scaled = h * __frcp_rn(scale);
    uint32_t bits;
    if constexpr (Tile::kHalfOperand) {
      bits = half_saturated(scaled).bits;
      if (valid && args_.saturated && fabsf(scaled) > kHalfMax) atomicAdd(args_.saturated, 1ull);
    } else {
      bits = to_bf16(h).bits;
    }
    const uint32_t next = __shfl_down_sync(~0u, bits, 1);
    if (valid && row % 2 == 0) publish(to + word_at<4>(unit_of(row), place_in_unit(row) / 2), bits | next << 16, tag);
  }

  const StepArgs& args_;
  const float* sums_;
  uint32_t summed_, drained_;
  int thread_;
  uint32_t turn_ = 0;
};

}  // namespace fut::cuda
