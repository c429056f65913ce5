// config.json and generation_config.json: every number that shapes a tensor or a rotation.
#include <cmath>

#include "model/config.h"
#include "mutate.h"

namespace fut::fuzz {
namespace {

const std::vector<std::string> kWords = {"architectures",
                                         "LlamaForCausalLM",
                                         "model_type",
                                         "llama",
                                         "hidden_size",
                                         "intermediate_size",
                                         "num_hidden_layers",
                                         "num_attention_heads",
                                         "num_key_value_heads",
                                         "head_dim",
                                         "vocab_size",
                                         "max_position_embeddings",
                                         "rms_norm_eps",
                                         "tie_word_embeddings",
                                         "bos_token_id",
                                         "eos_token_id",
                                         "rope_theta",
                                         "rope_scaling",
                                         "rope_parameters",
                                         "rope_type",
                                         "type",
                                         "factor",
                                         "attention_factor",
                                         "beta_fast",
                                         "beta_slow",
                                         "mscale",
                                         "mscale_all_dim",
                                         "truncate",
                                         "low_freq_factor",
                                         "high_freq_factor",
                                         "original_max_position_embeddings",
                                         "default",
                                         "linear",
                                         "dynamic",
                                         "yarn",
                                         "longrope",
                                         "llama3",
                                         "attention_bias",
                                         "mlp_bias",
                                         "partial_rotary_factor",
                                         "sliding_window",
                                         "use_sliding_window",
                                         "hidden_act",
                                         "silu",
                                         "rope_interleaved",
                                         "use_mrope",
                                         "num_experts",
                                         "logit_scale",
                                         "layer_types",
                                         "full_attention",
                                         "sliding_attention",
                                         "max_window_layers",
                                         "mistral",
                                         "qwen2",
                                         "qwen3",
                                         "MistralForCausalLM",
                                         "Qwen2ForCausalLM",
                                         "Qwen3ForCausalLM"};

class ConfigTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {"config.json", "generation_config.json"}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string &config = input["config.json"], &generation = input["generation_config.json"];
    if (random.chance(5)) return mutate_bytes(config, random, random.pick(seeds).at("config.json"));
    if (random.chance(90)) config = mutated_json(config, random, kWords);
    if (random.chance(15)) generation = mutated_json(generation, random, kWords);
  }

  std::string place(const std::string&) const override { return "config.json"; }

  void run(const Input& input, const std::string&) const override {
    const LlamaConfig c = parse_config(input.at("config.json"), input.at("generation_config.json"), "config.json");
    require(c.width > 0 && c.feed_forward > 0 && c.layers > 0 && c.vocabulary > 0 && c.positions > 0, "a size below 1");
    require(c.heads > 0 && c.kv_heads > 0 && c.heads % c.kv_heads == 0, "heads that do not divide");
    require(c.head_dim > 0 && c.head_dim % 2 == 0, "an odd head");
    require(c.rotary_dim > 0 && c.rotary_dim % 2 == 0 && c.rotary_dim <= c.head_dim, "rotary pairs outside the head");
    require(std::isfinite(c.norm_eps) && c.norm_eps > 0, "an epsilon that is no positive number");
    for (const int32_t id : c.eos) require(id >= 0 && id < c.vocabulary, "an end token outside the vocabulary");
    for (const double f : rope_inverse_frequencies(c)) require(std::isfinite(f) && f >= 0, "an infinite frequency");
  }
};

}  // namespace

std::unique_ptr<Target> config_target() { return std::make_unique<ConfigTarget>(); }

}  // namespace fut::fuzz
