// THE INT4 weight layout: which nibble holds weight (row, k), and which lane of a warp reads it.
//
// A matrix W (N, K) is cut into tiles of 16 rows x 64 k. A tile is the A operand of four m16n8k16 tensor-core steps, in
// the order in which the lanes of a warp hold it: lane l = 4 g + t reads its 16 bytes with one load, and word s of them
// is its whole A fragment of k-step s. Masking with 0x000f000f and 0x00f000f0, then again after a shift by 8, turns the
// word into the fragment's four registers without a shuffle.
//
//   word s of lane 4 g + t, low bits first (r = g, R = g + 8; columns k - 16 s):
//
//     bits    0-3      4-7      8-11      12-15     16-19     20-23     24-27     28-31
//           (r, 2t)  (R, 2t)  (r, 2t+8) (R, 2t+8) (r, 2t+1) (R, 2t+1) (r, 2t+9) (R, 2t+9)
//     register a0       a1        a2        a3     a0 high   a1 high   a2 high   a3 high
//
//   tile = 512 bytes of codes, then for each of its max(1, 64 / G) groups 16 FP16 scales, rows ordered 0 8 1 9 .. 7 15,
//          so that a lane finds the scales of rows g and g + 8 side by side. G = 64: 544 bytes a tile, 0.531 a weight.
//   matrix = tiles [ceil(N / 16)][ceil(K / 64)]; the padding holds code 8, which is zero.
//
// The value is w = s * (q - 8), with a signed FP16 scale s: whichever sign the largest magnitude has, it can be given
// code 0 and so the full range of -8.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace fut {

inline constexpr int kInt4TileRows = 16;
inline constexpr int kInt4TileCols = 64;
inline constexpr int kInt4TileCodeBytes = kInt4TileRows * kInt4TileCols / 2;
inline constexpr int kInt4Zero = 8;  ///< the code of the value zero

/// Where one code lies in a tile.
struct Int4Place {
  int lane;    ///< 0..31
  int word;    ///< 0..3, the k-step
  int nibble;  ///< 0..7, low bits first

  constexpr int byte() const { return lane * 16 + word * 4 + nibble / 2; }
  constexpr int shift() const { return nibble % 2 * 4; }
  constexpr bool operator==(const Int4Place&) const = default;
};

/// (row 0..15, k 0..63) -> place.
FUT_HD constexpr Int4Place int4_place(int row, int k) {
  return {(row & 7) * 4 + (k & 7) / 2, k / 16, (row >> 3) + (k >> 3 & 1) * 2 + (k & 1) * 4};
}

struct Int4Coordinate {
  int row, k;
  constexpr bool operator==(const Int4Coordinate&) const = default;
};

/// place -> (row, k): the inverse of int4_place.
FUT_HD constexpr Int4Coordinate int4_coordinate(Int4Place p) {
  return {(p.lane >> 2) + (p.nibble & 1) * 8,
          p.word * 16 + (p.lane & 3) * 2 + (p.nibble >> 2) + (p.nibble >> 1 & 1) * 8};
}

/// Position of column k (0..63) when a row's codes are read word by word: word s, then lanes t = 0..3, then bytes. It
/// is the order in which a CPU reads a row, and 16 consecutive positions are 16 consecutive k.
FUT_HD constexpr int int4_position(int k) { return k / 16 * 16 + (k & 7) / 2 * 4 + (k & 1) * 2 + (k >> 3 & 1); }

namespace detail {
constexpr bool int4_map_is_a_bijection() {
  bool seen[kInt4TileCodeBytes * 2] = {};
  for (int row = 0; row < kInt4TileRows; ++row) {
    for (int k = 0; k < kInt4TileCols; ++k) {
      const Int4Place place = int4_place(row, k);
      const int slot = place.byte() * 2 + place.nibble % 2;
      if (seen[slot] || int4_coordinate(place) != Int4Coordinate{row, k}) return false;
      seen[slot] = true;
    }
  }
  return true;
}
}  // namespace detail
static_assert(detail::int4_map_is_a_bijection());
static_assert(int4_place(3, 5) == Int4Place{14, 0, 4});  // row 3, k 5: lane 4*3+2, upper half of register a0
static_assert(int4_place(11, 61) == Int4Place{14, 3, 7});

FUT_HD constexpr int int4_groups_per_tile(int group) { return group >= kInt4TileCols ? 1 : kInt4TileCols / group; }
FUT_HD constexpr int int4_tile_bytes(int group) {
  return kInt4TileCodeBytes + 2 * kInt4TileRows * int4_groups_per_tile(group);
}
static_assert(int4_tile_bytes(64) == 544);

/// Byte offset, in a tile, of the scale of (row 0..15, k 0..63).
FUT_HD constexpr int int4_scale_offset(int row, int k, int group) {
  const int group_in_tile = group >= kInt4TileCols ? 0 : k / group;
  return kInt4TileCodeBytes + 2 * (group_in_tile * kInt4TileRows + (row & 7) * 2 + (row >> 3));
}

constexpr int64_t int4_row_tiles(int64_t rows) { return (rows + kInt4TileRows - 1) / kInt4TileRows; }
constexpr int64_t int4_col_tiles(int64_t cols) { return (cols + kInt4TileCols - 1) / kInt4TileCols; }
constexpr int64_t int4_matrix_bytes(int64_t rows, int64_t cols, int group) {
  return int4_row_tiles(rows) * int4_col_tiles(cols) * int4_tile_bytes(group);
}

inline constexpr int kInt4Group = 64;  ///< where nothing else is asked for

/// Group sizes the layout knows: a group is a whole number of k-steps, and tiles and groups divide one another.
constexpr bool int4_group_size_ok(int group) { return group == 32 || group == 64 || group == 128; }

/// Row-major codes and scales, as checkpoints store them, into tiles.
/// codes: (N, ceil(K / 8)) 32-bit words, lowest nibble first along K.  scales: (N, ceil(K / G)); a last group may be
/// short.  tiles: int4_matrix_bytes(rows, cols, group).
void pack_int4(uint8_t* tiles, const uint32_t* codes, const Half* scales, int64_t rows, int64_t cols, int group);

/// The inverse of pack_int4.
void unpack_int4(uint32_t* codes, Half* scales, const uint8_t* tiles, int64_t rows, int64_t cols, int group);

/// One weight out of the tiles, exactly: the plain reference's way of reading a matrix.
float int4_value(const uint8_t* tiles, int64_t row, int64_t col, int64_t cols, int group);

}  // namespace fut
