// Mistral, Qwen2 and Qwen3, biases and partial rotary: tiny random models whose losses, logits and greedy tokens come
// from transformers and a program in double precision (scripts/judges/architectures.py), through every path of this
// engine.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/backends.h"
#include "engine/inspect.h"
#include "engine/quantize.h"
#include "futransformer/engine.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "quant/quantisers.h"
#include "support/fixture_model.h"

namespace fut {
namespace {

using nlohmann::json;
using test::expect_refused;
using test::Fixture;
using test::TempFolder;
using test::write_fixture;
using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr int kVocabulary = 259;

const json& vectors() {
  static const json file = json::parse(test::read_file(FUT_SOURCE_DIR "/tests/architecture_vectors.json"));
  return file;
}

Ids prompt() { return vectors()["prompt"].get<Ids>(); }

const json& model(const std::string& name) {
  for (const json& each : vectors()["cases"]) {
    if (each["name"] == name) return each;
  }
  throw std::runtime_error("no model " + name);
}

Fixture fixture_of(const json& model) {
  const auto has = [&](const char* kind) {
    return std::find(model["biases"].begin(), model["biases"].end(), json(kind)) != model["biases"].end();
  };
  Fixture fixture;
  fixture.build = model["build"].dump();
  fixture.config = model["config"].dump();
  fixture.drop = model["drop"].get<std::vector<std::string>>();
  fixture.lm_head = model["lm_head"];
  fixture.attention_bias = has("o");
  fixture.qkv_bias = has("qkv");
  fixture.mlp_bias = has("mlp");
  fixture.head_norm = model["head_norm"];
  fixture.edit = [changes = model["values"]](const std::string& tensor, Floats& values) {
    for (const json& change : changes.value(tensor, json::array())) values[change[0].get<size_t>()] = change[1];
  };
  return fixture;
}

EngineOptions precision(const std::string& prefill, const std::string& decode, const std::string& kv) {
  EngineOptions options;
  options.prefill = prefill;
  options.decode = decode;
  options.kv = kv;
  options.backend = "cpu";
  options.kv_tokens = 2048;
  options.max_batch = 4;
  options.threads = 1;
  return options;
}

struct Pass {
  std::vector<double> losses;
  std::vector<Floats> logits;
};

/// The prompt's losses, BOS before it, and the logits at each of its tokens but the last.
Pass score(Engine& engine, bool decode, const Ids& ids = prompt()) {
  ScoreOptions options;
  options.context = 256;
  options.decode = decode;
  Pass out;
  Ids text(ids.begin() + 1, ids.end());
  text.push_back(0);  // for the logits behind the last token
  engine.score(text, options, [&](int64_t, double nll, const float* logits) {
    out.losses.push_back(nll);
    out.logits.emplace_back(logits, logits + kVocabulary);
  });
  out.losses.pop_back();
  return out;
}

Ids greedy(Engine& engine, const Ids& ids, int64_t count) {
  Request request;
  request.ids = ids;
  request.max_tokens = count;
  request.sampling.temperature = 0;
  request.ignore_end_tokens = true;
  const Completion answer = engine.generate({request})[0];
  EXPECT_EQ(answer.error, "");
  return answer.ids;
}

void expect_right(Engine& engine, const json& model, const std::string& what) {
  for (const bool decode : {false, true}) {
    const Pass got = score(engine, decode);
    ASSERT_EQ(got.losses.size(), model["losses"].size()) << what;
    for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], model["losses"][i], 1e-4) << what << i;
    for (size_t i = 0; i < kVocabulary; ++i) EXPECT_NEAR(got.logits.back()[i], model["logits"][i], 1e-4) << what << i;
  }
  EXPECT_EQ(greedy(engine, prompt(), 6), model["greedy"].get<Ids>()) << what;
}

TEST(ArchitecturesTest, LossesLogitsAndGreedyTokensInF32_A06_A07) {
  for (const json& each : vectors()["cases"]) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(each));
    const auto engine = Engine::load(folder.path(), precision("f32", "f32", "f32"));
    expect_right(*engine, each, each["name"]);
    const auto whole = score(*engine, false);
    EngineOptions chunks = precision("f32", "f32", "f32");
    chunks.prefill_chunk = 7;
    EXPECT_EQ(score(*Engine::load(folder.path(), chunks), false).logits, whole.logits) << each["name"];
  }
}

double cosine(const Floats& a, const Floats& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) ab += double{a[i]} * b[i], aa += double{a[i]} * a[i], bb += double{b[i]} * b[i];
  return ab / std::sqrt(aa * bb);
}

/// Mean cosine of the logits of all positions.
double likeness(const Pass& a, const Pass& b) {
  double sum = 0;
  for (size_t i = 0; i < a.logits.size(); ++i) sum += cosine(a.logits[i], b.logits[i]);
  return sum / static_cast<double>(a.logits.size());
}

// ---- precisions -----------------------------------------------------------------------------------------------------

struct Precision {
  const char *prefill, *decode, *kv;
  double like_prefill, like_decode;  ///< least mean cosine to F32's logits
};

/// Bounds: half as far again from 1 as the worst model measured.
constexpr Precision kPrecisions[] = {{"bf16", "bf16", "bf16", 0.99993, 0.99993},
                                     {"fp8", "fp8", "bf16", 0.997, 0.998},
                                     {"bf16", "bf16", "fp8", 0.9995, 0.9995},
                                     {"fp8", "int4", "bf16", 0.997, 0.98}};

TEST(ArchitecturesTest, EveryPrecisionComesCloseToF32) {
  for (const json& each : vectors()["cases"]) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(each));
    const auto exact = Engine::load(folder.path(), precision("f32", "f32", "f32"));
    const Pass want = score(*exact, false);
    for (const Precision& p : kPrecisions) {
      const auto engine = Engine::load(folder.path(), precision(p.prefill, p.decode, p.kv));
      const double prefill = likeness(score(*engine, false), want), decode = likeness(score(*engine, true), want);
      const std::string what = cat(each["name"].get<std::string>(), ", ", p.prefill, "-", p.decode, "-", p.kv);
      EXPECT_GT(prefill, p.like_prefill) << what;
      EXPECT_GT(decode, p.like_decode) << what;
    }
  }
}

/// 48 combinations, each finite and near: INT4 caches cost most here, 16 channels being less than one of their groups.
TEST(ArchitecturesTest, EveryCombinationOfFormatsRuns) {
  for (const char* name : {"llama, every bias", "qwen2, half rotary", "qwen3"}) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(model(name)));
    const Pass want = score(*Engine::load(folder.path(), precision("f32", "f32", "f32")), false);
    for (const char* prefill : {"f32", "bf16", "fp8"}) {
      for (const char* decode : {"f32", "bf16", "fp8", "int4"}) {
        for (const char* kv : {"f32", "bf16", "fp8", "int4"}) {
          const auto engine = Engine::load(folder.path(), precision(prefill, decode, kv));
          EXPECT_GT(likeness(score(*engine, false), want), 0.98) << name << prefill << decode << kv;
          EXPECT_GT(likeness(score(*engine, true), want), 0.97) << name << prefill << decode << kv;
        }
      }
    }
  }
}

/// Biases of gate and up that make silu(g) * u pass 65504, and of values that pass it themselves: the guards count
/// them.
TEST(ArchitecturesTest, BiasesBeyondHalfPrecision) {
  Fixture fixture = fixture_of(model("llama, every bias"));
  fixture.edit = [](const std::string& name, Floats& values) {
    if (name == "model.layers.0.mlp.gate_proj.bias" || name == "model.layers.0.mlp.up_proj.bias") values[3] = 400.0f;
    if (name == "model.layers.1.self_attn.v_proj.bias") values[9] = -1e5f;
  };
  const TempFolder folder;
  write_fixture(folder, fixture);
  const Pass want = score(*Engine::load(folder.path(), precision("f32", "f32", "f32")), true);
  const auto engine = Engine::load(folder.path(), precision("fp8", "int4", "bf16"));
  const Pass got = score(*engine, true);
  EXPECT_EQ(engine->last_timing().saturated, 0);
  EXPECT_GT(likeness(got, want), 0.97);
}

/// Chunks, company and order change no bit, whatever the formats.
TEST(ArchitecturesTest, ChunksAndCompanyDoNotMatter) {
  for (const char* name : {"llama, every bias", "qwen2, half rotary", "qwen3, biases, tied"}) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(model(name)));
    EngineOptions options = precision("fp8", "int4", "int4");
    const auto engine = Engine::load(folder.path(), options);
    options.prefill_chunk = 7;
    const auto chunked = Engine::load(folder.path(), options);
    EXPECT_EQ(score(*engine, false).logits, score(*chunked, false).logits) << name;
    std::vector<Request> requests;
    for (const int64_t length : {1, 17, 64, 101}) {
      Request request;
      request.ids = prompt();
      request.ids.resize(static_cast<size_t>(length));
      request.max_tokens = 70;
      request.sampling.temperature = 0;
      request.ignore_end_tokens = true;
      requests.push_back(request);
    }
    const auto together = engine->generate(requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(together[i].error, "");
      EXPECT_EQ(together[i].ids, engine->generate({requests[i]})[0].ids) << name << i;
      EXPECT_EQ(together[i].ids, chunked->generate({requests[i]})[0].ids) << name << i;
    }
  }
}

// ---- fut quantize ---------------------------------------------------------------------------------------------------

std::string calibration_text() {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += static_cast<char>(' ' + i * 37 % 90);
  return text;
}

struct Quantised {
  TempFolder folder;
  std::string path() const { return folder.file("out"); }
  json metadata() const { return json::parse(test::read_file(folder.file("out/futransformer.json"))); }
};

std::unique_ptr<Quantised> quantise(const TempFolder& source, const char* method, bool calibrate, bool rotate = false) {
  auto made = std::make_unique<Quantised>();
  QuantizeOptions options;
  options.group = 32;
  options.rotate_residual = rotate;
  options.threads = 1;
  if (calibrate) options.calibration_text = calibration_text();
  options.calibration_samples = 4;
  options.calibration_length = 100;
  const auto quantiser = find_quantiser(method).make({});
  options.quantiser = quantiser.get();
  quantize_model(source.path(), made->path(), options);
  return made;
}

TEST(ArchitecturesTest, QuantisedFoldersHoldBiasesAndNorms_A06) {
  for (const json& each : vectors()["cases"]) {
    const std::string name = each["name"];
    const TempFolder folder;
    write_fixture(folder, fixture_of(each));
    const auto exact = Engine::load(folder.path(), precision("f32", "f32", "f32"));
    EngineOptions options = precision("fp8", "int4", "int4");
    options.group_size = 32;
    const auto at_load = Engine::load(folder.path(), options);
    const auto plain = quantise(folder, "rtn", false), rotated = quantise(folder, "rtn", false, true);
    const auto engine = Engine::load(plain->path(), options);
    for (const bool decode : {false, true})
      EXPECT_EQ(score(*engine, decode).logits, score(*at_load, decode).logits) << name;
    // Both subfolders are models of their own.
    const Pass want = score(*exact, false);
    for (const auto& [of, what] : {std::pair{plain.get(), "plain"}, std::pair{rotated.get(), "rotated"}}) {
      const auto decode = Engine::load(of->path() + "/decode", precision("f32", "int4", "bf16"));
      const auto prefill = Engine::load(of->path() + "/prefill", precision("fp8", "fp8", "bf16"));
      const auto both = Engine::load(of->path(), precision("fp8", "int4", "bf16"));
      const double like_int4 = likeness(score(*decode, true), want), like_fp8 = likeness(score(*prefill, false), want),
                   like_both = likeness(score(*both, true), want);
      EXPECT_GT(like_fp8, 0.997) << name << what;
      EXPECT_GT(like_int4, 0.983) << name << what;
      EXPECT_GT(like_both, 0.983) << name << what;
    }
  }
}

TEST(ArchitecturesTest, WhatQuantizeMeasuredIsReadWithSuspicion) {
  const TempFolder folder;
  write_fixture(folder, fixture_of(vectors()["cases"][0]));
  const auto made = quantise(folder, "rtn", true);
  const json good = made->metadata();
  const std::pair<const char*, std::vector<std::string>> changes[] = {
      {R"({"version":2})", {"expected version 1", "2"}},
      {R"({"version":null})", {"expected version 1", "none"}},
      {R"({"rotations":{"value":"yes"}})", {"rotations.value is \"yes\"", "true or false"}},
      {R"({"activation_amax":{"attention":[1e308,1]}})", {"attention holds 1e+308"}},
      {R"({"activation_amax":{"attention":[-1,1]}})", {"attention holds -1", "from 0"}},
      {R"({"activation_amax":{"swiglu":[1]}})", {"swiglu is [1]", "2 numbers"}},
      {R"({"key_mean":[[1]]})", {"key_mean is [[1]]", "2 layers"}},
      {R"({"key_mean":[[1],[2]]})", {"key_mean is [1]"}}};
  for (const auto& [change, words] : changes) {
    json changed = good;
    changed.merge_patch(json::parse(change));
    made->folder.write("out/futransformer.json", changed.dump());
    std::vector<std::string> expected = words;
    expected.push_back(made->path() + "/futransformer.json");
    test::expect_refused([&] { Engine::load(made->path(), {}); }, expected);
  }
  made->folder.write("out/futransformer.json", "1");
  test::expect_refused([&] { Engine::load(made->path(), {}); }, {"is 1, expected a JSON object"});
}

/// The walk of gptq finds the means of keys as the calibrating pass does, though it computes them in another way.
TEST(ArchitecturesTest, GptqWalksThroughBiasesAndNorms) {
  for (const char* name :
       {"llama, every bias", "qwen2, outliers in keys", "qwen2, half rotary", "qwen3, biases, tied"}) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(model(name)));
    const auto rtn = quantise(folder, "rtn", true), gptq = quantise(folder, "gptq", true);
    for (size_t layer = 0; layer < 2; ++layer) {
      const auto expected = rtn->metadata()["key_mean"][layer].get<Floats>();
      const auto found = gptq->metadata()["key_mean"][layer].get<Floats>();
      const double like = cosine(expected, found);
      EXPECT_GT(like, 0.9997) << name;
    }
    const auto exact = Engine::load(folder.path(), precision("f32", "f32", "f32"));
    const auto engine = Engine::load(gptq->path(), precision("fp8", "int4", "bf16"));
    const double like = likeness(score(*engine, true), score(*exact, true));
    EXPECT_GT(like, 0.991) << name;
  }
}

/// Case E05: biases of 80 in single channels of the keys.
TEST(ArchitecturesTest, OutliersInKeysSurviveTheInt4Cache) {
  const TempFolder folder;
  write_fixture(folder, fixture_of(model("qwen2, outliers in keys")));
  const auto calibrated = quantise(folder, "rtn", true), plain = quantise(folder, "rtn", false);
  const auto like = [](const Quantised& model, const char* kv) {
    const auto exact = Engine::load(model.path(), precision("f32", "f32", "f32"));
    const auto engine = Engine::load(model.path(), precision("f32", "f32", kv));
    Ids ids;
    for (int i = 0; i < 250; ++i) ids.push_back(i * 53 % 256);
    return likeness(score(*engine, true, ids), score(*exact, true, ids));
  };
  const double with = like(*calibrated, "int4"), without = like(*plain, "int4"), fp8 = like(*plain, "fp8");
  if (getenv("FUT_SHOW")) printf("int4 with mean %.6f, without %.6f; fp8 %.6f\n", with, without, fp8);
  EXPECT_GE(with, 0.985);
  EXPECT_GE(fp8, 0.95);
  EXPECT_LT(without, with);
}

// ---- GGUF -----------------------------------------------------------------------------------------------------------

/// Rows of q or k as the architecture "llama" stores them: neighbours instead of halves within the first `rotary`.
Floats with_neighbours(const Floats& values, int64_t rows, int64_t head_dim, int64_t rotary) {
  Floats out(values.size());
  const int64_t cols = static_cast<int64_t>(values.size()) / rows;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t i = row % head_dim, half = rotary / 2;
    const int64_t to = i < rotary ? row - i + i % half * 2 + i / half : row;
    std::copy_n(values.begin() + row * cols, cols, out.begin() + to * cols);
  }
  return out;
}

std::string gguf_name(std::string name) {
  const std::pair<std::string, std::string> parts[] = {{"model.embed_tokens", "token_embd"},
                                                       {"model.norm", "output_norm"},
                                                       {"lm_head", "output"},
                                                       {"model.layers.", "blk."},
                                                       {"self_attn.q_proj", "attn_q"},
                                                       {"self_attn.k_proj", "attn_k"},
                                                       {"self_attn.v_proj", "attn_v"},
                                                       {"self_attn.o_proj", "attn_output"},
                                                       {"self_attn.q_norm", "attn_q_norm"},
                                                       {"self_attn.k_norm", "attn_k_norm"},
                                                       {"mlp.gate_proj", "ffn_gate"},
                                                       {"mlp.up_proj", "ffn_up"},
                                                       {"mlp.down_proj", "ffn_down"},
                                                       {"input_layernorm", "attn_norm"},
                                                       {"post_attention_layernorm", "ffn_norm"}};
  for (const auto& [hf, gguf] : parts) {
    if (const size_t at = name.find(hf); at != std::string::npos) name.replace(at, hf.size(), gguf);
  }
  return name;
}

/// The folder's model as a converter writes it.
std::string gguf_of(const TempFolder& folder, uint32_t window = 0) {
  const auto hf = Checkpoint::open(folder.path());
  const LlamaConfig c = parse_config(hf->config_json(), "{}", "config.json");
  const std::string arch = c.head_norm ? "qwen3" : c.qkv_bias && !c.o_bias ? "qwen2" : "llama";
  const auto u32 = [](int64_t number) { return static_cast<uint32_t>(number); };
  test::GgufBuilder gguf;
  gguf.text("general.architecture", arch).u32(arch + ".block_count", u32(c.layers));
  gguf.u32(arch + ".embedding_length", u32(c.width)).u32(arch + ".feed_forward_length", u32(c.feed_forward));
  gguf.u32(arch + ".attention.head_count", u32(c.heads)).u32(arch + ".attention.head_count_kv", u32(c.kv_heads));
  gguf.u32(arch + ".attention.key_length", u32(c.head_dim)).u32(arch + ".attention.value_length", u32(c.head_dim));
  gguf.u32(arch + ".rope.dimension_count", u32(c.rotary_dim)).u32(arch + ".context_length", u32(c.positions));
  gguf.f32(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
  if (window) gguf.u32(arch + ".attention.sliding_window", window);
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.push_back(test::byte_character(b));
  for (const char* control : {"<|bos|>", "<|eos|>", "<|eot|>"}) tokens.push_back(control);
  std::vector<int32_t> types(256, 1);
  types.resize(259, 3);
  gguf.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2").texts("tokenizer.ggml.tokens", tokens);
  gguf.texts("tokenizer.ggml.merges", {}).i32s("tokenizer.ggml.token_type", types);
  gguf.u32("tokenizer.ggml.bos_token_id", 256).value("tokenizer.ggml.add_bos_token", test::kGgufBool, "\1");
  for (const TensorInfo& info : hf->tensors()) {
    Floats values = hf->read_f32(info.name);
    const bool turned = arch == "llama" && (info.name.find("q_proj") + 1 || info.name.find("k_proj") + 1);
    if (turned) values = with_neighbours(values, info.shape[0], c.head_dim, c.rotary_dim);
    gguf.tensor(gguf_name(info.name), test::kGgmlF32, {info.shape.rbegin(), info.shape.rend()}, test::bytes_of(values));
  }
  return gguf.bytes();
}

TEST(ArchitecturesTest, GgufHoldsTheSameModels) {
  for (const json& each : vectors()["cases"]) {
    if (each["config"].dump().find("rope_type") != std::string::npos) continue;  // nothing that gguf_of() writes
    const std::string name = each["name"];
    const TempFolder folder;
    write_fixture(folder, fixture_of(each));
    const auto hf = Engine::load(folder.path(), precision("f32", "f32", "f32"));
    folder.write("model.gguf", gguf_of(folder));
    const auto gguf = Engine::load(folder.file("model.gguf"), precision("f32", "f32", "f32"));
    EXPECT_EQ(score(*gguf, false).logits, score(*hf, false).logits) << name;
    EXPECT_TRUE(gguf->info().unused_tensors.empty()) << name;
    // What is quantised from it says again which architecture it is.
    QuantizeOptions options;
    options.group = 32;
    const auto quantiser = find_quantiser("rtn").make({});
    options.quantiser = quantiser.get();
    quantize_model(folder.file("model.gguf"), folder.file("out"), options);
    EngineOptions formats = precision("fp8", "int4", "int4");
    formats.group_size = 32;
    EXPECT_EQ(score(*Engine::load(folder.file("out"), formats), true).logits,
              score(*Engine::load(folder.path(), formats), true).logits)
        << name;
  }
}

TEST(ArchitecturesTest, GgufWindowsAreRefused) {
  for (const char* name : {"llama, every bias", "qwen2", "qwen3"}) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(model(name)));
    folder.write("window.gguf", gguf_of(folder, 64));
    expect_refused([&] { Engine::load(folder.file("window.gguf"), precision("f32", "f32", "f32")); },
                   {"window.gguf", "sliding_window 64"});
    folder.write("whole.gguf", gguf_of(folder, 256));
    EXPECT_EQ(Engine::load(folder.file("whole.gguf"), precision("f32", "f32", "f32"))->info().context, 256);
  }
}

TEST(ArchitecturesTest, InspectCountsBiasesAndNorms) {
  const auto parameters = [](const char* name) {
    const TempFolder folder;
    write_fixture(folder, fixture_of(model(name)));
    const auto checkpoint = Checkpoint::open(folder.path());
    int64_t stored = 0;
    for (const TensorInfo& info : checkpoint->tensors())
      stored += static_cast<int64_t>(checkpoint->read_f32(info.name).size());
    return std::pair{inspect_model(folder.path(), precision("f32", "f32", "f32")).parameters, stored};
  };
  for (const char* name : {"llama, every bias", "qwen2", "qwen3, biases, tied"}) {
    const auto [counted, stored] = parameters(name);
    EXPECT_EQ(counted, stored) << name;
  }
}

// ---- what is refused ------------------------------------------------------------------------------------------------

TEST(ArchitecturesTest, BiasesAndNormsThatDoNotFitAreRefused) {
  const auto refused = [](const Fixture& fixture, const std::vector<std::string>& words) {
    const TempFolder folder;
    write_fixture(folder, fixture);
    expect_refused([&] { Engine::load(folder.path(), precision("f32", "f32", "f32")); }, words);
  };
  const char *qwen2 = R"({"model_type":"qwen2","architectures":["Qwen2ForCausalLM"]})",
             *qwen3 = R"({"model_type":"qwen3","architectures":["Qwen3ForCausalLM"],"head_dim":16})";
  refused({.config = qwen2}, {"model.layers.0.self_attn.q_proj.bias not found"});
  refused({.config = qwen2, .attention_bias = true}, {"self_attn.o_proj.bias", "no such bias", "Qwen2ForCausalLM"});
  refused({.config = qwen3}, {"model.layers.0.self_attn.q_norm.weight not found"});
  refused({.config = qwen3, .qkv_bias = true, .head_norm = true}, {"self_attn.k_proj.bias", "no such bias"});
  refused({.head_norm = true}, {"self_attn.k_norm.weight", "no such bias or norm", "LlamaForCausalLM"});
  Fixture broken{.config = qwen2, .qkv_bias = true};
  broken.edit = [](const std::string& name, Floats& values) {
    if (name == "model.layers.1.self_attn.v_proj.bias") values[3] = INFINITY;
  };
  refused(broken, {"model.layers.1.self_attn.v_proj.bias", "inf", "finite"});
}

/// Said whatever the build, before anything is loaded.
TEST(ArchitecturesTest, WhatACardHasNoKernelFor_J02) {
  LlamaConfig plain;
  plain.architecture = "LlamaForCausalLM";
  plain.width = plain.feed_forward = 128;
  plain.heads = plain.kv_heads = 2;
  plain.head_dim = plain.rotary_dim = 64;
  const auto said = [&](const std::function<void(LlamaConfig&)>& change) {
    LlamaConfig config = plain;
    change(config);
    return without_kernel(config, {Dtype::int4});
  };
  EXPECT_EQ(said([](LlamaConfig&) {}), "");
  EXPECT_EQ(said([](LlamaConfig& c) { c.qkv_bias = c.o_bias = c.mlp_bias = c.head_norm = true, c.rotary_dim = 32; }),
            "");
  EXPECT_NE(said([](LlamaConfig& c) { c.head_dim = 80; }).find("heads are 80 wide"), std::string::npos);
  EXPECT_NE(said([](LlamaConfig& c) { c.heads = 34; }).find("34 heads share 2 KV heads"), std::string::npos);
  EXPECT_NE(said([](LlamaConfig& c) { c.feed_forward = 100; }).find("feed-forward width is 100"), std::string::npos);
}

}  // namespace
}  // namespace fut
