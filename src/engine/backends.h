// Which backends this build has. backends.cpp is the only file that names them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "model/config.h"
#include "ops/backend.h"

namespace fut {

/// A backend for a model of these sizes whose weights and cache are kept in `formats`. "cpu", "cuda", or "auto": the
/// card where there is one that can run this, else the CPU. Error, in one line that says why, if the one that was asked
/// for cannot run it here.
std::unique_ptr<Backend> make_backend(const std::string& name, const LlamaConfig& config,
                                      const std::vector<Dtype>& formats);

}  // namespace fut
