// Which backends this build has. backends.cpp is the only file that names them.
#pragma once

#include <memory>
#include <string>

#include "ops/backend.h"

namespace fut {

/// "cpu", "cuda" or "auto" (the fastest that is there). Throws if the one that was asked for cannot run here.
std::unique_ptr<Backend> make_backend(const std::string& name);

}  // namespace fut
