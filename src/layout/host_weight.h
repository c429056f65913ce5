// A weight matrix in host memory, in the order in which checkpoints store it, and the encoders that make one from
// floats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace fut {

/// Aligned to 64 bytes as the backends' memory is: a backend that reads a checkpoint's order keeps the vector itself.
template <class T>
struct LineAligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  T* allocate(size_t count) { return static_cast<T*>(operator new(count * sizeof(T), kLine)); }
  void deallocate(T* data, size_t) { operator delete(data, kLine); }
  bool operator==(const LineAligned&) const = default;
};
using HostBytes = std::vector<uint8_t, LineAligned<uint8_t>>;

/// W (N, K) row-major. What the bytes are, by dtype:
///   f32, bf16  the elements
///   e4m3       the codes; w = code * scale[n], one FP32 scale an output row
///   int4       (N, ceil(K / 8)) 32-bit words, lowest nibble first along K: compressed-tensors' `weight_packed`;
///              w = group_scale[n, k / G] * (q - 8), signed FP16 group scales (N, ceil(K / G)): its `weight_scale`
struct HostWeight {
  Dtype dtype = Dtype::f32;
  int64_t rows = 0, cols = 0;
  int group = 0;  ///< int4: G
  HostBytes data;
  std::vector<float> scale;       ///< e4m3: (N)
  std::vector<Half> group_scale;  ///< int4: (N, ceil(K / G))
  /// int4: (K) or empty. The product is of W diag(input_scale): what a column of the weight is too small or too large
  /// to say in its group is said by its input, which is multiplied before it is rounded.
  std::vector<float> input_scale;
  std::vector<float> bias;  ///< (N) or empty: stays in FP32 whatever the format

  int64_t row_bytes() const { return dtype == Dtype::int4 ? (cols + 7) / 8 * 4 : cols * bits_per_element(dtype) / 8; }
  int64_t groups() const { return group ? (cols + group - 1) / group : 0; }
};

/// Rounds w (N, K) to `dtype`; INT4 by round-to-nearest (encode_int4_row). `name` is for messages: a weight that is
/// NaN, infinite, or too large for the format's scale is refused by it.
HostWeight encode_weight(Dtype dtype, int group, const float* w, int64_t rows, int64_t cols, const std::string& name);

/// The same in pieces: room for a weight, then its rows, `count` from row `first` on: w (count, K).
HostWeight empty_weight(Dtype dtype, int group, int64_t rows, int64_t cols);
void encode_rows(HostWeight& out, int64_t first, int64_t count, const float* w, const std::string& name);

/// Exact values of one row: row (K).
void decode_weight_row(const HostWeight& weight, int64_t n, float* row);

/// INT4 codes and scale of one group of at most 128 weights, round-to-nearest: the scale is searched over both signs
/// and over clipped magnitudes for the least squared error, then refitted by least squares to the codes it gave. Scales
/// are rounded to FP16 before they are judged. codes (count) in 0..15. All zeros: scale 0, codes 8.
/// `importance` (count), not negative: what a squared error counts at each weight; null or all equal: the same.
Half encode_int4_group(const float* w, int count, uint8_t* codes, const float* importance = nullptr);

/// The level -8..7 nearest to w / scale, ties to even. Adding and subtracting 1.5 * 2^23 rounds to an integer in any
/// vector unit.
inline float int4_level(float w, float inverse_scale) {
  constexpr float kMagic = 12582912.0f;
  const float level = (std::min(std::max(w * inverse_scale, -9.0f), 8.0f) + kMagic) - kMagic;
  return std::min(std::max(level, -8.0f), 7.0f);
}

}  // namespace fut
