// A text through the decode path layer by layer, with weights that are only then decided: every product's inputs are
// seen before its weights are needed, as the quantised products before it leave them. Each operation runs once a token.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/llama.h"

namespace fut {

class DecodeWalk {
 public:
  /// x (rows, K): inputs of the next product, rounded as decode rounds them for INT4 weights without input scales.
  using See = std::function<void(const float* x, int64_t rows)>;

  /// Pieces of equal length, each a sequence of its own; `embedding` (V, D). `tick` is called every now and then and
  /// may throw.
  /// `weights`: the type of the products' weights, int4 or bf16, of the operands (FP16 or BF16) and of the cache.
  DecodeWalk(Backend& backend, const LlamaConfig& config, Dtype weights,
             const std::vector<std::vector<int32_t>>& pieces, const std::vector<float>& embedding,
             std::function<void()> tick);

  int64_t tokens() const { return rows_; }
  /// Of the layers so far.
  const Calibration& calibration() const { return calibration_; }

  // One layer, in this order; each shows the inputs of the product behind it.
  void start_layer(const See& see_qkv);
  void attention(const HostWeight& qkv, const HeadNorm& norm, const See& see_o);
  void o_proj(const HostWeight& o, const See& see_gate_up);
  void gate_up(const HostWeight& gate_up, const See& see_down);
  void down(const HostWeight& down);

  /// Rows of the inputs that were shown last, in the order in which they were: x (rows, K).
  void inputs(int64_t first_row, int64_t rows, float* x) const;
  /// The residual stream in the same order, (rows, D) from this one on.
  const float* stream(int64_t first_row) const { return x_.data() + first_row * config_.width; }

 private:
  /// Sequences that step together. Their rows lie step by step: rows first_row + t * count .. of step t.
  struct Side {
    int64_t first_row, count;
  };

  void normalise(int64_t row, float* out) const;
  std::vector<float> mean_key(const HostWeight& qkv, const HeadNorm& norm) const;
  void see_normalised(const See& see) const;
  /// Elements of o_ or h_ as numbers, from row `first_row` on.
  void widen(const std::vector<uint16_t>& values, int64_t first_row, int64_t rows, int64_t cols, float guard,
             float* x) const;
  void see_halves(const std::vector<uint16_t>& values, int64_t first_row, int64_t rows, int64_t cols, float guard,
                  const See& see) const;
  Operand operand(float guard) const;
  void load_residual(int64_t first_row, int64_t rows);
  void store_residual(int64_t first_row, int64_t rows);
  void product_into_residual(const HostWeight& weight, const std::vector<uint16_t>& inputs, float guard, bool is_down);
  Residual residual() const;

  Backend& backend_;
  LlamaConfig config_;
  Dtype weights_;
  std::function<void()> tick_;
  int64_t length_, rows_;
  std::vector<Side> sides_;
  // All tokens, on the host.
  std::vector<float> x_, sum_squares_;  // (T, D), (T)
  std::vector<uint16_t> o_, h_;         // (T, H E), (T, F), FP16 over their guards or BF16
  enum class Shown { normalised, o, h } shown_ = Shown::normalised;
  float o_guard_ = 1.0f, h_guard_ = 1.0f;
  // A few of them, where the backend works.
  Buffer x_chunk_, sum_squares_chunk_, q_, k_, v_, operand_;
  RopeTables rope_;
  Buffer rope_cos_, rope_sin_;
  Calibration calibration_;
};

}  // namespace fut
