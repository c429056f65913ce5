// Picks the kernel for a weight (gemm_decode.cuh).
#include "cuda/gemm_wide.cuh"

namespace fut::cuda {

extern template void launch_gemm_for<Int4Tile<1>>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_wide_for<Int4Tile<1>>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_gemm_for<Int4Tile<2>>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_wide_for<Int4Tile<2>>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_gemm_for<E4m3Tile>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_wide_for<E4m3Tile>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_gemm_for<Bf16Tile>(const char*, const GemmArgs&, cudaStream_t);
extern template void launch_wide_for<Bf16Tile>(const char*, const GemmArgs&, cudaStream_t);

/// Every block of a launch normalises by itself: with more rows that is slower than one more kernel.
constexpr int kOwnNorm = 1;

bool gemm_normalises(const Weight& weight, int batch) {
  return batch <= kOwnNorm && batch * weight.cols * 2 <= kStagedBytes;
}

int weight_tile_bytes(Dtype dtype, int group) {
  switch (dtype) {
    case Dtype::int4: return int4_tile_bytes(group);
    case Dtype::e4m3: return E4m3Tile::kBytes;
    case Dtype::bf16: return Bf16Tile::kBytes;
    default: fail("backend cuda: weights in ", name_of(dtype), " run on the CPU alone (choose int4, fp8 or bf16)");
  }
}

void gemm_decode(const char* op, const Weight& weight, GemmArgs args, cudaStream_t stream) {
  FUT_CHECK(args.batch >= 1 && args.batch <= kGemmMaxRows, op, ": ", args.batch, " rows in one launch, the limit is ",
            kGemmMaxRows);
  FUT_CHECK(weight.cols % 64 == 0, op, ": K = ", weight.cols, " is no multiple of 64");
  FUT_CHECK(args.finish != Finish::swiglu || weight.rows % 32 == 0, op, ": SwiGLU of ", weight.rows / 2,
            " rows, expected a multiple of 16");
  args.weight = static_cast<const uint8_t*>(weight.data);
  args.weight_scale = weight.scale;
  args.bias = weight.bias;
  args.rows = static_cast<int>(weight.rows);
  args.cols = static_cast<int>(weight.cols);
  const auto launch_for = [&]<class Tile>(Tile) {
    if (!gemm_packs(args.finish, args.batch, weight.cols)) return launch_gemm_for<Tile>(op, args, stream);
    FUT_CHECK(!args.normalise, op, ": ", args.batch, " rows must be normalised before");
    launch_wide_for<Tile>(op, args, stream);
  };
  switch (weight.dtype) {
    case Dtype::int4:
      if (weight.group == 32) return launch_for(Int4Tile<2>{});
      return launch_for(Int4Tile<1>{});
    case Dtype::e4m3: return launch_for(E4m3Tile{});
    case Dtype::bf16: return launch_for(Bf16Tile{});
    default: weight_tile_bytes(weight.dtype, weight.group);
  }
}

}  // namespace fut::cuda
