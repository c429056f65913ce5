// gemm_decode for E4M3 weights.
#include "cuda/gemm_wide.cuh"

namespace fut::cuda {
template void launch_gemm_for<E4m3Tile>(const char*, const GemmArgs&, cudaStream_t);
template void launch_wide_for<E4m3Tile>(const char*, const GemmArgs&, cudaStream_t);
}  // namespace fut::cuda
