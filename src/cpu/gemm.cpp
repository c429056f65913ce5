#include "cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "layout/int4_fragment.h"

namespace fut::cpu {
namespace {

constexpr int64_t kBlockRows =
    kInt4TileRows;  // weight rows decoded at a time: an INT4 tile's, and they fit the L2 cache

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

int64_t padded_length(const Weight& w) { return round_up(w.cols, w.dtype == Dtype::int4 ? kInt4TileCols : kLanes); }

/// Operand rows in the order of the decoded weight rows, padded with zeros.
std::vector<float> arrange_operand(const float* a, int64_t rows, const Weight& w, int64_t length) {
  std::vector<float> arranged(rows * length);
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* from = a + t * w.cols;
      float* to = arranged.data() + t * length;
      if (w.dtype != Dtype::int4) {
        memcpy(to, from, w.cols * sizeof(float));
        continue;
      }
      for (int64_t k = 0; k < w.cols; ++k) {
        to[k / kInt4TileCols * kInt4TileCols + int4_position(static_cast<int>(k % kInt4TileCols))] = from[k];
      }
    }
  });
  return arranged;
}

/// Sixteen rows of an INT4 matrix as floats, s * (q - 8): exact, since 4 bits times 11 fit a float.
void decode_int4_rows(const Weight& w, int64_t first_row, float* to, int64_t length) {
  const int64_t tiles = int4_col_tiles(w.cols);
  const int tile_bytes = int4_tile_bytes(w.group);
  const uint8_t* tile = static_cast<const uint8_t*>(w.data) + first_row / kInt4TileRows * tiles * tile_bytes;
  float scale[kInt4TileRows][2];
  for (int64_t i = 0; i < tiles; ++i, tile += tile_bytes) {
    for (int row = 0; row < kInt4TileRows; ++row) {
      Half stored;
      memcpy(&stored, tile + int4_scale_offset(row, 0, w.group), sizeof stored);
      scale[row][0] = scale[row][1] = to_f32(stored);
      if (w.group >= kInt4TileCols) continue;
      memcpy(&stored, tile + int4_scale_offset(row, 32, w.group), sizeof stored);
      scale[row][1] = to_f32(stored);
    }
    simd().int4_tile(tile, kInt4Zero, scale, to + i * kInt4TileCols, length);
  }
}

/// Rows [first, first + count) as floats, `length` apart, zeros behind the K-th. E4M3: without the row's scale.
void decode_rows(const Weight& w, int64_t first, int64_t count, float* to, int64_t length) {
  if (w.dtype == Dtype::int4) return decode_int4_rows(w, first, to, length);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t start = (first + r) * w.cols;
    float* row = to + r * length;
    switch (w.dtype) {
      case Dtype::f32: memcpy(row, static_cast<const float*>(w.data) + start, w.cols * sizeof(float)); break;
      case Dtype::bf16: simd().bf16_to_f32(static_cast<const uint16_t*>(w.data) + start, row, w.cols); break;
      case Dtype::e4m3: simd().e4m3_to_f32(static_cast<const uint8_t*>(w.data) + start, row, w.cols); break;
      default: fail("gemm: a weight in ", name_of(w.dtype), " is not supported");
    }
    std::fill(row + w.cols, row + length, 0.0f);
  }
}

}  // namespace

void gemm(float* y, const float* a, int64_t rows, const Weight& weight) {
  if (rows == 0) return;
  const int64_t length = padded_length(weight);
  const std::vector<float> operand = arrange_operand(a, rows, weight, length);
  parallel_for(weight.rows, kBlockRows, [&](int64_t begin, int64_t end) {
    std::vector<float> block(kBlockRows * length);
    for (int64_t n = begin; n < end; n += kBlockRows) {
      const int64_t count = std::min(kBlockRows, end - n);
      decode_rows(weight, n, count, block.data(), length);
      simd().dot(block.data(), length, count, operand.data(), length, rows, length, y + n, weight.rows);
      if (weight.dtype != Dtype::e4m3) continue;
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t r = 0; r < count; ++r) y[t * weight.rows + n + r] *= weight.scale[n + r];
      }
    }
  });
}

void gemm_reference(double* y, const float* a, int64_t rows, const Weight& weight) {
  const auto value = [&](int64_t n, int64_t k) -> double {
    const int64_t i = n * weight.cols + k;
    switch (weight.dtype) {
      case Dtype::f32: return static_cast<const float*>(weight.data)[i];
      case Dtype::bf16: return to_f32(static_cast<const Bf16*>(weight.data)[i]);
      case Dtype::e4m3: return double{to_f32(static_cast<const E4m3*>(weight.data)[i])} * weight.scale[n];
      case Dtype::int4: return int4_value(static_cast<const uint8_t*>(weight.data), n, k, weight.cols, weight.group);
      case Dtype::f16: break;
    }
    fail("gemm: a weight in ", name_of(weight.dtype), " is not supported");
  };
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t n = 0; n < weight.rows; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < weight.cols; ++k) sum += value(n, k) * a[t * weight.cols + k];
      y[t * weight.rows + n] = sum;
    }
  }
}

}  // namespace fut::cpu
