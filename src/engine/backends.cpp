#include "engine/backends.h"

#include "base/error.h"
#include "cpu/cpu_backend.h"

namespace fut {

std::unique_ptr<Backend> make_backend(const std::string& name) {
  if (name == "cpu" || name == "auto") return make_cpu_backend();
  FUT_CHECK(name != "cuda", "backend cuda: this build has no CUDA backend (use --backend cpu)");
  fail("backend \"", name, "\" is unknown (auto, cpu and cuda are known)");
}

}  // namespace fut
