// MATH       y[b, n] = f(b, n) sum_k a[b, k] w[n, k], then Finish: store, add to the residual, or SwiGLU of a row pair.
// SHAPES     B = 1..8, K a multiple of 64, any N. Weights INT4 (G = 32, 64, 128), E4M3, BF16. Refused: f32 weights.
// LAYOUT     W is a row of tiles of 16 rows x 64 k per 16 rows: int4_fragment.h, weight_tile.cuh. The weight is operand
// A
//            of m16n8k16, the batch is n.
// SCHEDULE   One block an SM, 16 consumer warps, a producer warp, three finishing warps. A block has a run of row tiles
// and
//            takes two at a time (SwiGLU: a gate tile and its up tile) over all of K; consumer w works on row w / 8 of
//            the two and on class w % 8 of the k-tiles. The producer streams chunks through a ring of shared memory by
//            bulk copies, at most `window` of them in flight: more would only queue ahead of the hand-over's own
//            traffic. It starts before the previous kernel has ended, since weights depend on nothing; everything else
//            waits (griddepcontrol.wait).
//            The activations are read once, normalised where asked, and kept as B fragments in shared memory.
//            Which batches: gemm_packs(); the others: gemm_wide.cuh.
// NUMERICS   Operands are rounded once (f16; bf16 for BF16 weights); accumulators FP32; INT4 scales multiply the
//            accumulator of a group. k-tiles are dealt to 8 classes, which a balanced tree adds up
//            (weight_tile.cuh): a result depends on K and the format alone, never on the batch's other rows or on
//            timing.
// ROOFLINE   Weight bytes over the read rate (H200: 4.57 TB/s); docs/PERF.md has what each shape reaches.
// REFERENCE  Weight as operand A, masks to FP16 subnormals and scales on the accumulator: DESIGN section 5.
#pragma once

#include <climits>

#include "cuda/gemm_decode.h"
#include "cuda/launch.cuh"
#include "cuda/weight_tile.cuh"

namespace fut::cuda {

inline constexpr int kConsumerWarps = 16, kFinishWarps = 3;
inline constexpr int kConsumers = kConsumerWarps * 32;
inline constexpr int kBlockThreads = kConsumers + (kFinishWarps + 1) * 32;
inline constexpr int kMaxStages = 12;

/// The row tiles (SwiGLU: pairs of a gate tile and its up tile) of a block: a run, as long as any other's but for one.
struct GemmRun {
  int first, end, units;
  __device__ GemmRun(const GemmArgs& args) {
    const int tiles = (args.rows + 15) / 16, block = blockIdx.x, blocks = gridDim.x;
    units = args.finish == Finish::swiglu ? tiles / 2 : tiles;
    const int each = units / blocks, extra = units % blocks;
    first = block * each + min(block, extra);
    end = first + each + (block < extra);
  }
};

/// What turns an accumulator into y.
template <class Tile>
__device__ inline float finish_sum(const GemmArgs& args, float sum, int row_in_tile, int n, int row) {
  sum *= Tile::row_unit(row_in_tile) * args.a_scale;
  if (args.weight_scale) sum *= args.weight_scale[row];
  if (args.row_factor) sum *= args.row_factor[n];
  return args.bias ? sum + args.bias[row] : sum;
}

/// SwiGLU of one row of h.
__device__ inline void store_swiglu(const GemmArgs& args, float gate, float up, int n, int row) {
  const float h = swiglu_of(gate, up);
  const int64_t at = int64_t{n} * (args.rows / 2) + row;
  if (args.out_type == Dtype::bf16) {
    static_cast<Bf16*>(args.out)[at] = to_bf16(h);
    return;
  }
  const float scaled = h * __frcp_rn(args.out_scale);  // a power of two
  static_cast<Half*>(args.out)[at] = half_saturated(scaled);
  if (args.saturated && fabsf(scaled) > kHalfMax) atomicAdd(args.saturated, 1ull);
}

/// Everything about one kernel that the compiler must know.
template <class Tile_>
struct GemmShape {
  using Tile = Tile_;
  static constexpr int kChunk = Tile::kChunkTiles / 2, kTilesPerWarp = kChunk / kClasses;  ///< k-tiles
  static constexpr int kStageBytes = 2 * kChunk * Tile::kBytes;
  static constexpr int kReduceFloats = kConsumerWarps * 128;

  FUT_HD static int staged_bytes(int batch, int cols) { return batch * cols * 2 + cols / 64 * Tile::kGroups * 32; }
};

template <class Shape>
class GemmBlock {
 public:
  using Tile = typename Shape::Tile;
  static constexpr int kChunk = Shape::kChunk;

  __device__ GemmBlock(const GemmArgs& args, uint8_t* memory, uint64_t* full, uint64_t* empty, uint64_t* summed)
      : args_(args),
        run_(args),
        pairs_(args.finish == Finish::swiglu),
        col_tiles_(args.cols / 64),
        chunks_((col_tiles_ + kChunk - 1) / kChunk),
        ring_(shared_address(memory)),
        full_(shared_address(full)),
        empty_(shared_address(empty)),
        summed_(shared_address(summed)),
        fragments_(memory + args.stages * Shape::kStageBytes),
        reduce_(reinterpret_cast<float*>(fragments_ + Shape::staged_bytes(args.batch, args.cols))) {}

  __device__ void initialise() {
    for (int i = 0; i < args_.stages; ++i) {
      barrier_init(full_ + 8 * i, 1);
      barrier_init(empty_ + 8 * i, kConsumerWarps);
    }
    for (int i = 0; i < args_.sums; ++i) {
      barrier_init(summed_ + 16 * i, kConsumerWarps);
      barrier_init(summed_ + 16 * i + 8, kFinishWarps);
    }
    barrier_init_fence();
  }

  /// One thread of the producer warp: every chunk of every two row tiles, in the order of consumption.
  __device__ void produce() {
    const int total = (run_.end - run_.first + stride() - 1) / stride() * chunks_,
              ahead = min(min(args_.stages, args_.window), total);
    for (int i = 0; i < total; ++i) send_weights(i, ahead);
  }

  __device__ void consume() {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    wait_for_previous_kernel();
    stage_activations();
    int slot = 0, turn = 0;
    uint32_t parity = 0;
    for (int at = run_.first; at < run_.end; at += stride(), ++turn) {
      float acc[1][4] = {};
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        barrier_wait(full_ + 8 * slot, parity);
        multiply_chunk(acc, ring_ + slot * Shape::kStageBytes, chunk, warp, lane);
        settle(acc[0]);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_ + 8 * slot);  // closes: the producer overwriting tiles still being read
        if (++slot == args_.stages) {
          slot = 0;
          parity ^= 1;
        }
      }
      push_sums(acc[0], turn, warp, lane);
    }
  }

  /// The finishing warps: add the consumers' sums and apply the epilogue,
  /// while the consumers go on.
  __device__ void finish() {
    const int thread = threadIdx.x - kConsumers - 32;
    wait_for_previous_kernel();
    int turn = 0;
    for (int at = run_.first; at < run_.end; at += stride(), ++turn) {
      const int buffer = turn % args_.sums;
      barrier_wait(summed_ + 16 * buffer, turn / args_.sums & 1);
      finish_rows(reduce_ + buffer * Shape::kReduceFloats, at, thread);
      __syncwarp();
      if ((thread & 31) == 0) barrier_arrive(summed_ + 16 * buffer + 8);  // closes: sums overwritten while read
    }
  }

 private:
  __device__ int stride() const { return pairs_ ? 1 : 2; }
  __device__ int row_tile(int at, int r) const { return pairs_ ? at + r * run_.units : at + r; }
  __device__ bool real(int at, int r) const { return pairs_ || at + r < run_.end; }

  __device__ void send_weights(int i, int window) {
    const int slot = i % args_.stages, round = i / args_.stages;
    if (round > 0) barrier_wait(empty_ + 8 * slot, (round - 1) & 1);
    if (i >= window) {  // bounds the bytes in flight
      const int oldest = i - window;
      barrier_wait(full_ + 8 * (oldest % args_.stages), (oldest / args_.stages) & 1);
    }
    const int at = run_.first + i / chunks_ * stride(), chunk = i % chunks_;
    const int tiles = min(kChunk, col_tiles_ - chunk * kChunk), rows = real(at, 1) ? 2 : 1;
    const uint32_t bytes = tiles * Tile::kBytes;
    barrier_expect(full_ + 8 * slot, rows * bytes);
    for (int r = 0; r < rows; ++r) {
      const int64_t tile = int64_t{row_tile(at, r)} * col_tiles_ + chunk * kChunk;
      bulk_copy_once(ring_ + slot * Shape::kStageBytes + r * kChunk * Tile::kBytes, args_.weight + tile * Tile::kBytes,
                     bytes, full_ + 8 * slot);
    }
  }

  /// Reads a (B, K), normalises where asked, and leaves B fragments [k-tile][half][b][t] of 16 bytes, and for INT4 the
  /// start values [k-tile][group][8 columns].
  __device__ void stage_activations() {
    __shared__ float partial[kConsumerWarps][8], inverse_rms[8];
    const int tid = threadIdx.x, B = args_.batch, K = args_.cols;
    if (args_.normalise) {
      sum_squares(partial);
      named_barrier(1, kConsumers);  // closes: partial read before it is whole
      if (tid < B) {
        float sum = 0.0f;
        for (int w = 0; w < kConsumerWarps; ++w) sum += partial[w][tid];
        inverse_rms[tid] = inverse_rms_of(sum, K, args_.eps);
      }
      named_barrier(1, kConsumers);  // closes: inverse_rms read before it is written
    }
    float* starts = reinterpret_cast<float*>(fragments_ + B * K * 2);
    const int units = K / 8, total = B * units, lane = tid & 31;
    for (int first = tid - lane; first < total; first += kConsumers) {
      const int unit = min(first + lane, total - 1), n = unit / units, u = unit % units, k = fragment_column(u);
      uint32_t pair[4];
      if (args_.normalise) {
        const float* x = static_cast<const float*>(args_.a) + source_row(n) * K + k;
        for (int i = 0; i < 4; ++i) {
          const float2 v = *reinterpret_cast<const float2*>(x + 8 * i);
          const float2 c = input_scale_of(args_.input_scale, k + 8 * i);
          pair[i] = Tile::round_pair(v.x * inverse_rms[n] * c.x, v.y * inverse_rms[n] * c.y);
        }
      } else {
        const uint16_t* a = static_cast<const uint16_t*>(args_.a) + int64_t{n} * K + k;
        for (int i = 0; i < 4; ++i) pair[i] = *reinterpret_cast<const uint32_t*>(a + 8 * i);
      }
      float start = 0.0f;
      if constexpr (Tile::kGroups > 0) start = Tile::start_value(pair);
      if (first + lane >= total) break;
      *reinterpret_cast<uint4*>(fragments_ + ((u >> 2) * B + n) * 64 + (u & 3) * 16) =
          make_uint4(pair[0], pair[1], pair[2], pair[3]);
      if constexpr (Tile::kGroups > 0) {
        if (Tile::begins_group(u)) starts[Tile::group_of(u) * 8 + n] = start;
      }
    }
    named_barrier(1, kConsumers);  // closes: fragments read before all are there
  }

  __device__ void load_fragments(uint32_t (&b)[8], int j, int n, int t) const {
    const uint32_t at = shared_address(fragments_) + ((j * 2 * args_.batch + n) * 4 + t) * 16;
    unpack16(b, load_shared_16(at));
    unpack16(b + 4, load_shared_16(at + args_.batch * 64));
  }

  __device__ int64_t source_row(int n) const { return args_.row ? args_.row[n] : n; }

  __device__ void sum_squares(float (*partial)[8]) const {
    const int tid = threadIdx.x, B = args_.batch, K = args_.cols;
    float sum[8] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n >= B) break;
      const float* x = static_cast<const float*>(args_.a) + source_row(n) * K;
      for (int u = tid; u < K / 8; u += kConsumers) {
        for (int i = 0; i < 4; ++i)
          add_squares(sum[n], *reinterpret_cast<const float2*>(x + fragment_column(u) + 8 * i));
      }
      for (int step = 16; step > 0; step /= 2) sum[n] += __shfl_xor_sync(~0u, sum[n], step);
      if ((tid & 31) == 0) partial[tid >> 5][n] = sum[n];
    }
  }

  __device__ void multiply_chunk(float (&acc)[1][4], uint32_t stage, int chunk, int warp, int lane) {
    const int tiles = min(kChunk, col_tiles_ - chunk * kChunk), first = warp % kClasses;
    const uint32_t row = stage + warp / kClasses * kChunk * Tile::kBytes;
    if (tiles == kChunk) {
#pragma unroll
      for (int i = 0; i < Shape::kTilesPerWarp; ++i) multiply_tile(acc, row, chunk, first + i * kClasses, lane);
    } else {
      for (int i = first; i < tiles; i += kClasses) multiply_tile(acc, row, chunk, i, lane);
    }
  }

  __device__ void multiply_tile(float (&acc)[1][4], uint32_t row, int chunk, int tile, int lane) {
    const int t = lane & 3, n = min(lane >> 2, args_.batch - 1);  // columns beyond the batch are never stored
    const int j = chunk * kChunk + tile;
    const typename Tile::Words words = Tile::load(row + tile * Tile::kBytes, lane);
    uint32_t b[1][8];
    load_fragments(b[0], j, n, t);
    typename Tile::Start start[1];
    Tile::load_start(start[0], shared_address(fragments_) + args_.batch * args_.cols * 2 + j * Tile::kGroups * 32, t);
    Tile::multiply(acc, words, b, start);
  }

  __device__ static void unpack16(uint32_t* b, uint4 v) { b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w; }

  __device__ void push_sums(const float (&acc)[4], int turn, int warp, int lane) {
    const int buffer = turn % args_.sums, round = turn / args_.sums;
    if (round > 0) barrier_wait(summed_ + 16 * buffer + 8, (round - 1) & 1);
    float4* to = reinterpret_cast<float4*>(reduce_ + buffer * Shape::kReduceFloats) + warp * 32 + lane;
    *to = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __syncwarp();
    if (lane == 0) barrier_arrive(summed_ + 16 * buffer);
  }

  __device__ void finish_rows(const float* sums, int at, int thread) const {
    const int log_rows = pairs_ ? 4 : 5;
    for (int i = thread; i < args_.batch << log_rows; i += kFinishWarps * 32) {
      const int n = i >> log_rows, r = pairs_ ? 0 : i >> 4 & 1, row = row_tile(at, r) * 16 + i % 16;
      if (!real(at, r) || row >= args_.rows) continue;
      const float y = value(sums, r, i % 16, n, row);
      if (args_.finish == Finish::plain) {
        static_cast<float*>(args_.out)[int64_t{n} * args_.rows + row] = y;
      } else if (args_.finish == Finish::residual) {
        static_cast<float*>(args_.out)[int64_t{n} * args_.rows + row] += y;
      } else {
        store_swiglu(args_, y, value(sums, 1, i % 16, n, row + args_.rows / 2), n, row);
      }
    }
  }

  __device__ float value(const float* sums, int r, int row_in_tile, int n, int row) const {
    const int lane = (row_in_tile & 7) * 4 + n / 2, part = (row_in_tile >> 3) * 2 + (n & 1);
    float classes[kClasses];
#pragma unroll
    for (int c = 0; c < kClasses; ++c) classes[c] = sums[((r * kClasses + c) * 32 + lane) * 4 + part];
    return finish_sum<Tile>(args_, add_classes(classes), row_in_tile, n, row);
  }

  const GemmArgs& args_;
  const GemmRun run_;
  const bool pairs_;
  int col_tiles_, chunks_;
  uint32_t ring_, full_, empty_, summed_;  ///< summed_: pairs of full and empty, one a buffer of sums
  uint8_t* fragments_;
  float* reduce_;
};

template <class Shape>
__global__ void __launch_bounds__(kBlockThreads, 1) gemm_decode_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages], summed[4];
  GemmBlock<Shape> block(args, memory, full, empty, summed);
  if (threadIdx.x == 0) block.initialise();
  __syncthreads();  // closes: barriers used before they are initialised
  release_next_kernel();
  if (threadIdx.x < kConsumers) {
    block.consume();
  } else if (threadIdx.x < kConsumers + 32) {
    if (threadIdx.x == kConsumers) block.produce();
  } else {
    block.finish();
  }
}

/// One block an SM. With room for two, the next kernel's blocks would come early; but where one SM ends before another
/// it gets two of them, the other none, and the busiest SM decides (docs/PERF.md: 92 us a block of llama-3.1-8b against
/// 72).
template <class Shape>
void launch_gemm(const char* op, GemmArgs args, cudaStream_t stream) {
  constexpr int kWholeSm = 232448 - 1024, kInFlight = 48 * 1024;
  constexpr int stage = Shape::kStageBytes, sums = Shape::kReduceFloats * 4;
  const int room = kWholeSm - Shape::staged_bytes(args.batch, args.cols);
  args.sums = (room - 2 * sums) / stage >= 3 ? 2 : 1;
  const int stages = (room - args.sums * sums) / stage;
  FUT_CHECK(stages >= 2, op, ": ", args.batch, " rows of ", args.cols, " leave no room for weights in shared memory");
  args.stages = stages < kMaxStages ? stages : kMaxStages;
  args.window = (kInFlight + stage - 1) / stage;
  const int units = args.finish == Finish::swiglu ? args.rows / 32 : (args.rows + 15) / 16;
  const int blocks = units < multiprocessors() ? units : multiprocessors();
  launch(op, gemm_decode_kernel<Shape>, dim3(blocks), dim3(kBlockThreads),
         kWholeSm - room + args.sums * sums + args.stages * stage, stream, args);
}

template <class Tile>
void launch_gemm_for(const char* op, const GemmArgs& args, cudaStream_t stream) {
  launch_gemm<GemmShape<Tile>>(op, args, stream);
}

}  // namespace fut::cuda
