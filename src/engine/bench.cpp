#include "engine/bench.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <sstream>

#include "base/error.h"
#include "engine/backends.h"
#include "engine/bench_data.h"
#include "engine/kv_cache.h"
#include "layout/int4_fragment.h"
#include "model/source.h"

namespace fut {
namespace {

LlamaConfig shape(int64_t width, int64_t feed_forward, int64_t layers, int64_t heads, int64_t kv_heads,
                  int64_t vocabulary) {
  LlamaConfig c;
  c.width = width;
  c.feed_forward = feed_forward;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.head_dim = width / heads;
  c.vocabulary = vocabulary;
  c.rope_theta = 500000;
  return c;
}

enum Part { kEmbedding, kQkv, kO, kGateUp, kDown, kHead, kParts };

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

int64_t weight_bytes(Part part, const BenchOptions& o) {
  const WeightShape w = weight_shape(part, o);
  if (w.dtype == Dtype::int4) return int4_matrix_bytes(w.rows, w.cols, o.group);
  return w.rows * w.cols * bits_per_element(w.dtype) / 8 + (w.dtype == Dtype::e4m3 ? 4 * w.rows : 0);
}

/// What operands are rounded to (table in ops.h).
Dtype operand_type(const BenchOptions& o) {
  if (o.weights == Dtype::f32 || o.weights == Dtype::bf16) return o.weights;
  return o.prefill ? Dtype::e4m3 : Dtype::f16;
}

int64_t size_of(Dtype dtype) { return bits_per_element(dtype) / 8; }

class Workload;

/// One operation: what it reads, how it is run on set `i` of weights and cache, and the bytes that it moves.
struct Op {
  const char* name;
  bool in_prefill, in_decode, in_layer;
  std::optional<Part> weight;
  bool cache;
  void (Workload::*run)(int64_t i);
  int64_t (Workload::*bytes)() const;
};

/// How many sets there are: of the layers' weights and cache, and of embedding and head.
struct Sets {
  int64_t layers, tables;
};

/// Everything that the operations `ops` need, in the backend's memory.
class Workload {
 public:
  Workload(Backend& backend, const BenchOptions& options, const std::vector<const Op*>& ops, Sets sets);

  void embed(int64_t i) { backend_.embed({residual_, weight(kEmbedding, i), tokens_.data(), rows_, c_.width}); }
  void qkv(int64_t i) {
    const QkvArgs args{q_.as<void>(),   k_.as<void>(), v_.as<void>(), cache(i), residual_,
                       weight(kQkv, i), rope_,         pass_.batch,   heads(),  c_.width};
    o_.prefill ? backend_.qkv_rope_cache(args) : backend_.qkv_rope_append(args);
  }
  void attention(int64_t i) {
    const AttentionArgs args{attended_, q_.as<void>(), k_.as<void>(), v_.as<void>(), cache(i), pass_.batch, heads()};
    o_.prefill ? backend_.attention_prefill(args) : backend_.attention_decode(args);
  }
  void o_proj(int64_t i) { backend_.o_proj_residual({residual_, attended_, weight(kO, i), rows_}); }
  void gate_up(int64_t i) { backend_.gate_up_swiglu({gated_, residual_, weight(kGateUp, i), rows_}); }
  void down(int64_t i) { backend_.down_residual({residual_, gated_, weight(kDown, i), rows_}); }
  void head(int64_t i) {
    const int64_t* rows = o_.prefill ? last_rows_.data() : nullptr;  // a decode step's are all, in order
    backend_.lm_head({logits_.as<float>(), residual_, weight(kHead, i), rows, o_.batch});
  }

  int64_t embed_bytes() const { return rows_ * c_.width * size_of(weight(kEmbedding, 0).dtype) + residual_written(); }
  int64_t qkv_bytes() const {
    return weight(kQkv, 0).bytes + residual_read() + qkv_elements() * size_of(exact_) + cache_written();
  }
  int64_t attention_bytes() const {
    const int64_t q = rows_ * c_.heads * c_.head_dim;
    return (o_.prefill ? qkv_elements() : q) * size_of(exact_) + cache_read() + q * size_of(operand_);
  }
  int64_t o_proj_bytes() const { return residual_gemm_bytes(kO); }
  int64_t gate_up_bytes() const {
    return weight(kGateUp, 0).bytes + residual_read() + rows_ * c_.feed_forward * size_of(operand_);
  }
  int64_t down_bytes() const { return residual_gemm_bytes(kDown); }
  int64_t head_bytes() const {
    return weight(kHead, 0).bytes + o_.batch * (c_.width * size_of(residual_.dtype) + c_.vocabulary * 4);
  }

  /// Returns when all that was asked of the backend is done: a download waits for it.
  void wait() {
    uint8_t byte;
    backend_.download(&byte, residual_.x, 1);
  }

 private:
  void make_activations();
  void make_rope();
  void make_cache(int64_t layers);
  void make_weights(Part part, int64_t sets, const std::string& name);
  void start_residual();
  Buffer buffer(const std::vector<uint8_t>& bytes);
  std::vector<uint8_t> contents(const Buffer& buffer);
  Buffer floats(int64_t count, float value);
  Operand operand(Buffer& storage, int64_t width, uint64_t seed);
  KvCache cache(int64_t i) const;

  const Weight& weight(Part part, int64_t i) const { return weights_[part][i % weights_[part].size()].weight; }
  int heads() const { return static_cast<int>(c_.heads); }
  int64_t qkv_elements() const { return rows_ * (c_.heads + 2 * c_.kv_heads) * c_.head_dim; }
  int64_t residual_read() const { return rows_ * c_.width * (residual_.x8 ? 1 : size_of(residual_.dtype)); }
  int64_t residual_written() const { return rows_ * c_.width * (size_of(residual_.dtype) + (residual_.x8 ? 1 : 0)); }
  int64_t residual_gemm_bytes(Part part) const {
    const Weight& w = weight(part, 0);
    return w.bytes + rows_ * (w.cols * size_of(operand_) + w.rows * size_of(residual_.dtype)) + residual_written();
  }
  int64_t cache_written() const;
  int64_t cache_read() const;

  Backend& backend_;
  const BenchOptions& o_;
  const LlamaConfig& c_;
  const int64_t rows_;  ///< T
  const Dtype operand_, exact_;
  std::array<std::vector<PlacedWeight>, kParts> weights_;
  Residual residual_;
  Operand attended_, gated_;
  Rope rope_;
  Buffer x_, sum_squares_, x8_, x8_scale_, q_, k_, v_, attended_data_, gated_data_, row_scale_, logits_;
  Buffer cos_, sin_, kv_factor_;
  int64_t saturated_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> last_rows_;
  std::unique_ptr<KvPool> pool_;
  std::vector<CachedSequence> sequences_;  // after the pool that they belong to
  ForwardPass pass_;
};

Workload::Workload(Backend& backend, const BenchOptions& options, const std::vector<const Op*>& ops, Sets sets)
    : backend_(backend),
      o_(options),
      c_(options.config),
      rows_(options.batch * (options.prefill ? options.tokens : 1)),
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

Buffer Workload::buffer(const std::vector<uint8_t>& bytes) {
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

Operand Workload::operand(Buffer& storage, int64_t width, uint64_t seed) {
  storage = buffer(random_elements(operand_, rows_ * width, 1.0f, seed));
  Operand out;
  out.dtype = operand_;
  out.data = storage.as<void>();
  out.saturated = &saturated_;
  if (operand_ == Dtype::e4m3) out.row_scale = row_scale_.as<float>();
  return out;
}

void Workload::make_activations() {
  const auto random = [&](int64_t count, uint64_t seed) { return buffer(random_elements(exact_, count, 1.0f, seed)); };
  row_scale_ = floats(rows_, e4m3_unit(1.0f));
  attended_ = operand(attended_data_, c_.heads * c_.head_dim, 1);
  gated_ = operand(gated_data_, c_.feed_forward, 2);
  // Queries are that small because they carry log2(e) / sqrt(E).
  const float q_rms = 1.44f / std::sqrt(static_cast<float>(c_.head_dim));
  q_ = buffer(random_elements(exact_, rows_ * c_.heads * c_.head_dim, q_rms, 3));
  k_ = random(rows_ * c_.kv_heads * c_.head_dim, 4);
  v_ = random(rows_ * c_.kv_heads * c_.head_dim, 5);
  logits_ = floats(o_.batch * c_.vocabulary, 0.0f);
  const std::vector<uint8_t> ids = random_elements(Dtype::f32, rows_, 1.0f, 6);
  for (int64_t t = 0; t < rows_; ++t) {
    uint32_t bits;
    memcpy(&bits, ids.data() + t * 4, 4);
    tokens_.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(c_.vocabulary)));
  }
  for (int64_t b = 1; b <= o_.batch; ++b) last_rows_.push_back(rows_ / o_.batch * b - 1);
}

void Workload::make_rope() {
  const int64_t positions = o_.context + (o_.prefill ? o_.tokens : 1);
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
  rope_ = {cos_.as<float>(), sin_.as<float>(), static_cast<int>(c_.head_dim), positions};
}

/// Every sequence holds `context` tokens that were never computed.
void Workload::make_cache(int64_t layers) {
  const int64_t new_tokens = rows_ / o_.batch, reach = o_.context + new_tokens;
  const int64_t capacity = (reach + kKvPageTokens - 1) / kKvPageTokens * kKvPageTokens * o_.batch;
  LlamaConfig config = c_;
  config.layers = layers;
  pool_ = std::make_unique<KvPool>(backend_, config, o_.kv, capacity, o_.batch);
  sequences_.resize(o_.batch);
  std::vector<CachedSequence*> all;
  for (CachedSequence& sequence : sequences_) {
    FUT_CHECK(pool_->admit(sequence, reach), "the cache pool is smaller than its sequences");
    sequence.length = o_.context;
    all.push_back(&sequence);
  }
  pass_ = pool_->make_pass(all, std::vector<int64_t>(o_.batch, new_tokens), tokens_);

  const auto fill = [&](uint8_t* to, int64_t bytes, const std::vector<uint8_t>& piece) {
    for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(piece.size())) {
      backend_.upload(to + at, piece.data(), std::min<size_t>(piece.size(), bytes - at));
    }
  };
  const LayeredCache& cache = pass_.cache;
  fill(cache.first.pages, cache.pages_stride * layers,
       random_pages(cache.first.layout, std::min<int64_t>(capacity / kKvPageTokens * c_.kv_heads, 64), 7));
  if (o_.kv == Dtype::int4) {
    const std::vector<uint8_t> piece = random_elements(Dtype::bf16, 1 << 16, 1.0f, 8);
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
  placed.push_back(backend_.place(random_weight(w.dtype, o_.group, w.rows, w.cols, 100 + 2 * part)));
  if (sets == 1) return;
  const std::vector<uint8_t> bytes = contents(placed[0].storage), scales = contents(placed[0].scale_storage);
  for (int64_t i = 1; i < sets; ++i) {
    if (o_.on_progress) o_.on_progress("weights of " + name, i, sets);
    PlacedWeight copy{placed[0].weight, buffer(bytes), buffer(scales)};
    copy.weight.data = copy.storage.as<void>();
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

/// Bytes that a call leaves in the cache: tokens as they are stored, or, INT4, whole pages and what stays in the tail.
int64_t Workload::cache_written() const {
  const int64_t page_bytes = pass_.cache.first.layout.page_bytes(), added = rows_ / o_.batch;
  int64_t bytes = added * page_bytes / kKvPageTokens;
  if (o_.kv == Dtype::int4) {
    const int64_t end = o_.context + added, whole = end / kKvPageTokens - o_.context / kKvPageTokens;
    bytes = whole * page_bytes + std::min(added, end % kKvPageTokens) * 2 * c_.head_dim * 2;
  }
  return bytes * c_.kv_heads * o_.batch;
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

/// The operations of both phases, in the order of a step.
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

std::vector<const Op*> ops_of(const std::string& what, bool prefill) {
  std::vector<const Op*> ops;
  const auto add = [&](const auto& wanted) {
    const size_t before = ops.size();
    for (const Op& op : kOps) {
      if (wanted(op) && (prefill ? op.in_prefill : op.in_decode)) ops.push_back(&op);
    }
    return ops.size() > before;
  };
  if (what == "step" || what == "block") {
    add([&](const Op& op) { return op.in_layer || what == "step"; });
    return ops;
  }
  std::istringstream names(what);
  for (std::string name; std::getline(names, name, '+');) {
    FUT_CHECK(add([&](const Op& op) { return op.name == name; }), "there is no operation ", name, " in ",
              prefill ? "prefill" : "decode");
  }
  FUT_CHECK(!ops.empty(), "there is no operation \"", what, "\"");
  FUT_CHECK(std::is_sorted(ops.begin(), ops.end()) && std::adjacent_find(ops.begin(), ops.end()) == ops.end(), what,
            ": operations in another order than a step's");
  return ops;
}

struct Sizes {
  int64_t layer = 0;    ///< one set of a layer's weights and cache
  int64_t tables = 0;   ///< one set of embedding and head
  int64_t rest = 0;     ///< activations
  int64_t staging = 0;  ///< the largest weight, in host memory while it is made
};

Sizes sizes_of(const std::vector<const Op*>& ops, const BenchOptions& o) {
  const LlamaConfig& c = o.config;
  const int64_t added = o.prefill ? o.tokens : 1, rows = o.batch * added;
  Sizes sizes;
  bool cache = false;
  for (const Op* op : ops) {
    cache |= op->cache;
    if (!op->weight) continue;
    (op->in_layer ? sizes.layer : sizes.tables) += weight_bytes(*op->weight, o);
    sizes.staging = std::max(sizes.staging, weight_bytes(*op->weight, o));
  }
  if (cache) {
    LlamaConfig one = c;
    one.layers = 1;
    sizes.layer += o.batch * ((o.context + added + kKvPageTokens) * KvPool::bytes_per_token(one, o.kv) +
                              KvPool::bytes_per_slot(one, o.kv));
  }
  const int64_t exact = o.kv == Dtype::f32 ? 4 : 2, operand = size_of(operand_type(o));
  const int64_t qkv = (c.heads + 2 * c.kv_heads) * c.head_dim;
  sizes.rest = rows * (5 * c.width + qkv * exact + (c.heads * c.head_dim + c.feed_forward) * operand) +
               o.batch * c.vocabulary * 4 + (o.context + added) * c.head_dim * 4;
  return sizes;
}

/// Bytes that must be touched before the first of them has left every cache; 64 MiB covers the L2 of any card.
int64_t beyond_cache_bytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  return 2 * std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 64 << 20);
#else
  return 128 << 20;
#endif
}

std::string gib(int64_t bytes) {
  const double value = std::round(static_cast<double>(bytes) / (1 << 30) * 100) / 100;
  return cat(value, " GiB");
}

/// Throws where memory would not suffice.
Sets choose_sets(const Backend& backend, const std::string& what, const Sizes& sizes, const BenchOptions& o) {
  const bool step = what == "step";
  const int64_t free = static_cast<int64_t>(backend.free_bytes()), once = sizes.rest + sizes.staging;
  const int64_t one = sizes.layer + (step ? 0 : sizes.tables);
  int64_t count = o.layers > 0 ? o.layers : o.config.layers;
  if (!step && o.layers == 0) {
    constexpr int64_t kMostSets = 1024;
    const int64_t wanted = std::clamp<int64_t>(beyond_cache_bytes() / one + 1, 1, kMostSets);
    count = std::clamp<int64_t>((free / 2 - once) / one, 1, wanted);
  }
  const int64_t need = count * one + (step ? sizes.tables : 0) + once;
  FUT_CHECK(need <= free, what, ": ", count, step ? " layers of " : " sets of ", gib(one), " with embedding, head, ",
            "activations and the copy that a weight is made in take ", gib(need), "; ", backend.name(), " has ",
            gib(free), " free", step ? " (fewer layers, batch or context would fit)" : "");
  return {count, step ? 1 : count};
}

using Clock = std::chrono::steady_clock;

/// Microseconds of one run, sorted: a sample is one run on each of `turns` sets.
template <class Run>
std::vector<double> sample_on_card(const CardClock& clock, const BenchOptions& o, int64_t turns, Run run) {
  const auto all = [&] {
    for (int64_t turn = 0; turn < turns; ++turn) run(turn);
  };
  std::vector<double> us;
  for (double seconds : clock.seconds(all, o.repeat ? o.repeat : 40, o.warm_up_seconds))
    us.push_back(seconds * 1e6 / static_cast<double>(turns));
  std::sort(us.begin(), us.end());
  return us;
}

/// The same by the host's clock. `run(turn)` is called with rising turns.
template <class Run>
std::vector<double> sample(Workload& load, const BenchOptions& o, const std::string& what, Run run) {
  int64_t turn = 0;
  const auto timed = [&](int64_t runs) {
    load.wait();
    const auto start = Clock::now();
    for (int64_t i = 0; i < runs; ++i) run(turn++);
    load.wait();
    return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(runs);
  };
  double seconds = 0;
  const auto start = Clock::now();
  do {
    seconds = timed(1);
  } while (turn < 2 || std::chrono::duration<double>(Clock::now() - start).count() < o.warm_up_seconds);

  constexpr double kMostRuns = 10000;
  const auto runs = static_cast<int64_t>(std::clamp(std::ceil(o.sample_seconds / seconds), 1.0, kMostRuns));
  std::vector<double> us;
  const int samples = o.repeat ? o.repeat : 10;
  for (int i = 0; i < samples; ++i) {
    if (o.on_progress) o.on_progress(what, i, samples);
    us.push_back(timed(runs) * 1e6);
  }
  std::sort(us.begin(), us.end());
  return us;
}

void check_options(const BenchOptions& o) {
  FUT_CHECK(o.repeat >= 0 && o.batch > 0 && o.context >= 0 && o.layers >= 0 && (!o.prefill || o.tokens > 0),
            "benchmark: repeat ", o.repeat, ", batch ", o.batch, ", context ", o.context, ", layers ", o.layers,
            ", tokens ", o.tokens);
  FUT_CHECK(!o.prefill || (o.weights != Dtype::int4 && o.head != Dtype::int4),
            "benchmark: INT4 weights are for decode");
}

}  // namespace

const std::vector<BenchShape>& bench_shapes() {
  static const std::vector<BenchShape> shapes = {
      {"smollm2-135m", shape(576, 1536, 30, 9, 3, 49152)},
      {"llama-3.2-1b", shape(2048, 8192, 16, 32, 8, 128256)},
      {"llama-3.1-8b", shape(4096, 14336, 32, 32, 8, 128256)},
      {"llama-3.1-70b", shape(8192, 28672, 80, 64, 8, 128256)},
  };
  return shapes;
}

LlamaConfig model_shape(const std::string& model) { return ModelSource::open(model).config; }

std::vector<std::string> bench_op_names(bool prefill) {
  std::vector<std::string> names;
  for (const Op* op : ops_of("step", prefill)) names.emplace_back(op->name);
  return names;
}

std::optional<double> read_ceiling(const Backend& backend) {
  if (backend.name().find("H200") != std::string::npos) return 4.57e12;
  return std::nullopt;
}

double BenchResult::median_us() const {
  const size_t middle = us.size() / 2;
  return us.size() % 2 ? us[middle] : (us[middle - 1] + us[middle]) / 2;
}

BenchResult run_benchmark(Backend& backend, const std::string& what, const BenchOptions& options) {
  check_options(options);
  const std::vector<const Op*> ops = ops_of(what, options.prefill);
  const Sets sets = choose_sets(backend, what, sizes_of(ops, options), options);
  Workload load(backend, options, ops, sets);

  // A step runs its layers' operations once for every layer; anything else runs once, on the next set.
  const bool step = what == "step";
  std::vector<std::pair<const Op*, int64_t>> plan;
  const auto layer_begin = std::find_if(ops.begin(), ops.end(), [](const Op* op) { return op->in_layer; });
  const auto layer_end = std::find_if(layer_begin, ops.end(), [](const Op* op) { return !op->in_layer; });
  for (auto op = ops.begin(); op != layer_begin; ++op) plan.emplace_back(*op, 0);
  for (int64_t l = 0; l < (step ? sets.layers : 1); ++l) {
    for (auto op = layer_begin; op != layer_end; ++op) plan.emplace_back(*op, l);
  }
  for (auto op = layer_end; op != ops.end(); ++op) plan.emplace_back(*op, 0);

  BenchResult result;
  result.what = what;
  result.layers = sets.layers;
  for (const auto& [op, layer] : plan) result.bytes += (load.*op->bytes)();
  const auto run = [&](int64_t turn) {
    for (const auto& [op, layer] : plan) (load.*op->run)(step ? layer : turn % sets.layers);
  };
  const std::optional<CardClock> card = card_clock(backend);
  result.us = card ? sample_on_card(*card, options, step ? 1 : sets.layers, run) : sample(load, options, what, run);
  load.wait();  // a card's counters of clamped values reach their owner while it lives
  return result;
}

}  // namespace fut
