// MATH       A decode step of a Llama model for 2 to 32 sequences, embedding to logits, in one kernel: the operations
//            of cpu_backend.cpp, bit for bit as this backend's own kernels compute them one by one.
// SHAPES     INT4 weights in groups of 64 or 128, INT4 cache; E = 64, 128; at most 8 query heads a KV head.
// SCHEDULE   One block an SM, in clusters of two that share every row tile (step_batch_products.cuh). Roles: a producer
//            warp streams weights, pages and packed activations through one ring from the first layer to the last;
//            three warps make the start values of what has come; eight consumer warps multiply and finish. Between
//            stages blocks wait for counters (BatchFlags), the weights of the next stage on their way meanwhile. A
//            layer: normalise -> qkv -> y -> attention -> a -> o -> x_mid -> normalise -> gate_up -> h -> down -> x_in.
// NUMERICS   gemm_decode.cuh, attention.cuh, cache.cu, rows.cu.
// ROOFLINE   Weight and page bytes over the read rate, or, from about 16 rows on, products; docs/PERF.md.
// REFERENCE  DESIGN section 8; a tile that blocks share and one of them fixes up: stream-K (Osama et al., 2023), here
//            through distributed shared memory.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/step_batch_attention.cuh"

namespace fut::cuda {

template <class Types>
struct BatchShared {
  BatchBarriers barriers;
  BatchPieces<typename Types::Attention> pieces;
};

template <class Types>
class BatchRoles {
 public:
  using Shape = typename Types::Attention;

  __device__ BatchRoles(const StepBatchArgs& args, BatchShared<Types>& shared, uint8_t* memory)
      : args_(args), shared_(shared), memory_{args, memory} {}

  __device__ void initialise() {
    BatchBarriers& b = shared_.barriers;
    for (int i = 0; i < args_.stages; ++i) {
      barrier_init(shared_address(b.full + i), 1);
      barrier_init(shared_address(b.started + i), kBatchStartWarps);
      barrier_init(shared_address(b.empty + i), kBatchWarps);
    }
    for (uint64_t& post : b.post) barrier_init(shared_address(&post), 1);
    barrier_init_fence();
  }

  __device__ __forceinline__ void produce() {
    BatchProducer<Types> producer(args_, memory_, shared_.barriers);
    for (int i = 0;; ++i) {
      const int l = i / 4, part = i % 4;
      const bool head = l == args_.layer_count;
      if (part == 1) send_pieces(args_, shared_.pieces, producer, memory_.layers()[l]);
      const int product = head ? static_cast<int>(Product::head) : part;
      const uint8_t* tiles = head ? args_.head.tiles : memory_.layers()[l].matrix[part].tiles;
      const uint8_t* rows = part == 1 ? args_.rows_a : part == 3 ? args_.rows_h : args_.rows_x;
      const Handed what = part == 0   ? Handed::normed_in
                          : part == 1 ? Handed::a
                          : part == 2 ? Handed::normed_mid
                                      : Handed::h;
      if (args_.shape[product].rows > 0) producer.product(static_cast<Product>(product), tiles, rows, what, l);
      if (head) break;
    }
  }

  __device__ __forceinline__ void start() {
    BatchStarts<Types> starts(args_, memory_, shared_.barriers);
    for (int i = 0;; ++i) {
      const int l = i / 4, part = i % 4;
      const bool head = l == args_.layer_count;
      if (part == 1) {
        for_pieces(shared_.pieces, args_.kv_heads, [&](const StepUnit<Shape>& unit, bool) {
          for (int k = 0; k < unit.slots(); ++k) starts.skip();
        });
      }
      const int product = head ? static_cast<int>(Product::head) : part;
      if (args_.shape[product].rows > 0) starts.product(static_cast<Product>(product));
      if (head) break;
    }
  }

  __device__ __forceinline__ void consume() {
    BatchConsumer<Types> c(args_, memory_, shared_.barriers);
    for (int i = 0;; ++i) {
      const int l = i / 4, part = i % 4;
      const bool head = l == args_.layer_count;
      if (part == 1) {
        c.begin_stage();
        BatchAttend<Types>(c, shared_.pieces, l).run();
        c.end_stage();
      }
      const Product product = head ? Product::head : static_cast<Product>(part);
      const bool any = args_.shape[static_cast<int>(product)].rows > 0;
      c.begin_stage();
      if (any && part % 2 == 0) BatchNormalise<Types>(c, l, part == 2).run();
      if (any) BatchMultiply<Types>(c, product, l).run();
      const Handed after = part == 0 ? Handed::y : part == 1 ? Handed::x_mid : part == 2 ? Handed::h : Handed::x_in;
      if (!head) c.hand_over(after, part == 3 ? l + 1 : l);
      c.end_stage();
      if (head) break;
    }
  }

 private:
  const StepBatchArgs& args_;
  BatchShared<Types>& shared_;
  const BatchMemory<Types> memory_;
};

template <class Types>
__global__ void __launch_bounds__(kBatchThreads, 1)
    decode_step_batch_kernel(const __grid_constant__ StepBatchArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ BatchShared<Types> shared;
  BatchRoles<Types> roles(args, shared, memory);
  if (threadIdx.x == 0) {
    Watch::given_up() = 0;
    BatchConsumer<Types>::traced().ended = 0;
    BatchFlags::base() = *args.tag_base;
    roles.initialise();
  }
  if (threadIdx.x < kProducts) {
    const Product product = static_cast<Product>(threadIdx.x);
    BatchLot::of(product) = BatchLot::make<Types>(args, product);
  }
  load_step_layers(args, BatchMemory<Types>{args, memory}.layers());
  shared.pieces.locate(args);
  __syncthreads();    // closes: barriers used before they are initialised, pieces before they are located
  cluster_barrier();  // closes: messages from the neighbour before this block's barriers are initialised
  if (threadIdx.x < kBatchConsumers) {
    take_registers<kBatchConsumerRegisters>();
    roles.consume();
  } else {
    give_registers<kBatchOtherRegisters>();
    threadIdx.x < kBatchConsumers + 32 ? roles.produce() : roles.start();
  }
  cluster_barrier();  // closes: a block's shared memory gone while its neighbour still sends to it
}

inline constexpr int kBatchSharedBytes = 232448 - 6144;  ///< the rest is BatchShared and small change

/// The ring; false where too little of it would be left.
template <class Types>
bool fit_step_batch(StepBatchArgs& args) {
  static_assert(sizeof(BatchShared<Types>) <= 5120);
  for (int i = 0; i < kProducts; ++i) {  // half of a cluster's row tiles, where registers hold them
    const bool swiglu = i == static_cast<int>(Product::gate_up);
    const int most = args.shape[i].each + (args.shape[i].extra > 0), tiles = (most + 1) / 2 * (swiglu ? 2 : 1);
    args.row_pairs[i] = tiles > 4 ? Types::kMostPairs : tiles > 2 ? 2 : 1;
  }
  const int layers = args.layer_count * static_cast<int>(sizeof(StepLayer));
  const int slots = (kBatchSharedBytes - Types::kFixedBytes - layers) / Types::kSlotBytes;
  if (slots < 2) return false;
  args.stages = slots < kBatchMaxStages ? slots : kBatchMaxStages;
  return true;
}

template <class Types>
void launch_step_batch(const StepBatchArgs& args, cudaStream_t stream) {
  const size_t bytes =
      Types::kFixedBytes + args.layer_count * sizeof(StepLayer) + size_t{1} * args.stages * Types::kSlotBytes;
  allow_shared_memory(reinterpret_cast<const void*>(decode_step_batch_kernel<Types>), bytes);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;  // all blocks are resident, or the launch fails
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 2;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(multiprocessors() / 2 * 2);
  config.blockDim = dim3(kBatchThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  FUT_CUDA(cudaLaunchKernelEx(&config, decode_step_batch_kernel<Types>, args));
  after_launch("decode_step", stream);
}

}  // namespace fut::cuda
