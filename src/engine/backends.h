// Which backends this build has. backends.cpp is the only file that names them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "model/config.h"
#include "ops/backend.h"

namespace fut {

/// A backend for a model of these sizes whose weights and cache are kept in `formats`. "cpu", "cuda", or "auto": the
/// card where there is one that can run this, else the CPU, and one line in `warnings` that says why. Error, in one
/// line that says why, if the one that was asked for cannot run it here.
std::unique_ptr<Backend> make_backend(const std::string& name, const LlamaConfig& config,
                                      const std::vector<Dtype>& formats, std::vector<std::string>* warnings = nullptr);

/// What of such a model has no kernel on a card, as a message says it; empty: nothing. Whatever the build, so that it
/// can be tested.
std::string without_kernel(const LlamaConfig& config, const std::vector<Dtype>& formats);

/// One kind of stage of a decode step that runs as one kernel: means over the multiprocessors and layers, in cycles. As
/// StageCycles in cuda/replay.h.
struct StepStage {
  std::string op;
  int64_t count = 0;  ///< such stages in a step
  double cycles = 0, longest = 0;
  double input_cycles = 0;   ///< of `cycles`: until what other multiprocessors make was there and prepared
  double memory_cycles = 0;  ///< of `cycles`: waiting for weights or cached tokens from memory
};

/// A card's own clock, for benchmarks: the host's would mostly see the host. As time_on_card() in cuda/replay.h.
struct CardClock {
  int mhz = 0;  ///< the highest that the card's multiprocessors may use
  std::function<std::vector<double>(const std::function<void()>& work, int samples, double warm_up_seconds)> seconds;
  /// Of a run of `step`, which asks for one decode_step(); empty where that is not made by one kernel.
  std::function<std::vector<StepStage>(const std::function<void()>& step)> stages;
};
/// Nothing where the backend is no card.
std::optional<CardClock> card_clock(Backend& backend);

}  // namespace fut
