// Picks the attention kernel for a cache (attention.cuh).
#include <algorithm>

#include "cuda/attention.cuh"

namespace fut::cuda {

extern template void launch_attention<Dtype::int4, 64>(const char*, const AttentionLaunch&, cudaStream_t);
extern template void launch_attention<Dtype::int4, 128>(const char*, const AttentionLaunch&, cudaStream_t);
extern template void launch_attention<Dtype::bf16, 64>(const char*, const AttentionLaunch&, cudaStream_t);
extern template void launch_attention<Dtype::bf16, 128>(const char*, const AttentionLaunch&, cudaStream_t);
extern template void launch_attention<Dtype::e4m3, 64>(const char*, const AttentionLaunch&, cudaStream_t);
extern template void launch_attention<Dtype::e4m3, 128>(const char*, const AttentionLaunch&, cudaStream_t);

int attention_splits(int kv_heads) {
  const int splits = multiprocessors() / kv_heads;
  return splits > 1 ? splits : 1;
}

int attention_pieces_a_block(int rows, int kv_heads, int pieces) {
  constexpr int kBlocksAnSm = 2;
  const int blocks = std::max<int64_t>(1, int64_t{kBlocksAnSm} * multiprocessors() / (int64_t{rows} * kv_heads));
  return (pieces + blocks - 1) / blocks;
}

size_t attention_partial_bytes(int rows, int heads, int head_dim, int splits) {
  return size_t{sizeof(float)} * rows * heads * splits * (head_dim + 4);
}

void attention(const char* op, const AttentionLaunch& args, cudaStream_t stream) {
  const Dtype type = args.cache.layout.dtype;
  const int E = args.cache.layout.head_dim;
  FUT_CHECK(E == 64 || E == 128, op, ": head width ", E, ", this backend knows 64 and 128");
  FUT_CHECK(args.heads / args.cache.kv_heads <= 16, op, ": ", args.heads / args.cache.kv_heads,
            " query heads a KV head, the limit is 16");
  FUT_CHECK(type != Dtype::f32, op, ": an f32 cache is for the CPU alone (choose int4, fp8 or bf16)");
  if (args.rows == 0) return;
  switch (type) {
    case Dtype::int4:
      return E == 64 ? launch_attention<Dtype::int4, 64>(op, args, stream)
                     : launch_attention<Dtype::int4, 128>(op, args, stream);
    case Dtype::bf16:
      return E == 64 ? launch_attention<Dtype::bf16, 64>(op, args, stream)
                     : launch_attention<Dtype::bf16, 128>(op, args, stream);
    default:
      return E == 64 ? launch_attention<Dtype::e4m3, 64>(op, args, stream)
                     : launch_attention<Dtype::e4m3, 128>(op, args, stream);
  }
}

}  // namespace fut::cuda
