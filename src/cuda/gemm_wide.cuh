// MATH       gemm_decode.cuh's, for 2 to 32 rows, with the same bits a row.
// SHAPES     B = 2..32 (NB = 1, 2 or 4 column tiles of 8), K a multiple of 64, any N; operands f16 or bf16, normalised
//            before, packed (gemm_decode.h).
// LAYOUT     gemm_decode.cuh's.
// SCHEDULE   Tensor cores are what these batches need, and activations: every block reads all of them for every group
// of
//            rows that it takes. So a block takes 2 W row tiles at a time (SwiGLU: W pairs), W up to 4, and eight
//            consumer warps, each with most of a scheduler's registers, hold all of them: warp w works on class w of
//            the k-tiles and keeps 2 W x NB accumulators. A fragment of activations is read once and meets 2 W row
//            tiles, a weight is unpacked once and meets NB column tiles. Weights, packed rows and start values ride in
//            one ring; the producer sends weights before the previous kernel has ended. Sums meet in shared memory, two
//            row tiles and 16 rows of the batch at a time, and the consumers finish them.
// NUMERICS   gemm_decode.cuh's.
// ROOFLINE   docs/PERF.md.
// REFERENCE  registers moved between warpgroups: setmaxnreg, as in CUTLASS's and DeepGEMM's kernels.
#pragma once

#include <type_traits>

#include "cuda/gemm_decode.cuh"

namespace fut::cuda {

inline constexpr int kWideWarps = kClasses, kWideConsumers = kWideWarps * 32, kWideThreads = kWideConsumers + 128;
inline constexpr int kWideConsumerRegisters = 232, kWideProducerRegisters = 40;
static_assert(kWideConsumers * kWideConsumerRegisters + 128 * kWideProducerRegisters <= kWideThreads * 168);

template <class Tile_, int kColumnTiles_, int kRowPairs_>
struct WideShape {
  using Tile = Tile_;
  static constexpr int NB = kColumnTiles_, W = kRowPairs_;
  static constexpr int kOfWeights = Tile::kChunkTiles / (2 * W * kClasses), kOfRows = 4 / NB;  ///< k-tiles a warp
  static constexpr int kTilesPerWarp = kOfWeights < kOfRows ? kOfWeights : kOfRows;
  static constexpr int kChunk = kTilesPerWarp * kClasses;  ///< k-tiles
  static constexpr int kWeightBytes = 2 * W * kChunk * Tile::kBytes;
  static constexpr int kColumns = NB < 2 ? NB : 2;  ///< column tiles that are summed at a time
  static constexpr int kReduceBytes = kWideWarps * 2 * kColumns * 512;
  FUT_HD static int start_bytes(int batch) { return Tile::kGroups * padded_rows(batch) * 4; }  ///< of a k-tile
  FUT_HD static int stage_bytes(int batch) { return kWeightBytes + kChunk * (batch * 128 + start_bytes(batch)); }
};

template <class Shape>
class WideBlock {
 public:
  using Tile = typename Shape::Tile;
  static constexpr int NB = Shape::NB, W = Shape::W, kChunk = Shape::kChunk;
  static constexpr int kBlockTiles = kGemmPackedColumns / 64;  ///< k-tiles of a block of packed rows

  __device__ WideBlock(const GemmArgs& args, uint8_t* memory, uint64_t* full, uint64_t* empty)
      : args_(args),
        run_(args),
        pairs_(args.finish == Finish::swiglu),
        stride_(pairs_ ? W : 2 * W),
        col_tiles_(args.cols / 64),
        chunks_((col_tiles_ + kChunk - 1) / kChunk),
        stage_bytes_(Shape::stage_bytes(args.batch)),
        ring_(shared_address(memory)),
        full_(shared_address(full)),
        empty_(shared_address(empty)),
        reduce_(reinterpret_cast<float*>(memory + args.stages * stage_bytes_)) {}

  __device__ void initialise() {
    for (int i = 0; i < args_.stages; ++i) {
      barrier_init(full_ + 8 * i, 1);
      barrier_init(empty_ + 8 * i, kWideWarps);
    }
    barrier_init_fence();
  }

  /// One warp.
  __device__ void produce() {
    const int lane = threadIdx.x & 31;
    const int total = (run_.end - run_.first + stride_ - 1) / stride_ * chunks_, ahead = min(args_.stages, total);
    for (int i = 0; i < ahead; ++i) send_weights(i, lane);
    wait_for_previous_kernel();
    copy_engine_fence();  // what that kernel wrote, the copy engine reads
    for (int i = 0; i < ahead; ++i) send_rows(i, lane);
    for (int i = ahead; i < total; ++i) {
      send_weights(i, lane);
      send_rows(i, lane);
    }
  }

  __device__ void consume() {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    wait_for_previous_kernel();
    int slot = 0;
    uint32_t parity = 0;
    for (int at = run_.first; at < run_.end; at += stride_) {
      const int row_tiles = min(2 * W, pairs_ ? 2 * (run_.end - at) : run_.end - at);
      float acc[2 * W][NB][4] = {};
      for (int chunk = 0; chunk < chunks_; ++chunk) {
        barrier_wait(full_ + 8 * slot, parity);
#pragma unroll
        for (int i = 0; i < Shape::kTilesPerWarp; ++i) {
          const int tile = warp + i * kClasses;
          if (chunk * kChunk + tile < col_tiles_)
            multiply(acc, ring_ + slot * stage_bytes_, chunk, tile, row_tiles, lane);
        }
#pragma unroll
        for (int w = 0; w < 2 * W; ++w) {
#pragma unroll
          for (int nb = 0; nb < NB; ++nb) settle(acc[w][nb]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_ + 8 * slot);  // closes: the producer overwriting what is still read
        if (++slot == args_.stages) {
          slot = 0;
          parity ^= 1;
        }
      }
      reduce(acc, at, row_tiles, warp, lane);
    }
  }

 private:
  /// Row tile r of pair w (SwiGLU: its gate or up tile).
  __device__ int row_tile(int at, int w, int r) const { return pairs_ ? at + w + r * run_.units : at + 2 * w + r; }
  __device__ bool real(int at, int w, int r) const { return (pairs_ ? at + w : at + 2 * w + r) < run_.end; }

  __device__ void send_weights(int i, int lane) {
    const int slot = i % args_.stages, round = i / args_.stages;
    if (round > 0) barrier_wait(empty_ + 8 * slot, (round - 1) & 1);
    const int at = run_.first + i / chunks_ * stride_, chunk = i % chunks_;
    const int tiles = min(kChunk, col_tiles_ - chunk * kChunk);
    const uint32_t bytes = tiles * Tile::kBytes;
    int rows = 0;
    for (int j = 0; j < 2 * W; ++j) rows += real(at, j / 2, j % 2);
    const int padded = (tiles + kBlockTiles - 1) / kBlockTiles * kBlockTiles;
    if (lane == 0)
      barrier_expect(full_ + 8 * slot,
                     rows * bytes + padded * args_.batch * 128 + tiles * Shape::start_bytes(args_.batch));
    __syncwarp();  // closes: bytes that land before they are expected
    if (lane < 2 * W && real(at, lane / 2, lane % 2)) {
      const int64_t tile = int64_t{row_tile(at, lane / 2, lane % 2)} * col_tiles_ + chunk * kChunk;
      bulk_copy_once(ring_ + slot * stage_bytes_ + lane * kChunk * Tile::kBytes, args_.weight + tile * Tile::kBytes,
                     bytes, full_ + 8 * slot);
    }
  }

  __device__ void send_rows(int i, int lane) {
    const int slot = i % args_.stages, chunk = i % chunks_, first = chunk * kChunk + lane * kBlockTiles;
    const uint32_t rows = ring_ + slot * stage_bytes_ + Shape::kWeightBytes, start = Shape::start_bytes(args_.batch);
    if (lane < kChunk / kBlockTiles && first < col_tiles_) {
      const uint32_t bytes = kBlockTiles * args_.batch * 128;
      bulk_copy(rows + lane * bytes, static_cast<const uint16_t*>(args_.a) + int64_t{first} * 64 * args_.batch, bytes,
                full_ + 8 * slot);
    }
    if (Tile::kGroups > 0 && lane == 0) {
      bulk_copy(rows + kChunk * args_.batch * 128,
                reinterpret_cast<const uint8_t*>(args_.starts) + int64_t{first} * start,
                min(kChunk, col_tiles_ - first) * start, full_ + 8 * slot);
    }
  }

  __device__ void multiply(float (&acc)[2 * W][NB][4], uint32_t stage, int chunk, int tile, int row_tiles,
                           int lane) const {
    constexpr int kPitch = kBlockTiles * 128;
    const uint32_t all = stage + Shape::kWeightBytes;
    const uint32_t rows = all + tile / kBlockTiles * args_.batch * kPitch + tile % kBlockTiles * 128;
    const uint32_t starts = all + kChunk * args_.batch * 128 + tile * Shape::start_bytes(args_.batch);
    uint32_t b[NB][8];
    typename Tile::Start start[NB];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      const int n = min(nb * 8 + (lane & 7), args_.batch - 1);  // rows beyond the batch are never stored
      uint32_t low[4], high[4];
      const uint32_t row = rows + n * kPitch;
      load_matrices(low, row + ((lane >> 3) ^ (n & 7)) * 16);
      load_matrices(high, row + ((lane >> 3 | 4) ^ (n & 7)) * 16);
#pragma unroll
      for (int k = 0; k < 4; ++k) b[nb][k] = low[k], b[nb][k + 4] = high[k];
      Tile::load_column_start(start[nb], starts, padded_rows(args_.batch), nb * 8 + (lane & 3) * 2);
    }
#pragma unroll
    for (int w = 0; w < 2 * W; ++w) {
      if (NB > 1 && w >= row_tiles) break;
      const typename Tile::Words words = Tile::load(stage + (w * kChunk + tile) * Tile::kBytes, lane);
      Tile::multiply(acc[w], words, b, start);
    }
  }

  /// The sums of all warps meet in shared memory, [class][row tile of the pair][column tile][part][lane]: a lane's four
  /// parts are rows g and g + 8 in columns 2t and 2t + 1. A warp finishes one part of a tile (SwiGLU: of both tiles).
  __device__ void reduce(const float (&acc)[2 * W][NB][4], int at, int row_tiles, int warp, int lane) const {
    constexpr int kColumns = Shape::kColumns, kParts = kColumns * 4;
    float* mine = reduce_ + warp * 2 * kParts * 32 + lane;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      if (2 * w >= row_tiles) break;
#pragma unroll
      for (int first = 0; first < NB; first += kColumns) {
        if (first * 8 >= args_.batch) break;
        named_barrier(1, kWideConsumers);  // closes: sums overwritten while read
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) mine[i * 32] = acc[2 * w + i / kParts][first + i / 4 % kColumns][i % 4];
        named_barrier(1, kWideConsumers);  // closes: sums read before all are there
        for (int i = warp; i < (pairs_ ? kParts : 2 * kParts); i += kWideWarps)
          finish(at, w, i / kParts, first * 8, i % kParts, lane);
      }
    }
  }

  /// Part `part` of kParts of row tile r of pair w (SwiGLU: of both), for the sequences from first_n on.
  __device__ void finish(int at, int w, int r, int first_n, int part, int lane) const {
    const int n = first_n + part / 4 * 8 + 2 * (lane & 3) + (part & 1);
    const int in_tile = (lane >> 2) + (part & 2) * 4, row = row_tile(at, w, r) * 16 + in_tile;
    if (n >= args_.batch || !real(at, w, r) || row >= args_.rows) return;
    float* out = static_cast<float*>(args_.out) + int64_t{n} * args_.rows + row;
    const float before = args_.finish == Finish::residual ? *out : 0.0f;  // it comes from far
    const float y = finish_sum<Tile>(args_, add_up(r, part, lane), in_tile, n, row);
    if (args_.finish == Finish::swiglu) {
      store_swiglu(args_, y, finish_sum<Tile>(args_, add_up(1, part, lane), in_tile, n, row + args_.rows / 2), n, row);
    } else {
      *out = args_.finish == Finish::residual ? before + y : y;
    }
  }

  __device__ float add_up(int r, int part, int lane) const {
    constexpr int kParts = Shape::kColumns * 4;
    float classes[kClasses];
#pragma unroll
    for (int c = 0; c < kClasses; ++c) classes[c] = reduce_[((c * 2 + r) * kParts + part) * 32 + lane];
    return add_classes(classes);
  }

  const GemmArgs& args_;
  const GemmRun run_;
  const bool pairs_;
  int stride_, col_tiles_, chunks_, stage_bytes_;
  uint32_t ring_, full_, empty_;
  float* reduce_;
};

template <class Shape>
__global__ void __launch_bounds__(kWideThreads, 1) gemm_wide_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  WideBlock<Shape> block(args, memory, full, empty);
  if (threadIdx.x == 0) block.initialise();
  __syncthreads();  // closes: barriers used before they are initialised
  release_next_kernel();
  if (threadIdx.x < kWideConsumers) {
    take_registers<kWideConsumerRegisters>();
    block.consume();
  } else {
    give_registers<kWideProducerRegisters>();
    if (threadIdx.x < kWideConsumers + 32) block.produce();
  }
}

template <class Shape>
void launch_wide(const char* op, GemmArgs args, cudaStream_t stream) {
  constexpr int kWholeSm = 232448 - 1024;
  const int stage = Shape::stage_bytes(args.batch), stages = (kWholeSm - Shape::kReduceBytes) / stage;
  args.stages = stages < kMaxStages ? stages : kMaxStages;
  const int units = args.finish == Finish::swiglu ? args.rows / 32 : (args.rows + 15) / 16;
  const int blocks = units < multiprocessors() ? units : multiprocessors();
  launch(op, gemm_wide_kernel<Shape>, dim3(blocks), dim3(kWideThreads), Shape::kReduceBytes + args.stages * stage,
         stream, args);
}

/// As many rows at a time as a block has, up to what the format's tiles allow.
template <class Tile>
void launch_wide_for(const char* op, const GemmArgs& args, cudaStream_t stream) {
  const bool pairs = args.finish == Finish::swiglu;
  const int units = pairs ? args.rows / 32 : (args.rows + 15) / 16;
  const int run = (units + multiprocessors() - 1) / multiprocessors(), wanted = pairs ? run : (run + 1) / 2;
  const auto with_rows = [&]<int W>(std::integral_constant<int, W>) {
    if (args.batch <= 8) return launch_wide<WideShape<Tile, 1, W>>(op, args, stream);
    if (args.batch <= 16) return launch_wide<WideShape<Tile, 2, W>>(op, args, stream);
    launch_wide<WideShape<Tile, 4, (Tile::kGroups == 2 && W > 3 ? 3 : W)>>(op, args,
                                                                           stream);  // start values: registers
  };
  if constexpr (Tile::kMostRowPairs >= 4) {
    if (wanted > 2) return with_rows(std::integral_constant<int, 4>{});
  }
  if constexpr (Tile::kMostRowPairs >= 2) {
    if (wanted > 1) return with_rows(std::integral_constant<int, 2>{});
  }
  with_rows(std::integral_constant<int, 1>{});
}

}  // namespace fut::cuda
