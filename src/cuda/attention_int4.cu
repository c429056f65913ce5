// attention for INT4 caches.
#include "cuda/attention.cuh"

namespace fut::cuda {
template void launch_attention<Dtype::int4, 64>(const char*, const AttentionLaunch&, cudaStream_t);
template void launch_attention<Dtype::int4, 128>(const char*, const AttentionLaunch&, cudaStream_t);
}  // namespace fut::cuda
