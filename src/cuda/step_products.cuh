// The products of the step kernel, seen by its three roles: the producer warp sends weights, eight consumer warps gather
// activations and multiply, three finishing warps add up, apply the epilogue and publish. The arithmetic is that of
// gemm_decode.cuh, bit for bit.
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
  template <int R>
  __device__ void product(const StepShape& p, const StepMatrix& matrix, bool swiglu) {
    using Tile = typename Types::Tile;
    constexpr int kChunk = Types::chunk(R);
    for (int group = blockIdx.x; group < p.groups; group += gridDim.x) {
      for (int first = 0; first < p.col_tiles; first += kChunk) {
        const uint32_t slot = acquire(), bytes = min(kChunk, p.col_tiles - first) * Tile::kBytes;
        if (threadIdx.x % 32 != 0) continue;
        int real = 0;
        for (int r = 0; r < R; ++r) real += row_tile<R>(p, group, r, swiglu) < p.row_tiles;
        barrier_expect(full_ + 8 * slot, real * bytes);
        for (int r = 0; r < real; ++r) {
          const int64_t tile = int64_t{row_tile<R>(p, group, r, swiglu)} * p.col_tiles + first;
          bulk_copy(ring_ + slot * Types::kSlotBytes + r * kChunk * Tile::kBytes, matrix.tiles + tile * Tile::kBytes,
                    bytes, full_ + 8 * slot);
        }
      }
    }
  }

  template <int R>
  __device__ static int row_tile(const StepShape& p, int group, int r, bool swiglu) {
    return swiglu ? group + r * (p.row_tiles / 2) : group * R + r;
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
  uint32_t turn = 0;  ///< groups pushed so far
  Watch watch;
  uint32_t base;  ///< tag
  int warp, lane;

  __device__ StepConsumer(const StepArgs& step, const StepMemory<Types>& map, StepBarriers& barriers)
      : args(step), memory(map) {
    ring = shared_address(memory.ring());
    full = shared_address(barriers.full);
    empty = shared_address(barriers.empty);
    summed = shared_address(barriers.summed);
    drained = shared_address(barriers.drained);
    base = *step.tag_base;
    warp = threadIdx.x >> 5;
    lane = threadIdx.x & 31;
  }
  StepTrace trace;  ///< first warp, where args.trace asks for it
  int stages_begun = 0;
  __device__ bool traced() const { return args.trace && threadIdx.x == 0; }
  __device__ static uint32_t now() { return static_cast<uint32_t>(clock64()); }
  __device__ void end_stage() {
    if (!traced()) return;
    trace.end = now() - trace.begin;
    args.trace[blockIdx.x * (5 * args.layer_count + 1) + stages_begun++] = trace;
  }

  /// A stage begins: what the compiler derives from these is computed here, not kept in registers through all others.
  __device__ void begin_stage(Stage stage) {
    watch.stage = static_cast<uint32_t>(stage);
    asm volatile("" : "+r"(warp), "+r"(lane));
    if (traced()) trace = {now(), 0, 0, 0, 0};
  }
  __device__ int thread() const { return warp * 32 + lane; }
  __device__ void wait_slot() {
    const uint32_t from = traced() ? now() : 0;
    barrier_wait(full + 8 * cursor.slot, cursor.parity);
    if (traced()) trace.starved += now() - from;
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
    starts_ = fragments_ + c.args.batch * p_.cols * 2;
  }

  /// x (B, D): normalised, rounded, all of K at once.
  template <int R>
  __device__ void normalised(const uint2* x, uint32_t tag) {
    if (static_cast<int>(blockIdx.x) >= p_.groups) return;
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments of the last product overwritten while read
    stage_normalised(x, tag);
    if (c_.traced()) c_.trace.gathered = c_.now() - c_.trace.begin;
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments read before all are there
    if constexpr (Tile::kGroups > 0) make_starts();
    if (c_.traced()) c_.trace.ready = c_.now() - c_.trace.begin;
    for (int group = blockIdx.x; group < p_.groups; group += gridDim.x) {
      float acc[2][R][1][4] = {};
      chunks<R, true>(acc, 0, p_.col_tiles);
      push(acc);
    }
  }

  /// a (B, K / 2): operands as they are, piece by piece where shared memory does not hold all of K.
  template <int R>
  __device__ void rounded(const uint2* a, uint32_t tag) {
    for (int group = blockIdx.x; group < p_.groups; group += gridDim.x) {
      float acc[2][R][1][4] = {};
      for (int first = 0; first < p_.col_tiles; first += p_.piece) {
        const int tiles = min(p_.piece, p_.col_tiles - first);
        if (p_.piece < p_.col_tiles || group == static_cast<int>(blockIdx.x)) {
          named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments overwritten while read
          stage_rounded(a, tag, first, tiles);
          if (c_.traced()) c_.trace.gathered = c_.trace.ready = c_.now() - c_.trace.begin;
          named_barrier(kBarrierConsumers, kStepConsumers);  // closes: fragments read before all are there
        }
        chunks<R, false>(acc, first, tiles);
      }
      push(acc);
    }
  }

 private:
  __device__ void store_fragment(int unit, int n, const uint32_t (&pair)[4]) const {
    store_shared_16(fragments_ + ((unit >> 2) * c_.args.batch + n) * 64 + (unit & 3) * 16, pair);
  }

  __device__ void stage_rounded(const uint2* a, uint32_t tag, int first, int tiles) const {
    constexpr int kAtOnce = 4;
    const int units = tiles * 8, B = c_.args.batch, total = units * B;
    for (int at = c_.thread(); at < total; at += kAtOnce * kStepConsumers) {
      uint4 words[2 * kAtOnce];
      const auto place = [&](int i) { return min(at + i * kStepConsumers, total - 1); };
      gather(words, tag, c_.watch, c_.args.fault, [&](int i) {
        const int unit = place(i / 2), n = unit / units, u = first * 8 + unit % units;
        return a + int64_t{n} * (p_.cols / 2) + u * 4 + i % 2 * 2;
      });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (at + i * kStepConsumers >= total) break;
        const uint32_t pair[4] = {words[2 * i].x, words[2 * i].z, words[2 * i + 1].x, words[2 * i + 1].z};
        store_fragment(place(i) % units, place(i) / units, pair);
      }
    }
  }

  /// Two virtual threads of gemm_decode.cuh's 512 live in one here; their sums stay apart. A row is read again for its
  /// norm, unless it is the only one and fits registers.
  __device__ void stage_normalised(const uint2* x, uint32_t tag) const {
    constexpr int kKept = 4;
    const int units = p_.cols / 8, tid = c_.thread();
    if (c_.args.batch == 1 && units <= kKept * kStepConsumers) {
      float kept[kKept][8], sum[2] = {};
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int u = tid + i * kStepConsumers;
        if (u < units) {
          read_unit(kept[i], x, 0, u, tag);
        } else {
#pragma unroll
          for (int k = 0; k < 8; ++k) kept[i][k] = 0.0f;
        }
        add_unit(sum[i & 1], kept[i]);
      }
      const float inverse = inverse_rms(sum, 0);
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int u = tid + i * kStepConsumers;
        if (u < units) store_unit(u, 0, kept[i], inverse);
      }
      return;
    }
    for (int n = 0; n < c_.args.batch; ++n) {
      float v[8], sum[2] = {};
      for (int u = tid; u < units; u += 2 * kStepConsumers) {
        read_unit(v, x, n, u, tag);
        add_unit(sum[0], v);
        if (u + kStepConsumers >= units) break;
        read_unit(v, x, n, u + kStepConsumers, tag);
        add_unit(sum[1], v);
      }
      const float inverse = inverse_rms(sum, n);
      for (int u = tid; u < units; u += kStepConsumers) {
        read_unit(v, x, n, u, tag);
        store_unit(u, n, v, inverse);
      }
    }
  }

  __device__ float inverse_rms(float (&sum)[2], int n) const {
    __shared__ float partial[2][kClasses];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum[0] += __shfl_xor_sync(~0u, sum[0], step);
      sum[1] += __shfl_xor_sync(~0u, sum[1], step);
    }
    if (c_.lane == 0) partial[n & 1][c_.warp] = sum[0], partial[n & 1][c_.warp + kStepWarps] = sum[1];
    named_barrier(kBarrierConsumers, kStepConsumers);  // closes: partial read before it is whole; two, so that it is read
                                                       // before the next row but one overwrites it
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kClasses; ++w) total += partial[n & 1][w];
    return inverse_rms_of(total, p_.cols, c_.args.eps);
  }

  __device__ void read_unit(float (&v)[8], const uint2* x, int n, int u, uint32_t tag) const {
    uint4 words[4];
    gather(words, tag, c_.watch, c_.args.fault, [&](int i) { return x + int64_t{n} * p_.cols + u * 8 + i * 2; });
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = float_of(words[i].x), v[2 * i + 1] = float_of(words[i].z);
  }
  __device__ static void add_unit(float& sum, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) add_squares(sum, make_float2(v[2 * i], v[2 * i + 1]));
  }
  __device__ void store_unit(int u, int n, const float (&v)[8], float inverse) const {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = Tile::round_pair(v[2 * i] * inverse, v[2 * i + 1] * inverse);
    store_fragment(u, n, pair);
  }

  __device__ void load_fragments(uint32_t (&b)[8], int j) const {
    const int n = min(c_.lane >> 2, c_.args.batch - 1);
    const uint32_t at = fragments_ + (j * 2 * c_.args.batch + n) * 64 + (c_.lane & 3) * 16;
    const uint4 low = load_shared_16(at), high = load_shared_16(at + c_.args.batch * 64);
    b[0] = low.x, b[1] = low.y, b[2] = low.z, b[3] = low.w;
    b[4] = high.x, b[5] = high.y, b[6] = high.z, b[7] = high.w;
  }

  /// Start values of the k-tiles that this warp will multiply.
  __device__ void make_starts() const {
#pragma unroll 4
    for (int j = c_.warp; j < p_.col_tiles; j += kStepWarps) {
      uint32_t b[8];
      load_fragments(b, j);
      typename Tile::Start start;
      Tile::make_start(start, b);
#pragma unroll
      for (int i = 0; i < Tile::kGroups; ++i) {
        if (c_.lane < 4) store_shared_f2(starts_ + ((j * Tile::kGroups + i) * 4 + c_.lane) * 8, start.sum[i]);
      }
    }
    __syncwarp();  // closes: starts read by other lanes before they are written
  }

  /// k-tiles first .. first + tiles of this group, chunk by chunk. The fragments of k-tile `first` are the first ones.
  template <int R, bool kStarts>
  __device__ void chunks(float (&acc)[2][R][1][4], int first, int tiles) {
    constexpr int kChunk = Types::chunk(R), T = kChunk / kStepWarps;
    for (int at = 0; at < tiles; at += kChunk) {
      c_.wait_slot();
      const uint32_t stage = c_.slot_data();
      if (at + kChunk <= tiles) {
#pragma unroll
        for (int i = 0; i < T; ++i) tile<R, kStarts>(acc[i & 1], stage, at, c_.warp + i * kStepWarps);
      } else {
#pragma unroll
        for (int i = 0; i < T; ++i) {
          const int t = c_.warp + i * kStepWarps;
          if (at + t < tiles) tile<R, kStarts>(acc[i & 1], stage, at, t);
        }
      }
#pragma unroll
      for (int r = 0; r < R; ++r) settle(acc[0][r][0]), settle(acc[1][r][0]);
      c_.release_slot();
    }
  }

  template <int R, bool kStarts>
  __device__ void tile(float (&acc)[R][1][4], uint32_t stage, int at, int t) const {
    constexpr int kChunk = Types::chunk(R);
    typename Tile::Words words[R];
#pragma unroll
    for (int r = 0; r < R; ++r) words[r] = Tile::load(stage + (r * kChunk + t) * Tile::kBytes, c_.lane);
    uint32_t b[8];
    load_fragments(b, at + t);
    typename Tile::Start start;
    if constexpr (kStarts) {
      Tile::load_start(start, starts_ + (at + t) * Tile::kGroups * 32, c_.lane & 3);
    } else {
      Tile::make_start(start, b);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) Tile::multiply(acc[r][0], words[r], b, start);
  }

  /// Class w + class w + 8, the first level of add_classes(), and on to the finishing warps.
  template <int R>
  __device__ void push(const float (&acc)[2][R][1][4]) {
    const uint32_t buffer = c_.turn & 1, round = c_.turn >> 1;
    ++c_.turn;
    if (round > 0) barrier_wait(c_.drained + 8 * buffer, (round - 1) & 1);
    float4* to = reinterpret_cast<float4*>(c_.memory.sums() + buffer * kSumsFloats) + c_.warp * R * 32 + c_.lane;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float *u = acc[0][r][0], *v = acc[1][r][0];
      to[r * 32] = make_float4(u[0] + v[0], u[1] + v[1], u[2] + v[2], u[3] + v[3]);
    }
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
    const Weight& w = args_.embedding;
    const int tile_rows = 16 * p.at_a_time;
    for (int group = blockIdx.x; group < p.groups; group += gridDim.x) {
      for (int i = thread_; i < tile_rows * args_.batch; i += kStepFinishWarps * 32) {
        const int n = i / tile_rows, row = group * tile_rows + i % tile_rows;
        if (row >= p.rows) continue;
        const float x = to_f32(bf16_tile_element(static_cast<const Bf16*>(w.data), w.cols, args_.tokens[n], row));
        args_.x[int64_t{n} * p.rows + row] = x;
        publish_residual(args_.x_in, n, row, x, tag);
      }
    }
  }

  /// kind: what becomes of y. `tag` of what is published, `to` its words.
  template <int R, Product kProduct>
  __device__ void product(const StepShape& p, const StepMatrix& matrix, float scale, uint2* to, uint32_t tag) {
    constexpr bool kSwiglu = kProduct == Product::gate_up;
    const int tile_rows = kSwiglu ? 16 : 16 * R, count = tile_rows * args_.batch;
    for (int group = blockIdx.x; group < p.groups; group += gridDim.x, ++turn_) {
      const uint32_t buffer = turn_ & 1;
      barrier_wait(summed_ + 8 * buffer, turn_ >> 1 & 1);
      const float* sums = sums_ + buffer * kSumsFloats;
      for (int from = thread_ & ~31; from < count; from += kStepFinishWarps * 32) {
        const int i = from + (thread_ & 31), n = min(i / tile_rows, args_.batch - 1), r = i % tile_rows / 16;
        const int in_tile = i % 16;
        const int row = StepProducer<Types>::template row_tile<R>(p, group, r, kSwiglu) * 16 + in_tile;
        const bool valid = i < count && row < p.rows;
        float y = valid ? value<R>(sums, matrix, scale, r, in_tile, n, row) : 0.0f;
        if constexpr (kProduct == Product::qkv) {
          if (valid) publish(to + int64_t{n} * p.rows + row, bits_of(y), tag);
        } else if constexpr (kProduct == Product::o || kProduct == Product::down) {
          if (valid) {
            y = args_.x[int64_t{n} * p.rows + row] += y;
            publish_residual(to, n, row, y, tag);
          }
        } else if constexpr (kProduct == Product::head) {
          if (valid) args_.logits[int64_t{n} * p.rows + row] = y;
        } else {
          const float up = valid ? value<R>(sums, matrix, scale, 1, in_tile, n, row + p.rows / 2) : 0.0f;
          swiglu(y, up, n, row, valid, p.rows / 2, to, tag);
        }
      }
      __syncwarp();
      if ((thread_ & 31) == 0) barrier_arrive(drained_ + 8 * buffer);  // closes: sums overwritten while read
    }
  }

  float swiglu_scale = 1.0f;

 private:
  template <int R>
  __device__ float value(const float* sums, const StepMatrix& matrix, float scale, int r, int in_tile, int n,
                         int row) const {
    const int lane = (in_tile & 7) * 4 + n / 2, part = (in_tile >> 3) * 2 + (n & 1);
    float class_pairs[kStepWarps];
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) class_pairs[w] = sums[((w * R + r) * 32 + lane) * 4 + part];
    float sum = add_classes(class_pairs) * (Tile::row_unit(in_tile) * scale);
    if (matrix.scale) sum *= matrix.scale[row];
    return sum;
  }

  __device__ void publish_residual(uint2* to, int n, int row, float x, uint32_t tag) const {
    publish(to + int64_t{n} * args_.width + unit_of(row) * 8 + place_in_unit(row), bits_of(x), tag);
  }

  __device__ void swiglu(float gate, float up, int n, int row, bool valid, int width, uint2* to, uint32_t tag) const {
    const float h = gate / (1.0f + expf(-gate)) * up, scaled = h / swiglu_scale;
    uint32_t bits;
    if constexpr (Tile::kHalfOperand) {
      bits = to_half_saturated(scaled).bits;
      if (valid && args_.saturated && fabsf(scaled) > kHalfMax) atomicAdd(args_.saturated, 1ull);
    } else {
      bits = to_bf16(h).bits;
    }
    const uint32_t next = __shfl_down_sync(~0u, bits, 1);
    if (valid && row % 2 == 0)
      publish(to + int64_t{n} * (width / 2) + unit_of(row) * 4 + place_in_unit(row) / 2, bits | next << 16, tag);
  }

  const StepArgs& args_;
  const float* sums_;
  uint32_t summed_, drained_;
  int thread_;
  uint32_t turn_ = 0;
};

}  // namespace fut::cuda
