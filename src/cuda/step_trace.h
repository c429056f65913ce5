// How a benchmark gets at what the blocks of decode_step()'s kernel did.
#pragma once

#include <functional>
#include <vector>

#include "cuda/step.h"
#include "ops/backend.h"

namespace fut::cuda {

struct TracedStep {
  int blocks = 0, layers = 0;
  bool head = false;              ///< the kernel made the logits too
  std::vector<StepTrace> stages;  // (blocks, 5 L + 1): a layer's five operations, then lm_head
};

/// Of the last decode_step() of `work`, on a backend of make_cuda_backend(); without stages where there was none.
TracedStep traced_step(Backend& backend, const std::function<void()>& work);

}  // namespace fut::cuda
