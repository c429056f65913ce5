// A Llama model on a backend: whole prompts through prefill(), one token a sequence through decode_step(). Both are a
// list of operations, one line each: the order in which a token meets them.
#pragma once

#include <span>
#include <vector>

#include "model/weights.h"
#include "ops/backend.h"

namespace fut {

/// The cache of all layers, as the engine's allocator keeps it: one layer's piece is a fixed distance behind another's.
struct LayeredCache {
  KvCache first;             ///< layer 0; the per-head factors and means are filled in by the model
  int64_t pages_stride = 0;  ///< bytes from one layer's pages to the next
  int64_t tails_stride = 0;  ///< elements
  int64_t sinks_stride = 0;  ///< elements
};

/// One forward pass over packed rows.
struct ForwardPass {
  Batch batch;
  const int32_t* tokens = nullptr;  // (T)
  LayeredCache cache;
};

struct LlamaOptions {
  WeightOptions weights;
  Fp8Scaling scaling = Fp8Scaling::exact;  ///< of e4m3 prefill
  int64_t max_positions = 0;               ///< rotary table; 0: the model's own limit
};

/// What the formats had to clamp since the model was loaded.
struct Saturation {
  int64_t values = 0;  ///< activations that were clamped
  int64_t rows = 0;    ///< residual rows that outgrew their previous norm and were scaled exactly
};

/// Rotary turns at `positions` positions from `first` on, computed in FP64: (positions, R / 2) each.
struct RopeTables {
  std::vector<float> cos, sin;
};
RopeTables rope_tables(const LlamaConfig& config, int64_t positions, int64_t first = 0);

class LlamaModel {
 public:
  LlamaModel(Backend& backend, const ModelSource& source, const LlamaOptions& options);

  const LlamaConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  int64_t positions() const { return positions_; }

  /// Leaves the final residual of all rows for logits(). Rows may start anywhere in a sequence: chunks of a prompt give
  /// the result of the whole.
  void prefill(const ForwardPass& pass);

  /// The same for one row a sequence, with the decode weights.
  void decode_step(const ForwardPass& pass);

  /// Logits (rows, V) of residual rows of the last pass, into host memory.
  void logits(std::span<const int64_t> rows, float* out);

  Saturation saturation() const { return saturation_; }

  /// Records the largest magnitudes of attention and SwiGLU outputs of prefill passes from now on (calibration).
  void record_amax(bool on) { recording_ = on; }
  const Calibration& recorded() const { return recorded_; }

 private:
  void forward(const ForwardPass& pass, bool decode);
  bool whole_step(const ForwardPass& pass);
  Residual residual(int64_t rows, bool decode);
  Operand operand(Buffer& storage, Buffer& row_scale, AmaxHistory& history, float frozen_amax, float guard, bool decode,
                  float* recorded);
  Rope rope() const;
  KvCache layer_cache(const LayeredCache& cache, int64_t layer) const;
  void place_rope_tables();
  void reserve(int64_t rows);
  Dtype operand_type(bool decode) const;

  Backend& backend_;
  LlamaConfig config_;
  LlamaOptions options_;
  ModelWeights weights_;
  Calibration calibration_;
  int64_t positions_;
  Buffer rope_cos_, rope_sin_;           // (positions, R / 2)
  std::vector<Buffer> q_norm_, k_norm_;  // (L)(E), or empty
  std::vector<Buffer> key_factor_, value_factor_, key_mean_;
  std::vector<AmaxHistory> attention_history_, swiglu_history_;
  bool recording_ = false;
  Calibration recorded_;
  Saturation saturation_;

  // Activations of one pass, grown to the largest yet.
  int64_t capacity_ = 0;
  Buffer x_, sum_squares_, x8_, x8_scale_, q_, k_, v_, o_, o_scale_, h_, h_scale_;
  Residual last_;           // of the last pass, for logits()
  Buffer step_logits_;      // (B, V), where the backend makes a step as a whole
  bool from_step_ = false;  // logits() finds them there
};

}  // namespace fut
