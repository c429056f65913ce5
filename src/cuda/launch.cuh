// Checked CUDA calls, and the one way kernels are launched: on a stream, allowed to start before their predecessor
// ends.
#pragma once

#include <cuda_runtime.h>

#include "base/error.h"

#define FUT_CUDA(call)                                                 \
  do {                                                                 \
    const cudaError_t status_ = (call);                                \
    if (status_ != cudaSuccess) [[unlikely]]                           \
      ::fut::fail("CUDA: ", #call, ": ", cudaGetErrorString(status_)); \
  } while (0)

namespace fut::cuda {

/// Launches `kernel` with programmatic dependent launch: it may start while the kernel before it still runs, and waits
/// for it by wait_for_previous_kernel().
template <class... Parameters, class... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
  if (shared_bytes > 48 * 1024) {
    FUT_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)));
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  FUT_CHECK(status == cudaSuccess, op, ": launch of ", grid.x, " x ", grid.y, " x ", grid.z, " blocks of ", block.x,
            " threads with ", shared_bytes, " bytes of shared memory failed: ", cudaGetErrorString(status));
}

inline int multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    FUT_CUDA(cudaGetDevice(&device));
    FUT_CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
    return value;
  }();
  return count;
}

}  // namespace fut::cuda
