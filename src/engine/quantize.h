// Writing a model in both precisions: the folder that `fut quantize` makes.
//
//   OUT/decode/    INT4, compressed-tensors `pack-quantized`: a Hugging Face folder of its own
//   OUT/prefill/   FP8, compressed-tensors `float-quantized`, one scale an output channel: likewise
//   OUT/           tokenizer, futransformer.json (rotations, key means, activation amax, source)
//
// Norm gains are folded into the weights behind them (so the layers' norms are ones), values are rotated head by head,
// and, on request, the residual stream is rotated; all of it leaves the model's function as it was.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace fut {

struct QuantizeOptions {
  int group = 64;
  bool rotate_residual = false;
  int threads = 0;
  std::string calibration_text;       ///< empty: no activation scales and key means are stored
  int64_t calibration_samples = 128;  ///< pieces of the text, evenly spaced
  int64_t calibration_length = 2048;  ///< tokens of a piece
  /// One matrix (N, K) to INT4 codes and scales: an entry of quant/quantisers.h.
  std::function<HostWeight(const float* w, int64_t rows, int64_t cols, int group, const std::string& name)> quantise;
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_progress;
};

/// Reads `source`, writes the folder `out`, which must not exist: it appears whole, under its name, at the end.
void quantize_model(const std::string& source, const std::string& out, const QuantizeOptions& options);

}  // namespace fut
