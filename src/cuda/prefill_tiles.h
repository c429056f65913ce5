// How a prefill product is cut: plain host arithmetic, printable and tested without a card.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace fut::cuda {

/// Rows of a tile. Its columns are 256, or fewer where that leaves fewer multiprocessors idle.
inline constexpr int kPrefillTileRows = 128;

/// Tiles of kPrefillTileRows x `cols`, in the order in which clusters take them: `group` cluster rows, column by
/// column, then the next `group`. The blocks of a cluster take tiles below one another and share what they read of W.
struct PrefillTiles {
  int cols = 256;
  int cluster = 1;    ///< blocks, 1 or 2
  int row_tiles = 0;  ///< of a cluster's kPrefillTileRows * cluster rows
  int col_tiles = 0;
  int group = 1;
  int clusters = 0;  ///< launched at once; each takes every clusters-th tile

  std::string describe() const {
    return cat(kPrefillTileRows, "x", cols, ", clusters of ", cluster, ", ", row_tiles, " x ", col_tiles, " on ",
               clusters, ", groups of ", group);
  }
};

/// Time of a k-step of a tile, for comparison only: few columns use the tensor cores less well, since more has to be
/// brought for each product (docs/PERF.md).
inline double prefill_tile_cost(int cols) { return cols == 256 ? 1.0 : cols == 128 ? 0.55 : 0.4; }

/// The cheapest cut of a product of (rows, cols) outputs into tiles of at least `narrowest` columns. Clusters of two:
/// the kernels run with blocks alone too, but that has been timed only, not held against the reference.
inline PrefillTiles choose_prefill_tiles(int64_t rows, int64_t cols, int narrowest, int multiprocessors) {
  constexpr int kCluster = 2;
  PrefillTiles best;
  double best_cost = 0;
  for (int tile_cols = 256; tile_cols >= narrowest; tile_cols /= 2) {
    PrefillTiles t;
    t.cols = tile_cols;
    t.cluster = kCluster;
    constexpr int64_t kHeight = int64_t{kPrefillTileRows} * kCluster;
    t.row_tiles = static_cast<int>((rows + kHeight - 1) / kHeight);
    t.col_tiles = static_cast<int>((cols + tile_cols - 1) / tile_cols);
    t.group = std::min(t.row_tiles, 16 / kCluster);
    const int64_t tiles = int64_t{t.row_tiles} * t.col_tiles;
    t.clusters = static_cast<int>(std::min<int64_t>(multiprocessors / kCluster, tiles));
    const double cost = static_cast<double>((tiles + t.clusters - 1) / t.clusters) * prefill_tile_cost(tile_cols);
    if (best.clusters == 0 || cost < best_cost) best = t, best_cost = cost;
  }
  return best;
}

}  // namespace fut::cuda
