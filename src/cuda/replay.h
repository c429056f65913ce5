// Timing for benchmarks: work recorded once as a CUDA graph and replayed, so that the host's share does not count.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace fut {

/// Seconds of each of `samples` runs of `work` on a backend of make_cuda_backend(), by the card's own clock, after runs
/// of at least `warm_up_seconds` that do not count. `work` must ask for the same operations whenever it is called.
/// Replays follow one another without the host waiting in between. Work that copies from the host anew in every run
/// cannot be recorded; it is launched each time instead, and its launches count.
std::vector<double> time_on_card(Backend& backend, const std::function<void()>& work, int samples,
                                 double warm_up_seconds);

/// One kind of stage of decode_step()'s kernel, means over blocks and layers, in cycles of the multiprocessors.
struct StageCycles {
  std::string op;
  int64_t count = 0;  ///< such stages in the step
  double cycles = 0, longest = 0;
  double input_cycles = 0;   ///< of `cycles`: until what other blocks made was there and staged
  double memory_cycles = 0;  ///< of `cycles`: waiting for the ring of weights and pages
};

/// Of the second of two runs of `step`, which asks for one decode_step(); empty where that was refused. A traced step
/// takes a little longer.
std::vector<StageCycles> trace_step(Backend& backend, const std::function<void()>& step);

/// The highest clock of the multiprocessors that the card may use.
int card_clock_mhz();

}  // namespace fut
