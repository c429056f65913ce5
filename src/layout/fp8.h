// FP8 scales: how an amax becomes the factor between stored E4M3 codes and true values (true = code * scale).
//
// Three rules, chosen by --prefill-scaling:
//   exact    every row by its own amax, known before it is written (a second pass over the row);
//   frozen   one scale a layer and tensor, calibrated once and stored with the checkpoint: an answer never depends on
//            what was asked before;
//   delayed  one scale a layer and tensor from the largest amax of the last kAmaxHistory forward passes (the recipe of
//            NVIDIA's Transformer Engine).
// All three saturate; none ever makes a NaN out of a number.
#pragma once

#include <algorithm>
#include <cmath>

#include "base/dtype.h"

namespace fut {

enum class Fp8Scaling { exact, frozen, delayed };

inline constexpr int kAmaxHistory = 16;

/// The scale that maps `amax` to 448; 1 for an amax of 0, infinity or NaN.
FUT_HD float e4m3_scale(float amax) {
  const float scale = amax * (1.0f / kE4m3Max);
  return scale > 0.0f && scale < 3.0e38f ? scale : 1.0f;
}

inline float largest_magnitude(const float* x, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

/// Delayed scaling of one tensor: amax of the current pass in slot 0, earlier passes behind it.
struct AmaxHistory {
  float amax[kAmaxHistory] = {};
  float scale = 0.0f;  ///< 0: no pass yet, so the first one must scale exactly

  /// Ends a forward pass: takes the scale from the window's maximum, then makes room for the next pass. A window whose
  /// maximum is 0, infinite or NaN keeps the old scale.
  void roll() {
    float largest = 0.0f;
    bool finite = true;
    for (float value : amax) {
      finite = finite && std::isfinite(value);
      largest = std::max(largest, value);
    }
    if (finite && largest > 0.0f) scale = e4m3_scale(largest);
    std::copy_backward(amax, amax + kAmaxHistory - 1, amax + kAmaxHistory);
    amax[0] = 0.0f;
  }
};

}  // namespace fut
