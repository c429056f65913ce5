#include "layout/int4_fragment.h"

#include <cstring>

#include "base/error.h"
#include "base/parallel.h"

namespace fut {
namespace {

struct Tiles {
  int64_t col_tiles;
  int tile_bytes;

  Tiles(int64_t cols, int group) : col_tiles(int4_col_tiles(cols)), tile_bytes(int4_tile_bytes(group)) {}
  int64_t offset(int64_t row, int64_t col) const {
    return (row / kInt4TileRows * col_tiles + col / kInt4TileCols) * tile_bytes;
  }
};

int row_in_tile(int64_t row) { return static_cast<int>(row % kInt4TileRows); }
int col_in_tile(int64_t col) { return static_cast<int>(col % kInt4TileCols); }

}  // namespace

void pack_int4(uint8_t* tiles, const uint32_t* codes, const Half* scales, int64_t rows, int64_t cols, int group) {
  FUT_CHECK(int4_group_size_ok(group), "INT4 group size ", group, " is not 32, 64 or 128");
  const Tiles map(cols, group);
  const int64_t words = (cols + 7) / 8, groups = (cols + group - 1) / group;
  parallel_for(int4_row_tiles(rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin * map.col_tiles; tile < end * map.col_tiles; ++tile) {
      uint8_t* out = tiles + tile * map.tile_bytes;
      memset(out, kInt4Zero * 0x11, kInt4TileCodeBytes);
      memset(out + kInt4TileCodeBytes, 0, map.tile_bytes - kInt4TileCodeBytes);
      const int64_t row0 = tile / map.col_tiles * kInt4TileRows, col0 = tile % map.col_tiles * kInt4TileCols;
      for (int r = 0; r < kInt4TileRows && row0 + r < rows; ++r) {
        const uint32_t* row_codes = codes + (row0 + r) * words;
        for (int k = 0; k < kInt4TileCols && col0 + k < cols; ++k) {
          const int64_t col = col0 + k;
          const uint8_t code = row_codes[col / 8] >> (col % 8 * 4) & 15;
          const Int4Place place = int4_place(r, k);
          uint8_t& byte = out[place.byte()];
          byte = static_cast<uint8_t>((byte & ~(15 << place.shift())) | code << place.shift());
          if (k % 32 == 0) {
            memcpy(out + int4_scale_offset(r, k, group), &scales[(row0 + r) * groups + col / group], sizeof(Half));
          }
        }
      }
    }
  });
}

void unpack_int4(uint32_t* codes, Half* scales, const uint8_t* tiles, int64_t rows, int64_t cols, int group) {
  FUT_CHECK(int4_group_size_ok(group), "INT4 group size ", group, " is not 32, 64 or 128");
  const Tiles map(cols, group);
  const int64_t words = (cols + 7) / 8, groups = (cols + group - 1) / group;
  memset(codes, 0, rows * words * sizeof(uint32_t));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const uint8_t* tile = tiles + map.offset(row, col);
      const Int4Place place = int4_place(row_in_tile(row), col_in_tile(col));
      const uint32_t code = tile[place.byte()] >> place.shift() & 15;
      codes[row * words + col / 8] |= code << (col % 8 * 4);
      const int scale_offset = int4_scale_offset(row_in_tile(row), col_in_tile(col), group);
      memcpy(&scales[row * groups + col / group], tile + scale_offset, sizeof(Half));
    }
  }
}

float int4_value(const uint8_t* tiles, int64_t row, int64_t col, int64_t cols, int group) {
  const uint8_t* tile = tiles + Tiles(cols, group).offset(row, col);
  const Int4Place place = int4_place(row_in_tile(row), col_in_tile(col));
  Half scale;
  memcpy(&scale, tile + int4_scale_offset(row_in_tile(row), col_in_tile(col), group), sizeof scale);
  return to_f32(scale) * static_cast<float>((tile[place.byte()] >> place.shift() & 15) - kInt4Zero);
}

}  // namespace fut
