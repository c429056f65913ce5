// libcuda.so.1 of a driver for CUDA 11.0 that knows nothing but its version: what the program says to one (J02).
#include <cstdint>
#include <string_view>

extern "C" {

int cuDriverGetVersion(int* version) {
  *version = 11000;
  return 0;
}

static int not_supported() { return 801; }

/// How the runtime asks for every function, this one included.
int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  const std::string_view wanted = name;
  *function = wanted == "cuDriverGetVersion" ? reinterpret_cast<void*>(cuDriverGetVersion)
              : wanted == "cuGetProcAddress" ? reinterpret_cast<void*>(cuGetProcAddress_v2)
                                             : reinterpret_cast<void*>(not_supported);
  if (status) *status = 0;
  return 0;
}

}  // extern "C"
