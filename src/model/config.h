// What a model's config.json says, checked: every number that shapes a tensor or a rotation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fut {

/// How rotary frequencies are stretched beyond the trained context. `dynamic` leaves them alone up to
/// max_position_embeddings, which no sequence here passes: beyond, it would turn keys that are in the cache already.
struct RopeScaling {
  enum class Kind { none, linear, dynamic, llama3, yarn } kind = Kind::none;
  double factor = 1.0;
  int64_t original_positions = 0;                        ///< llama3, yarn
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  ///< llama3
  double beta_fast = 32.0, beta_slow = 1.0;              ///< yarn
  bool truncate = true;                                  ///< yarn: the blended range is one of whole pairs
  double attention_factor = 1.0;                         ///< of cosines and sines; 1 but for yarn
};

/// Llama, or an architecture whose block is Llama's with what the flags below say.
struct LlamaConfig {
  std::string architecture;  ///< "LlamaForCausalLM", ...
  int64_t width = 0;         ///< D, hidden_size
  int64_t feed_forward = 0;  ///< F, intermediate_size
  int64_t layers = 0;        ///< L
  int64_t heads = 0;         ///< H
  int64_t kv_heads = 0;      ///< J
  int64_t head_dim = 0;      ///< E
  int64_t rotary_dim = 0;    ///< R <= E: how much of a head RoPE turns; the rest stays as it is
  int64_t vocabulary = 0;    ///< V
  int64_t positions = 0;     ///< max_position_embeddings
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool tied = false;       ///< the head is the embedding
  bool qkv_bias = false;   ///< added to q, k and v before RoPE
  bool o_bias = false;     ///< added to what attention gives to the residual
  bool mlp_bias = false;   ///< of gate, up and down
  bool head_norm = false;  ///< each head's q and k are normalised before RoPE, with gains of their own
  int32_t bos = -1;
  std::vector<int32_t> eos;           ///< from config.json and generation_config.json, those of the vocabulary
  std::vector<std::string> warnings;  ///< one line each: what of the files is passed over
};

/// Parses and checks config.json. `what` names the file in messages. Keys that are not there mean what they mean to
/// transformers. Anything that would change the mathematics and is not supported (another architecture, an unknown rope
/// type, a sliding window, ...) is refused by name.
LlamaConfig parse_config(const std::string& config_json, const std::string& generation_config_json,
                         const std::string& what);

/// Rotation speed of each pair: theta^(-2 i / R), stretched as `rope_scaling` says. (R / 2). The attention factor is
/// left to the tables.
std::vector<double> rope_inverse_frequencies(const LlamaConfig& config);

}  // namespace fut
