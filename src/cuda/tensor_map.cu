// Host code.
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace fut::cuda {
namespace {

/// The driver's encoder, looked up: nothing links to the driver.
auto encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    FUT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    FUT_CHECK(found && result == cudaDriverEntryPointSuccess, "the NVIDIA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap tensor_map(Dtype dtype, const void* data, int64_t rows, int64_t cols, int64_t row_bytes, int box_rows) {
  const bool bytes = dtype == Dtype::e4m3;
  CUtensorMap map;
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)},
                   pitch[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {bytes ? 128u : 64u, static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUresult status = encoder()(
      &map, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), size,
      pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FUT_CHECK(status == CUDA_SUCCESS, "tensor map of ", rows, " x ", cols, " ", name_of(dtype), ", rows of ", row_bytes,
            " bytes, boxes of ", box_rows, " rows: CUDA error ", static_cast<int>(status));
  return map;
}

}  // namespace fut::cuda
