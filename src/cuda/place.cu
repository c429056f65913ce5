// Host code: row-major weights into tiles (weight_tile.cuh).
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
#include "cuda/gemm_decode.h"
#include "cuda/place.h"
#include "layout/int4_fragment.h"

namespace fut::cuda {
namespace {

/// Where element (row, k) of a tile stands, counted in elements: fragments a0 .. a3 of a k-step side by side in a lane,
/// two elements each; E4M3 keeps two k-steps in a lane's 16 bytes, BF16 one.
int tile_position(int row, int k, Dtype dtype) {
  const Int4Place place = int4_place(row, k);
  const int part = (place.nibble & 3) * 2 + (place.nibble >> 2);
  if (dtype == Dtype::bf16) return place.word * 256 + place.lane * 8 + part;
  return place.word / 2 * 512 + place.lane * 16 + place.word % 2 * 8 + part;
}

template <class T>
void arrange(T* tiles, const T* rows, const HostWeight& w) {
  const int64_t col_tiles = w.cols / 64;
  parallel_for(int4_row_tiles(w.rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * 16; n < std::min(end * 16, w.rows); ++n) {
      for (int64_t k = 0; k < w.cols; ++k) {
        const int64_t tile = n / 16 * col_tiles + k / 64;
        tiles[tile * 1024 + tile_position(static_cast<int>(n % 16), static_cast<int>(k % 64), w.dtype)] =
            rows[n * w.cols + k];
      }
    }
  });
}

}  // namespace

std::vector<uint8_t> make_tiles(const HostWeight& w) {
  const int tile_bytes = weight_tile_bytes(w.dtype, w.group);
  FUT_CHECK(w.cols % 64 == 0, "backend cuda: a weight of ", w.rows, " x ", w.cols, ": K is no multiple of 64");
  std::vector<uint8_t> tiles(static_cast<size_t>(int4_row_tiles(w.rows) * (w.cols / 64) * tile_bytes));
  if (w.dtype == Dtype::int4) {
    pack_int4(tiles.data(), reinterpret_cast<const uint32_t*>(w.data.data()), w.group_scale.data(), w.rows, w.cols,
              w.group);
  } else if (w.dtype == Dtype::bf16) {
    arrange(reinterpret_cast<uint16_t*>(tiles.data()), reinterpret_cast<const uint16_t*>(w.data.data()), w);
  } else {
    arrange(tiles.data(), w.data.data(), w);
  }
  return tiles;
}

}  // namespace fut::cuda
