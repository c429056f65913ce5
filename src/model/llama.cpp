#include "model/llama.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace fut {
namespace {

Buffer upload_floats(Backend& backend, const std::vector<float>& values) {
  Buffer buffer(backend, values.size() * sizeof(float));
  backend.upload(buffer.as<void>(), values.data(), values.size() * sizeof(float));
  return buffer;
}

}  // namespace

RopeTables rope_tables(const LlamaConfig& config, int64_t positions, int64_t first) {
  const std::vector<double> frequencies = rope_inverse_frequencies(config);
  const double factor = config.rope_scaling.attention_factor;
  RopeTables tables;
  for (int64_t p = first; p < first + positions; ++p) {
    for (double f : frequencies) {
      tables.cos.push_back(static_cast<float>(factor * std::cos(static_cast<double>(p) * f)));
      tables.sin.push_back(static_cast<float>(factor * std::sin(static_cast<double>(p) * f)));
    }
  }
  return tables;
}

LlamaModel::LlamaModel(Backend& backend, const ModelSource& source, const LlamaOptions& options)
    : backend_(backend),
      config_(source.config),
      options_(options),
      calibration_(source.calibration),
      positions_(options.max_positions > 0 ? options.max_positions : source.config.positions),
      attention_history_(config_.layers),
      swiglu_history_(config_.layers) {
  FUT_CHECK(options.scaling != Fp8Scaling::frozen || !calibration_.swiglu_amax.empty(), source.path,
            ": frozen FP8 scales were asked for, but the model brings no calibrated ones");
  place_rope_tables();
  weights_ = load_weights(backend, source, options.weights);  // what can be refused without them was
  for (int64_t l = 0; l < config_.layers; ++l) {
    if (config_.head_norm) {
      q_norm_.push_back(upload_floats(backend, weights_.head_norms[l].q));
      k_norm_.push_back(upload_floats(backend, weights_.head_norms[l].k));
    }
    key_factor_.push_back(upload_floats(backend, weights_.constants[l].key_factor));
    value_factor_.push_back(upload_floats(backend, weights_.constants[l].value_factor));
    if (!calibration_.key_mean.empty()) key_mean_.push_back(upload_floats(backend, calibration_.key_mean[l]));
  }
  recorded_.attention_amax.assign(config_.layers, 0.0f);
  recorded_.swiglu_amax.assign(config_.layers, 0.0f);
}

/// In pieces: those of a context of a million tokens take half a GiB, which nobody should need twice.
void LlamaModel::place_rope_tables() {
  constexpr int64_t kPiece = 8192;
  const int64_t pairs = config_.rotary_dim / 2, bytes = positions_ * pairs * static_cast<int64_t>(sizeof(float));
  const auto free = static_cast<int64_t>(backend_.free_bytes());
  FUT_CHECK(2 * bytes <= free, "the rotary tables of a context of ", positions_, " tokens need ", 2 * bytes >> 20,
            " MiB, ", free >> 20, " MiB are free on ", backend_.name(), ": lower --max-context");
  rope_cos_ = Buffer(backend_, static_cast<size_t>(bytes));
  rope_sin_ = Buffer(backend_, static_cast<size_t>(bytes));
  for (int64_t first = 0; first < positions_; first += kPiece) {
    const RopeTables piece = rope_tables(config_, std::min(kPiece, positions_ - first), first);
    backend_.upload(rope_cos_.as<float>() + first * pairs, piece.cos.data(), piece.cos.size() * sizeof(float));
    backend_.upload(rope_sin_.as<float>() + first * pairs, piece.sin.data(), piece.sin.size() * sizeof(float));
  }
}

/// Rounded to what the weights of the phase multiply (table in ops.h).
Dtype LlamaModel::operand_type(bool decode) const {
  const Dtype weight = decode ? options_.weights.decode : options_.weights.prefill;
  if (weight == Dtype::f32 || weight == Dtype::bf16) return weight;
  return decode ? Dtype::f16 : Dtype::e4m3;
}

void LlamaModel::reserve(int64_t rows) {
  if (rows <= capacity_) return;
  const auto grow = [&](Buffer& buffer, int64_t elements, int64_t element_bytes) {
    buffer = Buffer();  // give the old one back first
    buffer = Buffer(backend_, static_cast<size_t>(rows * elements * element_bytes));
  };
  const int64_t D = config_.width, E = config_.head_dim;
  grow(x_, D, 4);
  grow(sum_squares_, 1, 4);
  grow(x8_, D, 1);
  grow(x8_scale_, 1, 4);
  grow(q_, config_.heads * E, 4);
  grow(k_, config_.kv_heads * E, 4);
  grow(v_, config_.kv_heads * E, 4);
  grow(o_, config_.heads * E, 4);
  grow(o_scale_, 1, 4);
  grow(h_, config_.feed_forward, 4);
  grow(h_scale_, 1, 4);
  capacity_ = rows;
}

Residual LlamaModel::residual(int64_t rows, bool decode) {
  reserve(rows);
  Residual r;
  const Dtype operand = operand_type(decode);
  r.dtype = !decode && operand != Dtype::f32 ? Dtype::bf16 : Dtype::f32;
  r.x = x_.as<void>();
  r.sum_squares = sum_squares_.as<float>();
  r.eps = static_cast<float>(config_.norm_eps);
  if (operand == Dtype::e4m3) {
    r.x8 = x8_.as<E4m3>();
    r.x8_scale = x8_scale_.as<float>();
    r.x8_scaling = options_.scaling;
    r.requantised = &saturation_.rows;
  }
  return r;
}

Operand LlamaModel::operand(Buffer& storage, Buffer& row_scale, AmaxHistory& history, float frozen_amax, float guard,
                            bool decode, float* recorded) {
  Operand out;
  out.dtype = operand_type(decode);
  out.data = storage.as<void>();
  out.saturated = &saturation_.values;
  if (recording_) out.amax = recorded;
  if (out.dtype == Dtype::f16) out.scale = guard;
  if (out.dtype != Dtype::e4m3) return out;
  switch (options_.scaling) {
    case Fp8Scaling::exact: out.row_scale = row_scale.as<float>(); break;
    case Fp8Scaling::frozen: out.scale = e4m3_scale(frozen_amax); break;
    case Fp8Scaling::delayed:
      if (history.scale > 0.0f) {
        out.scale = history.scale;
      } else {
        out.row_scale = row_scale.as<float>();  // the first pass has no history
      }
      out.amax = history.amax;
      break;
  }
  return out;
}

Rope LlamaModel::rope() const {
  return {rope_cos_.as<float>(), rope_sin_.as<float>(), static_cast<int>(config_.rotary_dim), positions_};
}

KvCache LlamaModel::layer_cache(const LayeredCache& cache, int64_t layer) const {
  KvCache c = cache.first;
  c.pages += layer * cache.pages_stride;
  if (c.tails) c.tails += layer * cache.tails_stride;
  if (c.sinks) c.sinks += layer * cache.sinks_stride;
  c.key_factor = key_factor_[layer].as<float>();
  c.value_factor = value_factor_[layer].as<float>();
  c.key_mean = key_mean_.empty() ? nullptr : key_mean_[layer].as<float>();
  return c;
}

void LlamaModel::forward(const ForwardPass& pass, bool decode) {
  const int64_t rows = pass.batch.rows;
  if (rows == 0) return;
  from_step_ = decode && whole_step(pass);
  if (from_step_) return;
  Residual r = residual(rows, decode);
  backend_.embed({r, weights_.embedding.weight, pass.tokens, rows, config_.width});
  const int heads = static_cast<int>(config_.heads);
  for (int64_t l = 0; l < config_.layers; ++l) {
    const LayerWeights& w = decode ? weights_.for_decode(l) : weights_.prefill[l];
    const LayerConstants& constants = weights_.constants[l];
    const KvCache cache = layer_cache(pass.cache, l);
    const bool calibrated = !calibration_.swiglu_amax.empty();
    const Operand o = operand(o_, o_scale_, attention_history_[l], calibrated ? calibration_.attention_amax[l] : 0.0f,
                              constants.attention_guard, decode, &recorded_.attention_amax[l]);
    const Operand h = operand(h_, h_scale_, swiglu_history_[l], calibrated ? calibration_.swiglu_amax[l] : 0.0f,
                              constants.swiglu_guard, decode, &recorded_.swiglu_amax[l]);
    QkvArgs qkv{q_.as<void>(), k_.as<void>(), v_.as<void>(), cache, r,
                w.qkv.weight,  rope(),        pass.batch,    heads, config_.width};
    if (config_.head_norm) qkv.q_norm = q_norm_[l].as<float>(), qkv.k_norm = k_norm_[l].as<float>();
    const AttentionArgs attention{o, q_.as<void>(), k_.as<void>(), v_.as<void>(), cache, pass.batch, heads};
    if (decode) {
      backend_.qkv_rope_append(qkv);
      backend_.attention_decode(attention);
    } else {
      backend_.qkv_rope_cache(qkv);
      backend_.attention_prefill(attention);
    }
    backend_.o_proj_residual({r, o, w.o.weight, rows});
    backend_.gate_up_swiglu({h, r, w.gate_up.weight, rows});
    backend_.down_residual({r, h, w.down.weight, rows});
  }
  if (!decode && options_.scaling == Fp8Scaling::delayed) {
    for (AmaxHistory& history : attention_history_) history.roll();
    for (AmaxHistory& history : swiglu_history_) history.roll();
  }
  last_ = r;
}

/// The step as one call, where the backend has it; false where it does not.
bool LlamaModel::whole_step(const ForwardPass& pass) {
  if (recording_) return false;
  std::vector<DecodeLayer> layers;
  for (int64_t l = 0; l < config_.layers; ++l) {
    const LayerWeights& w = weights_.for_decode(l);
    const bool guarded = operand_type(true) == Dtype::f16;
    const LayerConstants& c = weights_.constants[l];
    layers.push_back({w.qkv.weight, w.o.weight, w.gate_up.weight, w.down.weight, layer_cache(pass.cache, l),
                      guarded ? c.attention_guard : 1.0f, guarded ? c.swiglu_guard : 1.0f});
    if (config_.head_norm) layers.back().q_norm = q_norm_[l].as<float>(), layers.back().k_norm = k_norm_[l].as<float>();
  }
  DecodeStepArgs args;
  const size_t bytes = static_cast<size_t>(pass.batch.rows * config_.vocabulary) * sizeof(float);
  if (step_logits_.bytes() < bytes) {
    step_logits_ = Buffer();  // give the old one back first
    step_logits_ = Buffer(backend_, bytes);
  }
  args.logits = step_logits_.as<float>();
  args.tokens = pass.tokens;
  args.embedding = weights_.embedding.weight;
  args.head = weights_.head.weight;
  args.layers = layers.data();
  args.layer_count = config_.layers;
  args.rope = rope();
  args.batch = pass.batch;
  args.heads = static_cast<int>(config_.heads);
  args.width = config_.width;
  args.feed_forward = config_.feed_forward;
  args.eps = static_cast<float>(config_.norm_eps);
  args.saturated = &saturation_.values;
  return backend_.decode_step(args);
}

void LlamaModel::prefill(const ForwardPass& pass) { forward(pass, false); }

void LlamaModel::decode_step(const ForwardPass& pass) { forward(pass, true); }

void LlamaModel::logits(std::span<const int64_t> rows, float* out) {
  if (from_step_) {
    for (size_t i = 0; i < rows.size(); ++i) {
      backend_.download(out + i * config_.vocabulary, step_logits_.as<float>() + rows[i] * config_.vocabulary,
                        config_.vocabulary * sizeof(float));
    }
    return;
  }
  LmHeadArgs args;
  args.residual = last_;
  args.head = weights_.head.weight;
  args.rows = static_cast<int64_t>(rows.size());
  // In a decode step these are all rows in order, which a backend knows without being told.
  bool in_order = true;
  for (int64_t i = 0; i < args.rows; ++i) in_order = in_order && rows[i] == i;
  if (!in_order) args.row = rows.data();
  Buffer logits(backend_, rows.size() * config_.vocabulary * sizeof(float));
  args.logits = logits.as<float>();
  backend_.lm_head(args);
  backend_.download(out, args.logits, rows.size() * config_.vocabulary * sizeof(float));
}

}  // namespace fut
