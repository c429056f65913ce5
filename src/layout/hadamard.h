// The rotation that spreads outliers before 4-bit rounding: x -> H D x / sqrt(n), block by block, with H the Hadamard
// matrix of a power of two and D a fixed random diagonal of signs. Orthogonal, so that dot products of two rotated
// vectors are those of the originals. (Idea: QuIP#, QuaRot.)
#pragma once

#include <cmath>
#include <cstdint>

#include "base/dtype.h"

namespace fut {

inline constexpr int kHadamardMaxBlock = 128;

/// Largest power of two that divides `width`, at most kHadamardMaxBlock.
FUT_HD constexpr int hadamard_block(int width) {
  int block = 1;
  while (block < kHadamardMaxBlock && width % (2 * block) == 0) block *= 2;
  return block;
}

/// The sign of channel `i` of a head: the lowest bit of a mixed counter, the same for every layer and head.
FUT_HD constexpr float hadamard_sign(int i) {
  uint32_t x = static_cast<uint32_t>(i) * 0x9e3779b9u + 0x7f4a7c15u;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x *= 0x735a2d97u;
  x ^= x >> 15;
  return x & 1 ? -1.0f : 1.0f;
}

/// Rotates x[0 .. width) in place. The butterflies run from stride 1 upwards and the scale comes last: this order is
/// part of the definition, because codes are compared bit for bit.
FUT_HD void hadamard_rotate(float* x, int width) {
  const int block = hadamard_block(width);
  const float scale = 1.0f / sqrtf(static_cast<float>(block));
  for (int start = 0; start < width; start += block) {
    float* v = x + start;
    for (int i = 0; i < block; ++i) v[i] *= hadamard_sign(start + i);
    for (int stride = 1; stride < block; stride *= 2) {
      for (int i = 0; i < block; ++i) {
        if (i & stride) continue;
        const float a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
    for (int i = 0; i < block; ++i) v[i] *= scale;
  }
}

/// Offline: the same rotation of every row of w (N, K), heads of `width` columns side by side: w[n] -> R w[n].
void hadamard_rotate_columns(float* w, int64_t rows, int64_t cols, int64_t width);

/// Offline: the same rotation of every column of w (N, K), so that its outputs come out rotated: W -> R W.
void hadamard_rotate_rows(float* w, int64_t rows, int64_t cols, int64_t width);

}  // namespace fut
