// The operations of ops.h as launches of this folder's kernels on one stream.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/attention.h"
#include "cuda/attention_prefill.h"
#include "cuda/cache.h"
#include "cuda/cuda_backend.h"
#include "cuda/device_memory.cuh"
#include "cuda/gemm_decode.h"
#include "cuda/place.h"
#include "cuda/prefill_products.h"
#include "cuda/rows.h"
#include "cuda/step.h"
#include "cuda/step_batch.h"
#include "cuda/step_trace.h"

namespace fut {
namespace cuda {
namespace {

/// FUT_STEP_ROWS, or what is faster: beyond one row it is the operations one by one (docs/PERF.md).
int64_t step_rows() {
  const char* text = getenv("FUT_STEP_ROWS");
  if (!text) return 1;
  const bool number = *text && strlen(text) <= 2 && strspn(text, "0123456789") == strlen(text);
  FUT_CHECK(number, "FUT_STEP_ROWS is \"", text, "\", expected 0 to 99");
  return atoi(text);
}

class CudaBackend final : public Backend {
 public:
  CudaBackend() : step_rows_(step_rows()) {
    FUT_CUDA(cudaSetDevice(0));
    FUT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    FUT_CUDA(cudaDeviceGetDefaultMemPool(&pool_, 0));
    uint64_t keep = UINT64_MAX;  // freed memory stays with the process: a step allocates its logits anew
    FUT_CUDA(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep));
    FUT_CUDA(cudaMallocHost(&fault_seen_, sizeof *fault_seen_));
  }
  ~CudaBackend() override {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
    cudaFreeHost(fault_seen_);
  }

  std::string name() const override {
    cudaDeviceProp properties;
    FUT_CUDA(cudaGetDeviceProperties(&properties, 0));
    return cat("cuda (", properties.name, ")");
  }

  void* allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes == 0) return data;
    const cudaError_t status = cudaMallocAsync(&data, bytes, stream_);
    if (status != cudaSuccess) cudaGetLastError();  // or the next launch would seem to have failed
    FUT_CHECK(status == cudaSuccess, "out of memory on the card: ", bytes >> 20, " MiB could not be allocated, ",
              free_bytes() >> 20, " MiB are free (", cudaGetErrorString(status), ")");
    return data;
  }
  void release(void* data, size_t) override {
    if (data) cudaFreeAsync(data, stream_);
  }

  void upload(void* to, const void* from, size_t bytes) override {
    FUT_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
    FUT_CUDA(cudaStreamSynchronize(stream_));
  }
  void download(void* to, const void* from, size_t bytes) override {
    if (step_layers_ > 0)
      FUT_CUDA(cudaMemcpyAsync(fault_seen_, fault_.reserve<StepFault>(1, stream_, true), sizeof *fault_seen_,
                               cudaMemcpyDeviceToHost, stream_));
    FUT_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    FUT_CUDA(cudaStreamSynchronize(stream_));
    counters_.flush(stream_);
    check_step();
  }

  cudaStream_t stream() const { return stream_; }
  void lose(LostRow row) { lost_ = row; }

  TracedStep trace(const std::function<void()>& work) {
    traced_ = {};
    tracing_ = true;
    work();
    tracing_ = false;
    TracedStep out = traced_;
    out.stages.resize(static_cast<size_t>(out.blocks) * (5 * out.layers + 1));
    const size_t bytes = out.stages.size() * sizeof(StepTrace);
    if (bytes) download(out.stages.data(), trace_.reserve<StepTrace>(out.stages.size(), stream_), bytes);
    return out;
  }

  size_t free_bytes() const override {
    size_t free = 0, total = 0;
    uint64_t reserved = 0, used = 0;
    FUT_CUDA(cudaMemGetInfo(&free, &total));
    FUT_CUDA(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved));
    FUT_CUDA(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used));
    return free + (reserved - used);  // what was released stays with the pool
  }

  bool takes_input_scale() const override { return true; }

  bool one_order() const override { return false; }

  PlacedWeight place(const HostWeight& host, Phase phase) override {
    PlacedWeight placed;
    Weight& w = placed.weight;
    w.dtype = host.dtype;
    w.rows = host.rows;
    w.cols = host.cols;
    w.group = host.group;
    w.phase = phase;
    const auto keep = [&](const std::vector<uint8_t>& bytes) {
      placed.storage = Buffer(*this, bytes.size());
      upload(placed.storage.as<void>(), bytes.data(), bytes.size());
      w.data = placed.storage.as<void>();
    };
    phase == Phase::prefill ? keep(prefill_rows(host)) : keep(make_tiles(host));
    if (host.dtype == Dtype::e4m3) {
      placed.scale_storage = Buffer(*this, host.scale.size() * sizeof(float));
      upload(placed.scale_storage.as<void>(), host.scale.data(), host.scale.size() * sizeof(float));
      w.scale = placed.scale_storage.as<float>();
    }
    if (!host.input_scale.empty()) {
      placed.input_scale_storage = Buffer(*this, host.input_scale.size() * sizeof(float));
      upload(placed.input_scale_storage.as<void>(), host.input_scale.data(), host.input_scale.size() * sizeof(float));
      w.input_scale = placed.input_scale_storage.as<float>();
    }
    if (!host.bias.empty()) {
      placed.bias_storage = Buffer(*this, host.bias.size() * sizeof(float));
      upload(placed.bias_storage.as<void>(), host.bias.data(), host.bias.size() * sizeof(float));
      w.bias = placed.bias_storage.as<float>();
    }
    w.bytes = static_cast<int64_t>(placed.storage.bytes() + placed.scale_storage.bytes() +
                                   placed.input_scale_storage.bytes() + placed.bias_storage.bytes());
    return placed;
  }

  void embed(const EmbedArgs& args) override {
    validate(args);
    if (args.rows == 0) return;
    const int32_t* tokens = tokens_on_device(args.tokens, args.rows, args.embedding.rows);
    embed_rows(on_device(args.residual), args.embedding, tokens, static_cast<int>(args.rows), stream_);
  }

  void qkv_rope_cache(const QkvArgs& args) override { qkv("qkv_rope_cache", args, false); }
  void qkv_rope_append(const QkvArgs& args) override { qkv("qkv_rope_append", args, true); }
  void attention_prefill(const AttentionArgs& args) override { attend_prefill("attention_prefill", args); }
  void attention_decode(const AttentionArgs& args) override { attend_decode("attention_decode", args); }
  void o_proj_residual(const ResidualGemmArgs& args) override { residual_gemm("o_proj_residual", args); }
  void down_residual(const ResidualGemmArgs& args) override { residual_gemm("down_residual", args); }

  void gate_up_swiglu(const GateUpArgs& args) override {
    validate(args);
    const int rows = static_cast<int>(args.rows), F = static_cast<int>(args.gate_up.rows / 2);
    if (rows == 0) return;
    const char* op = "gate_up_swiglu";
    const Operand out = on_device(args.out);
    if (args.gate_up.phase == Phase::prefill) {
      prefill_.gate_up(op, args, out, stream_);
      return collect_amax(args.out);
    }
    if (F % 16 == 0 && !out.amax && (out.dtype == Dtype::f16 || out.dtype == Dtype::bf16)) {
      GemmArgs gemm;
      gemm.finish = Finish::swiglu;
      gemm.out = out.data;
      gemm.out_type = out.dtype;
      gemm.out_scale = out.scale;
      gemm.saturated = reinterpret_cast<unsigned long long*>(out.saturated);
      return normalised_gemm(op, args.residual, args.gate_up, nullptr, rows, gemm);
    }
    GemmArgs gemm;
    gemm.out = y_.reserve<float>(static_cast<size_t>(rows) * args.gate_up.rows, stream_);
    normalised_gemm(op, args.residual, args.gate_up, nullptr, rows, gemm);
    store_operand(out, static_cast<float*>(gemm.out), true, rows, F, stream_);
    collect_amax(args.out);
  }

  void lm_head(const LmHeadArgs& args) override {
    validate(args);
    if (args.rows == 0) return;
    const int64_t* row = nullptr;
    if (args.row) {
      rows_.begin();
      const size_t place = rows_.add(args.row, args.rows);
      rows_.send(stream_);
      row = rows_.at<int64_t>(place);
    }
    GemmArgs gemm;
    gemm.out = args.logits;
    normalised_gemm("lm_head", args.residual, args.head, row, static_cast<int>(args.rows), gemm);
  }

  /// One kernel from the embedding to the logits, or to the last residual where the head has another format.
  bool decode_step(const DecodeStepArgs& args) override {
    const int64_t rows = args.batch.rows;
    if (rows == 0 || rows > step_rows_ || rows != args.batch.sequences || args.layer_count == 0) return false;
    validate(args);
    return rows == 1 ? step_of_one(args) : step_of_batch(args);
  }

 private:
  bool step_of_one(const DecodeStepArgs& args) {
    StepPlan plan;
    plan.weights = args.layers[0].qkv.dtype;
    plan.group = args.layers[0].qkv.group;
    plan.kv = args.layers[0].cache.layout.dtype;
    plan.head_dim = args.layers[0].cache.layout.head_dim;
    StepArgs& a = plan.args;
    if (!step_model(args, a) || !plan_step(plan).empty()) return false;
    if (lost_ != LostRow::none) --a.shape[static_cast<int>(lost_ == LostRow::qkv ? Product::qkv : Product::down)].rows;
    lost_ = LostRow::none;
    send_step(args, a);
    size_t words[kStages];
    step_words(plan, words);
    uint2** to[] = {&a.x_in, &a.y, &a.partial, &a.a, &a.x_mid, &a.h};
    for (int i = 0; i < kStages; ++i) *to[i] = handed_over_[i].reserve<uint2>(words[i], stream_, true);
    cuda::decode_step(plan, stream_);
    finish_step(args, a);
    return true;
  }

  bool step_of_batch(const DecodeStepArgs& args) {
    const Weight& like = args.layers[0].qkv;
    const KvCache& cache = args.layers[0].cache;
    if (like.dtype != Dtype::int4 || like.group == 32 || cache.layout.dtype != Dtype::int4) return false;
    StepBatchPlan plan;
    plan.head_dim = cache.layout.head_dim;
    StepBatchArgs& a = plan.args;
    if (!step_model(args, a) || !plan_step_batch(plan).empty()) return false;
    if (lost_ != LostRow::none) a.lost = static_cast<int>(lost_ == LostRow::qkv ? Handed::y : Handed::h);
    lost_ = LostRow::none;
    send_step(args, a);
    const size_t B = a.batch, J = a.kv_heads, E = plan.head_dim, H = a.heads, widest = kStepBatchRows;
    a.y = y_rows_.reserve<float>(B * (H + 2 * J) * E, stream_);
    a.partial =
        partial_.reserve<float>(attention_partial_bytes(a.batch, a.heads, plan.head_dim, a.splits) / 4, stream_);
    a.arrived = arrived_.reserve<unsigned>(B * J, stream_, true);
    a.rows_x = step_rows_of_[0].reserve<uint8_t>(packed_bytes(widest, a.width), stream_);
    a.rows_a = step_rows_of_[1].reserve<uint8_t>(packed_bytes(widest, H * E), stream_);
    a.rows_h = step_rows_of_[2].reserve<uint8_t>(packed_bytes(widest, a.feed_forward), stream_);
    a.flags = flags_.reserve<unsigned>(size_t{kHanded} * kFlagWords * (a.layer_count + 1), stream_, true);
    decode_step_batch(plan, stream_);
    finish_step(args, a);
    return true;
  }

  /// What the host sends for a step, and the arrays that both kernels have.
  void send_step(const DecodeStepArgs& args, StepModel& a) {
    const KvCache& cache = args.layers[0].cache;
    a.tokens = tokens_on_device(args.tokens, a.batch, args.embedding.rows);
    const DeviceBatch batch = on_device(args.batch, cache);
    a.layers = layers_on_device(args);
    a.head = {static_cast<const uint8_t*>(args.head.data), args.head.scale};
    a.eps = args.eps;
    a.q_scale = query_scale(cache.layout.head_dim);
    a.embedding = args.embedding;
    a.position = batch.map.position;
    a.page_table = batch.cache.page_table;
    a.table_width = cache.table_width;
    a.slot = batch.cache.slot;
    a.tail_in = batch.cache.tail_in;
    a.splits = attention_splits(a.kv_heads);
    a.x = y_.reserve<float>(static_cast<size_t>(a.batch) * a.width, stream_);
    a.logits = args.logits;
    a.tag_base = tag_base_.reserve<uint32_t>(1, stream_, true);
    a.fault = fault_.reserve<StepFault>(1, stream_, true);
    a.saturated = counters_.of(args.saturated, stream_);
    if (!tracing_) return;
    traced_ = {multiprocessors(), a.layer_count, head_inside(args), {}};
    a.trace = trace_.reserve<StepTrace>(static_cast<size_t>(traced_.blocks) * (5 * a.layer_count + 1), stream_);
  }

  void finish_step(const DecodeStepArgs& args, const StepModel& a) {
    step_layers_ = args.layer_count;
    if (head_inside(args)) return;
    Residual last;
    last.dtype = Dtype::f32;
    last.x = a.x;
    last.eps = args.eps;
    GemmArgs gemm;
    gemm.out = args.logits;
    normalised_gemm("lm_head", last, args.head, nullptr, a.batch, gemm);
  }

  const StepLayer* layers_on_device(const DecodeStepArgs& args) {
    const std::vector<StepLayer> layers = step_layers(args);
    layers_.begin();
    const size_t table = layers_.add(layers.data(), layers.size());
    layers_.send(stream_);
    return layers_.at<StepLayer>(table);
  }

  const int32_t* tokens_on_device(const int32_t* tokens, int64_t rows, int64_t vocabulary) {
    for (int64_t t = 0; t < rows; ++t) {
      FUT_CHECK(tokens[t] >= 0 && tokens[t] < vocabulary, "token id ", tokens[t],
                " is outside the model's vocabulary of ", vocabulary);
    }
    tokens_.begin();
    const size_t place = tokens_.add(tokens, rows);
    tokens_.send(stream_);
    return tokens_.at<int32_t>(place);
  }

  /// A step that gave up waiting left word of where. Called when the stream is idle and the fault is in host memory.
  /// The next step works: it raises its tags above all that this one left.
  void check_step() {
    const int64_t layers = step_layers_;
    step_layers_ = 0;
    if (layers == 0 || fault_seen_->first == 0) return;
    const StepFault fault = *fault_seen_;
    uint32_t base = 0;  // the step raised it behind itself
    fault_.zero(stream_);
    arrived_.zero(stream_);
    FUT_CUDA(cudaMemcpyAsync(&base, tag_base_.reserve<uint32_t>(1, stream_, true), sizeof base, cudaMemcpyDeviceToHost,
                             stream_));
    FUT_CUDA(cudaStreamSynchronize(stream_));
    const int64_t period = (layers + 1) * kStages, behind = static_cast<int32_t>(fault.tag() - 1 - base) % period;
    const int64_t place = behind < 0 ? behind + period : behind, layer = place / kStages;
    fail("decode step: block ", fault.block(), " waited in vain for ", name_of(static_cast<Stage>(place % kStages)),
         layer < layers ? cat(" of layer ", layer) : " of the head", " (tag ", fault.tag(), ")");
  }

  /// A batch's arrays on the device, and the cache with them in place of the host's.
  struct DeviceBatch {
    KvCache cache;
    RowMap map;
    const int64_t* start;
    int64_t longest = 0;  ///< new rows of the longest sequence
  };

  DeviceBatch on_device(const Batch& batch, const KvCache& cache) {
    const size_t B = batch.sequences;
    std::vector<int32_t> sequence;
    std::vector<int64_t> position;
    DeviceBatch d{cache, {}, nullptr};
    for (int64_t b = 0; b < batch.sequences; ++b) {
      const int64_t rows = batch.start[b + 1] - batch.start[b];
      d.longest = std::max(d.longest, rows);
      for (int64_t i = 0; i < rows; ++i) {
        sequence.push_back(static_cast<int32_t>(b));
        position.push_back(batch.past[b] + i);
      }
    }
    const bool tails = cache.layout.dtype == Dtype::int4;
    batch_.begin();
    const size_t start = batch_.add(batch.start, B + 1), past = batch_.add(batch.past, B),
                 table = batch_.add(cache.page_table, B * cache.table_width),
                 slot = batch_.add(cache.slot, tails ? B : 0), in = batch_.add(cache.tail_in, tails ? B : 0),
                 out = batch_.add(cache.tail_out, tails ? B : 0),
                 row_sequence = batch_.add(sequence.data(), sequence.size()),
                 row_position = batch_.add(position.data(), position.size());
    batch_.send(stream_);
    d.start = batch_.at<int64_t>(start);
    d.map = {batch_.at<int32_t>(row_sequence), batch_.at<int64_t>(row_position), batch_.at<int64_t>(past)};
    d.cache.page_table = batch_.at<int64_t>(table);
    d.cache.slot = batch_.at<int64_t>(slot);
    d.cache.tail_in = batch_.at<int8_t>(in);
    d.cache.tail_out = batch_.at<int8_t>(out);
    return d;
  }

  Operand on_device(Operand operand) {
    operand.saturated = reinterpret_cast<int64_t*>(counters_.of(operand.saturated, stream_));
    if (operand.amax) {
      operand.amax = amax_.reserve<float>(1, stream_);
      FUT_CUDA(cudaMemsetAsync(operand.amax, 0, sizeof(float), stream_));
    }
    return operand;
  }
  Residual on_device(Residual residual) {
    residual.requantised = reinterpret_cast<int64_t*>(counters_.of(residual.requantised, stream_));
    return residual;
  }

  void collect_amax(const Operand& host) {
    if (!host.amax) return;
    float largest = 0.0f;
    download(&largest, amax_.reserve<float>(1, stream_), sizeof largest);
    *host.amax = std::max(*host.amax, largest);
  }

  /// Memory for the packed rows of a launch, which it takes.
  PackedRows packed_rows(const Weight& weight, GemmArgs& args) {
    const PackedRows packed(weight, packed_.reserve<uint8_t>(PackedRows::bytes(weight, kGemmMaxRows), stream_),
                            args.batch);
    args.starts = packed.starts;
    return packed;
  }

  /// One product, cut into launches of at most kGemmMaxRows rows.
  void gemm_in_parts(const char* op, const Weight& weight, GemmArgs args, int rows, int64_t a_row_bytes,
                     int64_t out_row_bytes) {
    for (int first = 0; first < rows; first += kGemmMaxRows) {
      GemmArgs part = args;
      part.batch = std::min(kGemmMaxRows, rows - first);
      part.a = static_cast<const uint8_t*>(args.a) + first * a_row_bytes;
      part.out = static_cast<uint8_t*>(args.out) + first * out_row_bytes;
      if (args.row_factor) part.row_factor = args.row_factor + first;
      if (gemm_packs(part.finish, part.batch, weight.cols)) {
        const PackedRows packed = packed_rows(weight, part);
        pack_rows(part.a, part.batch, static_cast<int>(weight.cols), packed, stream_);
        part.a = packed.a;
      }
      gemm_decode(op, weight, part, stream_);
    }
  }

  /// A product with the normalised residual: in one kernel for a few f32 rows, else through an f16 or bf16 operand.
  void normalised_gemm(const char* op, const Residual& residual, const Weight& weight, const int64_t* row, int rows,
                       GemmArgs args) {
    const int width = static_cast<int>(weight.cols);
    const int64_t out_row =
        args.finish == Finish::swiglu ? weight.rows : weight.rows * 4;  // N / 2 16-bit values, or N f32
    if (residual.dtype == Dtype::f32 && !residual.x8 && gemm_normalises(weight, rows)) {
      args.a = residual.x;
      args.normalise = true;
      args.eps = residual.eps;
      args.input_scale = weight.input_scale;
      args.row = row;
      args.batch = rows;
      return gemm_decode(op, weight, args, stream_);
    }
    void* a = a16_.reserve<Half>(static_cast<size_t>(rows) * width, stream_);
    if (residual.dtype == Dtype::f32 && !residual.x8) {
      for (int first = 0; first < rows; first += kGemmMaxRows) {
        GemmArgs part = args;
        part.batch = std::min(kGemmMaxRows, rows - first);
        part.out = static_cast<uint8_t*>(args.out) + first * out_row;
        const float* x = static_cast<const float*>(residual.x) + (row ? 0 : int64_t{first} * width);
        const int64_t* of = row ? row + first : nullptr;
        if (gemm_packs(part.finish, part.batch, weight.cols)) {
          const PackedRows packed = packed_rows(weight, part);
          normalise_rows(x, of, part.batch, residual.eps, weight, &packed, nullptr, stream_);
          part.a = packed.a;
        } else {
          normalise_rows(x, of, part.batch, residual.eps, weight, nullptr, a, stream_);
          part.a = a;
        }
        gemm_decode(op, weight, part, stream_);
      }
      return;
    }
    float* factor = factor_.reserve<float>(rows, stream_);
    residual_operand(residual, weight, row, rows, a, factor, stream_);
    args.a = a;
    args.row_factor = factor;
    gemm_in_parts(op, weight, args, rows, width * 2, out_row);
  }

  void qkv(const char* op, const QkvArgs& args, bool decode) {
    validate_qkv(args, decode);
    if (args.batch.rows == 0) return;
    const int rows = static_cast<int>(args.batch.rows);
    const DeviceBatch batch = on_device(args.batch, args.cache);
    QkvFinish finish;
    finish.q = static_cast<Bf16*>(args.q), finish.k = static_cast<Bf16*>(args.k), finish.v = static_cast<Bf16*>(args.v);
    finish.cache = batch.cache, finish.map = batch.map, finish.start = batch.start;
    finish.rope = args.rope, finish.rows = rows, finish.heads = args.heads;
    finish.q_norm = args.q_norm, finish.k_norm = args.k_norm, finish.eps = args.residual.eps;
    finish.append = decode;
    const bool prefill = args.qkv.phase == Phase::prefill, fused = prefill && prefill_.qkv(op, args, finish, stream_);
    if (!fused) {
      float* y = y_.reserve<float>(static_cast<size_t>(rows) * args.qkv.rows, stream_);
      if (prefill) {
        prefill_.plain(op, args.residual, args.qkv, rows, y, stream_);
      } else {
        GemmArgs gemm;
        gemm.out = y;
        normalised_gemm(op, args.residual, args.qkv, nullptr, rows, gemm);
      }
      finish.y = y;
      finish_qkv(op, finish, stream_);
    }
    if (!decode) store_cache(op, finish, static_cast<int>(args.batch.sequences), batch.longest, stream_);
  }

  void attend_prefill(const char* op, const AttentionArgs& args) {
    validate_attention(args, false);
    if (args.batch.rows == 0) return;
    const DeviceBatch batch = on_device(args.batch, args.cache);
    const Operand out = on_device(args.out);
    const int width = args.heads * args.cache.layout.head_dim;
    const bool direct = !out.amax && !out.row_scale && out.dtype != Dtype::f16;
    AttentionPrefill a(args);
    a.cache = batch.cache, a.start = batch.start, a.past = batch.map.past;
    a.out = direct ? out.data : y_.reserve<float>(static_cast<size_t>(a.rows) * width, stream_);
    a.out_type = direct ? out.dtype : Dtype::f32, a.out_scale = out.scale;
    a.saturated = reinterpret_cast<unsigned long long*>(out.saturated);
    prefill_attention_(op, args.batch, a, stream_);
    if (!direct) store_operand(out, static_cast<float*>(a.out), false, a.rows, width, stream_);
    collect_amax(args.out);
  }

  void attend_decode(const char* op, const AttentionArgs& args) {
    validate_attention(args, true);
    if (args.batch.rows == 0) return;
    const DeviceBatch batch = on_device(args.batch, args.cache);
    const Operand out = on_device(args.out);
    const int width = args.heads * args.cache.layout.head_dim;
    const bool direct = !out.amax && (out.dtype == Dtype::f16 || out.dtype == Dtype::bf16);
    AttentionLaunch a;
    a.q = static_cast<const Bf16*>(args.q), a.cache = batch.cache, a.map = batch.map;
    a.rows = static_cast<int>(args.batch.rows), a.heads = args.heads;
    a.out = direct ? out.data : y_.reserve<float>(static_cast<size_t>(a.rows) * width, stream_);
    a.out_type = direct ? out.dtype : Dtype::f32;
    a.out_scale = out.scale;
    a.saturated = reinterpret_cast<unsigned long long*>(out.saturated);
    a.splits = attention_splits(a.cache.kv_heads);
    for (int64_t b = 0; b < args.batch.sequences; ++b) {
      const AttentionCut cut(static_cast<int>(args.batch.past[b] / kKvPageTokens), a.splits);
      a.pieces = std::max(a.pieces, cut.pieces);
    }
    a.pieces_a_block = attention_pieces_a_block(a.rows, a.cache.kv_heads, a.pieces);
    a.partial = partial_.reserve<float>(attention_partial_bytes(a.rows, a.heads, a.cache.layout.head_dim, a.splits) / 4,
                                        stream_);
    a.arrived = arrived_.reserve<unsigned>(static_cast<size_t>(a.rows) * a.cache.kv_heads, stream_, true);
    attention(op, a, stream_);
    if (!direct) store_operand(out, static_cast<float*>(a.out), false, a.rows, width, stream_);
    collect_amax(args.out);
  }

  void residual_gemm(const char* op, const ResidualGemmArgs& args) {
    validate_residual_gemm(args, op);
    const int rows = static_cast<int>(args.rows), N = static_cast<int>(args.weight.rows),
              K = static_cast<int>(args.weight.cols);
    if (rows == 0) return;
    if (args.weight.phase == Phase::prefill) return prefill_.residual(op, args, on_device(args.residual), stream_);
    FUT_CHECK(args.residual.dtype == Dtype::f32 && !args.residual.x8 && args.a.dtype != Dtype::e4m3, op,
              ": a weight placed for decode needs an f32 residual without e4m3 copy and an f16 or bf16 operand");
    GemmArgs gemm;
    gemm.a = args.a.data, gemm.a_scale = args.a.scale;
    gemm.finish = Finish::residual, gemm.out = args.residual.x;
    gemm_in_parts(op, args.weight, gemm, rows, K * 2, N * 4);
  }

  const int64_t step_rows_;  ///< decode_step() takes no more
  cudaStream_t stream_ = nullptr;
  cudaMemPool_t pool_ = nullptr;
  Scratch y_, a16_, packed_, factor_, partial_, arrived_, amax_;
  Mirror batch_, tokens_, rows_, layers_;
  PrefillProducts prefill_;
  PrefillAttention prefill_attention_;
  Scratch handed_over_[kStages], tag_base_, fault_;  ///< of decode_step()
  Scratch y_rows_, step_rows_of_[3], flags_;         ///< of a batch's
  StepFault* fault_seen_ = nullptr;                  ///< in host memory
  int64_t step_layers_ = 0;                          ///< of the step that check_step() has yet to ask about
  LostRow lost_ = LostRow::none;                     ///< of the next step
  bool tracing_ = false;
  Scratch trace_;
  TracedStep traced_;  ///< all but the stages, which are in trace_
  Counters counters_;
};

}  // namespace

TracedStep traced_step(Backend& backend, const std::function<void()>& work) {
  return dynamic_cast<CudaBackend&>(backend).trace(work);
}

}  // namespace cuda

std::string cuda_obstacle() {
  int driver = 0, devices = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no NVIDIA driver";
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status == cudaErrorInsufficientDriver) {
    return cat("the NVIDIA driver is for CUDA ", driver / 1000, ".", driver % 1000 / 10, ", this build needs ",
               CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
  }
  if (status != cudaSuccess) return cat("no NVIDIA device (", cudaGetErrorString(status), ")");
  if (devices == 0) return "no NVIDIA device";
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "the NVIDIA device does not answer";
  if (properties.major != 9 || properties.minor != 0) {
    return cat("the ", properties.name, " has compute capability ", properties.major, ".", properties.minor,
               ", this build is for 9.0 (H100, H200)");
  }
  return "";
}

std::unique_ptr<Backend> make_cuda_backend() {
  const std::string obstacle = cuda_obstacle();
  FUT_CHECK(obstacle.empty(), "backend cuda: ", obstacle);
  return std::make_unique<cuda::CudaBackend>();
}

void lose_row(Backend& backend, LostRow row) { dynamic_cast<cuda::CudaBackend&>(backend).lose(row); }

CUstream_st* cuda_stream(Backend& backend) { return dynamic_cast<cuda::CudaBackend&>(backend).stream(); }

}  // namespace fut
