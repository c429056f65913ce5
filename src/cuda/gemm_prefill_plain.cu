// Kernel and schedule: gemm_prefill.cuh.
#include <cstring>

#include "base/parallel.h"
#include "cuda/gemm_prefill.cuh"

namespace fut::cuda {

bool gemm_prefill_takes(const Weight& w) {
  return w.phase == Phase::prefill && (w.dtype == Dtype::e4m3 || w.dtype == Dtype::bf16);
}

std::vector<uint8_t> prefill_rows(const HostWeight& w) {
  const int64_t bytes = w.row_bytes();
  FUT_CHECK((w.dtype == Dtype::e4m3 || w.dtype == Dtype::bf16) && w.rows % 32 == 0 && bytes % 16 == 0,
            "backend cuda: a prefill weight of ", w.rows, " x ", w.cols, " in ", name_of(w.dtype),
            ": expected e4m3 or bf16, rows a multiple of 32 and columns of 16 bytes");
  std::vector<uint8_t> out(w.data.size());
  parallel_for(w.rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      memcpy(&out[n * bytes], &w.data[(n / 32 * 32 + prefill_output(static_cast<int>(n % 32))) * bytes], bytes);
  });
  return out;
}

void gemm_prefill(const char* op, const Weight& weight, const PrefillInput& a, const PlainOutput& out,
                  cudaStream_t stream) {
  dispatch_prefill<PlainEpilogue>(op, weight, a, out, stream);
}

}  // namespace fut::cuda
