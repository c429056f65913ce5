// Kernel and schedule: gemm_prefill.cuh.
#include "cuda/gemm_prefill.cuh"

namespace fut::cuda {

void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const QkvOutput& out, int head_dim,
                  cudaStream_t stream) {
  head_dim == 64 ? dispatch_prefill<QkvEpilogue<64>>(op, weight, a, out, stream)
                 : dispatch_prefill<QkvEpilogue<128>>(op, weight, a, out, stream);
}

}  // namespace fut::cuda
