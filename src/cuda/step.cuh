// MATH       A decode step of a Llama model for up to 8 sequences, embedding to logits, in one kernel: the operations of
//            cpu_backend.cpp, bit for bit as this backend's own kernels compute them one by one.
// SHAPES     INT4, E4M3, BF16 weights; INT4 cache; E = 64, 128; at most 8 query heads a KV head; whole rotary width.
// SCHEDULE   One block an SM, all resident. Roles that never change: a producer warp streams weights and pages through one
//            ring from the first layer to the last, needing nothing of this step, at most `window` slots in flight; eight
//            consumer warps; three finishing warps. While the consumers wait for activations the ring fills, and they
//            drain it faster than memory fills it. Activations go from block to block as tagged words (handover.cuh).
//            A layer: qkv -> y -> attention -> partial -> merge -> a -> o_proj -> x_mid -> gate_up -> h -> down -> x_in.
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
  __device__ StepRoles(const StepArgs& args, uint8_t* memory, StepBarriers& barriers)
      : args_(args), memory_{args, memory}, barriers_(barriers) {}

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
    StepPages<Types> pages(args_, ring);
    for (int l = 0; l < args_.layer_count; ++l) {
      const StepLayer& layer = args_.layers[l];
      send(ring, Product::qkv, layer.matrix[0]);
      pages.send(layer);
      send(ring, Product::o, layer.matrix[1]);
      send(ring, Product::gate_up, layer.matrix[2]);
      send(ring, Product::down, layer.matrix[3]);
    }
    send(ring, Product::head, args_.head);
  }

  __device__ __forceinline__ void consume() {
    StepConsumer<Types> c(args_, memory_, barriers_);
    // A layer is two halves, each a normalised product and a rounded one: few call sites keep the kernel small.
    for (int half = 0;; ++half) {
      const int l = half / 2;
      const bool first = half % 2 == 0, head = l == args_.layer_count;
      normalised(c, head ? Product::head : first ? Product::qkv : Product::gate_up, first ? args_.x_in : args_.x_mid, l,
                 first ? Stage::x_in : Stage::x_mid);
      if (head) break;
      if (first) {
        StepAttend<Types>(c, args_.layers[l], l).run();
        c.end_stage();
      }
      rounded(c, first ? Product::o : Product::down, first ? args_.a : args_.h, l, first ? Stage::a : Stage::h);
    }
  }

  __device__ __forceinline__ void finish() {
    StepFinish<Types> f(args_, memory_, barriers_);
    const uint32_t base = *args_.tag_base;
    f.embed(step_tag(base, 0, Stage::x_in));
    for (int l = 0; l < args_.layer_count; ++l) {
      const StepLayer& layer = args_.layers[l];
      f.swiglu_scale = layer.swiglu_scale;
      finish<Product::qkv>(f, layer.matrix[0], 1.0f, args_.y, step_tag(base, l, Stage::y));
      finish<Product::o>(f, layer.matrix[1], layer.attention_scale, args_.x_mid, step_tag(base, l, Stage::x_mid));
      finish<Product::gate_up>(f, layer.matrix[2], 1.0f, args_.h, step_tag(base, l, Stage::h));
      finish<Product::down>(f, layer.matrix[3], layer.swiglu_scale, args_.x_in, step_tag(base, l + 1, Stage::x_in));
    }
    finish<Product::head>(f, args_.head, 1.0f, nullptr, 0);
  }

 private:
  __device__ const StepShape& shape(Product p) const { return args_.shape[static_cast<int>(p)]; }

  __device__ void send(StepProducer<Types>& ring, Product p, const StepMatrix& matrix) const {
    const StepShape& s = shape(p);
    if (s.at_a_time == 1) {
      ring.template product<1>(s, matrix, false);
    } else {
      ring.template product<2>(s, matrix, p == Product::gate_up);
    }
  }

  __device__ __forceinline__ void normalised(StepConsumer<Types>& c, Product p, const uint2* x, int layer, Stage stage) const {
    c.begin_stage(stage);
    StepMultiply<Types> product(c, shape(p));
    const uint32_t tag = step_tag(c.base, layer, stage);
    if (shape(p).at_a_time == 1) {
      product.template normalised<1>(x, tag);
    } else {
      product.template normalised<2>(x, tag);
    }
    c.end_stage();
  }
  __device__ __forceinline__ void rounded(StepConsumer<Types>& c, Product p, const uint2* a, int layer, Stage stage) const {
    c.begin_stage(stage);
    StepMultiply<Types> product(c, shape(p));
    const uint32_t tag = step_tag(c.base, layer, stage);
    if (shape(p).at_a_time == 1) {
      product.template rounded<1>(a, tag);
    } else {
      product.template rounded<2>(a, tag);
    }
    c.end_stage();
  }

  template <Product kProduct>
  __device__ void finish(StepFinish<Types>& f, const StepMatrix& matrix, float scale, uint2* to, uint32_t tag) const {
    const StepShape& s = shape(kProduct);
    if constexpr (kProduct != Product::gate_up) {
      if (s.at_a_time == 1) return f.template product<1, kProduct>(s, matrix, scale, to, tag);
    }
    f.template product<2, kProduct>(s, matrix, scale, to, tag);
  }

  const StepArgs& args_;
  StepMemory<Types> memory_;
  StepBarriers& barriers_;
};

template <class Types>
__global__ void __launch_bounds__(kStepThreads, 1) decode_step_kernel(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ StepBarriers barriers;
  StepRoles<Types> roles(args, memory, barriers);
  if (threadIdx.x == 0) {
    Watch::given_up() = 0;
    roles.initialise();
  }
  __syncthreads();  // closes: barriers used before they are initialised
  if (threadIdx.x < kStepConsumers) {
    roles.consume();
  } else if (threadIdx.x < kStepConsumers + 32) {
    roles.produce();
  } else {
    roles.finish();
  }
}

inline constexpr int kStepSharedBytes = 232448 - 1024;

/// Ring and activations for these types; false where too little of the ring would be left.
template <class Types>
bool fit_step(StepArgs& args) {
  constexpr int kMergeBytes = kQuads * Types::Attention::kMergeBytes, kInFlight = 48 * 1024, kFewestSlots = 3;
  int staged = kMergeBytes - kSumsBytes;
  for (int i = 0; i < kProducts; ++i) {
    const bool whole = i == static_cast<int>(Product::qkv) || i == static_cast<int>(Product::gate_up) ||
                       i == static_cast<int>(Product::head);
    StepShape& s = args.shape[i];
    const int chunk = Types::chunk(1);
    s.piece = s.col_tiles;
    if (!whole) {  // a piece that leaves most of shared memory to the ring
      const int most = (64 * 1024 / (args.batch * 128)) / chunk * chunk;
      s.piece = s.col_tiles <= most || most == 0 ? s.col_tiles : most;
    }
    const int bytes = args.batch * s.piece * 128 + (whole ? s.col_tiles * Types::Tile::kGroups * 32 : 0);
    staged = bytes > staged ? bytes : staged;
  }
  args.staged_bytes = (staged + 127) / 128 * 128;
  const int slots = (kStepSharedBytes - Types::kFixedBytes - args.staged_bytes) / Types::kSlotBytes;
  if (slots < kFewestSlots) return false;
  args.stages = slots < kStepMaxStages ? slots : kStepMaxStages;
  args.window = (kInFlight + Types::kSlotBytes - 1) / Types::kSlotBytes;
  return true;
}

template <class Types>
void launch_step(const StepArgs& args, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(decode_step_kernel<Types>);
  const size_t bytes = Types::kFixedBytes + args.staged_bytes + args.stages * Types::kSlotBytes;
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
}

}  // namespace fut::cuda
