// config.json: what is read, what is refused by name, and the rotary frequencies that follow from it.
#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "model/llama.h"
#include "support/model_files.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

using nlohmann::json;
using test::expect_refused;

/// A small configuration with `changes` merged in (null removes nothing: it is a value like another).
LlamaConfig parse(const std::string& changes = "{}", const std::string& generation = "{}") {
  json c = {{"architectures", {"LlamaForCausalLM"}},
            {"model_type", "llama"},
            {"hidden_size", 64},
            {"intermediate_size", 96},
            {"num_hidden_layers", 2},
            {"num_attention_heads", 4},
            {"num_key_value_heads", 2},
            {"vocab_size", 259},
            {"max_position_embeddings", 256},
            {"rms_norm_eps", 1e-5},
            {"bos_token_id", 256},
            {"eos_token_id", 257}};
  c.update(json::parse(changes));
  return parse_config(c.dump(), generation, "x/config.json");
}

void expect_config_refused(const std::string& changes, std::vector<std::string> words) {
  words.push_back("x/config.json");
  expect_refused([&] { parse(changes); }, words);
}

TEST(ConfigTest, ReadsEveryField) {
  const LlamaConfig c = parse(R"({"rope_theta":500000,"tie_word_embeddings":true,"head_dim":32})");
  EXPECT_EQ(c.width, 64);
  EXPECT_EQ(c.feed_forward, 96);
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.heads, 4);
  EXPECT_EQ(c.kv_heads, 2);
  EXPECT_EQ(c.head_dim, 32);
  EXPECT_EQ(c.vocabulary, 259);
  EXPECT_EQ(c.positions, 256);
  EXPECT_EQ(c.norm_eps, 1e-5);
  EXPECT_EQ(c.rope_theta, 500000.0);
  EXPECT_EQ(c.rope_scaling.kind, RopeScaling::Kind::none);
  EXPECT_TRUE(c.tied);
  EXPECT_EQ(c.bos, 256);
  EXPECT_EQ(c.eos, std::vector<int32_t>{257});
}

TEST(ConfigTest, HeadWidthsAndHeadCounts_A05) {
  EXPECT_EQ(parse().head_dim, 16);
  EXPECT_EQ(parse(R"({"head_dim":null})").head_dim, 16);
  EXPECT_EQ(parse(R"({"num_key_value_heads":null})").kv_heads, 4);
  EXPECT_EQ(parse(R"({"hidden_size":52,"num_attention_heads":6,"head_dim":16})").head_dim, 16);
  expect_config_refused(R"({"hidden_size":52,"num_attention_heads":6})", {"52", "6", "head_dim is not given"});
  expect_config_refused(R"({"num_key_value_heads":3})", {"num_attention_heads 4", "num_key_value_heads 3"});
  expect_config_refused(R"({"head_dim":15})", {"head_dim 15 is odd"});
  expect_config_refused(R"({"head_dim":2048})", {"head_dim", "2048"});
}

TEST(ConfigTest, EndTokens_A09) {
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(parse(R"({"eos_token_id":[257,155]})").eos, (Ids{257, 155}));
  EXPECT_EQ(parse("{}", R"({"eos_token_id":[257,155]})").eos, (Ids{257, 155}));
  EXPECT_EQ(parse(R"({"eos_token_id":0})").eos, Ids{0});
  EXPECT_EQ(parse(R"({"eos_token_id":null})").eos, Ids{});
  EXPECT_EQ(parse(R"({"eos_token_id":[]})", R"({"eos_token_id":null})").eos, Ids{});
  const LlamaConfig beyond = parse(R"({"eos_token_id":100000})");  // no token of this vocabulary
  EXPECT_EQ(beyond.eos, Ids{});
  ASSERT_EQ(beyond.warnings.size(), 1u);
  EXPECT_NE(beyond.warnings[0].find("eos_token_id 100000 is beyond the vocabulary"), std::string::npos);
  EXPECT_TRUE(parse(R"({"eos_token_id":[257,155]})").warnings.empty());
  for (const char* bad : {"-1", "1.5", "\"257\"", "[257,null]", "4294967296", "true"}) {
    expect_config_refused(std::string(R"({"eos_token_id":)") + bad + "}", {"eos_token_id"});
  }
}

TEST(ConfigTest, MissingAndImpossibleNumbers) {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}) {
    expect_config_refused(json{{key, nullptr}}.dump(), {key, "missing"});
    for (const json& bad : {json(0), json(-1), json(1.5), json("64"), json(1e12), json::array({64}), json(true)}) {
      expect_config_refused(json{{key, bad}}.dump(), {key});
    }
  }
  EXPECT_EQ(parse(R"({"hidden_size":64.0})").width, 64);  // whole, if oddly written
  for (const char* bad : {"0", "-1e-5", "\"small\"", "false"}) {
    expect_config_refused(std::string(R"({"rms_norm_eps":)") + bad + "}", {"rms_norm_eps"});
    expect_config_refused(std::string(R"({"rope_theta":)") + bad + "}", {"rope_theta"});
  }
  expect_config_refused(R"({"tie_word_embeddings":"yes"})", {"tie_word_embeddings", "true or false"});
}

TEST(ConfigTest, RefusesWhatWouldChangeTheMathematics) {
  expect_config_refused(R"({"model_type":"qwen2_moe"})", {"qwen2_moe", "llama, mistral, qwen2 and qwen3"});
  expect_config_refused(R"({"model_type":"qwen2"})", {"LlamaForCausalLM", "\"qwen2\"", "Qwen2ForCausalLM"});
  expect_config_refused(R"({"model_type":null})", {"model_type"});
  expect_config_refused(R"({"architectures":["LlamaForSequenceClassification"]})", {"LlamaForSequenceClassification"});
  expect_config_refused(R"({"attention_bias":1})", {"attention_bias", "true or false"});
  for (const char* foreign :
       {R"("rope_interleaved":true)", R"("use_mrope":true)", R"("num_experts":8)", R"("num_local_experts":1)",
        R"("n_routed_experts":64)", R"("num_experts_per_tok":2)", R"("no_rope_layers":[1,0])", R"("use_qk_norm":true)",
        R"("clip_qkv":8.0)", R"("attention_chunk_size":8192)", R"("attn_logit_softcapping":50.0)",
        R"("final_logit_softcapping":30.0)", R"("logit_scale":0.0625)", R"("logits_scaling":8)",
        R"("embedding_multiplier":12)", R"("residual_multiplier":0.22)", R"("num_experts":"8")",
        R"("num_experts":{})"}) {
    const std::string key = std::string(foreign).substr(1, std::string(foreign).find('"', 1) - 1);
    expect_config_refused(cat("{", foreign, "}"), {key, "not supported"});
    for (const char* nothing : {"null", "false"}) EXPECT_EQ(parse(cat("{\"", key, "\":", nothing, "}")).width, 64);
  }
  EXPECT_EQ(parse(R"({"num_experts":0,"no_rope_layers":[],"logit_scale":1.0})").width, 64);
  expect_config_refused(R"({"hidden_act":"gelu"})", {"hidden_act", "gelu"});
  for (const char* factor : {"0", "-0.5", "1.5", "\"half\"", "0.05", "0.7"})
    expect_config_refused(cat(R"({"partial_rotary_factor":)", factor, "}"), {"partial_rotary_factor"});
  expect_config_refused(R"({"sliding_window":128})", {"sliding_window 128", "max_position_embeddings 256"});
  EXPECT_EQ(parse(R"({"sliding_window":256})").width, 64);
  expect_config_refused(R"({"layer_types":["full_attention","sliding_attention"]})",
                        {"layer_types", "sliding_attention"});
  EXPECT_EQ(parse(R"({"sliding_window":128,"use_sliding_window":false})").width, 64);
  EXPECT_EQ(parse(R"({"sliding_window":null})").width, 64);
  EXPECT_EQ(
      parse(R"({"partial_rotary_factor":1.0,"attention_bias":false,"hidden_act":"silu","architectures":null})").width,
      64);
  for (const char* text : {"", "[]", "{", "null", R"({"hidden_size":1,"hidden_size":2})"}) {
    expect_refused([&] { parse_config(text, "{}", "x/config.json"); }, {"x/config.json"});
  }
}

/// Messages name the file, not the folder that a user gave.
TEST(ConfigTest, RefusalsNameTheFile) {
  expect_config_refused(R"({"hidden_size":0})", {"x/config.json: hidden_size is 0"});
  expect_refused([] { parse("{}", R"({"eos_token_id":"a"})"); }, {"x/generation_config.json: eos_token_id"});
  expect_refused([] { parse("{}", "[]"); }, {"x/generation_config.json: expected a JSON object"});
  expect_refused([] { parse_config("{}", "{}", "x.gguf"); }, {"x.gguf: model_type"});
  const test::TempFolder folder;
  folder.write("model.safetensors", test::safetensors_bytes("{}", ""));
  folder.write("config.json", R"({"model_type":"gpt2"})");
  expect_refused([&] { ModelSource::open(folder.path()); }, {folder.path() + "/config.json: model_type is"});
}

TEST(ConfigTest, RopeTypes_A01) {
  using Kind = RopeScaling::Kind;
  EXPECT_EQ(parse(R"({"rope_scaling":null})").rope_scaling.kind, Kind::none);
  EXPECT_EQ(parse(R"({"rope_scaling":{"rope_type":"default"}})").rope_scaling.kind, Kind::none);
  const LlamaConfig newer = parse(R"({"rope_parameters":{"rope_type":"default","rope_theta":5e5}})");
  EXPECT_EQ(newer.rope_theta, 5e5);
  expect_config_refused(R"({"rope_parameters":{"full_attention":{"rope_type":"yarn","factor":4}}})",
                        {"rope_parameters", "full_attention", "not supported"});
  expect_config_refused(R"({"rope_scaling":{"rope_type":"default","mrope_section":[4,4,8]}})", {"mrope_section"});
  const RopeScaling linear = parse(R"({"rope_scaling":{"type":"linear","factor":4}})").rope_scaling;
  EXPECT_EQ(linear.kind, Kind::linear);
  EXPECT_EQ(linear.factor, 4.0);
  for (const char* key : {"type", "rope_type"}) {
    for (const char* number : {"8", "8.0"}) {
      const std::string block =
          std::string(R"({"rope_scaling":{")") + key + R"(":"llama3","factor":)" + number +
          R"(,"low_freq_factor":1,"high_freq_factor":4.0,"original_max_position_embeddings":32}})";
      const RopeScaling s = parse(block).rope_scaling;
      EXPECT_EQ(s.kind, Kind::llama3);
      EXPECT_EQ(s.factor, 8.0);
      EXPECT_EQ(s.low_freq_factor, 1.0);
      EXPECT_EQ(s.high_freq_factor, 4.0);
      EXPECT_EQ(s.original_positions, 32);
    }
  }
  EXPECT_EQ(parse(R"({"rope_scaling":{"type":"dynamic","factor":4}})").rope_scaling.kind, Kind::dynamic);
  for (const char* type : {"longrope", "su", "proportional", "LINEAR", ""}) {
    expect_config_refused(std::string(R"({"rope_scaling":{"rope_type":")") + type + R"(","factor":4}})",
                          {"rope_scaling", type});
  }
  expect_config_refused(R"({"rope_scaling":{"factor":4}})", {"no rope_type"});
  expect_config_refused(R"({"rope_scaling":{"rope_type":"linear","factor":0}})", {"factor"});
  expect_config_refused(R"({"rope_scaling":{"rope_type":"llama3","factor":8}})", {"low_freq_factor is missing"});
  expect_config_refused(R"({"rope_scaling":{"rope_type":"linear"}})", {"factor is missing"});
  expect_config_refused(
      R"({"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4}})",
      {"original_max_position_embeddings"});
  expect_config_refused(R"({"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4,)"
                        R"("original_max_position_embeddings":32}})",
                        {"high_freq_factor 4", "low_freq_factor 4"});
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    for (const char* wrong :
         {"[]", "[1]", "\"linear\"", "\"\"", "false", "0", R"([{"rope_type":"linear","factor":4}])"})
      expect_config_refused(cat("{\"", key, "\":", wrong, "}"), {key, "expected a JSON object"});
    EXPECT_EQ(parse(cat("{\"", key, "\":{}}")).rope_scaling.kind, Kind::none);
  }
  expect_config_refused(R"({"rope_scaling":{"rope_type":"linear","factor":4},"rope_parameters":[]})",
                        {"rope_parameters", "expected a JSON object"});
  expect_config_refused(R"({"rope_parameters":{"rope_type":"default","partial_rotary_factor":2}})",
                        {"rope_parameters", "partial_rotary_factor is 2"});
  expect_config_refused(R"({"rope_theta":1e-300,"head_dim":1024,"rope_scaling":{"type":"linear","factor":1e-300}})",
                        {"rope_theta 1e-300"});
}

/// A configuration of another architecture, without the keys that a plain one gives.
LlamaConfig parse_bare(const std::string& type, const std::string& name, const std::string& changes = "{}") {
  json c = {{"architectures", {name}}, {"model_type", type},        {"hidden_size", 4096}, {"intermediate_size", 96},
            {"num_hidden_layers", 2},  {"num_attention_heads", 32}, {"vocab_size", 259}};
  c.update(json::parse(changes));
  return parse_config(c.dump(), "{}", "x/config.json");
}

/// Of transformers 5.24's configuration classes.
TEST(ConfigTest, WhatAbsentKeysMeanToEachArchitecture) {
  const LlamaConfig llama = parse_bare("llama", "LlamaForCausalLM"),
                    mistral = parse_bare("mistral", "MistralForCausalLM", R"({"sliding_window":null})"),
                    qwen2 = parse_bare("qwen2", "Qwen2ForCausalLM"), qwen3 = parse_bare("qwen3", "Qwen3ForCausalLM");
  const auto numbers = [](const LlamaConfig& c) {
    return std::vector<int64_t>{c.kv_heads, c.head_dim, c.rotary_dim, c.positions};
  };
  EXPECT_EQ(numbers(llama), (std::vector<int64_t>{32, 128, 128, 2048}));
  EXPECT_EQ(numbers(mistral), (std::vector<int64_t>{8, 128, 128, 131072}));
  EXPECT_EQ(numbers(qwen2), (std::vector<int64_t>{32, 128, 128, 32768}));
  EXPECT_EQ(numbers(qwen3), (std::vector<int64_t>{32, 128, 128, 32768}));
  EXPECT_EQ(parse_bare("qwen3", "Qwen3ForCausalLM", R"({"hidden_size":1024})").head_dim, 128);
  EXPECT_EQ(parse_bare("qwen2", "Qwen2ForCausalLM", R"({"hidden_size":1024})").head_dim, 32);
  const LlamaConfig null =
      parse_bare("mistral", "MistralForCausalLM", R"({"sliding_window":null,"num_key_value_heads":null})");
  EXPECT_EQ(null.kv_heads, 32);
  const auto flags = [](const LlamaConfig& c) {
    return std::vector<bool>{c.qkv_bias, c.o_bias, c.mlp_bias, c.head_norm};
  };
  EXPECT_EQ(flags(llama), (std::vector<bool>{false, false, false, false}));
  EXPECT_EQ(flags(mistral), (std::vector<bool>{false, false, false, false}));
  EXPECT_EQ(flags(qwen2), (std::vector<bool>{true, false, false, false}));
  EXPECT_EQ(flags(qwen3), (std::vector<bool>{false, false, false, true}));
  const char* biased = R"({"attention_bias":true,"mlp_bias":true})";
  EXPECT_EQ(flags(parse_bare("llama", "LlamaForCausalLM", biased)), (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(flags(parse_bare("qwen3", "Qwen3ForCausalLM", biased)), (std::vector<bool>{true, true, false, true}));
}

TEST(ConfigTest, SlidingWindowsInUseAreRefused) {
  const auto refused = [](const char* type, const char* name, const char* changes, const std::string& word) {
    expect_refused([&] { parse_bare(type, name, changes); }, {"x/config.json", word});
  };
  refused("mistral", "MistralForCausalLM", "{}", "sliding_window 4096 (which it is if not given)");
  refused("mistral", "MistralForCausalLM", R"({"sliding_window":4096,"use_sliding_window":false})",
          "sliding_window 4096");
  refused("mistral", "MistralForCausalLM", R"({"sliding_window":0,"max_position_embeddings":64})",
          "sliding_window is 0");
  refused("qwen2", "Qwen2ForCausalLM", R"({"use_sliding_window":true,"max_window_layers":1})", "sliding_window 4096");
  refused("qwen3", "Qwen3ForCausalLM", R"({"use_sliding_window":true,"sliding_window":64,"max_window_layers":0})",
          "sliding_window 64");
  refused("qwen3", "Qwen3ForCausalLM", R"({"layer_types":["sliding_attention","full_attention"]})", "layer_types");
  const auto taken = [](const char* type, const char* name, const char* changes) {
    EXPECT_EQ(parse_bare(type, name, changes).layers, 2) << changes;
  };
  taken("mistral", "MistralForCausalLM", R"({"max_position_embeddings":4096})");
  taken("qwen2", "Qwen2ForCausalLM", R"({"sliding_window":64,"use_sliding_window":false})");
  taken("qwen2", "Qwen2ForCausalLM", R"({"use_sliding_window":true,"sliding_window":64})");  // from layer 28 on
  taken("qwen2", "Qwen2ForCausalLM", R"({"use_sliding_window":true,"sliding_window":null,"max_window_layers":0})");
  taken("qwen3", "Qwen3ForCausalLM",
        R"({"use_sliding_window":true,"layer_types":["full_attention","full_attention"]})");
}

TEST(ConfigTest, PartialRotary_A07) {
  const LlamaConfig half = parse(R"({"head_dim":64,"partial_rotary_factor":0.5})");
  EXPECT_EQ(half.rotary_dim, 32);
  const std::vector<double> frequencies = rope_inverse_frequencies(half);
  ASSERT_EQ(frequencies.size(), 16u);
  EXPECT_DOUBLE_EQ(frequencies[1], std::pow(10000.0, -1.0 / 16));
  // The block comes before what is beside it.
  EXPECT_EQ(parse(R"({"head_dim":64,"partial_rotary_factor":0.5,"rope_parameters":{"rope_theta":1e4}})").rotary_dim,
            32);
  EXPECT_EQ(parse(R"({"head_dim":64,"partial_rotary_factor":0.5,"rope_parameters":{"partial_rotary_factor":0.25}})")
                .rotary_dim,
            16);
  EXPECT_EQ(parse(R"({"head_dim":10,"partial_rotary_factor":0.6})").rotary_dim, 6);
}

TEST(ConfigTest, YarnRefusesWhatItCannotUse_A03) {
  const auto refused = [](const std::string& block, std::vector<std::string> words) {
    words.push_back("rope_scaling");
    expect_config_refused(R"({"rope_scaling":{"rope_type":"yarn",)" + block + "}}", std::move(words));
  };
  refused(R"("original_max_position_embeddings":64)", {"factor"});
  refused(R"("factor":0)", {"factor is 0"});
  refused(R"("factor":4,"original_max_position_embeddings":0)", {"original_max_position_embeddings is 0"});
  refused(R"("factor":4,"beta_fast":-1)", {"beta_fast is -1"});
  refused(R"("factor":4,"attention_factor":0)", {"attention_factor is 0"});
  refused(R"("factor":4,"mscale":-100,"mscale_all_dim":1)", {"mscale -100", "attention factor"});
  refused(R"("factor":4,"truncate":1)", {"truncate is 1"});
  refused(R"("factor":4,"rope_theta":1)", {"rope_theta above 1"});
}

TEST(ConfigTest, DynamicLeavesTheTrainedLengthAlone_A04) {
  EXPECT_EQ(rope_inverse_frequencies(parse(R"({"rope_scaling":{"type":"dynamic","factor":4}})")),
            rope_inverse_frequencies(parse()));
}

/// transformers computes in FP32: theta^(i/E) by a power whose argument is up to ln(theta) = 13.8 and rounded to 2^-24
/// of itself, a few roundings more, and the difference that blends has lost what 1 - ramp cancels.
TEST(ConfigTest, FrequenciesOfTransformers_A03) {
  const json file = json::parse(test::read_file(FUT_SOURCE_DIR "/tests/rope_vectors.json"));
  ASSERT_GT(file["cases"].size(), 50u);
  for (const json& c : file["cases"]) {
    const std::string name = c["name"];
    const LlamaConfig config = parse(c["config"].dump());
    const auto expected = c["inverse_frequencies"].get<std::vector<double>>();
    const std::vector<double> frequencies = rope_inverse_frequencies(config);
    ASSERT_EQ(frequencies.size(), expected.size()) << name;
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(frequencies[i] / expected[i], 1.0, 2e-6) << name << ", pair " << i;
    }
    EXPECT_NEAR(config.rope_scaling.attention_factor, c["attention_factor"].get<double>(), 1e-12) << name;
  }
}

/// Heads of 128 trained on 4096 tokens: pairs 20 to 46 are blended.
TEST(ConfigTest, YarnBlendsAndScales_A03) {
  const auto config = [](double factor) {
    return parse(
        cat(R"({"head_dim":128,"rope_scaling":{"rope_type":"yarn","original_max_position_embeddings":4096,"factor":)",
            factor, "}}"));
  };
  const std::vector<double> frequencies = rope_inverse_frequencies(config(4));
  const auto plain = [](int pair) { return std::pow(1e4, -pair / 64.0); };
  for (int pair = 0; pair <= 20; ++pair) EXPECT_DOUBLE_EQ(frequencies[pair], plain(pair)) << pair;
  for (int pair = 46; pair < 64; ++pair) EXPECT_DOUBLE_EQ(frequencies[pair], plain(pair) / 4) << pair;
  EXPECT_NEAR(frequencies[21], 4.729204e-2, 1e-8);
  EXPECT_NEAR(frequencies[30], 9.488518e-3, 1e-9);
  EXPECT_NEAR(frequencies[45], 4.294026e-4, 1e-10);
  for (const auto& [factor, expected] :
       {std::pair{4, 1.138629}, {8, 1.207944}, {16, 1.277259}, {32, 1.346574}, {64, 1.415888}}) {
    EXPECT_NEAR(config(factor).rope_scaling.attention_factor, expected, 1e-6) << factor;
  }
}

TEST(ConfigTest, TablesHoldTheAttentionFactor_A03) {
  const LlamaConfig config = parse(R"({"rope_scaling":{"type":"yarn","factor":4,"attention_factor":1.25}})");
  const RopeTables tables = rope_tables(config, 3);
  const std::vector<double> frequencies = rope_inverse_frequencies(config);
  ASSERT_EQ(tables.cos.size(), 3 * frequencies.size());
  for (size_t i = 0; i < frequencies.size(); ++i) {
    EXPECT_EQ(tables.cos[i], 1.25f);
    EXPECT_NEAR(tables.cos[2 * frequencies.size() + i], 1.25 * std::cos(2 * frequencies[i]), 1e-7);
    EXPECT_NEAR(tables.sin[2 * frequencies.size() + i], 1.25 * std::sin(2 * frequencies[i]), 1e-7);
  }
}

TEST(ConfigTest, LinearAndPlainFrequencies_A01) {
  const std::vector<double> plain = rope_inverse_frequencies(parse()),
                            linear =
                                rope_inverse_frequencies(parse(R"({"rope_scaling":{"type":"linear","factor":4}})"));
  ASSERT_EQ(plain.size(), 8u);
  EXPECT_EQ(plain[0], 1.0);
  EXPECT_NEAR(plain[4], 0.01, 1e-15);  // 10000^(-8/16)
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(linear[i], plain[i] / 4, 1e-15);
}

std::vector<double> llama3_frequencies(int head_dim, double factor) {
  return rope_inverse_frequencies(parse(json{{"head_dim", head_dim},
                                             {"rope_theta", 5e5},
                                             {"rope_scaling",
                                              {{"rope_type", "llama3"},
                                               {"factor", factor},
                                               {"low_freq_factor", 1},
                                               {"high_freq_factor", 4},
                                               {"original_max_position_embeddings", 8192}}}}
                                            .dump()));
}

TEST(ConfigTest, Llama3Frequencies_A01) {
  const std::vector<double> small = llama3_frequencies(64, 32), large = llama3_frequencies(128, 8);
  const auto unscaled = [](int i, int head_dim) { return std::pow(5e5, -2.0 * i / head_dim); };
  for (int i = 0; i < 32; ++i) {
    const bool blended = i > 14 && i < 18;
    EXPECT_TRUE(blended || std::fabs(small[i] - unscaled(i, 64) / (i > 14 ? 32 : 1)) < 1e-15) << i;
  }
  EXPECT_NEAR(small[15], 1.290547928e-3, 1e-12);
  EXPECT_NEAR(small[16], 4.295567966e-4, 1e-13);
  EXPECT_NEAR(small[17], 9.708287803e-5, 1e-14);
  for (int i = 0; i < 64; ++i) {
    const double kept = unscaled(i, 128), stretched = kept / 8;
    const bool blended = i > 28 && i < 35;
    EXPECT_TRUE(blended ? large[i] > stretched && large[i] < kept
                        : std::fabs(large[i] - (i > 28 ? stretched : kept)) < 1e-15)
        << i;
  }
}

}  // namespace
}  // namespace fut
