// gemm_decode for BF16 weights.
#include "cuda/gemm_wide.cuh"

namespace fut::cuda {
template void launch_gemm_for<Bf16Tile>(const char*, const GemmArgs&, cudaStream_t);
template void launch_wide_for<Bf16Tile>(const char*, const GemmArgs&, cudaStream_t);
}  // namespace fut::cuda
