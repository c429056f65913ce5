// Numbers that only data can tell: how large activations get, and where keys are centred.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "model/source.h"

namespace fut {

struct CalibrateOptions {
  std::string text;
  int64_t samples = 128;
  int64_t length = 2048;
  int threads = 0;
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_progress;
};

/// Runs pieces of the text through the model in BF16 with rotated values (as the quantised model has them) and records
/// the largest attention and SwiGLU outputs of each layer, and the mean of its keys after RoPE.
Calibration calibrate(const ModelSource& source, const CalibrateOptions& options);

}  // namespace fut
