// MATH       A decode step of a Llama model for one sequence, embedding to logits, in one kernel: the operations of
//            cpu_backend.cpp, bit for bit as this backend's own kernels compute them one by one.
// SHAPES     INT4 weights, INT4 cache; E = 64, 128; at most 8 query heads a KV head; whole rotary width.
// SCHEDULE   One block an SM, all resident. Roles that never change: a producer warp streams weights and pages through
// one
//            ring from the first layer to the last, needing nothing of this step, at most `window` slots in flight;
//            eight consumer warps; three finishing warps. While the consumers wait for activations the ring fills, and
//            they drain it faster than memory fills it. Activations go from block to block as tagged words
//            (handover.cuh). A layer: qkv -> y -> attention -> partial -> merge -> a -> o_proj -> x_mid -> gate_up -> h
//            -> down -> x_in.
// NUMERICS   gemm_decode.cuh, attention.cuh, cache.cu.
// ROOFLINE   Weight and page bytes over the read rate; docs/PERF.md.
// REFERENCE  DESIGN section 8.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/step_attention.cuh"

namespace fut::cuda {

template <class Types>
class StepRoles {
 public:
  __device__ StepRoles(const StepArgs& args, const StepOwn<Types>& own, uint8_t* memory, StepBarriers& barriers)
      : args_(args), own_(own), memory_{args, memory}, barriers_(barriers) {}

  __device__ void initialise() {
    for (int i = 0; i < args_.stages; ++i) {
      barrier_init(shared_address(barriers_.full + i), 1);
      barrier_init(shared_address(barriers_.empty + i), kStepWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(barriers_.summed + i), kStepWarps);
      barrier_init(shared_address(barriers_.drained + i), kStepFinishWarps);
    }
    barrier_init_fence();
  }

  __device__ __forceinline__ void produce() {
    StepProducer<Types> ring(args_, memory_, barriers_);
    StepPages<Types> pages(args_, own_, ring);
    for (int i = 0;; ++i) {
      const int l = i / 4, part = i % 4;
      const bool head = l == args_.layer_count;
      if (part == 1) pages.send(memory_.layers()[l]);
      ring.product(args_.shape[head ? static_cast<int>(Product::head) : part],
                   head ? args_.head.tiles : memory_.layers()[l].matrix[part].tiles, part == 2);
      if (head) break;
    }
  }

  __device__ __forceinline__ void consume() {
    StepConsumer<Types> c(args_, memory_, barriers_);
    // A layer is four products; with one call site for all of them the kernel stays small, and so in the instruction
    // cache.
    for (int i = 0;; ++i) {
      const int l = i / 4, part = i % 4;
      const bool head = l == args_.layer_count;
      const Stage from = part == 0 ? Stage::x_in : part == 1 ? Stage::a : part == 2 ? Stage::x_mid : Stage::h;
      const uint2* words = part == 0 ? args_.x_in : part == 1 ? args_.a : part == 2 ? args_.x_mid : args_.h;
      if (part == 1) {
        StepAttend<Types>(c, own_, memory_.layers()[l], l).run();
        c.end_stage();
      }
      c.begin_stage();
      StepMultiply<Types>(c, args_.shape[head ? static_cast<int>(Product::head) : part])
          .run(words, step_tag(c.base(), l, from), part % 2 == 0, part == 2,
               part % 2 == 0 && !head ? memory_.layers()[l].input_scale[part / 2] : nullptr);
      c.end_stage();
      if (head) break;
    }
  }

  __device__ __forceinline__ void finish() {
    StepFinish<Types> f(args_, memory_, barriers_);
    const uint32_t base = StepConsumer<Types>::base();
    f.embed(step_tag(base, 0, Stage::x_in));
    for (int i = 0;; ++i) {
      const int l = i / 4, part = i % 4;
      const bool head = l == args_.layer_count;
      const Product product = head ? Product::head : static_cast<Product>(part);
      const StepLayer& layer = memory_.layers()[head ? 0 : l];
      const float scale = part == 1 ? layer.attention_scale : part == 3 ? layer.swiglu_scale : 1.0f;
      const Stage to = part == 0 ? Stage::y : part == 1 ? Stage::x_mid : part == 2 ? Stage::h : Stage::x_in;
      uint2* words = part == 0 ? args_.y : part == 1 ? args_.x_mid : part == 2 ? args_.h : args_.x_in;
      f.product(product, head ? args_.head : layer.matrix[part], scale, layer.swiglu_scale, words,
                step_tag(base, l + (part == 3), to));
      if (head) break;
    }
  }

 private:
  const StepArgs& args_;
  const StepOwn<Types>& own_;
  StepMemory<Types> memory_;
  StepBarriers& barriers_;
};

template <class Types>
__global__ void __launch_bounds__(kStepThreads, 1) decode_step_kernel(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ StepBarriers barriers;
  __shared__ StepOwn<Types> own;
  StepRoles<Types> roles(args, own, memory, barriers);
  if (threadIdx.x == 0) {
    Watch::given_up() = 0;
    StepConsumer<Types>::stages_ended() = 0;
    StepConsumer<Types>::base() = *args.tag_base;
    roles.initialise();
  }
  load_step_layers(args, StepMemory<Types>{args, memory}.layers());
  own.locate(args);
  __syncthreads();  // closes: barriers used before they are initialised, its unit before it is located
  if (threadIdx.x < kStepConsumers) {
    roles.consume();
  } else if (threadIdx.x < kStepConsumers + 32) {
    roles.produce();
  } else {
    roles.finish();
  }
}

inline constexpr int kStepSharedBytes = 232448 - 2048;

/// Ring and activations for these types; false where too little of the ring would be left.
template <class Types>
bool fit_step(StepArgs& args) {
  const int layers = args.layer_count * static_cast<int>(sizeof(StepLayer));
  constexpr int kMergeBytes = Types::Attention::kMergeBytes + Types::kHalfQueryBytes, kInFlight = 48 * 1024,
                kFewestSlots = 3;
  const int pieces_bytes = args.splits * 17 * 8;  // a share of the merge, of all pieces
  int staged = (kMergeBytes > pieces_bytes ? kMergeBytes : pieces_bytes) - kSumsBytes;
  for (int i = 0; i < kProducts; ++i) {
    const bool whole = i == static_cast<int>(Product::qkv) || i == static_cast<int>(Product::gate_up) ||
                       i == static_cast<int>(Product::head);
    StepShape& s = args.shape[i];
    s.piece = s.col_tiles;
    if (!whole) {  // a piece that leaves most of shared memory to the ring
      const int most = 64 * 1024 / 128 / Types::kChunk * Types::kChunk;
      s.piece = s.col_tiles <= most || most == 0 ? s.col_tiles : most;
    }
    const int bytes = s.piece * (128 + Types::Tile::kGroups * Types::kStartBytes);
    staged = bytes > staged ? bytes : staged;
  }
  args.staged_bytes = (staged + 127) / 128 * 128;
  const int slots = (kStepSharedBytes - Types::kFixedBytes - layers - args.staged_bytes) / Types::kSlotBytes;
  if (slots < kFewestSlots) return false;
  args.stages = slots < kStepMaxStages ? slots : kStepMaxStages;
  args.window = (kInFlight + Types::kSlotBytes - 1) / Types::kSlotBytes;
  return true;
}

template <class Types>
void launch_step(const StepArgs& args, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(decode_step_kernel<Types>);
  const size_t bytes =
      Types::kFixedBytes + args.layer_count * sizeof(StepLayer) + args.staged_bytes + args.stages * Types::kSlotBytes;
  allow_shared_memory(kernel, bytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks are resident, or the launch fails
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(multiprocessors());
  config.blockDim = dim3(kStepThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  FUT_CUDA(cudaLaunchKernelEx(&config, decode_step_kernel<Types>, args));
  after_launch("decode_step", stream);
}

}  // namespace fut::cuda
