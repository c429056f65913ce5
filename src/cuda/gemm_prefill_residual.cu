// Kernel and schedule: gemm_prefill.cuh.
#include "cuda/gemm_prefill.cuh"

namespace fut::cuda {

void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const ResidualOutput& out,
                  cudaStream_t stream) {
  dispatch_prefill<ResidualEpilogue>(op, weight, a, out, stream);
}

}  // namespace fut::cuda
