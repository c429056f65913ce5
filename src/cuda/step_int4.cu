// The step kernel for INT4 weights, groups of 64 or 128 (step.cuh).
#include "cuda/step.cuh"

namespace fut::cuda {

template bool fit_step<StepTypes<Int4Tile<1>, AttentionShape<Dtype::int4, 128, 1>>>(StepArgs&);
template void launch_step<StepTypes<Int4Tile<1>, AttentionShape<Dtype::int4, 128, 1>>>(const StepArgs&, cudaStream_t);
template bool fit_step<StepTypes<Int4Tile<1>, AttentionShape<Dtype::int4, 64, 1>>>(StepArgs&);
template void launch_step<StepTypes<Int4Tile<1>, AttentionShape<Dtype::int4, 64, 1>>>(const StepArgs&, cudaStream_t);

}  // namespace fut::cuda
