// Numbers that only data can tell: how large activations get, and where keys are centred.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/source.h"

namespace fut {

struct CalibrateOptions {
  std::string text;
  int64_t samples = 128;
  int64_t length = 2048;
  int threads = 0;
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_progress;
};

/// Evenly spaced pieces of the text, all of one length and each begun as a prompt is (with BOS where the tokenizer adds
/// one); fewer, or one shorter one, where the text is short.
std::vector<std::vector<int32_t>> calibration_pieces(const ModelSource& source, const CalibrateOptions& options);

/// Runs these pieces through the model in BF16 with rotated values (as the quantised model has them) and records
/// the largest attention and SwiGLU outputs of each layer, and the mean of its keys after RoPE.
Calibration calibrate(const ModelSource& source, const CalibrateOptions& options);

}  // namespace fut
