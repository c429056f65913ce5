// The one loop that a data-driven quantiser spends its time in.
#pragma once

#include <cstdint>

namespace fut {

/// Matrices are cut into panels of 32 columns, each stored by itself: (rows, 32) row-major.
inline constexpr int64_t kPanel = 32;

/// c (32, 32) += a^T b with a, b (depth, 32). Every element is a sum in order of depth, products and sums rounded one
/// by one, so that it is the same number on every machine.
void panel_product(float* c, const float* a, const float* b, int64_t depth);

}  // namespace fut
