// The few loops in which a CPU user waits, compiled for several instruction sets and chosen at run time.
//
// All sets give the same sums bit for bit where they have fused multiply-add (AVX2, AVX-512): a dot product runs over
// 16 partial sums, element i going to sum i % 16, in any vector width; the 16 are then added in one fixed tree. The
// x86-64-v2 set has no fused multiply-add and differs in the last bits.
#pragma once

#include <cstdint>

namespace fut::cpu {

inline constexpr int kLanes = 16;  ///< vectors that the loops below read are padded to a multiple of this with zeros

struct Simd {
  const char* name;

  /// y[c * y_stride + r] = dot(w + r * stride, a + c * stride) over `length` elements, r < w_rows, c < a_rows.
  /// length is a multiple of kLanes.
  void (*dot)(const float* w, int64_t w_stride, int64_t w_rows, const float* a, int64_t a_stride, int64_t a_rows,
              int64_t length, float* y, int64_t y_stride);

  void (*bf16_to_f32)(const uint16_t* from, float* to, int64_t count);

  /// NaN codes are not looked for: encoders never make one out of a weight.
  void (*e4m3_to_f32)(const uint8_t* from, float* to, int64_t count);

  /// One tile of 16 x 64 codes (int4_fragment.h): out[row * out_stride + position] = (q - zero) * scale[row][half],
  /// positions as int4_position() orders them, half = position / 32.
  void (*int4_tile)(const uint8_t* codes, float zero, const float (*scale)[2], float* out, int64_t out_stride);
};

/// The best set that this machine has. FUT_SIMD=baseline|avx2|avx512 in the environment picks a lower one.
const Simd& simd();

/// A set by name, or nullptr where this machine lacks it.
const Simd* simd_named(const char* name);

}  // namespace fut::cpu
