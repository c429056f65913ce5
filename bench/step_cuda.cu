// Decode on the card by shape name, without a model: every op, the block (five ops a layer) and the whole step, as CUDA
// graphs of PDL kernels over the weights of all layers, so that nothing stays in the L2 cache from one layer to the
// next. Weights and cache hold random bits; every number is the median of graph replays.
//
//   decode_cuda SHAPE BATCH CONTEXT [--weights int4|e4m3|bf16] [--kv int4|e4m3|bf16] [--layers N] [--csv FILE --commit
//   ID]
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/gemm_decode.h"
#include "cuda/launch.cuh"
#include "cuda/step.h"

using namespace fut;

namespace {

constexpr double kReadRate = 4.57e12;  ///< bytes a second, measured on an H200: DESIGN section 8

struct Shape {
  int64_t D, F, H, J, E, L, V;
};
const std::map<std::string, Shape> kShapes = {{"llama-3.1-8b", {4096, 14336, 32, 8, 128, 32, 128256}},
                                              {"llama-3.1-70b", {8192, 28672, 64, 8, 128, 80, 128256}},
                                              {"llama-3.2-1b", {2048, 8192, 32, 8, 64, 16, 128256}},
                                              {"smollm2-135m", {576, 1536, 9, 3, 64, 30, 49152}}};

struct Options {
  std::string shape, csv, commit = "unknown";
  int64_t batch = 1, context = 2048, layers = 0, past = -1, ragged = 0, slots = 0, window = 0;
  bool check = false, graph = false, trace = false;
  Dtype weights = Dtype::int4, kv = Dtype::int4;
};

__device__ uint32_t mix(uint64_t i) {
  uint32_t x = static_cast<uint32_t>(i) * 0x9e3779b9u ^ static_cast<uint32_t>(i >> 32) * 0x85ebca6bu;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}

/// Random 16-bit words: INT4 codes anywhere, scales and BF16 elements small, E4M3 codes below 2.
__global__ void fill_weights(uint16_t* to, int64_t words, int tile_words, int code_words, Dtype dtype) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t r = mix(i);
    if (dtype == Dtype::int4) {
      to[i] = i % tile_words < code_words ? r : (r & 0x81ff) | 0x1400;  // +- 2^-10 .. 2^-9
    } else if (dtype == Dtype::e4m3) {
      to[i] = r & 0xbfbf;
    } else {
      to[i] = (r & 0x807f) | 0x3c00 | (r >> 9 & 0x0080);  // +- 2^-7 .. 2^-6
    }
  }
}

/// INT4 pages: codes anywhere, scales 0.5 .. 2; BF16 and E4M3 pages: numbers about 1, FP32 scales 2^-4.
__global__ void fill_pages(uint8_t* to, int64_t bytes, int page_bytes, int scales_at, Dtype dtype) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < bytes; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t r = mix(i);
    const int at = static_cast<int>(i % page_bytes);
    if (at < scales_at) {
      to[i] = dtype == Dtype::int4   ? r
              : dtype == Dtype::e4m3 ? (r & 0x87) | 0x30
              : i & 1                ? (r & 0x80) | 0x3f
                                     : r & 0x7f;
    } else {
      to[i] = dtype == Dtype::int4 ? 0x30 + r % 16 : at % 4 == 3 ? 0x3d : at % 4 == 2 ? 0x80 : 0;
    }
  }
}

__global__ void fill_floats(float* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = static_cast<float>(static_cast<int32_t>(mix(i))) * 0x1p-31f * 1.7f;
  }
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : o_(options), s_(kShapes.at(options.shape)), gpu_(make_cuda_backend()), stream_(cuda_stream(*gpu_)) {
    if (o_.layers) s_.L = o_.layers;
    make_weights();
    make_activations();
    make_cache();
  }

  void run() {
    make_step();
    if (o_.check) return check();
    const int64_t B = o_.batch, E = s_.E;
    const int64_t kv = B * s_.J * (KvPageLayout{o_.kv, static_cast<int>(E)}.page_bytes() * o_.context / kKvPageTokens);
    const int64_t block = qkv_[0].bytes + o_proj_[0].bytes + gate_up_[0].bytes + down_[0].bytes + kv;
    printf("ring %d slots, window %d, staged %d bytes; row tiles", plan_.args.stages, plan_.args.window,
           plan_.args.staged_bytes);
    for (const auto& p : plan_.args.shape) printf(" %d", p.row_units);
    printf("\n");
    std::vector<double> us;
    for (int64_t layers : {s_.L, s_.L / 2}) {
      plan_.args.layer_count = static_cast<int>(layers);
      us.push_back(time("step_kernel", 1, block * layers + head_.bytes, [&] { cuda::decode_step(plan_, stream_); }));
      fault();
    }
    report("block_kernel", (us[0] - us[1]) / static_cast<double>(s_.L - s_.L / 2), 0, 0, block);
    if (o_.trace) trace();
    if (o_.graph) {
      time("step_graph", 1, block * s_.L + head_.bytes, [&] {
        for (int64_t l = 0; l < s_.L; ++l) layer(l);
        gpu_->lm_head({logits_, residual_, head_, nullptr, B});
      });
    }
  }

  /// One traced step: for every kind of stage the mean over blocks and layers, and block 0's.
  void trace() {
    const int L = static_cast<int>(s_.L), stages = 5 * L + 1, blocks = cuda::multiprocessors();
    plan_.args.layer_count = L;
    plan_.args.trace = device(std::vector<cuda::StepTrace>(blocks * stages));
    cuda::decode_step(plan_, stream_);
    cuda::decode_step(plan_, stream_);
    const auto t = fetch(plan_.args.trace, blocks * stages);
    plan_.args.trace = nullptr;
    const char* names[] = {"qkv", "attention", "o_proj", "gate_up", "down", "head"};
    printf(
        "cycles (mean over blocks and layers): gathered, ready, starved, pushing, rest, end | min gathered, min end, "
        "max end\n");
    for (int k = 0; k < 6; ++k) {
      double sum[6] = {};
      uint32_t most = 0, count = 0, least = ~0u, soonest = ~0u;
      for (int b = 0; b < blocks; ++b) {
        for (int s = 0; s < stages; ++s) {
          if ((s == stages - 1 ? 5 : s % 5) != k) continue;
          const cuda::StepTrace& x = t[b * stages + s];
          sum[0] += x.gathered, sum[1] += x.ready, sum[2] += x.starved, sum[3] += x.pushing, sum[5] += x.end;
          sum[4] += static_cast<double>(x.end) - x.ready - x.starved - x.pushing;
          most = std::max(most, x.end), ++count, least = std::min(least, x.gathered),
          soonest = std::min(soonest, x.end);
        }
      }
      printf("  %-10s", names[k]);
      for (double v : sum) printf(" %8.0f", v / count);
      printf(" | %u %u %u\n", least, soonest, most);
    }
  }

  void fault() {
    cuda::StepFault f;
    gpu_->download(&f, plan_.args.fault, sizeof f);
    if (f.first) {
      printf("FAULT: block %u gave up waiting for tag %u\n", f.block(), f.tag());
      exit(1);
    }
  }

  template <class T>
  std::vector<T> fetch(const T* from, int64_t count) {
    std::vector<T> to(count);
    gpu_->download(to.data(), from, count * sizeof(T));
    return to;
  }
  template <class T>
  bool same(const char* name, const std::vector<T>& want, const std::vector<T>& got) {
    int64_t off = 0, first = -1;
    for (size_t i = 0; i < want.size(); ++i) {
      if (memcmp(&want[i], &got[i], sizeof(T)) != 0) {
        if (first < 0) first = static_cast<int64_t>(i);
        ++off;
      }
    }
    if (off)
      printf("  MISMATCH %s: %lld of %zu differ, first at %lld\n", name, (long long)off, want.size(), (long long)first);
    return off == 0;
  }

  /// The step kernel against this backend's kernels one by one, bit for bit, then twice more against itself.
  void check() {
    const int64_t L = s_.L, B = o_.batch, D = s_.D;
    const auto pages0 = fetch(cache_.pages, pages_stride_ * L);
    const auto tails0 = fetch(cache_.tails, tails_stride_ * L);
    const auto sinks0 = fetch(cache_.sinks, sinks_stride_ * L);
    gpu_->embed({residual_, embedding_, tokens_.data(), B, D});
    for (int64_t l = 0; l < L; ++l) layer(l);
    gpu_->lm_head({logits_, residual_, head_, nullptr, B});
    const auto logits = fetch(logits_, B * s_.V);
    const auto pages1 = fetch(cache_.pages, pages_stride_ * L);
    const auto tails1 = fetch(cache_.tails, tails_stride_ * L);
    const auto sinks1 = fetch(cache_.sinks, sinks_stride_ * L);
    int64_t bad = 0;
    for (float x : logits) bad += !std::isfinite(x);
    bool ok = bad == 0;
    for (int turn = 0; turn < 3 && ok; ++turn) {
      gpu_->upload(cache_.pages, pages0.data(), pages0.size());
      gpu_->upload(cache_.tails, tails0.data(), tails0.size() * 2);
      gpu_->upload(cache_.sinks, sinks0.data(), sinks0.size() * 2);
      FUT_CUDA(cudaMemsetAsync(logits_, 0xff, B * s_.V * 4, stream_));
      cuda::decode_step(plan_, stream_);
      FUT_CUDA(cudaStreamSynchronize(stream_));
      fault();
      ok &= same("logits", logits, fetch(logits_, B * s_.V));
      ok &= same("tails", tails1, fetch(cache_.tails, tails_stride_ * L));
      ok &= same("sinks", sinks1, fetch(cache_.sinks, sinks_stride_ * L));
      ok &= same("pages", pages1, fetch(cache_.pages, pages_stride_ * L));
    }
    printf("%s %s B=%lld past %lld.. layers %lld: logits[0] %g, %lld not finite\n", ok ? "ok    " : "FAILED",
           o_.shape.c_str(), (long long)B, (long long)past_[0], (long long)L, logits[0], (long long)bad);
  }

 private:
  void layer(int64_t l) {
    gpu_->qkv_rope_append(qkv_args(l));
    gpu_->attention_decode(attention_args(l));
    gpu_->o_proj_residual({residual_, a_, o_proj_[l], o_.batch});
    gpu_->gate_up_swiglu({h_, residual_, gate_up_[l], o_.batch});
    gpu_->down_residual({residual_, h_, down_[l], o_.batch});
  }

  /// Runs once for the arrays that ops keep, captures, replays; microseconds of one of `count` equal pieces.
  double time(const char* name, int64_t count, int64_t bytes, const std::function<void()>& work) {
    work();
    FUT_CUDA(cudaStreamSynchronize(stream_));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    FUT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    work();
    FUT_CUDA(cudaStreamEndCapture(stream_, &graph));
    FUT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    cudaEvent_t begin, end;
    FUT_CUDA(cudaEventCreate(&begin));
    FUT_CUDA(cudaEventCreate(&end));
    std::vector<float> us;
    for (int i = 0; i < 45; ++i) {
      FUT_CUDA(cudaEventRecord(begin, stream_));
      FUT_CUDA(cudaGraphLaunch(executable, stream_));
      FUT_CUDA(cudaEventRecord(end, stream_));
      FUT_CUDA(cudaStreamSynchronize(stream_));
      float ms = 0;
      FUT_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 5) us.push_back(ms * 1e3f / static_cast<float>(count));
    }
    FUT_CUDA(cudaGraphExecDestroy(executable));
    FUT_CUDA(cudaGraphDestroy(graph));
    std::sort(us.begin(), us.end());
    report(name, us[us.size() / 2], us.front(), us[us.size() * 9 / 10], bytes);
    return us[us.size() / 2];
  }

  void report(const char* name, double us, double low, double high, int64_t bytes) {
    const double rate = static_cast<double>(bytes) / us * 1e6, share = rate / kReadRate;
    printf("%-14s B=%-3lld C=%-6lld %-4s %-4s %-17s %9.2f us (%.2f-%.2f) %8.3f MB %7.1f GB/s %5.1f %%\n",
           o_.shape.c_str(), static_cast<long long>(o_.batch), static_cast<long long>(o_.context), name_of(o_.weights),
           name_of(o_.kv), name, us, low, high, static_cast<double>(bytes) / 1e6, rate / 1e9, share * 100);
    fflush(stdout);
    if (o_.csv.empty()) return;
    cudaDeviceProp card;
    FUT_CUDA(cudaGetDeviceProperties(&card, 0));
    int clock = 0;
    FUT_CUDA(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0));
    char date[16];
    const time_t now = ::time(nullptr);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    std::ofstream(o_.csv, std::ios::app) << o_.commit << ',' << card.name << ',' << date << ',' << clock / 1000 << ','
                                         << name << ',' << o_.shape << ',' << o_.batch << ',' << o_.context << ','
                                         << name_of(o_.weights) << ',' << name_of(o_.kv) << ',' << us << ',' << bytes
                                         << ',' << share << '\n';
  }

  template <class T>
  T* reserve(int64_t count) {
    buffers_.emplace_back(*gpu_, static_cast<size_t>(count) * sizeof(T));
    return buffers_.back().as<T>();
  }
  float* random_floats(int64_t count) {
    float* x = reserve<float>(count);
    fill_floats<<<1024, 256, 0, stream_>>>(x, count);
    return x;
  }

  Weight weight(Dtype dtype, int64_t N, int64_t K) {
    const int tile = cuda::weight_tile_bytes(dtype, 64);
    Weight w;
    w.dtype = dtype;
    w.rows = N;
    w.cols = K;
    w.group = dtype == Dtype::int4 ? 64 : 0;
    const int64_t bytes = (N + 15) / 16 * (K / 64) * tile;
    uint16_t* data = reserve<uint16_t>(bytes / 2);
    fill_weights<<<2048, 256, 0, stream_>>>(data, bytes / 2, tile / 2, kInt4TileCodeBytes / 2, dtype);
    w.data = data;
    w.bytes = bytes;
    if (dtype == Dtype::e4m3) {
      std::vector<float> scale(N, 0.004f);
      float* device = reserve<float>(N);
      gpu_->upload(device, scale.data(), N * sizeof(float));
      w.scale = device;
      w.bytes += N * 4;
    }
    return w;
  }

  void make_weights() {
    for (int64_t l = 0; l < s_.L; ++l) {
      qkv_.push_back(weight(o_.weights, (s_.H + 2 * s_.J) * s_.E, s_.D));
      o_proj_.push_back(weight(o_.weights, s_.D, s_.H * s_.E));
      gate_up_.push_back(weight(o_.weights, 2 * s_.F, s_.D));
      down_.push_back(weight(o_.weights, s_.D, s_.F));
    }
    head_ = weight(o_.weights, s_.V, s_.D);
    embedding_ = weight(Dtype::bf16, 1024, s_.D);
  }

  template <class T>
  T* device(const std::vector<T>& values) {
    T* to = reserve<T>(values.size());
    gpu_->upload(to, values.data(), values.size() * sizeof(T));
    return to;
  }

  void make_step() {
    cuda::StepArgs& a = plan_.args;
    plan_.weights = o_.weights, plan_.kv = o_.kv, plan_.head_dim = static_cast<int>(s_.E);
    a.layer_count = static_cast<int>(s_.L), a.batch = static_cast<int>(o_.batch);
    a.width = static_cast<int>(s_.D), a.feed_forward = static_cast<int>(s_.F);
    a.heads = static_cast<int>(s_.H), a.kv_heads = static_cast<int>(s_.J);
    a.eps = residual_.eps;
    a.q_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(s_.E)));
    a.embedding = embedding_;
    a.rope = rope_;
    for (int64_t b = 0; b < o_.batch; ++b) tokens_.push_back(static_cast<int32_t>(b * 37 % 1024));
    a.tokens = device(tokens_), a.position = device(past_), a.page_table = device(table_), a.slot = device(slot_);
    a.tail_in = device(tail_);
    a.table_width = cache_.table_width;
    a.splits = std::max(1, cuda::multiprocessors() / a.kv_heads);
    a.head = {static_cast<const uint8_t*>(head_.data), head_.scale};
    a.shape[static_cast<int>(cuda::Product::head)].rows = static_cast<int>(s_.V);
    std::vector<cuda::StepLayer> layers(s_.L);
    for (int64_t l = 0; l < s_.L; ++l) {
      int i = 0;
      for (const Weight* w : {&qkv_[l], &o_proj_[l], &gate_up_[l], &down_[l]})
        layers[l].matrix[i++] = {static_cast<const uint8_t*>(w->data), w->scale};
      const KvCache c = cache(l);
      layers[l].pages = c.pages, layers[l].tails = c.tails, layers[l].sinks = c.sinks;
      layers[l].key_factor = c.key_factor, layers[l].value_factor = c.value_factor;
    }
    a.layers = device(layers);
    const std::string why = cuda::plan_step(plan_);
    FUT_CHECK(why.empty(), "step kernel: ", why);
    size_t words[cuda::kStages];
    cuda::step_words(plan_, words);
    uint2** to[] = {&a.x_in, &a.y, &a.partial, &a.a, &a.x_mid, &a.h};
    for (int i = 0; i < cuda::kStages; ++i) *to[i] = device(std::vector<uint2>(words[i], uint2{0, 0}));
    a.x = reserve<float>(o_.batch * s_.D);
    a.logits = logits_;
    a.tag_base = device(std::vector<uint32_t>{0});
    a.fault = device(std::vector<cuda::StepFault>(1));
    if (o_.slots) a.stages = std::min(a.stages, static_cast<int>(o_.slots));
    if (o_.window) a.window = static_cast<int>(o_.window);
  }

  void make_activations() {
    const int64_t B = o_.batch;
    residual_.x = random_floats(B * s_.D);
    residual_.sum_squares = reserve<float>(B);
    const Dtype operand = o_.weights == Dtype::bf16 ? Dtype::bf16 : Dtype::f16;
    a_.dtype = h_.dtype = operand;
    a_.data = reserve<Half>(B * s_.H * s_.E);
    h_.data = reserve<Half>(B * s_.F);
    q_ = reserve<Bf16>(B * s_.H * s_.E);
    k_ = reserve<Bf16>(B * s_.J * s_.E);
    v_ = reserve<Bf16>(B * s_.J * s_.E);
    logits_ = reserve<float>(B * s_.V);
    const int64_t positions = o_.context + 64;
    rope_ = {random_floats(positions * s_.E / 2), random_floats(positions * s_.E / 2), static_cast<int>(s_.E),
             positions};
  }

  /// Sequences of `context` tokens with a half-full last page, pages of different sequences interleaved.
  void make_cache() {
    const int64_t B = o_.batch, E = s_.E, J = s_.J, pages = o_.context / kKvPageTokens + 1;
    const KvPageLayout layout{o_.kv, static_cast<int>(E)};
    start_.push_back(0);
    for (int64_t b = 0; b < B; ++b) {
      start_.push_back(b + 1);
      past_.push_back(o_.past >= 0 ? o_.past + o_.ragged * b : o_.context - 33);
      slot_.push_back(b);
      for (int64_t p = 0; p < pages; ++p) table_.push_back(p * B + b);
    }
    tail_.assign(B, 0);
    cache_.layout = layout;
    cache_.kv_heads = static_cast<int>(J);
    cache_.page_count = pages * B;
    cache_.page_table = table_.data();
    cache_.table_width = pages;
    cache_.slot = slot_.data();
    cache_.tail_in = cache_.tail_out = tail_.data();
    pages_stride_ = cache_.page_count * J * layout.page_bytes();
    cache_.pages = reserve<uint8_t>(pages_stride_ * s_.L);
    fill_pages<<<2048, 256, 0, stream_>>>(cache_.pages, pages_stride_ * s_.L, static_cast<int>(layout.page_bytes()),
                                          static_cast<int>(layout.key_scale_offset()), o_.kv);
    tails_stride_ = B * 2 * J * 2 * kKvPageTokens * E;
    sinks_stride_ = B * J * 2 * kKvSinkTokens * E;
    cache_.tails = reserve<Bf16>(tails_stride_ * s_.L);
    cache_.sinks = reserve<Bf16>(sinks_stride_ * s_.L);
    for (const auto& [rows, count] : {std::pair{cache_.tails, tails_stride_}, std::pair{cache_.sinks, sinks_stride_}}) {
      fill_pages<<<512, 256, 0, stream_>>>(reinterpret_cast<uint8_t*>(rows), count * s_.L * 2, 1 << 20, 1 << 20,
                                           Dtype::bf16);
    }
    std::vector<float> factors(J, 1.0f / 16);
    float* device = reserve<float>(J);
    gpu_->upload(device, factors.data(), J * sizeof(float));
    cache_.key_factor = cache_.value_factor = device;
  }

  KvCache cache(int64_t l) const {
    KvCache c = cache_;
    c.pages += l * pages_stride_;
    c.tails += l * tails_stride_;
    c.sinks += l * sinks_stride_;
    return c;
  }
  Batch batch() const { return {o_.batch, o_.batch, start_.data(), past_.data()}; }
  QkvArgs qkv_args(int64_t l) const {
    return {q_, k_, v_, cache(l), residual_, qkv_[l], rope_, batch(), static_cast<int>(s_.H), s_.D};
  }
  AttentionArgs attention_args(int64_t l) const { return {a_, q_, k_, v_, cache(l), batch(), static_cast<int>(s_.H)}; }

  Options o_;
  Shape s_;
  std::unique_ptr<Backend> gpu_;
  cudaStream_t stream_;
  std::vector<Buffer> buffers_;
  std::vector<Weight> qkv_, o_proj_, gate_up_, down_;
  Weight head_, embedding_;
  cuda::StepPlan plan_;
  std::vector<int32_t> tokens_;
  Residual residual_;
  Operand a_, h_;
  Bf16 *q_ = nullptr, *k_ = nullptr, *v_ = nullptr;
  float* logits_ = nullptr;
  Rope rope_;
  KvCache cache_;
  int64_t pages_stride_ = 0, tails_stride_ = 0, sinks_stride_ = 0;
  std::vector<int64_t> start_, past_, slot_, table_;
  std::vector<int8_t> tail_;
};

Dtype dtype_of(const std::string& name) {
  for (Dtype d : {Dtype::int4, Dtype::e4m3, Dtype::bf16}) {
    if (name == name_of(d)) return d;
  }
  fail("format \"", name, "\" is unknown (int4, e4m3, bf16)");
}

Options parse(int count, char** words) {
  FUT_CHECK(count >= 4,
            "usage: decode_cuda SHAPE BATCH CONTEXT [--weights T] [--kv T] [--layers N] [--csv FILE --commit ID]");
  Options o;
  o.shape = words[1];
  FUT_CHECK(kShapes.count(o.shape), "shape \"", o.shape, "\" is unknown");
  o.batch = std::stoll(words[2]);
  o.context = std::stoll(words[3]);
  FUT_CHECK(o.batch >= 1 && o.context >= 64, "batch ", o.batch, ", context ", o.context);
  for (int i = 4; i + 1 < count; i += 2) {
    const std::string flag = words[i], value = words[i + 1];
    if (flag == "--weights")
      o.weights = dtype_of(value);
    else if (flag == "--kv")
      o.kv = dtype_of(value);
    else if (flag == "--layers")
      o.layers = std::stoll(value);
    else if (flag == "--past")
      o.past = std::stoll(value);
    else if (flag == "--ragged")
      o.ragged = std::stoll(value);
    else if (flag == "--slots")
      o.slots = std::stoll(value);
    else if (flag == "--window")
      o.window = std::stoll(value);
    else if (flag == "--check")
      o.check = value == "1";
    else if (flag == "--trace")
      o.trace = value == "1";
    else if (flag == "--graph")
      o.graph = value == "1";
    else if (flag == "--csv")
      o.csv = value;
    else if (flag == "--commit")
      o.commit = value;
    else
      fail("option ", flag, " is unknown");
  }
  return o;
}

}  // namespace

int main(int count, char** words) {
  try {
    Bench(parse(count, words)).run();
  } catch (const std::exception& error) {
    fprintf(stderr, "decode_cuda: %s\n", error.what());
    return 1;
  }
}
