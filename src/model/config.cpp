#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "io/json.h"
#include "io/mapped_file.h"

namespace fut {
namespace {

using Json = nlohmann::json;

/// An architecture, and what transformers takes for keys that its config.json lacks.
struct Architecture {
  const char *type, *name;     ///< model_type, and the class in `architectures`
  int64_t kv_heads, head_dim;  ///< 0: as many as heads; hidden_size / heads
  int64_t positions;
};
constexpr Architecture kArchitectures[] = {{"llama", "LlamaForCausalLM", 0, 0, 2048},
                                           {"mistral", "MistralForCausalLM", 8, 0, 131072},
                                           {"qwen2", "Qwen2ForCausalLM", 32, 0, 32768},
                                           {"qwen3", "Qwen3ForCausalLM", 32, 128, 32768}};
constexpr int64_t kUsualWindow = 4096;    // Mistral's and Qwen's sliding_window where it is not given
constexpr int64_t kUsualFullLayers = 28;  // Qwen's max_window_layers

/// Reads fields of one JSON object with messages that name file, key and value.
class Fields {
 public:
  Fields(const Json& object, std::string what) : object_(object), what_(std::move(what)) {
    FUT_CHECK(object.is_object(), what_, ": expected a JSON object, found ", object.type_name());
  }

  const Json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  /// Whether the key is there at all, if only as null.
  bool names(const char* key) const { return object_.contains(key); }

  double number(const char* key, double fallback) const {
    const Json* value = find(key);
    if (!value) return fallback;
    FUT_CHECK(value->is_number(), what_, ": ", key, " is ", shown(*value), ", expected a number");
    return value->get<double>();
  }

  /// A whole number in [low, high]; `fallback` below low means that the key is required.
  int64_t integer(const char* key, int64_t fallback, int64_t low, int64_t high) const {
    const Json* value = find(key);
    FUT_CHECK(value || fallback >= low, what_, ": ", key, " is missing");
    if (!value) return fallback;
    const double x = number(key, 0);
    FUT_CHECK(x == std::floor(x) && x >= static_cast<double>(low) && x <= static_cast<double>(high), what_, ": ", key,
              " is ", shown(*value), ", expected a whole number from ", low, " to ", high);
    return static_cast<int64_t>(x);
  }

  /// `fallback` below 0 means that the key is required.
  double positive(const char* key, double fallback) const {
    FUT_CHECK(find(key) || fallback > 0, what_, ": ", key, " is missing");
    const double x = number(key, fallback);
    FUT_CHECK(std::isfinite(x) && x > 0, what_, ": ", key, " is ", x, ", expected a positive number");
    return x;
  }

  bool flag(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (!value) return fallback;
    FUT_CHECK(value->is_boolean(), what_, ": ", key, " is ", shown(*value), ", expected true or false");
    return value->get<bool>();
  }

  std::string text(const char* key, const std::string& fallback) const {
    const Json* value = find(key);
    if (!value) return fallback;
    FUT_CHECK(value->is_string(), what_, ": ", key, " is ", shown(*value), ", expected a string");
    return value->get<std::string>();
  }

  const std::string& what() const { return what_; }

 private:
  const Json& object_;
  std::string what_;
};

/// What the paper on YaRN multiplies the cosines and sines by.
double yarn_attention_factor(const Fields& rope, double factor) {
  const auto grown = [factor](double scale) { return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0; };
  if (rope.find("attention_factor")) return rope.positive("attention_factor", -1);
  const double scale = rope.number("mscale", 0), scale_all = rope.number("mscale_all_dim", 0);
  const double ratio = scale != 0 && scale_all != 0 ? grown(scale) / grown(scale_all) : grown(1);
  FUT_CHECK(std::isfinite(ratio) && ratio > 0, rope.what(), ": mscale ", scale, " and mscale_all_dim ", scale_all,
            " give the attention factor ", ratio, ", expected a positive number");
  return ratio;
}

/// As transformers 5 does: a factor that is null follows from the two lengths, a beta of 0 means the usual one, and the
/// trained length beside the block comes before the one in it.
void read_yarn(const Fields& config, const Fields& rope, LlamaConfig& out) {
  constexpr int64_t kLongest = int64_t{1} << 30;
  RopeScaling& scaling = out.rope_scaling;
  const int64_t inside = rope.integer("original_max_position_embeddings", out.positions, 1, kLongest);
  scaling.original_positions = config.integer("original_max_position_embeddings", inside, 1, kLongest);
  const double ratio = static_cast<double>(out.positions) / static_cast<double>(scaling.original_positions);
  scaling.factor = rope.positive("factor", rope.names("factor") ? ratio : -1);
  const double fast = rope.number("beta_fast", 0), slow = rope.number("beta_slow", 0);
  scaling.beta_fast = fast == 0 ? scaling.beta_fast : rope.positive("beta_fast", -1);
  scaling.beta_slow = slow == 0 ? scaling.beta_slow : rope.positive("beta_slow", -1);
  scaling.truncate = rope.flag("truncate", !rope.names("truncate"));
  scaling.attention_factor = yarn_attention_factor(rope, scaling.factor);
  FUT_CHECK(out.rope_theta > 1, rope.what(), ": yarn needs a rope_theta above 1, found ", out.rope_theta);
}

/// R of a head of E, rounded down as transformers does it, but for a fraction that no float holds.
int64_t rotary_width(const std::string& what, double factor, int64_t head_dim) {
  FUT_CHECK(factor > 0 && factor <= 1, what, ": partial_rotary_factor is ", factor,
            ", expected more than 0, at most 1");
  const auto width = static_cast<int64_t>(static_cast<double>(head_dim) * factor + 1e-6);
  FUT_CHECK(width >= 2 && width % 2 == 0, what, ": partial_rotary_factor ", factor, " turns ", width, " of ", head_dim,
            " channels; rotary embedding needs pairs");
  return width;
}

/// rope_scaling (older files) or rope_parameters (newer ones, which also carry rope_theta). Where both are given the
/// first counts, as in transformers.
void read_rope(const Fields& config, LlamaConfig& out) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (const Json* block = config.find(key)) Fields(*block, config.what() + ": " + key);  // an object, both of them
  }
  const Json* older = config.find("rope_scaling");
  const char* key = older && !older->empty() ? "rope_scaling" : "rope_parameters";
  const Json* block = config.find(key);
  out.rope_theta = config.positive("rope_theta", 10000.0);
  const double beside = config.number("partial_rotary_factor", 1.0);
  out.rotary_dim = rotary_width(config.what(), beside, out.head_dim);
  if (!block || block->empty()) return;
  const Fields rope(*block, config.what() + ": " + key);
  out.rope_theta = rope.positive("rope_theta", out.rope_theta);
  out.rotary_dim = rotary_width(rope.what(), rope.number("partial_rotary_factor", beside), out.head_dim);
  const std::string type = rope.text("rope_type", rope.text("type", ""));
  FUT_CHECK(!type.empty() || !rope.find("factor"), rope.what(), " has no rope_type");
  const auto known = {"", "default", "linear", "dynamic", "yarn", "llama3"};
  FUT_CHECK(std::find(known.begin(), known.end(), type) != known.end(), rope.what(), ": rope type \"", printable(type),
            "\" is not supported (default, linear, dynamic, yarn and llama3 are)");
  for (const auto& [name, value] : block->items()) {  // a block for each kind of layer, sections of a head, ...
    FUT_CHECK(!value.is_structured(), rope.what(), ": ", printable(name), " is ", shown(value),
              ", which is not supported");
  }
  RopeScaling& scaling = out.rope_scaling;
  if (type.empty() || type == "default") return;
  if (type == "linear" || type == "dynamic") {
    scaling.kind = type == "linear" ? RopeScaling::Kind::linear : RopeScaling::Kind::dynamic;
    scaling.factor = rope.positive("factor", -1);
    return;
  }
  if (type == "yarn") {
    scaling.kind = RopeScaling::Kind::yarn;
    return read_yarn(config, rope, out);
  }
  scaling.kind = RopeScaling::Kind::llama3;
  scaling.factor = rope.positive("factor", -1);
  scaling.low_freq_factor = rope.positive("low_freq_factor", -1);
  scaling.high_freq_factor = rope.positive("high_freq_factor", -1);
  const int64_t trained = config.integer("original_max_position_embeddings", 0, 0, int64_t{1} << 30);
  scaling.original_positions = rope.integer("original_max_position_embeddings", trained, 1, int64_t{1} << 30);
  if (trained > 0) scaling.original_positions = trained;
  FUT_CHECK(scaling.high_freq_factor > scaling.low_freq_factor, rope.what(), ": high_freq_factor ",
            scaling.high_freq_factor, " is not above low_freq_factor ", scaling.low_freq_factor);
}

/// eos_token_id is a number, a list, or absent; 0 is an id like any other.
void add_eos(const Fields& fields, LlamaConfig& out) {
  const Json* value = fields.find("eos_token_id");
  if (!value) return;
  const Json list = value->is_array() ? *value : Json::array({*value});
  for (const Json& id : list) {
    FUT_CHECK(id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < (int64_t{1} << 31), fields.what(),
              ": eos_token_id holds ", shown(id), ", expected token ids");
    const int64_t token = id.get<int64_t>();
    if (token >= out.vocabulary) {
      out.warnings.push_back(cat(fields.what(), ": eos_token_id ", token, " is beyond the vocabulary of ",
                                 out.vocabulary, " and is passed over"));
    } else if (std::find(out.eos.begin(), out.eos.end(), token) == out.eos.end()) {
      out.eos.push_back(static_cast<int32_t>(token));
    }
  }
}

const Architecture& architecture_of(const Fields& config) {
  const std::string type = config.text("model_type", ""), &what = config.what();
  const auto known = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                  [&](const Architecture& a) { return a.type == type; });
  FUT_CHECK(known != std::end(kArchitectures), what, ": model_type is \"", printable(type),
            "\"; only Llama and what is built like it is supported (llama, mistral, qwen2 and qwen3)");
  if (const Json* names = config.find("architectures")) {
    const bool listed = names->is_array() && std::find(names->begin(), names->end(), Json(known->name)) != names->end();
    FUT_CHECK(listed, what, ": architectures is ", shown(*names), "; with model_type \"", type, "\" only ", known->name,
              " is supported");
  }
  return *known;
}

void read_sizes(const Fields& fields, const Architecture& architecture, LlamaConfig& out) {
  constexpr int64_t kWidest = 1 << 20;
  out.width = fields.integer("hidden_size", 0, 1, kWidest);
  out.feed_forward = fields.integer("intermediate_size", 0, 1, kWidest);
  out.layers = fields.integer("num_hidden_layers", 0, 1, 10000);
  out.heads = fields.integer("num_attention_heads", 0, 1, 65536);
  const bool as_heads = architecture.kv_heads == 0 || fields.names("num_key_value_heads");  // null means that too
  out.kv_heads = fields.integer("num_key_value_heads", as_heads ? out.heads : architecture.kv_heads, 1, 65536);
  out.vocabulary = fields.integer("vocab_size", 0, 1, int64_t{1} << 24);
  out.positions = fields.integer("max_position_embeddings", architecture.positions, 1, int64_t{1} << 30);
  const bool computed = architecture.head_dim == 0;
  FUT_CHECK(fields.find("head_dim") || !computed || out.width % out.heads == 0, fields.what(), ": hidden_size ",
            out.width, " is no multiple of num_attention_heads ", out.heads, " and head_dim is not given");
  out.head_dim = fields.integer("head_dim", computed ? out.width / out.heads : architecture.head_dim, 1, 1024);
  FUT_CHECK(out.heads % out.kv_heads == 0, fields.what(), ": num_attention_heads ", out.heads,
            " is no multiple of num_key_value_heads ", out.kv_heads);
  FUT_CHECK(out.head_dim % 2 == 0, fields.what(), ": head_dim ", out.head_dim, " is odd; rotary embedding needs pairs");
}

/// What the block has beyond a plain Llama's. Flags that an architecture does not know say nothing there.
void read_block(const Fields& fields, const std::string& type, LlamaConfig& out) {
  const bool flag = (type == "llama" || type == "qwen3") && fields.flag("attention_bias", false);
  out.qkv_bias = flag || type == "qwen2";
  out.o_bias = flag;
  out.mlp_bias = type == "llama" && fields.flag("mlp_bias", false);
  out.head_norm = type == "qwen3";
}

/// A window that is as long as the longest context hides nothing. Qwen's has a switch and begins at some layer.
void refuse_sliding_window(const Fields& config, const std::string& type, const LlamaConfig& c) {
  const bool qwen = type == "qwen2" || type == "qwen3", mistral = type == "mistral";
  if (const Json* kinds = config.find("layer_types")) {
    const bool full = kinds->is_array() && std::all_of(kinds->begin(), kinds->end(),
                                                       [](const Json& kind) { return kind == "full_attention"; });
    FUT_CHECK(full, config.what(), ": layer_types is ", shown(*kinds), "; only \"full_attention\" is supported");
    if (qwen) return;
  }
  const bool given = config.names("sliding_window");
  if (given ? !config.find("sliding_window") : !qwen && !mistral) return;
  if (!mistral && !config.flag("use_sliding_window", !qwen)) return;
  if (qwen && config.integer("max_window_layers", kUsualFullLayers, 0, int64_t{1} << 30) >= c.layers) return;
  const int64_t window = config.integer("sliding_window", kUsualWindow, 1, int64_t{1} << 40);
  FUT_CHECK(window >= c.positions, config.what(), ": sliding_window ", window,
            given ? "" : " (which it is if not given)",
            " is not supported; it would have to be null, or at least max_position_embeddings ", c.positions);
}

/// Keys of blocks that are not Llama's, and the value at which they change nothing; null, false and nothing in a list
/// change nothing either.
constexpr struct {
  const char* key;
  double neutral;
} kForeignKeys[] = {{"num_experts", 0},
                    {"num_local_experts", 0},
                    {"n_routed_experts", 0},
                    {"num_experts_per_tok", 0},
                    {"rope_interleaved", 0},
                    {"use_mrope", 0},
                    {"no_rope_layers", 0},
                    {"no_rope_layer_interval", 0},
                    {"use_qk_norm", 0},
                    {"qk_layernorm", 0},
                    {"clip_qkv", 0},
                    {"attention_chunk_size", 0},
                    {"attn_logit_softcapping", 0},
                    {"final_logit_softcapping", 0},
                    {"logit_scale", 1},
                    {"logits_scaling", 1},
                    {"embedding_multiplier", 1},
                    {"residual_multiplier", 1}};

/// Keys that would change the result if they were ignored.
void refuse_unsupported(const Fields& config) {
  const std::string& what = config.what();
  for (const auto& [key, neutral] : kForeignKeys) {
    const Json* value = config.find(key);
    FUT_CHECK(!value || *value == false || (value->is_array() && value->empty()) || *value == neutral, what, ": ", key,
              " is ", shown(*value), ", which is not supported");
  }
  const std::string act = config.text("hidden_act", "silu");
  FUT_CHECK(act == "silu" || act == "swish", what, ": hidden_act \"", printable(act), "\" is not supported (silu is)");
}

}  // namespace

LlamaConfig parse_config(const std::string& config_json, const std::string& generation_config_json,
                         const std::string& what) {
  const Json json = parse_json(config_json, what);
  const Fields fields(json, what);
  LlamaConfig out;
  const Architecture& architecture = architecture_of(fields);
  out.architecture = architecture.name;
  read_sizes(fields, architecture, out);
  out.norm_eps = fields.positive("rms_norm_eps", 1e-6);
  out.tied = fields.flag("tie_word_embeddings", false);
  out.bos = static_cast<int32_t>(fields.integer("bos_token_id", -1, -1, int64_t{1} << 30));
  read_block(fields, architecture.type, out);
  refuse_sliding_window(fields, architecture.type, out);
  refuse_unsupported(fields);
  read_rope(fields, out);
  for (const double f : rope_inverse_frequencies(out)) {
    FUT_CHECK(std::isfinite(f), what, ": rope_theta ", out.rope_theta, " with factor ", out.rope_scaling.factor,
              " gives a rotation that no number can hold");
  }
  add_eos(fields, out);
  const bool file = what.ends_with("config.json");  // the other lies beside it
  const std::string beside = file ? what.substr(0, what.size() - 11) + "generation_config.json" : what;
  const Json generation = parse_json(generation_config_json.empty() ? "{}" : generation_config_json, beside);
  add_eos(Fields(generation, beside), out);
  return out;
}

std::vector<double> rope_inverse_frequencies(const LlamaConfig& config) {
  using Kind = RopeScaling::Kind;
  const RopeScaling& scaling = config.rope_scaling;
  const auto pairs = static_cast<double>(config.rotary_dim) / 2;
  // The pair that turns so many times within the trained context, as a number between pairs.
  const auto pair_of = [&](double turns) {
    const double wavelength = static_cast<double>(scaling.original_positions) / turns;
    return pairs * std::log(wavelength / (2.0 * std::numbers::pi)) / std::log(config.rope_theta);
  };
  double first = 0, last = 0;  // yarn: up to the first all is kept, from the last on all is stretched
  if (scaling.kind == Kind::yarn) {
    first = pair_of(scaling.beta_fast), last = pair_of(scaling.beta_slow);
    if (scaling.truncate) first = std::floor(first), last = std::ceil(last);
    first = std::max(first, 0.0), last = std::min(last, 2 * pairs - 1);
    if (first == last) last += 0.001;
  }
  std::vector<double> frequencies(config.rotary_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const auto pair = static_cast<double>(i);
    double f = std::pow(config.rope_theta, -pair / pairs);
    if (scaling.kind == Kind::linear) f /= scaling.factor;
    if (scaling.kind == Kind::llama3 || scaling.kind == Kind::yarn) {
      // How often the pair turns within the trained context decides: often, keep; seldom, stretch; between, blend.
      const double turns = static_cast<double>(scaling.original_positions) * f / (2.0 * std::numbers::pi);
      const double keep =
          scaling.kind == Kind::yarn
              ? 1.0 - std::clamp((pair - first) / (last - first), 0.0, 1.0)
              : std::clamp((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor),
                           0.0, 1.0);
      f = (1.0 - keep) * f / scaling.factor + keep * f;
    }
    frequencies[i] = f;
  }
  return frequencies;
}

}  // namespace fut
