// gemm_decode for INT4 weights, groups of 64 or 128.
#include "cuda/gemm_wide.cuh"

namespace fut::cuda {
template void launch_gemm_for<Int4Tile<1>>(const char*, const GemmArgs&, cudaStream_t);
template void launch_wide_for<Int4Tile<1>>(const char*, const GemmArgs&, cudaStream_t);
}  // namespace fut::cuda
