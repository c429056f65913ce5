// Descriptions of matrices for the copy engine, which brings a box of one into shared memory swizzled.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/dtype.h"

namespace fut::cuda {

/// A row-major matrix (rows, cols) of bf16 or e4m3 at `data`, aligned to 16 bytes, its rows `row_bytes` apart (a
/// multiple of 16), read in boxes of `box_rows` rows and 128 bytes under the 128-byte swizzle: the 16-byte unit u of a
/// box's row r stands at u ^ (r % 8). What a box has beyond the matrix is zero.
CUtensorMap tensor_map(Dtype dtype, const void* data, int64_t rows, int64_t cols, int64_t row_bytes, int box_rows);

}  // namespace fut::cuda
