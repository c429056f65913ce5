// What benchmarks run on: random weights, activations and cached tokens of a shape, and the operations over them.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/bench.h"
#include "engine/kv_cache.h"

namespace fut::bench {

enum Part { kEmbedding, kQkv, kO, kGateUp, kDown, kHead, kParts };

class Workload;
struct Op;

int64_t weight_bytes(Part part, const BenchOptions& options);

/// Of the operation's product, or of causal attention, which sees half of the new tokens' square.
int64_t prefill_flops(const Op& op, const BenchOptions& options);

/// What operands are rounded to (table in ops.h).
Dtype operand_type(const BenchOptions& options);

inline int64_t size_of(Dtype dtype) { return bits_per_element(dtype) / 8; }

/// One operation: what it reads, how it is run on set `i` of weights and cache, and the bytes that it moves.
struct Op {
  const char* name;
  bool in_prefill, in_decode, in_layer;
  std::optional<Part> weight;
  bool cache;
  void (Workload::*run)(int64_t i);
  int64_t (Workload::*bytes)() const;
};

/// The operations of both phases, in the order of a step.
std::span<const Op> all_ops();

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

  /// A decode step of so many layers as one call of the backend; false where that has none for it.
  bool step(int64_t layers);

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
  Buffer buffer(std::span<const uint8_t> bytes);
  std::vector<uint8_t> contents(const Buffer& buffer);
  Buffer floats(int64_t count, float value);
  Operand operand(Buffer& storage, Buffer& amax, int64_t width, uint64_t seed);
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
  const std::vector<int64_t> added_;  ///< new tokens of every sequence
  const int64_t rows_;                ///< T
  const Dtype operand_, exact_;
  std::array<std::vector<PlacedWeight>, kParts> weights_;
  Residual residual_;
  Operand attended_, gated_;
  Rope rope_;
  Buffer x_, sum_squares_, x8_, x8_scale_, q_, k_, v_, attended_data_, gated_data_, row_scale_, logits_;
  Buffer cos_, sin_, kv_factor_, attended_amax_, gated_amax_;
  int64_t saturated_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> last_rows_;
  std::unique_ptr<KvPool> pool_;
  std::vector<CachedSequence> sequences_;  // after the pool that they belong to
  ForwardPass pass_;
};

}  // namespace fut::bench
