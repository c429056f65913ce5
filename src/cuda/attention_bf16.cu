// attention for BF16 caches.
#include "cuda/attention.cuh"

namespace fut::cuda {
template void launch_attention<Dtype::bf16, 64>(const char*, const AttentionLaunch&, cudaStream_t);
template void launch_attention<Dtype::bf16, 128>(const char*, const AttentionLaunch&, cudaStream_t);
}  // namespace fut::cuda
