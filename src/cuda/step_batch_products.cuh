// The products of step_batch.cuh. Two neighbouring blocks, a cluster, share every row tile: one has the k-tiles of
// classes 0-3, the other those of 4-7, so that each reads half of the activations. A block's eight warps are two halves
// of the row tiles times four classes. At the end of a pass the sums of four classes meet in shared memory; each block
// keeps the sums of half of the rows and sends the other half to its neighbour, which adds them to its own: that is
// add_classes()' order.
//
// What runs once a stage is not in the instruction cache when it does: short and rolled beats unrolled.
#pragma once

#include "cuda/step_batch_block.cuh"

namespace fut::cuda {

/// The producer warp: all lanes.
template <class Types>
class BatchProducer {
 public:
  using Tile = typename Types::Tile;

  __device__ BatchProducer(const StepBatchArgs& args, const BatchMemory<Types>& memory, BatchBarriers& barriers)
      : args_(args), ring_(memory, barriers), flags_{args, {}} {}

  /// Every chunk of a product, in the order of consumption: weights ahead of activations, which `what` announces.
  __device__ void product(Product product, const uint8_t* tiles, const uint8_t* rows, Handed what, int layer) {
    const BatchLot& lot = BatchLot::of(product);
    const int total = lot.passes * lot.chunks, ahead = min(args_.stages, total);
    BatchRing<Types> late = ring_;
#pragma unroll 1
    for (int i = 0, sent = 0; i < total; ++i) {
      send_weights(lot, tiles, i);
      if (i + 1 < ahead) continue;
      if (sent == 0) {
        flags_.await(what, layer);
        copy_engine_fence();  // what other blocks wrote, the copy engine reads
      }
      for (; sent <= i; ++sent) send_rows(late, lot, rows, sent % lot.chunks);
    }
  }

  /// Waits until the next slot is free; the barrier of what comes into it.
  __device__ uint32_t acquire() {
    if (again_) barrier_wait(ring_.empty(), ring_.parity ^ 1);
    if (ring_.slot + 1 == static_cast<uint32_t>(args_.stages)) again_ = true;
    return ring_.full();
  }
  __device__ BatchRing<Types>& ring() { return ring_; }

 private:
  __device__ void send_weights(const BatchLot& lot, const uint8_t* tiles, int i) {
    const int lane = threadIdx.x & 31, pass = i / lot.chunks, chunk = i % lot.chunks, T = 1 << lot.log_T;
    const int s = lane >> lot.log_T, t = lane & (T - 1), eighth = chunk * T + t;  // this lane's row tile and k-tiles
    const int h = s >= 2 * lot.W, j = s - h * 2 * lot.W;
    const BatchLot::Half half = lot.half(pass, h);
    const int own = lot.own(eighth);
    const uint32_t mine = s < 4 * lot.W && j < lot.row_tiles(half) ? own * Tile::kBytes : 0;
    const uint32_t row_bytes = lane < T && has_rows(lot, eighth) ? args_.batch * kGemmPackedColumns * 2 : 0;
    const uint32_t all = __reduce_add_sync(~0u, mine + row_bytes);
    const uint32_t full = acquire();
    if (lane == 0) barrier_expect(full, all);
    __syncwarp();  // closes: bytes that land before they are expected
    if (mine > 0) {
      const int64_t tile = int64_t{lot.row_tile(half, j)} * lot.col_tiles + BatchLot::first_own(eighth);
      bulk_copy_once(ring_.at() + (s * T + t) * kOwnClasses * Tile::kBytes, tiles + tile * Tile::kBytes, mine, full);
    }
    ring_.advance();
  }

  __device__ void send_rows(BatchRing<Types>& late, const BatchLot& lot, const uint8_t* rows, int chunk) {
    const int lane = threadIdx.x & 31, eighth = (chunk << lot.log_T) + lane;
    if (lane < 1 << lot.log_T && has_rows(lot, eighth)) {
      const uint32_t bytes = args_.batch * kGemmPackedColumns * 2;
      const int block = lot.own(eighth) > 0 ? 2 * eighth + BatchLot::rank() : 0;
      bulk_copy(late.at() + Types::rows_offset(lot.W) + lane * bytes, rows + int64_t{block} * bytes, bytes,
                late.full());
    }
    late.advance();
  }
  /// The first block always comes: a block without k-tiles, too, must not get ahead of what it waits for.
  __device__ static bool has_rows(const BatchLot& lot, int eighth) { return lot.own(eighth) > 0 || eighth == 0; }

  const StepBatchArgs& args_;
  BatchRing<Types> ring_;
  const BatchFlags flags_;
  bool again_ = false;  ///< the ring has been filled once
};

/// Three warps: the start values of every slot's activations, Int4Tile::start_value() of every k-tile and row.
template <class Types>
class BatchStarts {
 public:
  __device__ BatchStarts(const StepBatchArgs& args, const BatchMemory<Types>& memory, BatchBarriers& barriers)
      : args_(args), ring_(memory, barriers) {}

  __device__ void product(Product product) {
    const BatchLot& lot = BatchLot::of(product);
#pragma unroll 1
    for (int i = 0; i < lot.passes * lot.chunks; ++i) {
      barrier_wait(ring_.full(), ring_.parity);
      const uint32_t rows = ring_.at() + Types::rows_offset(lot.W),
                     starts = rows + (args_.batch << lot.log_T) * kGemmPackedColumns * 2;
#pragma unroll 1
      for (int at = threadIdx.x - kBatchConsumers - 32; at < kOwnClasses * Types::kRows << lot.log_T;
           at += kBatchStartWarps * 32) {
        const int n = at % Types::kRows, tile = at / Types::kRows;
        if (n >= args_.batch) continue;
        const uint32_t row =
            rows + (tile / kOwnClasses * args_.batch + n) * kGemmPackedColumns * 2 + tile % kOwnClasses * 128;
        store_shared_4(starts + at * 4, bits_of(start_of(row, n & 7)));
      }
      arrive();
    }
  }

  /// A slot of something else.
  __device__ void skip() {
    barrier_wait(ring_.full(), ring_.parity);
    arrive();
  }

 private:
  __device__ void arrive() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(ring_.started());
    ring_.advance();
  }

  /// 64 values in the order of start_value(): pairs, then by fours of eight columns apart, then lanes.
  __device__ static float start_of(uint32_t row, int swizzle) {
    float half[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sums[4][4];  // [t][eight columns]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = load_shared_16(row + ((h * 4 + i) ^ swizzle) * 16);
        const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pair[t]));
          sums[t][i] = x.x + x.y;
        }
      }
      const float lanes[4] = {add_classes(sums[0]), add_classes(sums[1]), add_classes(sums[2]), add_classes(sums[3])};
      half[h] = add_classes(lanes);
    }
    return (half[0] + half[1]) * (-8.0f / 16777216.0f);
  }

  const StepBatchArgs& args_;
  BatchRing<Types> ring_;
};

/// State of a consumer warp that lives through the step.
template <class Types>
struct BatchConsumer {
  const StepBatchArgs& args;
  const BatchMemory<Types> memory;
  BatchRing<Types> ring;
  BatchFlags flags;
  uint32_t post_barriers;
  uint32_t turn = 0;  ///< passes so far, and messages of the neighbour block
  int warp, lane;

  __device__ BatchConsumer(const StepBatchArgs& step, const BatchMemory<Types>& map, BatchBarriers& barriers)
      : args(step), memory(map), ring(map, barriers), flags{step, {}}, post_barriers(shared_address(barriers.post)) {
    warp = threadIdx.x >> 5;
    lane = threadIdx.x & 31;
  }
  __device__ int thread() const { return warp * 32 + lane; }
  __device__ void sync() const { named_barrier(1, kBatchConsumers); }
  /// All consumers have written their part of `what`.
  __device__ void hand_over(Handed what, int layer) const {
    sync();
    if (threadIdx.x == 0) flags.raise(what, layer);
  }

  // ---- trace: of the first thread, where args.trace asks for it; in shared memory, since registers are scarce
  struct Traced {
    StepTrace stage;
    int ended;
  };
  __device__ static Traced& traced() {
    __shared__ Traced t;
    return t;
  }
  __device__ bool traces() const { return args.trace && threadIdx.x == 0; }
  __device__ static uint32_t now() { return static_cast<uint32_t>(clock64()); }
  /// A stage begins: what the compiler derives from these is computed here, not kept in registers through all others.
  __device__ void begin_stage() {
    asm volatile("" : "+r"(warp), "+r"(lane));
    if (traces()) traced().stage = {now(), 0, 0, 0, 0};
  }
  __device__ void begin_pass() { asm volatile("" : "+r"(warp), "+r"(lane)); }
  __device__ void has_inputs() const {
    if (!traces()) return;
    StepTrace& t = traced().stage;
    if (t.gathered == 0) t.gathered = t.ready = now() - t.begin;
  }
  __device__ void end_stage() const {
    if (!traces()) return;
    Traced& t = traced();
    t.stage.end = now() - t.stage.begin;
    args.trace[blockIdx.x * (5 * args.layer_count + 1) + t.ended++] = t.stage;
  }
  __device__ void wait_slot(uint32_t barrier) {
    if (!args.trace) return barrier_wait(barrier, ring.parity);
    const uint32_t from = now();
    barrier_wait(barrier, ring.parity);
    if (!traces()) return;
    if (traced().stage.gathered != 0) traced().stage.starved += now() - from;
    has_inputs();
  }
};

/// Consumers: one product.
template <class Types>
class BatchMultiply {
 public:
  using Tile = typename Types::Tile;
  static constexpr int NB = Types::NB;

  __device__ BatchMultiply(BatchConsumer<Types>& c, Product product, int layer)
      : c_(c), product_(product), layer_(layer), lot_(BatchLot::of(product)) {}

  __device__ void run() {
#pragma unroll 1
    for (int pass = 0; pass < lot_.passes; ++pass) {
      c_.begin_pass();
      if (lot_.W > 2) {
        multiply<Types::kMostPairs>(pass);
      } else if (lot_.W == 2) {
        multiply<2>(pass);
      } else {
        multiply<1>(pass);
      }
      c_.begin_pass();
      finish(pass);
    }
  }

 private:
  /// All of K for this warp's class and row tiles; the sums of its row tiles, one after the other, to share_sums().
  template <int W>
  __device__ __forceinline__ void multiply(int pass) {
    constexpr int T = Types::depth(W);
    const int row_tiles = lot_.row_tiles(lot_.half(pass, c_.warp / kOwnClasses));
    const int eighths = (lot_.col_tiles - BatchLot::first_own(0) - c_.warp % kOwnClasses + kClasses - 1) / kClasses;
    float acc[2 * W][NB][4] = {};
#pragma unroll 1
    for (int eighth = 0, left = lot_.chunks; left > 0; --left, eighth += T) {
      c_.wait_slot(c_.ring.started());
      barrier_wait(c_.ring.full(), c_.ring.parity);  // it has come: for the copies' own order
#pragma unroll
      for (int t = 0; t < T; ++t) {
        if (eighth + t < eighths) multiply_tile<W>(acc, t, row_tiles);
      }
#pragma unroll
      for (int w = 0; w < 2 * W; ++w) {
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) settle(acc[w][nb]);
      }
      c_.ring.release();
    }
    const int tiles = lot_.row_tiles(lot_.half(pass, 0));
    begin_sums(tiles);
#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
      c_.sync();  // closes: sums overwritten while read
      float4* const mine = reinterpret_cast<float4*>(c_.memory.mail()) + c_.warp * NB * 32 + c_.lane;
#pragma unroll
      for (int w = 0; w < 2 * W; ++w) {
        if (w != j) continue;
#pragma unroll
        for (int nb = 0; nb < NB; ++nb)
          mine[nb * 32] = make_float4(acc[w][nb][0], acc[w][nb][1], acc[w][nb][2], acc[w][nb][3]);
      }
      c_.sync();  // closes: sums read before all are there
      share_sums(j);
    }
  }

  template <int W>
  __device__ __forceinline__ void multiply_tile(float (&acc)[2 * W][NB][4], int t, int row_tiles) const {
    constexpr int T = Types::depth(W);
    const int lane = c_.lane, own = c_.warp % kOwnClasses, batch = c_.args.batch;
    const uint32_t rows = c_.ring.at() + Types::rows_offset(W);
    const uint32_t starts = rows + T * batch * kGemmPackedColumns * 2 + (t * kOwnClasses + own) * Types::kStartBytes;
    uint32_t b[NB][8];
    typename Tile::Start start[NB];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      const int n = min(nb * 8 + (lane & 7), batch - 1);  // rows beyond the batch are never stored
      uint32_t low[4], high[4];
      const uint32_t row = rows + (t * batch + n) * kGemmPackedColumns * 2 + own * 128;
      load_matrices(low, row + ((lane >> 3) ^ (n & 7)) * 16);
      load_matrices(high, row + ((lane >> 3 | 4) ^ (n & 7)) * 16);
#pragma unroll
      for (int k = 0; k < 4; ++k) b[nb][k] = low[k], b[nb][k + 4] = high[k];
      Tile::load_column_start(start[nb], starts, Types::kRows, nb * 8 + (lane & 3) * 2);
    }
    const uint32_t weights =
        c_.ring.at() + (c_.warp / kOwnClasses * 2 * W * T + t) * kOwnClasses * Tile::kBytes + own * Tile::kBytes;
    const auto load = [&](int w) { return Tile::load(weights + w * T * kOwnClasses * Tile::kBytes, lane); };
    typename Tile::Words next = load(0);
#pragma unroll
    for (int w = 0; w < 2 * W; ++w) {
      const typename Tile::Words words = next;
      if (w + 1 < 2 * W) next = load(w + 1);
      // Where a branch costs less than the products; by twos, so that two tiles' products fill each other's gaps.
      if (NB > 1 && w > 0 && w % (W < 3 ? 1 : 2) == 0 && w >= row_tiles) break;
      Tile::multiply(acc[w], words, b, start);
    }
  }

  // ---- sums. A block finishes rows 8 rank .. 8 rank + 7 of every row tile: parts 2 rank and 2 rank + 1 of the
  // fragments. They lie as [row tile][half][column tile][lane] pairs, in kept() this block's and in post() the
  // neighbour's, whose buffers take turns: one is free again when its second next message comes, because the neighbour
  // has had an answer to the one between.

  __device__ void begin_sums(int tiles) const {
    if (threadIdx.x == 0) barrier_expect(post_barrier(), tiles * 2 * NB * 32 * 8);
  }
  __device__ uint32_t post_barrier() const { return c_.post_barriers + (c_.turn & 1) * 8; }

  __device__ void share_sums(int j) const {
    const int i = c_.thread(), rank = BatchLot::rank();
    if (i >= 2 * NB * 32) return;
    const int h = i / (NB * 32), at = i % (NB * 32);
    const float4* from = reinterpret_cast<const float4*>(c_.memory.mail()) + h * kOwnClasses * NB * 32 + at;
    const float4 a = from[0], b = from[NB * 32], c = from[2 * NB * 32], d = from[3 * NB * 32];
    const float4 sum = make_float4((a.x + b.x) + (c.x + d.x), (a.y + b.y) + (c.y + d.y), (a.z + b.z) + (c.z + d.z),
                                   (a.w + b.w) + (c.w + d.w));
    const int to = j * 2 * NB * 32 + i;
    c_.memory.kept()[to] = rank ? make_float2(sum.z, sum.w) : make_float2(sum.x, sum.y);
    send_remote(at_rank(shared_address(c_.memory.post(c_.turn & 1) + to), rank ^ 1),
                rank ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w), at_rank(post_barrier(), rank ^ 1));
  }

  __device__ void finish(int pass) {
    const int rank = BatchLot::rank(), step = lot_.pairs ? 2 : 1, tiles = lot_.row_tiles(lot_.half(pass, 0)) / step;
    const StepShape& p = c_.args.shape[static_cast<int>(product_)];
    const StepLayer& layer = c_.memory.layers()[product_ == Product::head ? 0 : layer_];
    const bool adds = product_ == Product::o || product_ == Product::down;
    const float scale = product_ == Product::o      ? layer.attention_scale
                        : product_ == Product::down ? layer.swiglu_scale
                                                    : 1.0f;
    float* const out = adds ? c_.args.x : product_ == Product::qkv ? c_.args.y : c_.args.logits;
    const float2* const theirs = c_.memory.post(c_.turn & 1);
    barrier_wait(post_barrier(), c_.turn >> 1 & 1);
    ++c_.turn;
    c_.sync();  // closes: sums read before they are kept
#pragma unroll 1
    for (int i = c_.thread(); i < tiles * 2 * NB * 32; i += kBatchConsumers) {
      const int lane = i % 32, nb = i / 32 % NB, h = i / (32 * NB) % 2, j = i / (64 * NB);
      const BatchLot::Half half = lot_.half(pass, h);
      const int in_tile = (lane >> 2) + 8 * rank, row = lot_.row_tile(half, j * step) * 16 + in_tile;
      const int n = nb * 8 + 2 * (lane & 3), real = j < half.count && row < p.rows ? c_.args.batch - n : 0;
      const int at = (j * step * 2 + h) * NB * 32 + i % (NB * 32);
      const float unit = Tile::row_unit(in_tile) * scale;
      const float2 y = add(c_.memory.kept()[at], theirs[at], unit);
      if (lot_.pairs) {
        const int other = at + 2 * NB * 32;
        store_swiglu(y, add(c_.memory.kept()[other], theirs[other], unit), 1.0f / layer.swiglu_scale, n, row, real);
      } else {
        store(out + int64_t{n} * p.rows + row, p.rows, y, adds, real);
      }
    }
  }

  __device__ static float2 add(float2 a, float2 b, float unit) {
    return make_float2((a.x + b.x) * unit, (a.y + b.y) * unit);
  }

  /// The same row of sequences n and n + 1; `real`: how many of them there are.
  __device__ static void store(float* to, int pitch, float2 y, bool adds, int real) {
    const float first = adds && real > 0 ? __ldcg(to) : 0.0f, second = adds && real > 1 ? __ldcg(to + pitch) : 0.0f;
    if (real > 0) *to = adds ? first + y.x : y.x;
    if (real > 1) to[pitch] = adds ? second + y.y : y.y;
  }

  __device__ void store_swiglu(float2 gate, float2 up, float inverse, int n, int row, int real) const {
    const float first = swiglu_of(gate.x, up.x) * inverse, second = swiglu_of(gate.y, up.y) * inverse;
    const int clamped = (real > 0 && fabsf(first) > kHalfMax) + (real > 1 && fabsf(second) > kHalfMax);
    if (c_.args.saturated && clamped) atomicAdd(c_.args.saturated, static_cast<unsigned long long>(clamped));
    // Rows g and g + 1 of a sequence side by side: an even lane has both of the first, its odd neighbour of the second.
    const uint32_t pair = half_pair(first, second), next = __shfl_xor_sync(~0u, pair, 4);
    const bool odd = row & 1;
    if (real > odd)
      *reinterpret_cast<uint32_t*>(c_.args.rows_h + 2 * packed_place(c_.args.batch, n + odd, row & ~1)) =
          odd ? __byte_perm(next, pair, 0x7632) : __byte_perm(pair, next, 0x5410);
  }

  BatchConsumer<Types>& c_;
  const Product product_;
  const int layer_;
  const BatchLot& lot_;
};

/// The rows of the residual whose turn it is in this block, normalised and packed; layer 0's first come from the
/// embedding. The arithmetic of rows.cu, two of its threads in one.
template <class Types>
class BatchNormalise {
 public:
  using Tile = typename Types::Tile;

  __device__ BatchNormalise(BatchConsumer<Types>& c, int layer, bool middle) : c_(c), layer_(layer), middle_(middle) {}

  __device__ void run() const {
    const int batch = c_.args.batch, block = blockIdx.x, grid = gridDim.x, n = (block * batch + grid - 1) / grid;
    if (n >= batch || n * grid / batch != block) return;
    if (middle_ || layer_ > 0) c_.flags.await(middle_ ? Handed::x_mid : Handed::x_in, layer_);
    row(n);
    c_.hand_over(middle_ ? Handed::normed_mid : Handed::normed_in, layer_);
  }

 private:
  static constexpr int kKept = 2;  ///< units a thread that stay in registers

  __device__ void row(int n) const {
    const StepBatchArgs& a = c_.args;
    if (!middle_ && layer_ == 0) embed(n);
    const int units = a.width / 8, thread = c_.thread();
    const float* scale = layer_ < a.layer_count ? c_.memory.layers()[layer_].input_scale[middle_] : nullptr;
    const float* x = a.x + int64_t{n} * a.width;
    float2 kept[kKept][4];
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < kKept; ++j) load(kept[j], x, thread + j * kBatchConsumers, units);
#pragma unroll
    for (int j = 0; j < kKept; ++j) add(j & 1 ? odd : even, kept[j]);
#pragma unroll 1
    for (int u = thread + kKept * kBatchConsumers; u < units; u += 2 * kBatchConsumers) {
      float2 v[4];
      load(v, x, u, units);
      add(even, v);
      load(v, x, u + kBatchConsumers, units);
      add(odd, v);
    }
    const float inverse = inverse_rms(even, odd);
#pragma unroll
    for (int j = 0; j < kKept; ++j) store(n, thread + j * kBatchConsumers, units, kept[j], inverse, scale);
#pragma unroll 1
    for (int u = thread + kKept * kBatchConsumers; u < units; u += kBatchConsumers) {
      float2 v[4];
      load(v, x, u, units);
      store(n, u, units, v, inverse, scale);
    }
  }

  __device__ void embed(int n) const {
    const StepBatchArgs& a = c_.args;
    const Bf16* table = static_cast<const Bf16*>(a.embedding.data);
    const int64_t token = a.tokens[n];
    for (int k = c_.thread(); k < a.width; k += kBatchConsumers)
      a.x[int64_t{n} * a.width + k] = to_f32(bf16_tile_element(table, a.embedding.cols, token, k));
    c_.sync();  // closes: the row read by other threads before it is written
  }

  __device__ static void load(float2 (&v)[4], const float* x, int u, int units) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] =
          u < units ? __ldcg(reinterpret_cast<const float2*>(x + fragment_column(u) + 8 * i)) : make_float2(0.0f, 0.0f);
    }
  }
  __device__ static void add(float& sum, const float2 (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) add_squares(sum, v[i]);
  }
  __device__ void store(int n, int u, int units, const float2 (&v)[4], float inverse, const float* scale) const {
    if (u >= units) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = fragment_column(u) + 8 * i;
      const float2 s = input_scale_of(scale, k);
      *reinterpret_cast<uint32_t*>(c_.args.rows_x + 2 * packed_place(c_.args.batch, n, k)) =
          Tile::round_pair(v[i].x * inverse * s.x, v[i].y * inverse * s.y);
    }
  }

  __device__ float inverse_rms(float even, float odd) const {
    __shared__ float partial[2 * kBatchWarps];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      even += __shfl_xor_sync(~0u, even, step);
      odd += __shfl_xor_sync(~0u, odd, step);
    }
    c_.sync();  // closes: partial overwritten while read
    if (c_.lane == 0) partial[c_.warp] = even, partial[c_.warp + kBatchWarps] = odd;
    c_.sync();  // closes: partial read before it is whole
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 2 * kBatchWarps; ++w) total += partial[w];
    return inverse_rms_of(total, c_.args.width, c_.args.eps);
  }

  BatchConsumer<Types>& c_;
  const int layer_;
  const bool middle_;
};

}  // namespace fut::cuda
