// Sums and maxima over a block of kRowThreads threads, in a fixed order.
#pragma once

#include <cuda_runtime.h>

namespace fut::cuda {

inline constexpr int kRowThreads = 512;

/// The same value for all threads. Combine is associative enough: a tree over lanes, then over warps in their order.
template <class Combine>
__device__ float reduce_block(float x, Combine combine) {
  __shared__ float part[kRowThreads / 32];
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();  // closes: parts of an earlier call still being read
  if ((threadIdx.x & 31) == 0) part[threadIdx.x / 32] = x;
  __syncthreads();  // closes: parts read before they are written
  x = part[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) x = combine(x, part[w]);
  return x;
}
__device__ inline float sum_block(float x) {
  return reduce_block(x, [](float a, float b) { return a + b; });
}
__device__ inline float max_block(float x) {
  return reduce_block(x, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace fut::cuda
