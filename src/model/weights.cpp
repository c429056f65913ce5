#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "base/parallel.h"
#include "layout/hadamard.h"

namespace fut {
namespace {

std::string layer_name(int64_t layer, const char* name) { return cat("model.layers.", layer, ".", name, ".weight"); }

std::string bias_name(const std::string& weight) {
  return weight.substr(0, weight.size() - std::string_view("weight").size()) + "bias";
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += cat(i ? ", " : "", shape[i]);
  return text + ")";
}

void check_shape(const Checkpoint& checkpoint, const std::string& name, const std::vector<int64_t>& expected) {
  const TensorInfo* info = checkpoint.find(name);
  FUT_CHECK(info, checkpoint.path(), ": tensor ", name, " not found");
  FUT_CHECK(info->shape == expected, info->file, ": tensor ", name, " has shape ", shape_text(info->shape),
            ", the configuration says ", shape_text(expected));
}

/// Every tensor that a model of this configuration is made of.
std::vector<std::pair<std::string, std::vector<int64_t>>> expected_tensors(const LlamaConfig& c) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> all = {
      {"model.embed_tokens.weight", {c.vocabulary, c.width}}};
  const auto projection = [&](int64_t l, const char* name, int64_t outputs, int64_t inputs, bool bias) {
    all.push_back({layer_name(l, name), {outputs, inputs}});
    if (bias) all.push_back({bias_name(all.back().first), {outputs}});
  };
  for (int64_t l = 0; l < c.layers; ++l) {
    all.push_back({layer_name(l, "input_layernorm"), {c.width}});
    projection(l, "self_attn.q_proj", c.heads * c.head_dim, c.width, c.qkv_bias);
    projection(l, "self_attn.k_proj", c.kv_heads * c.head_dim, c.width, c.qkv_bias);
    projection(l, "self_attn.v_proj", c.kv_heads * c.head_dim, c.width, c.qkv_bias);
    projection(l, "self_attn.o_proj", c.width, c.heads * c.head_dim, c.o_bias);
    for (const char* norm : {"self_attn.q_norm", "self_attn.k_norm"}) {
      if (c.head_norm) all.push_back({layer_name(l, norm), {c.head_dim}});
    }
    all.push_back({layer_name(l, "post_attention_layernorm"), {c.width}});
    projection(l, "mlp.gate_proj", c.feed_forward, c.width, c.mlp_bias);
    projection(l, "mlp.up_proj", c.feed_forward, c.width, c.mlp_bias);
    projection(l, "mlp.down_proj", c.width, c.feed_forward, c.mlp_bias);
  }
  all.push_back({"model.norm.weight", {c.width}});
  if (!c.tied) all.push_back({"lm_head.weight", {c.vocabulary, c.width}});
  return all;
}

/// w (N, K) *= gain (K): the norm's gain moves into the weight that reads the normalised row.
void fold_gain(std::vector<float>& w, const std::vector<float>& gain) {
  const int64_t cols = static_cast<int64_t>(gain.size()), rows = static_cast<int64_t>(w.size()) / cols;
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < cols; ++k) w[n * cols + k] *= gain[k];
    }
  });
}

/// By the name that it has in the file; what is made of it has another.
std::vector<float> read_finite(const Checkpoint& checkpoint, const std::string& name) {
  std::vector<float> values = checkpoint.read_f32(name);
  parallel_for(static_cast<int64_t>(values.size()), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      FUT_CHECK(std::isfinite(values[i]), checkpoint.find(name)->file, ": tensor ", name, " holds ", values[i],
                ", expected finite numbers");
    }
  });
  return values;
}

/// Tensors with their rows behind one another.
std::vector<float> read_stacked(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
  size_t size = 0;
  for (const std::string& name : names) {
    const std::vector<int64_t>& shape = checkpoint.find(name)->shape;
    size += static_cast<size_t>(shape[0] * shape[1]);
  }
  std::vector<float> rows;
  rows.reserve(size);  // growing would copy, and hold, what is there twice
  for (const std::string& name : names) {
    const std::vector<float> part = read_finite(checkpoint, name);
    rows.insert(rows.end(), part.begin(), part.end());
  }
  return rows;
}

/// The biases of stacked tensors behind one another.
std::vector<float> read_stacked_biases(const Checkpoint& checkpoint, const std::vector<std::string>& weights) {
  std::vector<float> biases;
  for (const std::string& weight : weights) {
    const std::vector<float> part = read_finite(checkpoint, bias_name(weight));
    biases.insert(biases.end(), part.begin(), part.end());
  }
  return biases;
}

/// Names of the tensors whose rows are stacked into one GEMM weight.
std::vector<std::string> qkv_names(int64_t l) {
  return {layer_name(l, "self_attn.q_proj"), layer_name(l, "self_attn.k_proj"), layer_name(l, "self_attn.v_proj")};
}
std::vector<std::string> gate_up_names(int64_t l) {
  return {layer_name(l, "mlp.gate_proj"), layer_name(l, "mlp.up_proj")};
}

/// Codes and scales of stacked tensors exactly as the checkpoint stores them, if it does.
class StoredCodes {
 public:
  StoredCodes(const Checkpoint& checkpoint, Dtype dtype) : checkpoint_(checkpoint), dtype_(dtype) {}

  /// All of them, in groups of one size: they become one weight. If not, `why` says what is wrong with INT4 codes that
  /// are there, and stays as it is where there are none.
  bool hold(const std::vector<std::string>& names, std::string* why) const {
    int group = 0;
    for (const std::string& name : names) {
      if (dtype_ != Dtype::int4) {
        if (dtype_ != Dtype::e4m3 || !has_scale_a_row(name)) return false;
        continue;
      }
      std::string reason;
      const int own = checkpoint_.int4_group(name, &reason);
      const bool differ = group && own && own != group;
      if (why && (differ || !reason.empty())) *why = cat(name, " has ", differ ? "groups of another size" : reason);
      if (!own || differ) return false;
      group = own;
    }
    return true;
  }

  HostWeight read(const std::vector<std::string>& names) const {
    HostWeight out;
    out.dtype = dtype_;
    for (const std::string& name : names) {
      const TensorInfo& info = *checkpoint_.find(name);
      out.rows += info.shape[0];
      out.cols = info.shape[1];
      if (dtype_ == Dtype::int4) {
        const HostWeight part = checkpoint_.int4_codes(name);
        out.group = part.group;
        out.data.insert(out.data.end(), part.data.begin(), part.data.end());
        out.group_scale.insert(out.group_scale.end(), part.group_scale.begin(), part.group_scale.end());
      } else {
        append_raw(out, name, info.shape[0] * info.shape[1]);
        for (float scale : checkpoint_.read_f32(name + "_scale")) out.scale.push_back(scale);
      }
    }
    return out;
  }

 private:
  bool has_scale_a_row(const std::string& name) const {
    const TensorInfo *info = checkpoint_.find(name), *scale = checkpoint_.find(name + "_scale");
    return info && info->type == "F8_E4M3" && scale && info->shape.size() == 2 &&
           (scale->shape == std::vector<int64_t>{info->shape[0]} ||
            scale->shape == std::vector<int64_t>{info->shape[0], 1});
  }

  void append_raw(HostWeight& out, const std::string& name, int64_t expected_bytes) const {
    int64_t size = 0;
    const uint8_t* data = checkpoint_.raw(name, &size);
    FUT_CHECK(size == expected_bytes, checkpoint_.path(), ": tensor ", name, " has ", size, " bytes, expected ",
              expected_bytes);
    out.data.insert(out.data.end(), data, data + size);
  }

  const Checkpoint& checkpoint_;
  Dtype dtype_;
};

/// The four matrices of one layer in one format, on the host.
struct HostLayer {
  HostWeight qkv, o, gate_up, down;
};

/// Gains of the norm in front of a stored INT4 weight: its input scale. Empty: all ones.
std::vector<float> stored_input_scale(const Checkpoint& checkpoint, int64_t l, const char* norm) {
  std::vector<float> scale = checkpoint.read_f32(layer_name(l, norm));
  const bool ones = std::all_of(scale.begin(), scale.end(), [](float c) { return c == 1.0f; });
  return ones ? std::vector<float>{} : scale;
}

/// From the codes that the checkpoint stores.
HostLayer stored_layer(const Checkpoint& checkpoint, int64_t l, Dtype dtype) {
  const StoredCodes codes(checkpoint, dtype);
  HostLayer out{codes.read(qkv_names(l)), codes.read({layer_name(l, "self_attn.o_proj")}), codes.read(gate_up_names(l)),
                codes.read({layer_name(l, "mlp.down_proj")})};
  if (dtype == Dtype::int4) {
    out.qkv.input_scale = stored_input_scale(checkpoint, l, "input_layernorm");
    out.gate_up.input_scale = stored_input_scale(checkpoint, l, "post_attention_layernorm");
  }
  return out;
}

/// From floats. With `scale_inputs` the gains stay out of INT4 weights, whose groups have no room for them.
HostLayer encode_layer(const LayerTensors& tensors, const LlamaConfig& config, int64_t l, const WeightOptions& options,
                       Dtype dtype, bool scale_inputs) {
  const int64_t E = config.head_dim, qkv_rows = (config.heads + 2 * config.kv_heads) * E;
  const auto encode = [&](const std::vector<float>& w, int64_t rows, int64_t cols, const char* name) {
    return encode_weight(dtype, options.group, w.data(), rows, cols, layer_name(l, name));
  };
  const auto encode_scaled = [&](const std::vector<float>& w, int64_t rows, const std::vector<float>& gain,
                                 const char* name) {
    if (dtype != Dtype::int4 || !scale_inputs) return encode(w, rows, config.width, name);
    const std::vector<float> scale = usable_input_scale(gain);
    HostWeight out = encode(divide_columns(w, scale), rows, config.width, name);
    out.input_scale = scale;
    return out;
  };
  return {encode_scaled(tensors.qkv, qkv_rows, tensors.qkv_gain, "self_attn.qkv_proj"),
          encode(tensors.o, config.width, config.heads * E, "self_attn.o_proj"),
          encode_scaled(tensors.gate_up, 2 * config.feed_forward, tensors.gate_up_gain, "mlp.gate_up_proj"),
          encode(tensors.down, config.width, config.feed_forward, "mlp.down_proj")};
}

void add_biases(HostLayer& layer, LayerBiases biases) {
  layer.qkv.bias = std::move(biases.qkv);
  layer.o.bias = std::move(biases.o);
  layer.gate_up.bias = std::move(biases.gate_up);
  layer.down.bias = std::move(biases.down);
}

/// Euclidean norm of every row of a weight with its input scale: (N).
std::vector<float> row_norms(const HostWeight& weight) {
  std::vector<float> norms(weight.rows);
  parallel_for(weight.rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(weight.cols);
    for (int64_t n = begin; n < end; ++n) {
      decode_weight_row(weight, n, row.data());
      const std::vector<float>& c = weight.input_scale;
      double sum = 0;
      for (int64_t k = 0; k < weight.cols; ++k) sum += std::pow(double{row[k]} * (c.empty() ? 1.0f : c[k]), 2);
      norms[n] = static_cast<float>(std::sqrt(sum));
    }
  });
  return norms;
}

/// Smallest power of two that brings `bound` below the largest FP16; at least 1.
float guard_for(double bound) {
  return bound <= kHalfMax ? 1.0f : static_cast<float>(std::exp2(std::ceil(std::log2(bound / kHalfMax))));
}

/// The power of two that puts the scale of a typical group of this head's keys or values near 8, in the middle of what
/// E4M3 can say. Typical: `mean_square` (E) of every channel; groups of 32 reach about 2.5 of its root, divided over
/// 7.5 levels.
float kv_factor(const std::vector<double>& mean_square) {
  double sum = 0;
  for (double square : mean_square) sum += square;
  const double typical_scale = std::sqrt(sum / static_cast<double>(mean_square.size())) * 2.5 / 7.5;
  return typical_scale > 0 ? static_cast<float>(std::exp2(std::round(std::log2(typical_scale / 8.0)))) : 1.0f;
}

LayerWeights place_layer(Backend& backend, HostLayer layer, Phase phase) {
  return {backend.take(std::move(layer.qkv), phase), backend.take(std::move(layer.o), phase),
          backend.take(std::move(layer.gate_up), phase), backend.take(std::move(layer.down), phase)};
}

/// (V, D) the embedding or the head, some rows at a time: as floats it would be larger than all layers of a small
/// model.
PlacedWeight place_table(Backend& backend, const Checkpoint& checkpoint, const LlamaConfig& c, Dtype dtype,
                         OfflineRotation rotation, decltype(read_head) read, const std::string& name) {
  constexpr int64_t kRows = 2048;
  HostWeight table = empty_weight(dtype, 0, c.vocabulary, c.width);
  for (int64_t first = 0; first < c.vocabulary; first += kRows) {
    const int64_t count = std::min(kRows, c.vocabulary - first);
    encode_rows(table, first, count, read(checkpoint, c, rotation, {first, count}).data(),
                cat(name, " of ", checkpoint.path()));
    checkpoint.drop_pages();
  }
  return backend.take(std::move(table), Phase::decode);
}

/// Whether all codes of a phase are there in the checkpoint.
bool stored_as(const Checkpoint& checkpoint, Dtype dtype, int64_t layers, std::string* why) {
  const StoredCodes codes(checkpoint, dtype);
  for (int64_t l = 0; l < layers; ++l) {
    for (const auto& names :
         {qkv_names(l), {layer_name(l, "self_attn.o_proj")}, gate_up_names(l), {layer_name(l, "mlp.down_proj")}}) {
      if (!codes.hold(names, why)) return false;
    }
  }
  return true;
}

/// Only then can FP8 codes be used as they are: a gain would have to be folded into them.
bool gains_are_ones(const Checkpoint& checkpoint, int64_t layers) {
  for (int64_t l = 0; l < layers; ++l) {
    for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) {
      for (float gain : checkpoint.read_f32(layer_name(l, norm))) {
        if (gain != 1.0f) return false;
      }
    }
  }
  return true;
}

/// Whether a phase takes its codes from the checkpoint as they are. Otherwise it reads numbers and encodes them.
bool uses_stored(const Checkpoint& checkpoint, Dtype dtype, int64_t layers, std::string* why = nullptr) {
  return stored_as(checkpoint, dtype, layers, why) && (dtype == Dtype::int4 || gains_are_ones(checkpoint, layers));
}

}  // namespace

std::vector<float> usable_input_scale(std::vector<float> wanted) {
  const float reach =
      0.99f * kHalfMax / std::sqrt(static_cast<float>(wanted.size()));  // a row of rms 1 reaches sqrt(K)
  float largest = 0.0f;
  for (float c : wanted) largest = std::max(largest, std::fabs(c));
  const float fit = largest > reach ? reach / largest : 1.0f;
  bool ones = true;
  for (float& c : wanted) {
    c = to_f32(to_bf16(c * fit));
    if (std::fabs(c) < 1e-6f) c = 1.0f;  // FP16 would lose the input, and the weight is next to nothing
    ones = ones && c == 1.0f;
  }
  return ones ? std::vector<float>{} : wanted;
}

std::vector<float> divide_columns(std::vector<float> w, const std::vector<float>& input_scale) {
  if (input_scale.empty()) return w;
  std::vector<float> inverse;
  for (float c : input_scale) inverse.push_back(1.0f / c);
  fold_gain(w, inverse);
  return w;
}

// Bounds by Cauchy and Schwarz: a normalised row has norm sqrt(D), so |row n of W times it| <= sqrt(D) |W_n|; its bias
// comes on top. An input of unit mean square gives channel n the mean square |W_n|^2 + bias^2; a norm over the head
// then leaves its gain's.

LayerConstants attention_constants(const HostWeight& weight, const HeadNorm& norm, const LlamaConfig& config) {
  LayerConstants out;
  const int64_t E = config.head_dim, H = config.heads, J = config.kv_heads;
  const std::vector<float> rows = row_norms(weight);
  const auto bias = [&](int64_t n) { return weight.bias.empty() ? 0.0 : double{weight.bias[n]}; };
  double bound = 0;
  for (int64_t n = (H + J) * E; n < weight.rows; ++n)
    bound = std::max(bound, std::sqrt(static_cast<double>(config.width)) * rows[n] + std::fabs(bias(n)));
  out.attention_guard = guard_for(bound);
  const auto factor_of = [&](int64_t head, const std::vector<float>& gain) {
    std::vector<double> mean_square;
    for (int64_t i = 0; i < E; ++i) {
      const int64_t n = head * E + i;
      mean_square.push_back(gain.empty() ? double{rows[n]} * rows[n] + bias(n) * bias(n) : double{gain[i]} * gain[i]);
    }
    return kv_factor(mean_square);
  };
  for (int64_t j = 0; j < J; ++j) {
    out.key_factor.push_back(factor_of(H + j, norm.k));
    out.value_factor.push_back(factor_of(H + J + j, {}));
  }
  return out;
}

float swiglu_guard(const HostWeight& weight, const LlamaConfig& config) {
  const int64_t F = config.feed_forward;
  const std::vector<float> gate_up = row_norms(weight);
  const double reach = std::sqrt(static_cast<double>(config.width));
  const auto bound_of = [&](int64_t n) {
    return reach * gate_up[n] + (weight.bias.empty() ? 0.0 : std::fabs(double{weight.bias[n]}));
  };
  double bound = 0;
  for (int64_t i = 0; i < F; ++i) bound = std::max(bound, bound_of(i) * bound_of(F + i));
  return guard_for(bound);
}

namespace {

bool is_zero_bias(const Checkpoint& checkpoint, const TensorInfo& info) {
  if (!info.name.ends_with(".bias")) return false;
  const std::vector<float> values = checkpoint.read_f32(info.name);
  return std::all_of(values.begin(), values.end(), [](float value) { return value == 0.0f; });
}

}  // namespace

void check_tensors(const Checkpoint& checkpoint, const LlamaConfig& c) {
  std::set<std::string> expected;
  for (const auto& [name, shape] : expected_tensors(c)) {
    check_shape(checkpoint, name, shape);
    expected.insert(name);
  }
  for (const TensorInfo& info : checkpoint.tensors()) {
    // Passed over, these would change the result without a word; but GPTQ's programs write biases of zeros.
    const bool changes =
        info.name.ends_with(".bias") || info.name.ends_with(".q_norm.weight") || info.name.ends_with(".k_norm.weight");
    FUT_CHECK(!changes || expected.contains(info.name) || is_zero_bias(checkpoint, info), info.file, ": tensor ",
              info.name, ": the configuration has no such bias or norm (", c.architecture, ")");
    const bool too_deep = info.name.rfind(cat("model.layers.", c.layers, "."), 0) == 0;
    FUT_CHECK(!too_deep, info.file, ": tensor ", info.name, ", but the configuration says ", c.layers, " layers");
  }
}

std::vector<std::string> unused_tensors(const Checkpoint& checkpoint, const LlamaConfig& c) {
  std::set<std::string> used = {"rope_freqs.weight"};  // GGUF's llama3 scaling, which became part of the configuration
  for (const auto& [name, shape] : expected_tensors(c)) {
    for (const char* part : {"", "_packed", "_scale", "_scale_inv", "_shape", "_zero_point", "_g_idx"})
      used.insert(name + part);
    const std::string module = name.substr(0, name.rfind('.') + 1);
    for (const char* part : {"qweight", "qzeros", "scales", "g_idx"}) used.insert(module + part);
  }
  std::vector<std::string> unused;
  for (const TensorInfo& info : checkpoint.tensors()) {
    const bool recomputed = info.name.ends_with(".rotary_emb.inv_freq");
    const bool zeros = info.name.ends_with(".bias");  // others are refused
    if (!recomputed && !zeros && !used.contains(info.name)) unused.push_back(info.name);
  }
  return unused;
}

LayerBiases read_biases(const Checkpoint& checkpoint, const LlamaConfig& c, int64_t l, OfflineRotation rotation) {
  LayerBiases out;
  if (c.qkv_bias) out.qkv = read_stacked_biases(checkpoint, qkv_names(l));
  if (c.o_bias) out.o = read_stacked_biases(checkpoint, {layer_name(l, "self_attn.o_proj")});
  if (c.mlp_bias) out.gate_up = read_stacked_biases(checkpoint, gate_up_names(l));
  if (c.mlp_bias) out.down = read_stacked_biases(checkpoint, {layer_name(l, "mlp.down_proj")});
  const int64_t E = c.head_dim, H = c.heads, J = c.kv_heads;
  if (rotation.value && c.qkv_bias) hadamard_rotate_rows(out.qkv.data() + (H + J) * E, J * E, 1, E);
  if (rotation.residual && c.o_bias) hadamard_rotate_rows(out.o.data(), c.width, 1, c.width);
  if (rotation.residual && c.mlp_bias) hadamard_rotate_rows(out.down.data(), c.width, 1, c.width);
  return out;
}

HeadNorm read_head_norm(const Checkpoint& checkpoint, const LlamaConfig& c, int64_t l) {
  if (!c.head_norm) return {};
  return {read_finite(checkpoint, layer_name(l, "self_attn.q_norm")),
          read_finite(checkpoint, layer_name(l, "self_attn.k_norm"))};
}

LayerTensors read_layer(const Checkpoint& checkpoint, const LlamaConfig& c, int64_t l, OfflineRotation rotation) {
  LayerTensors out;
  out.qkv = read_stacked(checkpoint, qkv_names(l));
  out.gate_up = read_stacked(checkpoint, gate_up_names(l));
  out.o = read_finite(checkpoint, layer_name(l, "self_attn.o_proj"));
  out.down = read_finite(checkpoint, layer_name(l, "mlp.down_proj"));
  out.qkv_gain = read_finite(checkpoint, layer_name(l, "input_layernorm"));
  out.gate_up_gain = read_finite(checkpoint, layer_name(l, "post_attention_layernorm"));
  fold_gain(out.qkv, out.qkv_gain);
  fold_gain(out.gate_up, out.gate_up_gain);
  out.bias = read_biases(checkpoint, c, l, rotation);
  out.head_norm = read_head_norm(checkpoint, c, l);
  const int64_t E = c.head_dim, H = c.heads, J = c.kv_heads;
  if (rotation.value) {
    hadamard_rotate_rows(out.qkv.data() + (H + J) * E * c.width, J * E, c.width, E);
    hadamard_rotate_columns(out.o.data(), c.width, H * E, E);
  }
  if (rotation.residual) {
    hadamard_rotate_columns(out.qkv.data(), (H + 2 * J) * E, c.width, c.width);
    hadamard_rotate_columns(out.gate_up.data(), 2 * c.feed_forward, c.width, c.width);
    hadamard_rotate_rows(out.o.data(), c.width, H * E, c.width);
    hadamard_rotate_rows(out.down.data(), c.width, c.feed_forward, c.width);
    out.qkv_gain.assign(c.width, 1.0f);
    out.gate_up_gain.assign(c.width, 1.0f);
  }
  return out;
}

std::vector<float> read_head(const Checkpoint& checkpoint, const LlamaConfig& c, OfflineRotation rotation,
                             TableRows rows) {
  std::vector<float> head =
      checkpoint.read_rows(c.tied ? "model.embed_tokens.weight" : "lm_head.weight", rows.first, rows.count);
  fold_gain(head, checkpoint.read_f32("model.norm.weight"));
  if (rotation.residual) hadamard_rotate_columns(head.data(), rows.count, c.width, c.width);
  return head;
}

std::vector<float> read_embedding(const Checkpoint& checkpoint, const LlamaConfig& c, OfflineRotation rotation,
                                  TableRows rows) {
  std::vector<float> embedding = checkpoint.read_rows("model.embed_tokens.weight", rows.first, rows.count);
  if (rotation.residual) hadamard_rotate_columns(embedding.data(), rows.count, c.width, c.width);
  return embedding;
}

ModelWeights load_weights(Backend& backend, const ModelSource& source, const WeightOptions& options) {
  const LlamaConfig& c = source.config;
  const Checkpoint &for_prefill = source.for_prefill(), &for_decode = *source.decode;
  check_tensors(for_decode, c);
  if (source.quantised()) check_tensors(for_prefill, c);
  const bool prefill_stored = uses_stored(for_prefill, options.prefill, c.layers);
  std::string lost;  // why INT4 codes cannot be used
  const bool decode_stored = uses_stored(for_decode, options.decode, c.layers, &lost);
  // Values of both phases meet in one cache, so both must be rotated, or neither.
  const OfflineRotation rotation{options.rotate_values && !source.quantised() && !prefill_stored && !decode_stored,
                                 false};
  const bool same = options.prefill == options.decode && !source.quantised(), shared = same && backend.one_order();
  const bool scale_inputs = backend.takes_input_scale();

  ModelWeights out;
  if (!lost.empty()) {
    out.warning =
        cat(for_decode.path(), ": its 4-bit codes are read as numbers and rounded to INT4 anew, in groups of ",
            options.group, ": ", lost);
  }
  for (int64_t l = 0; l < c.layers; ++l) {
    if (options.on_progress) options.on_progress("weights", l, c.layers);
    for_decode.drop_pages(), for_prefill.drop_pages();
    LayerTensors tensors;
    const bool same_tensors = !source.quantised() && !prefill_stored && !decode_stored;
    if (!decode_stored) tensors = read_layer(for_decode, c, l, rotation);
    HostLayer decode = decode_stored ? stored_layer(for_decode, l, options.decode)
                                     : encode_layer(tensors, c, l, options, options.decode, scale_inputs);
    FUT_CHECK(scale_inputs || (decode.qkv.input_scale.empty() && decode.gate_up.input_scale.empty()), for_decode.path(),
              ": its INT4 weights have input scales (norm weights other than 1), which backend ", backend.name(),
              " does not know; --backend cpu does");
    add_biases(decode, read_biases(for_decode, c, l, rotation));
    out.head_norms.push_back(read_head_norm(for_decode, c, l));
    out.constants.push_back(attention_constants(decode.qkv, out.head_norms.back(), c));
    out.constants.back().swiglu_guard = swiglu_guard(decode.gate_up, c);
    if (shared) {
      out.prefill.push_back(place_layer(backend, std::move(decode), Phase::prefill));
      continue;
    }
    if (same) out.prefill.push_back(place_layer(backend, decode, Phase::prefill));
    out.decode.push_back(place_layer(backend, std::move(decode), Phase::decode));
    if (same) continue;
    if (!prefill_stored && !same_tensors) tensors = read_layer(for_prefill, c, l, rotation);
    HostLayer prefill = prefill_stored ? stored_layer(for_prefill, l, options.prefill)
                                       : encode_layer(tensors, c, l, options, options.prefill, false);
    add_biases(prefill, read_biases(for_prefill, c, l, rotation));
    out.prefill.push_back(place_layer(backend, std::move(prefill), Phase::prefill));
  }
  const bool f32 = options.prefill == Dtype::f32 || options.decode == Dtype::f32;
  const Dtype table = f32 ? Dtype::f32 : Dtype::bf16;
  if (options.on_progress) options.on_progress("embedding and head", c.layers, c.layers);
  out.embedding = place_table(backend, for_decode, c, table, rotation, read_embedding, "model.embed_tokens.weight");
  out.head = place_table(backend, for_decode, c, table, rotation, read_head, "lm_head.weight");
  return out;
}

}  // namespace fut
