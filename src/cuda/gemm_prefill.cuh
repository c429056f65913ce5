// MATH       y = a W^T for many rows, and what follows it on the accumulators (prefill_epilogues.cuh).
// SHAPES     a (M, K), W (N, K) row-major e4m3 or bf16; any M and N, rows of a multiple of 16 bytes.
// LAYOUT     A stage holds 128 bytes of K of 128 rows of a and of `kCols` rows of W, swizzled by the copy engine. The
//            rows of W come in two halves, wherever they are, so that gate and up rows of the same outputs meet in one
//            thread. Within each 32 they are stored in the order of prefill_output(): a thread's accumulators are eight
//            neighbouring outputs, and a head's channels i and i + E / 2 meet in it too.
// SCHEDULE   One block an SM, persistent; clusters of one or two blocks, one below the other. Warp 0 brings operands
// into a
//            ring of stages, two warpgroups multiply, 64 rows each, and finish their rows in registers: nothing of the
//            output is staged or exchanged. Of a cluster's two blocks each brings one half of W for both. A stage is
//            free when the multiplying warps of all blocks that it was brought for have said so. Weights depend on no
//            kernel before: the first stages' are asked for before this one waits.
// NUMERICS   E4M3: wgmma keeps about 14 bits of each sum; FP32 from there on. BF16: FP32.
// ROOFLINE   2 M N K operations; docs/PERF.md.
// REFERENCE  The split into a copying and two multiplying groups of warps: CUTLASS, DeepGEMM.
#pragma once

#include <type_traits>

#include "cuda/gemm_prefill.h"
#include "cuda/launch.cuh"
#include "cuda/prefill_epilogues.cuh"
#include "cuda/ptx.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"

namespace fut::cuda {

template <class Element, int kTileCols, class Epilogue>
struct PrefillShape {
  static constexpr int kCols = kTileCols, kStepBytes = 128, kDepth = kStepBytes / static_cast<int>(sizeof(Element));
  static constexpr int kABytes = kPrefillTileRows * kStepBytes, kBBytes = kCols * kStepBytes,
                       kStageBytes = kABytes + kBBytes;
  static constexpr int kXBytes = Epilogue::kBands ? kPrefillTileRows * kCols * 2 : 0;  // a tile of the residual
  static constexpr int kStages = ((Epilogue::kBands ? 208 : 192) * 1024 - kXBytes) / kStageBytes;
  static constexpr int kColumnBytes = 2 * kCols * 4;  // scales and biases
  static constexpr int kXAt = kStages * kStageBytes, kColumnsAt = kXAt + kXBytes,
                       kBarriersAt = kColumnsAt + kColumnBytes;
  static constexpr int kBandAt = kBarriersAt + (2 * kStages + 6) * 8;
  static constexpr int kSharedBytes = kBandAt + ResidualEpilogue::kBandBytes;
  static constexpr int kMultipliers = 2, kThreads = 128 * (1 + kMultipliers);
};

/// Cluster row and column of a tile.
__device__ inline int2 prefill_tile(int tile, const PrefillCut& c) {
  const int per_group = c.group * c.col_tiles, first = tile / per_group * c.group;
  const int height = min(c.row_tiles - first, c.group), rest = tile % per_group;
  return {first + rest % height, rest / height};
}

template <class Shape>
struct PrefillRing {
  uint32_t base;
  __device__ uint32_t a(int stage) const { return base + stage * Shape::kStageBytes; }
  __device__ uint32_t b(int stage) const { return a(stage) + Shape::kABytes; }
  __device__ uint32_t columns() const { return base + Shape::kColumnsAt; }
  __device__ uint32_t full(int stage) const { return base + Shape::kBarriersAt + stage * 16; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t columns_full() const { return full(Shape::kStages); }
  __device__ uint32_t columns_empty() const { return empty(Shape::kStages); }
  __device__ uint32_t tile_left() const { return full(Shape::kStages + 1); }
  __device__ uint32_t tile_seen() const { return empty(Shape::kStages + 1); }
  __device__ uint32_t x() const { return base + Shape::kXAt; }
  __device__ uint32_t x_full() const { return full(Shape::kStages + 2); }
};

/// A place in the ring and how often it has come round.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t round = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
};

struct PrefillColumns {
  const float *scale, *bias;  // (N) or null each
};

/// The copying thread.
template <class Shape>
__device__ void prefill_copies(const PrefillRing<Shape>& ring, const CUtensorMap& a_map, const CUtensorMap& b_map,
                               const PrefillCut& cut, const PrefillColumns& columns, int rank, int cluster, int first,
                               int count, int tiles) {
  constexpr int kHalf = Shape::kCols / 2;
  RingPlace<Shape::kStages> place;
  int step = 0;
  const auto bring_b = [&](int stage, int k, int row) {
    if (cluster == 1) {
      tensor_copy(ring.b(stage), &b_map, k * Shape::kDepth, row, ring.full(stage));
      tensor_copy(ring.b(stage) + kHalf * Shape::kStepBytes, &b_map, k * Shape::kDepth, row + cut.half_stride,
                  ring.full(stage));
    } else {
      tensor_copy(ring.b(stage) + rank * kHalf * Shape::kStepBytes, &b_map, k * Shape::kDepth,
                  row + rank * cut.half_stride, ring.full(stage), 3);
    }
  };
  const auto bring_columns = [&](int row) {
    const int here[2] = {min(kHalf, cut.cols - row), max(0, min(kHalf, cut.cols - row - cut.half_offset))};
    const int kinds = (columns.scale != nullptr) + (columns.bias != nullptr);
    barrier_expect(ring.columns_full(), kinds * (here[0] + here[1]) * 4);
    for (int half = 0; half < 2; ++half) {
      const uint32_t to = ring.columns() + half * kHalf * 4;
      const int from = row + half * cut.half_stride, bytes = here[half] * 4;
      if (columns.scale && bytes) bulk_copy(to, columns.scale + from, bytes, ring.columns_full());
      if (columns.bias && bytes) bulk_copy(to + Shape::kCols * 4, columns.bias + from, bytes, ring.columns_full());
    }
  };
#pragma unroll 1
  for (int tile = first, turn = 0; tile < tiles; tile += count, ++turn) {
    const int2 at = prefill_tile(tile, cut);
    const int a_row = (at.x * cluster + rank) * kPrefillTileRows, b_row = at.y * cut.tile_stride;
    // Until the kernels before have ended: weights alone, as far as the ring goes.
    const int early = turn == 0 ? min(Shape::kStages, cut.steps) : 0;
#pragma unroll 1
    for (int k = 0; k < early; ++k) {
      barrier_expect(ring.full(k), Shape::kStageBytes);
      bring_b(k, k, b_row);
    }
    if (turn == 0) wait_for_previous_kernel();
    const int filled = min(Shape::kStages, cut.steps) - 1;
#pragma unroll 1
    for (int k = 0; k < cut.steps; ++k, ++step) {
      if (k >= early) {
        if (step >= Shape::kStages) barrier_wait(ring.empty(place.stage), place.round ^ 1);
        barrier_expect(ring.full(place.stage), Shape::kStageBytes);
      }
      tensor_copy(ring.a(place.stage), &a_map, k * Shape::kDepth, a_row, ring.full(place.stage));
      if (k >= early) bring_b(place.stage, k, b_row);
      if (k == filled) {  // not before: those of the last tile may still be in use
        if (turn > 0) barrier_wait(ring.columns_empty(), (turn & 1) ^ 1);
        bring_columns(b_row);
      }
      place.next();
    }
  }
}

/// Warps 1 to 3 where an epilogue changes x: they bring and take away its tiles, and finish bands of rows.
template <class Epilogue, class Shape>
__device__ void prefill_bands(const PrefillRing<Shape>& ring, const CUtensorMap& x_map, const PrefillCut& cut,
                              const typename Epilogue::Output& out, int rank, int cluster, int first, int count,
                              int tiles, float* shared) {
  const auto bring = [&](int tile) {
    const int2 at = prefill_tile(tile, cut);
    Epilogue::template bring<Shape::kCols>(x_map, ring.x(), at.x * cluster + rank, at.y, ring.x_full());
  };
  wait_for_previous_kernel();
  if (threadIdx.x == 32) bring(first);
#pragma unroll 1
  for (int tile = first, turn = 0; tile < tiles; tile += count, ++turn) {
    const int2 at = prefill_tile(tile, cut);
    const int row_tile = at.x * cluster + rank;
    barrier_wait(ring.tile_left(), turn & 1);
    if (threadIdx.x == 32) {
      Epilogue::template take_away<Shape::kCols>(x_map, ring.x(), row_tile, at.y);
      wait_stores_read();
      if (tile + count < tiles) bring(tile + count);
      wait_stores();
    }
    Epilogue::finish_band(out, cut, row_tile, shared);
    barrier_arrive(ring.tile_seen());
  }
}

/// The products of a tile's 64 rows of this warpgroup. meanwhile(): what can be asked for under the last of them.
template <class Element, class Shape, class Meanwhile>
__device__ void prefill_products(float (&acc)[Shape::kCols / 2], const PrefillRing<Shape>& ring,
                                 RingPlace<Shape::kStages>& place, int steps, int group, int cluster,
                                 Meanwhile meanwhile) {
  constexpr int kSteps = 4;  // of 32 bytes in a stage
  const uint64_t operand = operand_at(ring.base);
  const auto release = [&](int stage) {
    const int lane = thread_index() % 32;
    if (lane < cluster) barrier_arrive_remote(ring.empty(stage), lane);
  };
  int before = 0;
  for (int k = 0; k < steps; ++k) {
    barrier_wait(ring.full(place.stage), place.round);
    const uint64_t stage = operand + place.stage * (Shape::kStageBytes / 16), a = stage + group * (64 * 128 / 16),
                   b = stage + Shape::kABytes / 16;
    open_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply(Element{}, acc, a + 2 * i, b + 2 * i, k > 0 || i > 0);
    commit_products();
    wait_products<1>();
    if (k > 0) release(before);
    before = place.stage;
    place.next();
  }
  meanwhile();
  wait_products<0>();
  settle(acc);
  release(before);
}

template <class Element, int kTileCols, class Epilogue>
__global__ void __launch_bounds__(PrefillShape<Element, kTileCols, Epilogue>::kThreads, 1)
    gemm_prefill_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                        const __grid_constant__ CUtensorMap x_map, const __grid_constant__ PrefillCut cut,
                        const __grid_constant__ PrefillInput input, const __grid_constant__ PrefillColumns columns,
                        const __grid_constant__ typename Epilogue::Output out, int cluster) {
  using Shape = PrefillShape<Element, kTileCols, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillRing<Shape> ring{shared_address(shared)};
  const int group = threadIdx.x / 128, rank = cluster > 1 ? cluster_rank() : 0;
  const int first = blockIdx.x >> (cluster - 1), count = gridDim.x >> (cluster - 1);  // of clusters
  const int tiles = cut.row_tiles * cut.col_tiles;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(ring.full(s), 1);
      barrier_init(ring.empty(s), cluster * 4 * Shape::kMultipliers);
    }
    barrier_init(ring.columns_full(), 1);
    barrier_init(ring.columns_empty(), 4 * Shape::kMultipliers);
    barrier_init(ring.tile_left(), 4 * Shape::kMultipliers);
    barrier_init(ring.tile_seen(), ResidualEpilogue::kThreads);
    barrier_init(ring.x_full(), 1);
    barrier_init_fence();
    prefetch_tensor_map(&a_map);
    prefetch_tensor_map(&b_map);
  }
  // Scales of columns that there are none of: their products are zeros, and zeros they shall stay.
  for (int i = threadIdx.x; i < Shape::kColumnBytes / 4; i += Shape::kThreads)
    store_shared_4(ring.columns() + 4 * i, 0);
  copy_engine_fence();
  __syncthreads();                     // closes: barriers used before they are there
  if (cluster > 1) cluster_barrier();  // closes: the same, by the other block
  release_next_kernel();
  if (group == 0) {
    give_registers<40>();  // with the others' 232 what a block of 384 threads has: more, and it would wait for ever
    if (threadIdx.x == 0) prefill_copies<Shape>(ring, a_map, b_map, cut, columns, rank, cluster, first, count, tiles);
    if constexpr (Epilogue::kBands) {
      if (threadIdx.x >= 32)
        prefill_bands<Epilogue, Shape>(ring, x_map, cut, out, rank, cluster, first, count, tiles,
                                       reinterpret_cast<float*>(shared + Shape::kBandAt));
    }
    __syncwarp();
  } else {
    take_registers<232>();
    wait_for_previous_kernel();
    RingPlace<Shape::kStages> place;
    for (int tile = first, turn = 0; tile < tiles; tile += count, ++turn) {
      const int2 at = prefill_tile(tile, cut);
      const int row_tile = at.x * cluster + rank;
      const PrefillPlace<kTileCols> here{
          cut,
          ring.columns(),
          columns.bias != nullptr,
          at.y,
          row_tile,
          row_tile * kPrefillTileRows + (thread_index() - 128) / 32 * 16 + thread_index() % 32 / 4};
      typename Epilogue::template Ahead<kTileCols> ahead;
      float acc[Shape::kCols / 2], factor[2];
      prefill_products<Element, Shape>(acc, ring, place, cut.steps, group - 1, cluster, [&] {
        for (int half = 0; half < 2; ++half) factor[half] = here.row_factor(input, half);
        ahead.load(out, here);
      });
      constexpr bool kHasScale = std::is_same_v<Element, E4m3>;
      const auto free_columns = [&] {
        __syncwarp();
        if (thread_index() % 32 == 0) barrier_arrive(ring.columns_empty());
      };
      barrier_wait(ring.columns_full(), turn & 1);
      if constexpr (Epilogue::kBands) {
        barrier_wait(ring.x_full(), turn & 1);
        Epilogue::finish(acc, factor, kHasScale, out, here, ahead, ring.x());
        free_columns();
        if (turn > 0) barrier_wait(ring.tile_seen(), (turn & 1) ^ 1);  // or one could be missed
        __syncwarp();
        if (thread_index() % 32 == 0) barrier_arrive(ring.tile_left());
      } else {
        here.finish_products(acc, factor, kHasScale);
        free_columns();
        Epilogue::finish(acc, out, here, ahead);
      }
    }
  }
  if (cluster > 1)
    cluster_barrier();  // closes: a block that ends while the other still sends to it or frees its stages
}

template <class Element, int kTileCols, class Epilogue>
void launch_prefill(const char* op, const Weight& w, const PrefillInput& a, const typename Epilogue::Output& out,
                    const PrefillTiles& tiles, cudaStream_t stream) {
  using Shape = PrefillShape<Element, kTileCols, Epilogue>;
  constexpr int kHalf = kTileCols / 2;
  PrefillCut cut;
  cut.rows = a.rows;
  cut.width = static_cast<int>(w.cols);
  cut.steps = static_cast<int>((w.cols + Shape::kDepth - 1) / Shape::kDepth);
  cut.row_tiles = tiles.row_tiles;
  cut.col_tiles = tiles.col_tiles;
  cut.group = tiles.group;
  cut.tile_stride = Epilogue::kPaired ? kHalf : kTileCols;
  cut.half_stride = Epilogue::kPaired ? static_cast<int>(w.rows / 2) : kHalf;
  cut.half_offset = Epilogue::kPaired ? 0 : kHalf;
  cut.cols = static_cast<int>(Epilogue::kPaired ? w.rows / 2 : w.rows);
  const int64_t row_bytes = w.cols * static_cast<int64_t>(sizeof(Element));
  const CUtensorMap a_map = tensor_map(w.dtype, a.data, a.rows, w.cols, row_bytes, kPrefillTileRows),
                    b_map = tensor_map(w.dtype, w.data, w.rows, w.cols, row_bytes, kHalf);
  CUtensorMap x_map = a_map;
  if constexpr (Epilogue::kBands)
    x_map = plain_tensor_map(Dtype::bf16, out.residual.x, a.rows, w.rows, w.rows * 2, kPrefillTileRows);
  launch_clusters(op, gemm_prefill_kernel<Element, kTileCols, Epilogue>, tiles.clusters * tiles.cluster, tiles.cluster,
                  Shape::kThreads, Shape::kSharedBytes, stream, a_map, b_map, x_map, cut, a,
                  PrefillColumns{w.scale, w.bias}, out, tiles.cluster);
}

/// The kernel for a weight and a cut.
template <class Epilogue>
void dispatch_prefill(const char* op, const Weight& w, const PrefillInput& a, const typename Epilogue::Output& out,
                      cudaStream_t stream) {
  FUT_CHECK(gemm_prefill_takes(w), op, ": a weight in ", name_of(w.dtype), " that was not placed for prefill");
  const PrefillTiles tiles = choose_prefill_tiles(a.rows, w.rows, Epilogue::kNarrowest, multiprocessors());
  const auto cols = [&]<class Element>(Element) {
    if constexpr (Epilogue::kNarrowest == 64) {
      if (tiles.cols == 64) return launch_prefill<Element, 64, Epilogue>(op, w, a, out, tiles, stream);
    }
    tiles.cols == 256 ? launch_prefill<Element, 256, Epilogue>(op, w, a, out, tiles, stream)
                      : launch_prefill<Element, 128, Epilogue>(op, w, a, out, tiles, stream);
  };
  w.dtype == Dtype::e4m3 ? cols(E4m3{}) : cols(Bf16{});
}

}  // namespace fut::cuda
