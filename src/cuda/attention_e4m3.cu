// attention for E4M3 caches.
#include "cuda/attention.cuh"

namespace fut::cuda {
template void launch_attention<Dtype::e4m3, 64>(const char*, const AttentionLaunch&, cudaStream_t);
template void launch_attention<Dtype::e4m3, 128>(const char*, const AttentionLaunch&, cudaStream_t);
}  // namespace fut::cuda
