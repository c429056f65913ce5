#include "engine/bench.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "engine/backends.h"
#include "engine/bench_workload.h"
#include "model/source.h"

namespace fut {
namespace {

using namespace bench;

LlamaConfig shape(int64_t width, int64_t feed_forward, int64_t layers, int64_t heads, int64_t kv_heads,
                  int64_t vocabulary) {
  LlamaConfig c;
  c.width = width;
  c.feed_forward = feed_forward;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.head_dim = c.rotary_dim = width / heads;
  c.vocabulary = vocabulary;
  c.rope_theta = 500000;
  return c;
}

std::vector<const Op*> ops_of(const std::string& what, bool prefill) {
  std::vector<const Op*> ops;
  const auto add = [&](const auto& wanted) {
    const size_t before = ops.size();
    for (const Op& op : all_ops()) {
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
  const std::vector<int64_t> added = new_tokens(o);
  const int64_t rows = std::accumulate(added.begin(), added.end(), int64_t{0});
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
    sizes.layer += (o.batch * (o.context + kKvPageTokens) + rows) * KvPool::bytes_per_token(one, o.kv) +
                   o.batch * KvPool::bytes_per_slot(one, o.kv);
  }
  const int64_t exact = o.kv == Dtype::f32 ? 4 : 2, operand = size_of(operand_type(o));
  const int64_t qkv = (c.heads + 2 * c.kv_heads) * c.head_dim;
  sizes.rest = rows * (5 * c.width + qkv * exact + (c.heads * c.head_dim + c.feed_forward) * operand) +
               o.batch * c.vocabulary * 4 +
               (o.context + *std::max_element(added.begin(), added.end())) * c.head_dim * 4;
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
  int samples = o.repeat ? o.repeat : 40;
  double warm_up = o.warm_up_seconds;
  if (o.prefill) {
    // Whole prompts heat a card up to its power cap, and then it is slower: the same load as the peers' (bench/peers).
    constexpr double kLoadSeconds = 0.03, kWarmUpSeconds = 0.015;
    warm_up = std::min(warm_up, kWarmUpSeconds);
    const double once = clock.seconds(all, 1, 0).front();
    if (!o.repeat) samples = std::clamp(static_cast<int>(kLoadSeconds / once), 3, samples);
  }
  std::vector<double> us;
  for (double seconds : clock.seconds(all, samples, warm_up)) us.push_back(seconds * 1e6 / static_cast<double>(turns));
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

double median(const std::vector<double>& sorted) {
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

using Plan = std::vector<std::pair<const Op*, int64_t>>;

/// What runs in order: a layer's operations once for each of `layers`, what comes before and behind them once.
Plan plan_of(const std::vector<const Op*>& ops, int64_t layers) {
  Plan plan;
  const auto begin = std::find_if(ops.begin(), ops.end(), [](const Op* op) { return op->in_layer; });
  const auto end = std::find_if(begin, ops.end(), [](const Op* op) { return !op->in_layer; });
  for (auto op = ops.begin(); op != begin; ++op) plan.emplace_back(*op, 0);
  for (int64_t l = 0; l < layers; ++l) {
    for (auto op = begin; op != end; ++op) plan.emplace_back(*op, l);
  }
  for (auto op = end; op != ops.end(); ++op) plan.emplace_back(*op, 0);
  return plan;
}

void check_options(const BenchOptions& o) {
  FUT_CHECK(o.repeat >= 0 && o.batch > 0 && o.context >= 0 && o.layers >= 0 && (!o.prefill || o.tokens > 0),
            "benchmark: repeat ", o.repeat, ", batch ", o.batch, ", context ", o.context, ", layers ", o.layers,
            ", tokens ", o.tokens);
  FUT_CHECK(!o.prefill || (o.weights != Dtype::int4 && o.head != Dtype::int4),
            "benchmark: INT4 weights are for decode");
  FUT_CHECK(o.lengths.empty() || (o.prefill && o.lengths.size() == static_cast<size_t>(o.batch) &&
                                  *std::min_element(o.lengths.begin(), o.lengths.end()) > 0),
            "benchmark: ", o.lengths.size(), " lengths of prompts for a batch of ", o.batch,
            o.prefill ? "; each has a token or more" : " in decode");
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

std::vector<int64_t> new_tokens(const BenchOptions& o) {
  return o.lengths.empty() ? std::vector<int64_t>(o.batch, o.prefill ? o.tokens : 1) : o.lengths;
}

std::optional<double> read_ceiling(const Backend& backend) {
  if (backend.name().find("H200") != std::string::npos) return 4.57e12;
  return std::nullopt;
}

double BenchResult::median_us() const { return median(us); }

BenchResult run_benchmark(Backend& backend, const std::string& what, const BenchOptions& options) {
  check_options(options);
  const std::vector<const Op*> ops = ops_of(what, options.prefill);
  const Sets sets = choose_sets(backend, what, sizes_of(ops, options), options);
  Workload load(backend, options, ops, sets);
  const bool step = what == "step";
  const std::optional<CardClock> card = card_clock(backend);
  BenchResult result;
  result.what = what;
  result.layers = sets.layers;
  result.one_call = step && !options.prefill && load.step(sets.layers);
  FUT_CHECK(!options.trace || (card && result.one_call),
            "benchmark: only a decode step that runs as one kernel on a card has stages to trace; this one is ",
            step ? "made operation by operation" : what);

  const auto measure = [&](int64_t layers) {
    const Plan plan = plan_of(ops, step ? layers : 1);
    const auto run = [&](int64_t turn) {
      if (result.one_call) return static_cast<void>(load.step(layers));
      for (const auto& [op, layer] : plan) (load.*op->run)(step ? layer : turn % sets.layers);
    };
    return card ? sample_on_card(*card, options, step ? 1 : sets.layers, run) : sample(load, options, what, run);
  };
  for (const auto& [op, layer] : plan_of(ops, step ? sets.layers : 1)) {
    result.bytes += (load.*op->bytes)();
    if (options.prefill) result.flops += prefill_flops(*op, options);
  }
  result.us = measure(sets.layers);
  if (step && sets.layers > 1) {
    const int64_t fewer = sets.layers / 2;
    const double less = result.median_us() - median(measure(fewer));
    if (less > 0) result.layer_us = less / static_cast<double>(sets.layers - fewer);
    for (const Op* op : ops) result.layer_bytes += op->in_layer ? (load.*op->bytes)() : 0;
  }
  if (options.trace) result.stages = card->stages([&] { load.step(sets.layers); });
  load.wait();  // a card's counters of clamped values reach their owner while it lives
  return result;
}

}  // namespace fut
