// The reference backend: every operation in plain C++, with the arithmetic that the kernels must reproduce.
#pragma once

#include <memory>

#include "ops/backend.h"

namespace fut {

std::unique_ptr<Backend> make_cpu_backend();

}  // namespace fut
