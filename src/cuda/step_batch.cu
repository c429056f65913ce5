// Picks the kernel for a batch's step (step_batch.cuh), and makes it ready for the next one.
#include "cuda/step_batch.cuh"

namespace fut::cuda {

template <int E, int NB>
using Int4BatchTypes = BatchTypes<Int4Tile<1>, AttentionShape<Dtype::int4, E, 1>, NB>;
extern template bool fit_step_batch<Int4BatchTypes<128, 1>>(StepBatchArgs&);
extern template bool fit_step_batch<Int4BatchTypes<128, 2>>(StepBatchArgs&);
extern template bool fit_step_batch<Int4BatchTypes<128, 4>>(StepBatchArgs&);
extern template bool fit_step_batch<Int4BatchTypes<64, 1>>(StepBatchArgs&);
extern template bool fit_step_batch<Int4BatchTypes<64, 2>>(StepBatchArgs&);
extern template bool fit_step_batch<Int4BatchTypes<64, 4>>(StepBatchArgs&);
extern template void launch_step_batch<Int4BatchTypes<128, 1>>(const StepBatchArgs&, cudaStream_t);
extern template void launch_step_batch<Int4BatchTypes<128, 2>>(const StepBatchArgs&, cudaStream_t);
extern template void launch_step_batch<Int4BatchTypes<128, 4>>(const StepBatchArgs&, cudaStream_t);
extern template void launch_step_batch<Int4BatchTypes<64, 1>>(const StepBatchArgs&, cudaStream_t);
extern template void launch_step_batch<Int4BatchTypes<64, 2>>(const StepBatchArgs&, cudaStream_t);
extern template void launch_step_batch<Int4BatchTypes<64, 4>>(const StepBatchArgs&, cudaStream_t);

namespace {

template <int E, class Use>
void with_columns(int batch, Use use) {
  if (batch <= 8) return use(Int4BatchTypes<E, 1>{});
  if (batch <= 16) return use(Int4BatchTypes<E, 2>{});
  use(Int4BatchTypes<E, 4>{});
}
/// Calls use(Types{}) for the plan's kernel; false where there is none.
template <class Use>
bool with_types(const StepBatchPlan& plan, Use use) {
  if (plan.head_dim == 128) return with_columns<128>(plan.args.batch, use), true;
  if (plan.head_dim == 64) return with_columns<64>(plan.args.batch, use), true;
  return false;
}

__global__ void end_step(uint32_t* tag_base, uint32_t by, unsigned* flags, int count) {
  if (threadIdx.x == 0) *tag_base += by;
  for (int i = threadIdx.x; i < count; i += blockDim.x) flags[i * kFlagWords] = 0;
}

}  // namespace

std::string plan_step_batch(StepBatchPlan& plan) {
  StepBatchArgs& a = plan.args;
  const int E = plan.head_dim, H = a.heads, J = a.kv_heads, F = a.feed_forward;
  if (a.batch < 2 || a.batch > kStepBatchRows) return cat("a batch of ", a.batch, ", expected 2 to ", kStepBatchRows);
  if (H / J > kBatchMaxHeads) return cat(H / J, " query heads a KV head, the limit is ", kBatchMaxHeads);
  if (a.rope.rotary_dim != E) return cat("a rotary width of ", a.rope.rotary_dim, " of ", E);
  if (F % 16 != 0) return cat("a feed-forward width of ", F, ", no multiple of 16");
  deal_out(a, E, multiprocessors() / 2);  // to clusters of two blocks
  bool fits = false;
  if (!with_types(plan, [&]<class Types>(Types) { fits = fit_step_batch<Types>(a); })) return cat("heads of ", E);
  return fits ? "" : cat("the table of ", a.layer_count, " layers leaves no room for weights in shared memory");
}

void decode_step_batch(const StepBatchPlan& plan, cudaStream_t stream) {
  const StepBatchArgs& a = plan.args;
  with_types(plan, [&]<class Types>(Types) { launch_step_batch<Types>(a, stream); });
  end_step<<<1, 256, 0, stream>>>(a.tag_base, (a.layer_count + 1) * kStages, a.flags, (a.layer_count + 1) * kHanded);
  FUT_CUDA(cudaGetLastError());
}

}  // namespace fut::cuda
