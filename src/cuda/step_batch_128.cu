// The kernels of step_batch.cuh for heads of 128.
#include "cuda/step_batch.cuh"

namespace fut::cuda {

template <int NB>
using Types = BatchTypes<Int4Tile<1>, AttentionShape<Dtype::int4, 128, 1>, NB>;
template bool fit_step_batch<Types<1>>(StepBatchArgs&);
template bool fit_step_batch<Types<2>>(StepBatchArgs&);
template bool fit_step_batch<Types<4>>(StepBatchArgs&);
template void launch_step_batch<Types<1>>(const StepBatchArgs&, cudaStream_t);
template void launch_step_batch<Types<2>>(const StepBatchArgs&, cudaStream_t);
template void launch_step_batch<Types<4>>(const StepBatchArgs&, cudaStream_t);

}  // namespace fut::cuda
