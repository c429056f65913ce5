// Writing a model in both precisions: the folder that `fut quantize` makes.
//
//   OUT/decode/    INT4, compressed-tensors `pack-quantized`: a Hugging Face folder of its own
//   OUT/prefill/   FP8, compressed-tensors `float-quantized`, one scale an output channel: likewise
//   OUT/           tokenizer, futransformer.json (rotations, key means, activation amax, source)
//
// FP8 weights have the norm gains in front of them folded in (so those norms are ones); INT4 weights have what their
// input scale leaves of it, and the norms are the input scales. Values are rotated head by head, and, on request, the
// residual stream is; all of it leaves the model's function as it was.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "layout/weight_quantiser.h"

namespace fut {

struct QuantizeOptions {
  int group = 64;
  bool rotate_residual = false;
  int threads = 0;
  std::string calibration_text;          ///< empty: no activation scales and key means, and no inputs for `quantiser`
  int64_t calibration_samples = 128;     ///< pieces of the text, evenly spaced
  int64_t calibration_length = 2048;     ///< tokens of a piece
  WeightQuantiser* quantiser = nullptr;  ///< made by an entry of quant/quantisers.h
  /// `stage` names the work under way; the layer and its loss are part of it.
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_progress;
  std::function<void(const std::string& line)> on_warning;
};

/// What the quantiser lost, as shares of the outputs' energy on the calibration text: mean over all matrices.
struct QuantizeReport {
  double loss = 0, rtn_loss = 0;
  int64_t calibration_tokens = 0;  ///< 0: the quantiser wanted none
};

/// Reads `source`, writes the folder `out`, which must not exist: it appears whole, under its name, at the end.
QuantizeReport quantize_model(const std::string& source, const std::string& out, const QuantizeOptions& options);

}  // namespace fut
