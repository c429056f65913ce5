// Checked CUDA calls, and the one way kernels are launched: on a stream, allowed to start before their predecessor
// ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.h"

#define FUT_CUDA(call)                                                 \
  do {                                                                 \
    const cudaError_t status_ = (call);                                \
    if (status_ != cudaSuccess) [[unlikely]]                           \
      ::fut::fail("CUDA: ", #call, ": ", cudaGetErrorString(status_)); \
  } while (0)

namespace fut::cuda {

/// Every kernel asks for the same split between L1 and shared memory, the largest: an SM must drain before it can
/// change its split, and so kernels that differ never overlap.
inline void allow_shared_memory(const void* kernel, size_t bytes) {
  thread_local std::unordered_map<const void*, size_t> allowed;
  const auto [entry, fresh] = allowed.try_emplace(kernel, 0);
  if (fresh)
    FUT_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  if (bytes <= entry->second) return;
  FUT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  entry->second = bytes;
}

/// With the environment variable FUT_SYNC=1 every launch is waited for, so that a fault names its operation; work that
/// is recorded into a graph is not. For debugging: nothing overlaps any more.
inline void after_launch(const char* op, cudaStream_t stream) {
  static const bool waits = [] {
    const char* text = getenv("FUT_SYNC");
    const std::string_view value = text ? text : "0";
    FUT_CHECK(value == "0" || value == "1", "FUT_SYNC is \"", value, "\", expected 0 or 1");
    return value == "1";
  }();
  if (!waits) return;
  cudaStreamCaptureStatus capture;
  FUT_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return;
  const cudaError_t status = cudaStreamSynchronize(stream);
  FUT_CHECK(status == cudaSuccess, op, ": ", cudaGetErrorString(status));
}

/// Launches `kernel` with programmatic dependent launch: it may start while the kernel before it still runs, and waits
/// for it by wait_for_previous_kernel(). `cluster`: blocks of a cluster, 1 for none.
template <class... Parameters, class... Arguments>
void launch_clusters(const char* op, void (*kernel)(Parameters...), dim3 grid, int cluster, dim3 block,
                     size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  FUT_CHECK(status == cudaSuccess, op, ": launch of ", grid.x, " x ", grid.y, " x ", grid.z, " blocks of ", block.x,
            " threads with ", shared_bytes, " bytes of shared memory failed: ", cudaGetErrorString(status));
  after_launch(op, stream);
}

template <class... Parameters, class... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Arguments&&... arguments) {
  launch_clusters(op, kernel, grid, 1, block, shared_bytes, stream, std::forward<Arguments>(arguments)...);
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
