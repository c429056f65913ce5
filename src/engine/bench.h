// How fast operations, a block (the operations of one layer) and a whole step are on a backend. Weights, activations
// and cached tokens are random, so that no model is needed and none has to be read; sizes are what a model's would be.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/backends.h"
#include "model/config.h"
#include "ops/backend.h"

namespace fut {

/// A model's sizes under the name that users type.
struct BenchShape {
  std::string name;
  LlamaConfig config;
};
const std::vector<BenchShape>& bench_shapes();

/// The sizes of a model on disk; reads its headers only.
LlamaConfig model_shape(const std::string& model);

/// Bytes a second at which a card can be read at most, as it was measured; nothing for others. On an H200: one launch
/// that streams an 8B model's INT4 weights and does nothing else (docs/PERF.md).
std::optional<double> read_ceiling(const Backend& backend);

/// Names of the operations of a phase, in the order of a step.
std::vector<std::string> bench_op_names(bool prefill);

struct BenchOptions {
  LlamaConfig config;
  bool prefill = false;          ///< whole prompts, or one token a sequence
  Dtype weights = Dtype::int4;   ///< prefill takes all but int4
  Dtype kv = Dtype::int4;        ///< int4, e4m3, bf16 or f32
  std::optional<Dtype> head;     ///< of lm_head; by itself as the engine keeps it: bf16, f32 beside f32 weights
  int group = 64;                ///< of int4 weights
  int64_t batch = 1;             ///< sequences
  int64_t context = 2048;        ///< tokens of each that are in the cache already
  int64_t tokens = 512;          ///< prefill: new tokens of each
  std::vector<int64_t> lengths;  ///< prefill: instead of `tokens`, the new tokens of every one of `batch` sequences
  Fp8Scaling scaling = Fp8Scaling::exact;  ///< of FP8 activations in prefill
  int64_t layers = 0;            ///< step: layers that run, 0: all. op, block: sets of weights and cache that take
                                 ///< turns, 0: enough to exceed the last-level cache twice, where memory allows
  bool trace = false;            ///< step: also BenchResult::stages
  int repeat = 0;                ///< samples; 0: 40 on a card (prefill: at most 30 ms of them), 10 elsewhere
  double sample_seconds = 2e-3;  ///< runs are repeated within a sample until it is this long; on a card a sample is one
                                 ///< run on each set
  double warm_up_seconds = 0.1;  ///< runs before anything counts: caches, page tables and clocks settle
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_progress;
};

/// New tokens of every sequence in one run.
std::vector<int64_t> new_tokens(const BenchOptions& options);

/// One row of a benchmark's table.
struct BenchResult {
  std::string what;
  int64_t layers = 0;      ///< as BenchOptions::layers, resolved
  int64_t bytes = 0;       ///< moved by one run, each thing counted once (kBenchBytes)
  int64_t flops = 0;       ///< prefill: of products, and of attention over half of a prompt's square
  std::vector<double> us;  ///< of a run, sorted, one a sample
  // Of a step alone.
  bool one_call = false;           ///< Backend::decode_step() made it, not the operations one by one
  std::optional<double> layer_us;  ///< a layer's part: medians of the step and of one with half the layers, subtracted
  int64_t layer_bytes = 0;
  std::vector<StepStage> stages;  ///< where BenchOptions::trace asks for them

  double median_us() const;
  double gb_per_second() const { return static_cast<double>(bytes) / median_us() * 1e-3; }
  double pflop_per_second() const { return static_cast<double>(flops) / median_us() * 1e-9; }
};

/// What BenchResult::bytes counts, for users.
inline constexpr const char* kBenchBytes =
    "weights with their scales and padding as the backend holds them; cached keys and values with their scales that\n"
    "are read or written; activations read and written, once each. Single numbers a row (scales, sums) are left out.";

/// `what`: a name of bench_op_names, several of them that follow one another, joined by "+", "block" or "step". Error
/// before anything large is allocated where memory does not suffice.
BenchResult run_benchmark(Backend& backend, const std::string& what, const BenchOptions& options);

}  // namespace fut
