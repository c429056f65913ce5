// Tiny random Llamas with a byte-level tokenizer. Right values of their losses and greedy tokens are known from
// outside, so the weights must be exactly those that CPython's random.Random(seed).gauss() draws, tensor by tensor.
#pragma once

#include <array>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numbers>

#include "base/dtype.h"
#include "model_files.h"
#include "temp_folder.h"

namespace fut::test {

/// The numbers of CPython's random.Random: MT19937, 53-bit fractions, normal deviates in pairs.
class PythonRandom {
 public:
  explicit PythonRandom(uint32_t seed) {
    state_[0] = 19650218u;
    for (uint32_t i = 1; i < kWords; ++i) state_[i] = 1812433253u * twist(state_[i - 1]) + i;
    uint32_t i = 1;
    const auto next = [&] {
      if (++i < kWords) return;
      state_[0] = state_[kWords - 1];
      i = 1;
    };
    for (uint32_t n = 0; n < kWords; ++n, next()) state_[i] = (state_[i] ^ twist(state_[i - 1]) * 1664525u) + seed;
    for (uint32_t n = 1; n < kWords; ++n, next()) state_[i] = (state_[i] ^ twist(state_[i - 1]) * 1566083941u) - i;
    state_[0] = 0x80000000u;
  }

  double gauss(double sigma) {
    if (has_spare_) {
      has_spare_ = false;
      return spare_ * sigma;
    }
    const double angle = uniform() * 2.0 * std::numbers::pi;
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    spare_ = std::sin(angle) * radius;
    has_spare_ = true;
    return std::cos(angle) * radius * sigma;
  }

 private:
  static constexpr uint32_t kWords = 624;
  static uint32_t twist(uint32_t x) { return x ^ x >> 30; }

  uint32_t word() {
    if (at_ == kWords) {
      for (uint32_t i = 0; i < kWords; ++i) {
        const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % kWords] & 0x7fffffffu);
        state_[i] = state_[(i + 397) % kWords] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0u);
      }
      at_ = 0;
    }
    uint32_t y = state_[at_++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
  }

  double uniform() {
    const uint32_t high = word() >> 5, low = word() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }

  std::array<uint32_t, kWords> state_;
  uint32_t at_ = kWords;
  bool has_spare_ = false;
  double spare_ = 0;
};

/// What differs from the base fixture: hidden 64, 2 layers, 4 query and 2 KV heads, feed-forward 96, vocabulary 259
/// (bytes, <|bos|> 256, <|eos|> 257, <|eot|> 258), context 256, F32, seed 7.
struct Fixture {
  std::string build = "{}";            ///< merged into the configuration before the weights are made
  std::string config = "{}";           ///< merged into config.json afterwards: may contradict the weights
  std::vector<std::string> drop = {};  ///< keys that config.json goes without
  std::string stored = "F32";          ///< or "BF16"
  std::string lm_head = "yes";         ///< "yes", "no", "zero", or "copy" of the embedding
  bool attention_bias = false, mlp_bias = false, inv_freq = false;
  bool qkv_bias = false;   ///< without o_proj's, which attention_bias means as well
  bool head_norm = false;  ///< q_norm and k_norm, with gains around 1
  std::function<void(const std::string& tensor, std::vector<float>& values)> edit = {};  ///< after they were drawn
};

/// GPT-2's spelling of a byte as a character, in UTF-8.
inline std::string byte_character(int byte) {
  const auto printable = [](int b) { return (b > 32 && b < 127) || (b > 160 && b < 173) || b > 173; };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += !printable(b);
  }
  if (code < 128) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
}

inline void write_byte_tokenizer(const TempFolder& folder, bool adds_bos = true) {
  using Json = nlohmann::json;
  Json added = Json::array(), vocabulary = Json::object();
  const char* control[] = {"<|bos|>", "<|eos|>", "<|eot|>"};
  for (int i = 0; i < 3; ++i) added.push_back({{"id", 256 + i}, {"content", control[i]}, {"special", true}});
  for (int b = 0; b < 256; ++b) vocabulary[byte_character(b)] = b;
  const Json level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  Json tokenizer = {
      {"added_tokens", added},     {"normalizer", nullptr},
      {"pre_tokenizer", level},    {"decoder", level},
      {"post_processor", nullptr}, {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", Json::array()}}}};
  if (adds_bos) {
    const Json bos = {{"SpecialToken", {{"id", "<|bos|>"}, {"type_id", 0}}}};
    const Json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    const Json special = {{"id", "<|bos|>"}, {"ids", {256}}, {"tokens", {"<|bos|>"}}};
    tokenizer["post_processor"] = {{"type", "TemplateProcessing"},
                                   {"single", {bos, text}},
                                   {"pair", {bos, text}},
                                   {"special_tokens", {{"<|bos|>", special}}}};
  }
  folder.write("tokenizer.json", tokenizer.dump());
  folder.write("tokenizer_config.json", R"({"bos_token":"<|bos|>","eos_token":"<|eos|>"})");
}

/// Draws the tensors in the order that fixes the random stream, and puts them into a safetensors file.
class FixtureWeights {
 public:
  FixtureWeights(const Fixture& fixture, const nlohmann::json& c) : fixture_(fixture) {
    const int64_t D = c["hidden_size"], F = c["intermediate_size"], V = c["vocab_size"], H = c["num_attention_heads"];
    const int64_t J = c.contains("num_key_value_heads") ? c["num_key_value_heads"].get<int64_t>() : H;
    const int64_t E = c.contains("head_dim") ? c["head_dim"].get<int64_t>() : D / H;
    const std::vector<float> embedding = draw("model.embed_tokens.weight", {V, D}, 1.0);
    for (int64_t l = 0; l < c["num_hidden_layers"]; ++l) layer(cat("model.layers.", l, "."), D, F, H * E, J * E, E);
    constant("model.norm.weight", {D}, 1.0f);
    if (fixture.lm_head == "yes") draw("lm_head.weight", {V, D});
    if (fixture.lm_head == "zero") constant("lm_head.weight", {V, D}, 0.0f);
    if (fixture.lm_head == "copy") put("lm_head.weight", {V, D}, embedding);
  }

  std::string bytes() const { return file_.bytes(); }

 private:
  void layer(const std::string& prefix, int64_t D, int64_t F, int64_t q_width, int64_t kv_width, int64_t E) {
    const auto projection = [&](const char* name, int64_t outputs, int64_t inputs, bool bias) {
      draw(cat(prefix, name, ".weight"), {outputs, inputs});
      if (bias) draw(cat(prefix, name, ".bias"), {outputs}, 0.5);
    };
    const bool qkv_bias = fixture_.attention_bias || fixture_.qkv_bias;
    projection("self_attn.q_proj", q_width, D, qkv_bias);
    projection("self_attn.k_proj", kv_width, D, qkv_bias);
    projection("self_attn.v_proj", kv_width, D, qkv_bias);
    projection("self_attn.o_proj", D, q_width, fixture_.attention_bias);
    projection("mlp.gate_proj", F, D, fixture_.mlp_bias);
    projection("mlp.up_proj", F, D, fixture_.mlp_bias);
    projection("mlp.down_proj", D, F, fixture_.mlp_bias);
    for (const char* norm : {"q_norm", "k_norm"}) {
      if (fixture_.head_norm) draw(cat(prefix, "self_attn.", norm, ".weight"), {E}, 0.25, 1.0f);
    }
    constant(prefix + "input_layernorm.weight", {D}, 1.0f);
    constant(prefix + "post_attention_layernorm.weight", {D}, 1.0f);
    if (fixture_.inv_freq) constant(prefix + "self_attn.rotary_emb.inv_freq", {E / 2}, 0.5f);
  }

  /// Normal deviates of variance 1 / inputs, unless told otherwise, around `base`.
  std::vector<float> draw(const std::string& name, const std::vector<int64_t>& shape, double sigma = 0,
                          float base = 0.0f) {
    if (sigma == 0) sigma = std::pow(static_cast<double>(shape.back()), -0.5);
    std::vector<float> values(count_of(shape));
    for (float& value : values) value = static_cast<float>(random_.gauss(sigma)) + base;
    put(name, shape, values);
    return values;
  }

  void constant(const std::string& name, const std::vector<int64_t>& shape, float value) {
    put(name, shape, std::vector<float>(count_of(shape), value));
  }

  void put(const std::string& name, const std::vector<int64_t>& shape, std::vector<float> values) {
    if (fixture_.edit) fixture_.edit(name, values);
    std::vector<uint16_t> halves;
    for (float value : values) halves.push_back(to_bf16(value).bits);
    file_.add(name, fixture_.stored, nlohmann::json(shape).dump(),
              fixture_.stored == "F32" ? bytes_of(values) : bytes_of(halves));
  }

  static size_t count_of(const std::vector<int64_t>& shape) {
    size_t count = 1;
    for (int64_t extent : shape) count *= static_cast<size_t>(extent);
    return count;
  }

  const Fixture& fixture_;
  PythonRandom random_{7};
  SafetensorsBuilder file_;
};

/// Writes config.json, the tokenizer and model.safetensors.
inline void write_fixture(const TempFolder& folder, const Fixture& fixture = {}) {
  nlohmann::json c = {{"architectures", {"LlamaForCausalLM"}},
                      {"model_type", "llama"},
                      {"hidden_act", "silu"},
                      {"hidden_size", 64},
                      {"intermediate_size", 96},
                      {"num_hidden_layers", 2},
                      {"num_attention_heads", 4},
                      {"num_key_value_heads", 2},
                      {"max_position_embeddings", 256},
                      {"rms_norm_eps", 1e-5},
                      {"rope_theta", 10000.0},
                      {"vocab_size", 259},
                      {"tie_word_embeddings", false},
                      {"bos_token_id", 256},
                      {"eos_token_id", 257},
                      {"torch_dtype", fixture.stored == "F32" ? "float32" : "bfloat16"}};
  c.update(nlohmann::json::parse(fixture.build));
  folder.write("model.safetensors", FixtureWeights(fixture, c).bytes());
  c.update(nlohmann::json::parse(fixture.config));
  for (const std::string& key : fixture.drop) c.erase(key);
  folder.write("config.json", c.dump(1));
  write_byte_tokenizer(folder);
}

}  // namespace fut::test
