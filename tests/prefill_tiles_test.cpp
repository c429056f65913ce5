// How the card's prefill products are cut: host arithmetic, checked without a card.
#include "cuda/prefill_tiles.h"

#include <gtest/gtest.h>

namespace fut::cuda {
namespace {

TEST(PrefillTiles, CoverEveryOutputAndFitTheCard) {
  for (int multiprocessors : {132, 114, 2, 7}) {
    for (int narrowest : {64, 128}) {
      for (int64_t rows : {1, 127, 128, 129, 1000, 65536}) {
        for (int64_t cols : {64, 576, 960, 4096, 28672}) {
          const PrefillTiles t = choose_prefill_tiles(rows, cols, narrowest, multiprocessors);
          const int64_t height = int64_t{kPrefillTileRows} * t.cluster;
          EXPECT_GE(t.row_tiles * height, rows);
          EXPECT_LT((t.row_tiles - 1) * height, rows);
          EXPECT_GE(int64_t{t.col_tiles} * t.cols, cols);
          EXPECT_LT(int64_t{t.col_tiles - 1} * t.cols, cols);
          EXPECT_GE(t.cols, narrowest);
          EXPECT_GE(t.clusters, 1);
          EXPECT_LE(t.clusters * t.cluster, multiprocessors) << t.describe();
          EXPECT_LE(t.clusters, t.row_tiles * t.col_tiles);
          EXPECT_TRUE(t.group >= 1 && t.group <= t.row_tiles);
        }
      }
    }
  }
}

TEST(PrefillTiles, WideWhereTheyFillTheCardNarrowWhereNot) {
  EXPECT_EQ(choose_prefill_tiles(4096, 28672, 128, 132).cols, 256);
  EXPECT_EQ(choose_prefill_tiles(4096, 28672, 128, 132).cluster, 2);
  EXPECT_EQ(choose_prefill_tiles(1024, 4096, 64, 132).cols, 256);   // 128 blocks
  EXPECT_EQ(choose_prefill_tiles(1024, 6144, 128, 132).cols, 128);  // 192 wide ones would take two turns
  EXPECT_EQ(choose_prefill_tiles(256, 4096, 64, 132).cols, 64);
}

TEST(PrefillTiles, TellWhatTheyAre) {
  EXPECT_EQ(choose_prefill_tiles(4096, 4096, 64, 132).describe(), "128x256, clusters of 2, 16 x 16 on 66, groups of 8");
}

}  // namespace
}  // namespace fut::cuda
