#include "engine/bench_workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "engine/bench_data.h"
#include "layout/int4_fragment.h"

namespace fut::bench {
namespace {

struct WeightShape {
  int64_t rows, cols;
  Dtype dtype;
};

WeightShape weight_shape(Part part, const BenchOptions& o) {
  const LlamaConfig& c = o.config;
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const Dtype table = o.weights == Dtype::f32 ? Dtype::f32 : Dtype::bf16;
  switch (part) {
    case kEmbedding: return {c.vocabulary, c.width, table};
    case kQkv: return {q + 2 * kv, c.width, o.weights};
    case kO: return {c.width, q, o.weights};
    case kGateUp: return {2 * c.feed_forward, c.width, o.weights};
    case kDown: return {c.width, c.feed_forward, o.weights};
    case kHead: return {c.vocabulary, c.width, o.head.value_or(table)};
    case kParts: break;
  }
  fail("no such weight");
}

}  // namespace

int64_t weight_bytes(Part part, const BenchOptions& o) {
  const WeightShape w = weight_shape(part, o);
  if (w.dtype == Dtype::int4) return int4_matrix_bytes(w.rows, w.cols, o.group);
  return w.rows * w.cols * bits_per_element(w.dtype) / 8 + (w.dtype == Dtype::e4m3 ? 4 * w.rows : 0);
}

int64_t prefill_flops(const Op& op, const BenchOptions& o) {
  const std::vector<int64_t> added = new_tokens(o);
  if (op.weight == kEmbedding) return 0;
  if (op.weight) {
    const WeightShape w = weight_shape(*op.weight, o);
    const int64_t rows = op.in_layer ? std::accumulate(added.begin(), added.end(), int64_t{0}) : o.batch;
    return 2 * rows * w.rows * w.cols;
  }
  int64_t seen = 0;  // twice the pairs of a query and a key
  for (int64_t n : added) seen += n * (2 * o.context + n);
  return 2 * seen * o.config.heads * o.config.head_dim;
}

Dtype operand_type(const BenchOptions& o) {
  if (o.weights == Dtype::f32 || o.weights == Dtype::bf16) return o.weights;
  return o.prefill ? Dtype::e4m3 : Dtype::f16;
}

Workload::Workload(Backend& backend, const BenchOptions& options, const std::vector<const Op*>& ops, Sets sets)
    : backend_(backend),
      o_(options),
      c_(options.config),
      added_(new_tokens(options)),
      rows_(std::accumulate(added_.begin(), added_.end(), int64_t{0})),
      operand_(operand_type(options)),
      exact_(options.kv == Dtype::f32 ? Dtype::f32 : Dtype::bf16) {
  make_activations();
  make_rope();
  const bool cache = std::any_of(ops.begin(), ops.end(), [](const Op* op) { return op->cache; });
  if (cache) make_cache(sets.layers);
  start_residual();
  for (const Op* op : ops) {
    if (op->weight) make_weights(*op->weight, op->in_layer ? sets.layers : sets.tables, op->name);
  }
}

Buffer Workload::buffer(std::span<const uint8_t> bytes) {
  Buffer out(backend_, bytes.size());
  backend_.upload(out.as<void>(), bytes.data(), bytes.size());
  return out;
}

std::vector<uint8_t> Workload::contents(const Buffer& buffer) {
  std::vector<uint8_t> bytes(buffer.bytes());
  if (buffer) backend_.download(bytes.data(), buffer.as<void>(), bytes.size());
  return bytes;
}

Buffer Workload::floats(int64_t count, float value) {
  const std::vector<float> values(count, value);
  Buffer out(backend_, values.size() * sizeof(float));
  backend_.upload(out.as<void>(), values.data(), out.bytes());
  return out;
}

/// Frozen and delayed scales are those of the random codes, which therefore fit.
Operand Workload::operand(Buffer& storage, Buffer& amax, int64_t width, uint64_t seed) {
  storage = buffer(random_elements(operand_, rows_ * width, 1.0f, seed));
  Operand out;
  out.dtype = operand_;
  out.data = storage.as<void>();
  out.saturated = &saturated_;
  if (operand_ != Dtype::e4m3) return out;
  if (o_.scaling == Fp8Scaling::exact) {
    out.row_scale = row_scale_.as<float>();
  } else {
    out.scale = e4m3_unit(1.0f);
  }
  if (o_.scaling == Fp8Scaling::delayed) {
    amax = floats(1, 0.0f);
    out.amax = amax.as<float>();
  }
  return out;
}

void Workload::make_activations() {
  const auto random = [&](int64_t count, uint64_t seed) { return buffer(random_elements(exact_, count, 1.0f, seed)); };
  row_scale_ = floats(rows_, e4m3_unit(1.0f));
  attended_ = operand(attended_data_, attended_amax_, c_.heads * c_.head_dim, 1);
  gated_ = operand(gated_data_, gated_amax_, c_.feed_forward, 2);
  // Queries are that small because they carry log2(e) / sqrt(E).
  const float q_rms = 1.44f / std::sqrt(static_cast<float>(c_.head_dim));
  q_ = buffer(random_elements(exact_, rows_ * c_.heads * c_.head_dim, q_rms, 3));
  k_ = random(rows_ * c_.kv_heads * c_.head_dim, 4);
  v_ = random(rows_ * c_.kv_heads * c_.head_dim, 5);
  logits_ = floats(o_.batch * c_.vocabulary, 0.0f);
  const HostBytes ids = random_elements(Dtype::f32, rows_, 1.0f, 6);
  for (int64_t t = 0; t < rows_; ++t) {
    uint32_t bits;
    memcpy(&bits, ids.data() + t * 4, 4);
    tokens_.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(c_.vocabulary)));
  }
  int64_t end = 0;
  for (int64_t added : added_) last_rows_.push_back((end += added) - 1);
}

void Workload::make_rope() {
  const int64_t positions = o_.context + *std::max_element(added_.begin(), added_.end());
  std::vector<float> cos, sin;
  const std::vector<double> frequencies = rope_inverse_frequencies(c_);
  for (int64_t p = 0; p < positions; ++p) {
    for (double f : frequencies) {
      cos.push_back(static_cast<float>(std::cos(static_cast<double>(p) * f)));
      sin.push_back(static_cast<float>(std::sin(static_cast<double>(p) * f)));
    }
  }
  cos_ = Buffer(backend_, cos.size() * sizeof(float));
  sin_ = Buffer(backend_, sin.size() * sizeof(float));
  backend_.upload(cos_.as<void>(), cos.data(), cos_.bytes());
  backend_.upload(sin_.as<void>(), sin.data(), sin_.bytes());
  rope_ = {cos_.as<float>(), sin_.as<float>(), static_cast<int>(c_.rotary_dim), positions};
}

/// Every sequence holds `context` tokens that were never computed.
void Workload::make_cache(int64_t layers) {
  int64_t capacity = 0;
  for (int64_t added : added_) capacity += (o_.context + added + kKvPageTokens - 1) / kKvPageTokens * kKvPageTokens;
  LlamaConfig config = c_;
  config.layers = layers;
  pool_ = std::make_unique<KvPool>(backend_, config, o_.kv, capacity, o_.batch);
  sequences_.resize(o_.batch);
  std::vector<CachedSequence*> all;
  for (int64_t b = 0; b < o_.batch; ++b) {
    CachedSequence& sequence = sequences_[b];
    FUT_CHECK(pool_->admit(sequence, o_.context + added_[b]), "the cache pool is smaller than its sequences");
    sequence.length = o_.context;
    all.push_back(&sequence);
  }
  pass_ = pool_->make_pass(all, added_, tokens_);

  const auto fill = [&](uint8_t* to, int64_t bytes, std::span<const uint8_t> piece) {
    for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(piece.size())) {
      backend_.upload(to + at, piece.data(), std::min<size_t>(piece.size(), bytes - at));
    }
  };
  const LayeredCache& cache = pass_.cache;
  fill(cache.first.pages, cache.pages_stride * layers,
       random_pages(cache.first.layout, std::min<int64_t>(capacity / kKvPageTokens * c_.kv_heads, 64), 7));
  if (o_.kv == Dtype::int4) {
    const HostBytes piece = random_elements(Dtype::bf16, 1 << 16, 1.0f, 8);
    fill(reinterpret_cast<uint8_t*>(cache.first.tails), cache.tails_stride * layers * 2, piece);
    fill(reinterpret_cast<uint8_t*>(cache.first.sinks), cache.sinks_stride * layers * 2, piece);
  }
  kv_factor_ = floats(c_.kv_heads, kRandomKvFactor);
}

KvCache Workload::cache(int64_t i) const {
  const LayeredCache& all = pass_.cache;
  KvCache c = all.first;
  c.pages += i * all.pages_stride;
  if (c.tails) c.tails += i * all.tails_stride;
  if (c.sinks) c.sinks += i * all.sinks_stride;
  c.key_factor = c.value_factor = kv_factor_.as<float>();
  return c;
}

/// Made and placed once; further sets are copies of the bytes, each in memory of its own, which is what counts.
void Workload::make_weights(Part part, int64_t sets, const std::string& name) {
  const WeightShape w = weight_shape(part, o_);
  if (o_.on_progress) o_.on_progress("weights of " + name, 0, sets);
  std::vector<PlacedWeight>& placed = weights_[part];
  const bool in_layer = part != kEmbedding && part != kHead;
  placed.push_back(backend_.place(random_weight(w.dtype, o_.group, w.rows, w.cols, 100 + 2 * part),
                                  o_.prefill && in_layer ? Phase::prefill : Phase::decode));
  if (sets == 1) return;
  const std::vector<uint8_t> bytes = contents(placed[0].storage), scales = contents(placed[0].scale_storage);
  for (int64_t i = 1; i < sets; ++i) {
    if (o_.on_progress) o_.on_progress("weights of " + name, i, sets);
    PlacedWeight copy{placed[0].weight, buffer(bytes), buffer(scales)};
    copy.kept = placed[0].kept;
    copy.weight.data = copy.data();
    if (copy.weight.scale) copy.weight.scale = copy.scale_storage.as<float>();
    placed.push_back(std::move(copy));
  }
}

/// The residual with everything that belongs to it, as `embed` leaves it; out of a small table of its own.
void Workload::start_residual() {
  residual_.dtype = o_.prefill && operand_ != Dtype::f32 ? Dtype::bf16 : Dtype::f32;
  x_ = Buffer(backend_, rows_ * c_.width * size_of(residual_.dtype));
  sum_squares_ = Buffer(backend_, rows_ * sizeof(float));
  residual_.x = x_.as<void>();
  residual_.sum_squares = sum_squares_.as<float>();
  residual_.eps = static_cast<float>(c_.norm_eps);
  if (operand_ == Dtype::e4m3) {
    x8_ = Buffer(backend_, rows_ * c_.width);
    x8_scale_ = Buffer(backend_, rows_ * sizeof(float));
    residual_.x8 = x8_.as<E4m3>();
    residual_.x8_scale = x8_scale_.as<float>();
    residual_.x8_scaling = o_.scaling;
    residual_.requantised = &saturated_;
  }
  constexpr int64_t kTableRows = 64;
  const Dtype table_type = weight_shape(kEmbedding, o_).dtype;
  const PlacedWeight table = backend_.place(random_weight(table_type, 0, kTableRows, c_.width, 9));
  std::vector<int32_t> tokens(rows_);
  for (int64_t t = 0; t < rows_; ++t) tokens[t] = static_cast<int32_t>(t % kTableRows);
  backend_.embed({residual_, table.weight, tokens.data(), rows_, c_.width});
  wait();  // the table dies here
}

bool Workload::step(int64_t layers) {
  std::vector<DecodeLayer> all;
  for (int64_t l = 0; l < layers; ++l)
    all.push_back({weight(kQkv, l), weight(kO, l), weight(kGateUp, l), weight(kDown, l), cache(l)});
  DecodeStepArgs args;
  args.logits = logits_.as<float>();
  args.tokens = tokens_.data();
  args.embedding = weight(kEmbedding, 0);
  args.head = weight(kHead, 0);
  args.layers = all.data();
  args.layer_count = layers;
  args.rope = rope_;
  args.batch = pass_.batch;
  args.heads = heads();
  args.width = c_.width;
  args.feed_forward = c_.feed_forward;
  args.eps = residual_.eps;
  args.saturated = &saturated_;
  return backend_.decode_step(args);
}

/// Bytes that a call leaves in the cache: tokens as they are stored, or, INT4, whole pages and what stays in the tail.
int64_t Workload::cache_written() const {
  const int64_t page_bytes = pass_.cache.first.layout.page_bytes();
  int64_t bytes = 0;
  for (int64_t added : added_) {
    const int64_t end = o_.context + added, whole = end / kKvPageTokens - o_.context / kKvPageTokens;
    bytes += o_.kv == Dtype::int4 ? whole * page_bytes + std::min(added, end % kKvPageTokens) * 2 * c_.head_dim * 2
                                  : added * page_bytes / kKvPageTokens;
  }
  return bytes * c_.kv_heads;
}

/// Bytes of the cached tokens that attention sees; a decode step sees its own token there too.
int64_t Workload::cache_read() const {
  const int64_t page_bytes = pass_.cache.first.layout.page_bytes(), tokens = o_.context + (o_.prefill ? 0 : 1);
  int64_t bytes = tokens * page_bytes / kKvPageTokens;
  if (o_.kv == Dtype::int4) {
    const int64_t in_pages = o_.context / kKvPageTokens * kKvPageTokens;
    const int64_t sinks = std::min<int64_t>(in_pages, kKvSinkTokens), exact = sinks + tokens - in_pages;
    bytes = (in_pages - sinks) * page_bytes / kKvPageTokens + exact * 2 * c_.head_dim * 2;
  }
  return bytes * c_.kv_heads * o_.batch;
}

const Op kOps[] = {
    {"embed", true, true, false, kEmbedding, false, &Workload::embed, &Workload::embed_bytes},
    {"qkv_rope_cache", true, false, true, kQkv, true, &Workload::qkv, &Workload::qkv_bytes},
    {"qkv_rope_append", false, true, true, kQkv, true, &Workload::qkv, &Workload::qkv_bytes},
    {"attention_prefill", true, false, true, {}, true, &Workload::attention, &Workload::attention_bytes},
    {"attention_decode", false, true, true, {}, true, &Workload::attention, &Workload::attention_bytes},
    {"o_proj_residual", true, true, true, kO, false, &Workload::o_proj, &Workload::o_proj_bytes},
    {"gate_up_swiglu", true, true, true, kGateUp, false, &Workload::gate_up, &Workload::gate_up_bytes},
    {"down_residual", true, true, true, kDown, false, &Workload::down, &Workload::down_bytes},
    {"lm_head", true, true, false, kHead, false, &Workload::head, &Workload::head_bytes},
};

std::span<const Op> all_ops() { return kOps; }

}  // namespace fut::bench
