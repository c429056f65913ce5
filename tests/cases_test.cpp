// What broke other engines, end to end on the small models whose right values are known: what the tests of one room
// cannot see. docs/CHOICES.md lists what was decided where more than one behaviour is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "futransformer/engine.h"
#include "io/checkpoint.h"
#include "support/fixture_model.h"
#include "support/process.h"

namespace fut {
namespace {

using nlohmann::json;
using test::bytes_of;
using test::expect_refused;
using test::Fixture;
using test::Result;
using test::SafetensorsBuilder;
using test::TempFolder;
using test::write_fixture;
using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr double kBaseNll = 65.206474;
const Ids kBaseGreedy = {77, 218, 155, 162, 4, 79};

EngineOptions f32() {
  EngineOptions options;
  options.prefill = options.decode = options.kv = "f32";
  options.backend = "cpu";
  options.threads = 1;
  options.max_batch = 2;
  return options;
}

/// NLL of "Hello world" behind BOS.
double hello_nll(Engine& engine) {
  ScoreOptions options;
  options.context = 256;
  return engine.score(engine.tokenize("Hello world", false), options).nll;
}

Ids hello_greedy(Engine& engine) {
  Request request;
  request.prompt = "Hello world";
  request.max_tokens = 6;
  request.sampling.temperature = 0;
  return engine.generate({request})[0].ids;
}

/// The fixture's tensors, to be written in another way.
struct Tensors {
  TempFolder folder;
  std::unique_ptr<Checkpoint> checkpoint;
  explicit Tensors(const Fixture& fixture = {}) {
    write_fixture(folder, fixture);
    checkpoint = Checkpoint::open(folder.path());
  }
  std::string raw(const TensorInfo& info) const {
    int64_t size = 0;
    const auto* data = reinterpret_cast<const char*>(checkpoint->raw(info.name, &size));
    return {data, static_cast<size_t>(size)};
  }
};

/// A folder with the fixture's configuration and tokenizer and these weights instead of its own.
void replace_weights(const TempFolder& folder, const std::string& safetensors) {
  write_fixture(folder);
  folder.write("model.safetensors", safetensors);
}

std::string bf16_bytes(const Floats& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(to_bf16(value).bits);
  return bytes_of(bits);
}

std::string f16_bytes(const Floats& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) bits.push_back(to_half(value).bits);
  return bytes_of(bits);
}

// ---- files ----------------------------------------------------------------------------------------------------------

TEST(Cases, FilesWithoutTensorsAreReadAndThenLackThem_B06) {
  for (const char* header : {"{}", R"({"__metadata__":{"format":"pt"}})"}) {
    const TempFolder folder;
    replace_weights(folder, test::safetensors_bytes(header, ""));
    expect_refused([&] { Engine::load(folder.path(), f32()); }, {"tensor model.embed_tokens.weight not found"});
  }
}

TEST(Cases, ExtraTensorsAreNamedAndDoNoHarm_B06) {
  const Tensors source;
  SafetensorsBuilder extended;
  for (const TensorInfo& info : source.checkpoint->tensors()) {
    extended.add(info.name, info.type, json(info.shape).dump(), source.raw(info));
  }
  extended.add("marker", "U8", "[0]", "").add("s", "F32", "[]", bytes_of(1.0f)).add("caf\\u00e9", "F32", "[1]", "1234");
  extended.add("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", "[1]", "1234");
  const TempFolder folder;
  replace_weights(folder, extended.bytes());
  const auto engine = Engine::load(folder.path(), f32());
  EXPECT_NEAR(hello_nll(*engine), kBaseNll, 1e-4);
  EXPECT_EQ(engine->info().unused_tensors, (std::vector<std::string>{"caf\xc3\xa9", "marker", "s"}));
  const Result result = test::fut({"generate", folder.path(), "-p", "a", "-n", "1", "--json"});
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.err.find("3 tensors of the model are not used: caf\xc3\xa9, marker, s\n"), std::string::npos)
      << result.err;
  EXPECT_TRUE(Engine::load(source.folder.path(), f32())->info().unused_tensors.empty());
}

TEST(Cases, HeaderWithSpacesAtItsEnd_B06) {
  const TempFolder folder;
  write_fixture(folder);
  std::string bytes = test::read_file(folder.file("model.safetensors"));
  uint64_t length;
  memcpy(&length, bytes.data(), 8);
  bytes = bytes_of(length + 64) + bytes.substr(8, length) + std::string(64, ' ') + bytes.substr(8 + length);
  folder.write("model.safetensors", bytes);
  EXPECT_NEAR(hello_nll(*Engine::load(folder.path(), f32())), kBaseNll, 1e-4);
}

TEST(Cases, ShardsOfUnusualNamesAndOneThatIsMissingOrEmpty_B02_B07) {
  const Tensors source;
  const auto tensors = source.checkpoint->tensors();
  const TempFolder folder;
  write_fixture(folder);
  std::filesystem::remove(folder.file("model.safetensors"));
  json map;
  for (size_t shard = 0; shard < 3; ++shard) {
    const std::string name = cat("model.safetensors-0000", shard + 1, "-of-00003.safetensors");
    SafetensorsBuilder file;
    for (size_t i = shard; i < tensors.size(); i += 3) {
      file.add(tensors[i].name, tensors[i].type, json(tensors[i].shape).dump(), source.raw(tensors[i]));
      map[tensors[i].name] = name;
    }
    folder.write(name, file.bytes());
  }
  folder.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  EXPECT_NEAR(hello_nll(*Engine::load(folder.path(), f32())), kBaseNll, 1e-4);
  std::filesystem::remove(folder.file("model.safetensors-00002-of-00003.safetensors"));
  expect_refused([&] { Engine::load(folder.path(), f32()); },
                 {"model.safetensors-00002-of-00003.safetensors", "incomplete"});
  folder.write("model.safetensors-00002-of-00003.safetensors", "");
  expect_refused([&] { Engine::load(folder.path(), f32()); },
                 {"model.safetensors-00002-of-00003.safetensors", "0 bytes are too few"});
}

/// Norms in F32, projections in BF16, embedding and head in F16: what is stored counts, whatever the configuration
/// says.
TEST(Cases, MixedTypesInOneFile_B10) {
  const Tensors source;
  SafetensorsBuilder mixed;
  for (const TensorInfo& info : source.checkpoint->tensors()) {
    const Floats values = source.checkpoint->read_f32(info.name);
    const bool norm = info.name.find("norm") != std::string::npos,
               projection = info.name.find("_proj") != std::string::npos;
    mixed.add(info.name,
              norm         ? "F32"
              : projection ? "BF16"
                           : "F16",
              json(info.shape).dump(),
              norm         ? bytes_of(values)
              : projection ? bf16_bytes(values)
                           : f16_bytes(values));
  }
  const TempFolder folder;
  replace_weights(folder, mixed.bytes());
  // All of it in BF16 moves the loss by 0.006.
  EXPECT_NEAR(hello_nll(*Engine::load(folder.path(), f32())), kBaseNll, 0.02);
}

TEST(Cases, OneProjectionInFp8OrInIntegers_B10) {
  const Tensors source;
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const auto with = [&](const char* type, const std::string& bytes, const std::string& scale_name) {
    SafetensorsBuilder file;
    for (const TensorInfo& info : source.checkpoint->tensors()) {
      const bool changed = info.name == name;
      file.add(info.name, changed ? type : info.type, json(info.shape).dump(), changed ? bytes : source.raw(info));
    }
    if (!scale_name.empty()) file.add(scale_name, "F32", "[]", bytes_of(0.01f));
    return file.bytes();
  };
  Floats values = source.checkpoint->read_f32(name);
  std::string codes;
  for (float& value : values) {
    const E4m3 code = to_e4m3(value / 0.01f);
    codes += static_cast<char>(code.bits);
    value = to_f32(code) * 0.01f;
  }
  const TempFolder rounded, fp8;
  replace_weights(rounded, with("F32", bytes_of(values), ""));
  replace_weights(fp8, with("F8_E4M3", codes, name + "_scale"));
  EXPECT_NEAR(hello_nll(*Engine::load(fp8.path(), f32())), hello_nll(*Engine::load(rounded.path(), f32())), 1e-6);
  for (const std::string scale : {"", "other_scale"}) {
    const TempFolder folder;
    replace_weights(folder, with("F8_E4M3", codes, scale));
    expect_refused([&] { Engine::load(folder.path(), f32()); }, {name, "F8_E4M3"});
  }
  const TempFolder folder;
  replace_weights(folder, with("I32", std::string(values.size() * 4, 'x'), ""));
  expect_refused([&] { Engine::load(folder.path(), f32()); }, {name, "I32"});
}

/// Every projection in FP8, with gains that are not ones: read as numbers, whatever the scales belong to.
TEST(Cases, Fp8CheckpointsOfOtherPrograms) {
  const Tensors source({.edit = [](const std::string& name, Floats& values) {
    for (size_t i = 0; i < values.size() && name.ends_with("layernorm.weight"); ++i) values[i] = 0.5f + 0.25f * (i % 5);
  }});
  struct Layout {
    const char* scale;
    int64_t block_rows, block_columns;  // 0: all
  };
  constexpr int64_t kBlock = 32;
  for (const Layout layout :
       {Layout{"_scale", 0, 0}, {"_scale", 1, 0}, {"_scale_inv", 0, 0}, {"_scale_inv", kBlock, kBlock}}) {
    SafetensorsBuilder fp8, plain;
    for (const TensorInfo& info : source.checkpoint->tensors()) {
      Floats values = source.checkpoint->read_f32(info.name);
      const std::string shape = json(info.shape).dump();
      if (info.name.find("_proj") == std::string::npos) {
        fp8.add(info.name, info.type, shape, source.raw(info));
        plain.add(info.name, info.type, shape, source.raw(info));
        continue;
      }
      const int64_t rows = info.shape[0], columns = info.shape[1];
      const int64_t block_rows = layout.block_rows ? layout.block_rows : rows;
      const int64_t block_columns = layout.block_columns ? layout.block_columns : columns;
      const int64_t across = columns / block_columns, down = rows / block_rows;
      Floats scales;
      for (int64_t i = 0; i < down * across; ++i) scales.push_back(0.002f + 0.0005f * static_cast<float>(i % 3));
      std::string codes;
      for (int64_t i = 0; i < rows * columns; ++i) {
        const float scale = scales[i / columns / block_rows * across + i % columns / block_columns];
        const E4m3 code = to_e4m3(values[i] / scale);
        codes += static_cast<char>(code.bits);
        values[i] = to_f32(code) * scale;
      }
      fp8.add(info.name, "F8_E4M3", shape, codes);
      fp8.add(info.name + layout.scale, "F32", json{down, across}.dump(), bytes_of(scales));
      plain.add(info.name, "F32", shape, bytes_of(values));
    }
    const TempFolder stored, decoded;
    write_fixture(stored, {.config = R"({"quantization_config":{"quant_method":"fp8","weight_block_size":[32,32]}})"});
    stored.write("model.safetensors", fp8.bytes());
    replace_weights(decoded, plain.bytes());
    const double expected = hello_nll(*Engine::load(decoded.path(), f32()));
    EXPECT_NEAR(hello_nll(*Engine::load(stored.path(), f32())), expected, 1e-6) << layout.scale << layout.block_rows;
    EngineOptions fp8_prefill = f32();
    fp8_prefill.prefill = "fp8";
    const auto engine = Engine::load(stored.path(), fp8_prefill);
    EXPECT_NEAR(hello_nll(*engine), expected, 0.5) << layout.scale;
    EXPECT_TRUE(engine->info().unused_tensors.empty()) << layout.scale;
  }
}

/// Symmetric INT4 codes as llm-compressor stores them, scales in BF16: the codes are used as they are, so that groups
/// of 32 stay what they are although groups of 64 are the default. Groups that do not agree are read as numbers.
TEST(Cases, Int4CheckpointsOfOtherPrograms) {
  const Tensors source;
  for (const int64_t k_group : {32, 64}) {
    SafetensorsBuilder packed, plain;
    for (const TensorInfo& info : source.checkpoint->tensors()) {
      Floats values = source.checkpoint->read_f32(info.name);
      const std::string shape = json(info.shape).dump();
      if (info.name.find("_proj") == std::string::npos) {
        packed.add(info.name, info.type, shape, source.raw(info));
        plain.add(info.name, info.type, shape, source.raw(info));
        continue;
      }
      const int64_t group = info.name.find("k_proj") == std::string::npos ? 32 : k_group;
      Floats scales;
      std::string codes;
      for (size_t i = 0; i < values.size(); ++i) {
        if (i % group == 0) scales.push_back(to_f32(to_bf16(0.03f + 0.01f * static_cast<float>(scales.size() % 3))));
        const int q = std::clamp(static_cast<int>(std::lround(values[i] / scales.back())), -8, 7);
        values[i] = static_cast<float>(q) * scales.back();
        if (i % 2) codes.back() = static_cast<char>(codes.back() | (q + 8) << 4);
        if (i % 2 == 0) codes += static_cast<char>(q + 8);
      }
      const int64_t rows = info.shape[0], columns = info.shape[1];
      packed.add(info.name + "_packed", "I32", json{rows, columns / 8}.dump(), codes);
      packed.add(info.name + "_scale", "BF16", json{rows, columns / group}.dump(), bf16_bytes(scales));
      packed.add(info.name + "_shape", "I64", "[2]", bytes_of(info.shape));
      plain.add(info.name, "F32", shape, bytes_of(values));
    }
    const TempFolder stored, decoded;
    replace_weights(stored, packed.bytes());
    replace_weights(decoded, plain.bytes());
    const double expected = hello_nll(*Engine::load(decoded.path(), f32()));
    EXPECT_NEAR(hello_nll(*Engine::load(stored.path(), f32())), expected, 1e-6);
    EngineOptions int4 = f32();
    int4.decode = "int4";
    const auto engine = Engine::load(stored.path(), int4);
    ScoreOptions decode;
    decode.context = 256;
    decode.decode = true;
    const double nll = engine->score(engine->tokenize("Hello world", false), decode).nll;
    EXPECT_NEAR(nll, expected, k_group == 32 ? 0.01 : 0.5);
  }
}

// ---- GGUF holds the same model --------------------------------------------------------------------------------------

std::string gguf_of(const Checkpoint& hf) {
  test::GgufBuilder gguf;
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.push_back(test::byte_character(b));
  for (const char* control : {"<|bos|>", "<|eos|>", "<|eot|>"}) tokens.push_back(control);
  std::vector<int32_t> types(256, 1);
  types.resize(259, 3);
  gguf.text("general.architecture", "llama").u32("llama.embedding_length", 64).u32("llama.block_count", 2);
  gguf.u32("llama.feed_forward_length", 96)
      .u32("llama.attention.head_count", 4)
      .u32("llama.attention.head_count_kv", 2);
  gguf.u32("llama.context_length", 256).f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  gguf.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2").texts("tokenizer.ggml.tokens", tokens);
  gguf.texts("tokenizer.ggml.merges", {}).i32s("tokenizer.ggml.token_type", types);
  gguf.u32("tokenizer.ggml.bos_token_id", 256).u32("tokenizer.ggml.eos_token_id", 257);
  gguf.value("tokenizer.ggml.add_bos_token", test::kGgufBool, "\1");
  gguf.text("tokenizer.chat_template", "{{ bos_token }}[{{ messages[0].content }}]{{ eos_token }}");
  const std::pair<std::string, std::string> names[] = {{"model.embed_tokens", "token_embd"},
                                                       {"model.norm", "output_norm"},
                                                       {"lm_head", "output"},
                                                       {"model.layers.", "blk."},
                                                       {"self_attn.q_proj", "attn_q"},
                                                       {"self_attn.k_proj", "attn_k"},
                                                       {"self_attn.v_proj", "attn_v"},
                                                       {"self_attn.o_proj", "attn_output"},
                                                       {"mlp.gate_proj", "ffn_gate"},
                                                       {"mlp.up_proj", "ffn_up"},
                                                       {"mlp.down_proj", "ffn_down"},
                                                       {"post_attention_layernorm", "ffn_norm"},
                                                       {"input_layernorm", "attn_norm"}};
  for (const TensorInfo& info : hf.tensors()) {
    std::string name = info.name;
    for (const auto& [from, to] : names) {
      if (const size_t at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
    }
    Floats values = hf.read_f32(info.name);
    if (name.find("attn_q.") != std::string::npos || name.find("attn_k.") != std::string::npos) {
      const Floats halves = values;  // GGUF has the two that turn together side by side, within each head of 16
      for (size_t row = 0; row < values.size() / 64; ++row) {
        const size_t from = row / 16 * 16 + row % 2 * 8 + row % 16 / 2;
        std::copy_n(halves.begin() + static_cast<long>(from * 64), 64, values.begin() + static_cast<long>(row * 64));
      }
    }
    gguf.tensor(name, test::kGgmlF32, {info.shape.rbegin(), info.shape.rend()}, bytes_of(values));
  }
  return gguf.bytes();
}

TEST(Cases, GgufReproducesTheFolder_A07) {
  const Tensors source;
  const TempFolder folder;
  const auto engine = Engine::load(folder.write("model.gguf", gguf_of(*source.checkpoint)), f32());
  EXPECT_NEAR(hello_nll(*engine), kBaseNll, 1e-4);
  EXPECT_EQ(hello_greedy(*engine), kBaseGreedy);
  EXPECT_TRUE(engine->info().unused_tensors.empty());
  EXPECT_EQ(engine->chat_prompt({{"user", "<|eot|>"}}), (Ids{256, '[', '<', '|', 'e', 'o', 't', '|', '>', ']', 257}));
}

// ---- text -----------------------------------------------------------------------------------------------------------

/// Six bytes of which one pair is a character: M, U+069B, a byte that is none, U+0004, O.
TEST(Cases, StreamedTextIsTheWholeTextAndHoldsNothingBack_C07) {
  const TempFolder folder;
  write_fixture(folder);
  const auto engine = Engine::load(folder.path(), f32());
  Request request;
  request.prompt = "Hello world";
  request.max_tokens = 6;
  request.sampling.temperature = 0;
  std::vector<std::string> pieces;
  const Completion answer = engine->generate({request}, [&](size_t, std::string_view piece) {
    if (!piece.empty()) pieces.emplace_back(piece);
    return true;
  })[0];
  EXPECT_EQ(answer.ids, kBaseGreedy);
  EXPECT_EQ(answer.text, "M\u069b\ufffd\u0004O");
  EXPECT_EQ(pieces, (std::vector<std::string>{"M", "\u069b", "\ufffd", "\u0004", "O"}));
}

TEST(Cases, IdsAreUsedAsGiven_C10_G05) {
  const TempFolder folder;
  write_fixture(folder);
  const auto engine = Engine::load(folder.path(), f32());
  Request request;
  request.max_tokens = 1;
  request.ids = {256, 104, 105};
  EXPECT_EQ(engine->generate({request})[0].prompt_tokens, 3);
  request.ids = {258};
  EXPECT_EQ(engine->generate({request})[0].error, "");
  request.ids = {};
  request.prompt = "";
  EXPECT_EQ(engine->generate({request})[0].prompt_tokens, 1);  // the BOS that the tokenizer adds
  request.prompt = "<|bos|>hi";
  request.parse_control_tokens = true;
  EXPECT_EQ(engine->generate({request})[0].prompt_tokens, 4);  // one more, as Hugging Face has it
}

/// A row of a batch is sampled as if it were alone, whatever the filters of its neighbours.
TEST(Cases, MixedSamplingInOneBatch_G02) {
  const TempFolder folder;
  write_fixture(folder);
  EngineOptions options = f32();
  options.max_batch = 8;
  const auto engine = Engine::load(folder.path(), options);
  std::vector<Request> requests(8);
  const Sampling samplings[] = {{0, 0, 1, 0, 0},     {1, 64, 1, 0, 1},    {1, 0, 0.5f, 0, 2}, {1, 9999999, 1, 0, 3},
                                {1, -1, 1, 0.2f, 4}, {1e-4f, 3, 1, 1, 5}, {100, 1, 1, 0, 6},  {1, 259, 0, 0, 7}};
  for (size_t i = 0; i < 8; ++i) {
    requests[i].prompt = "Hello world";
    requests[i].max_tokens = 12;
    requests[i].sampling = samplings[i];
    requests[i].ignore_end_tokens = true;
  }
  const auto together = engine->generate(requests);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(together[i].ids, engine->generate({requests[i]})[0].ids) << i;
  for (size_t greedy : {0u, 5u, 6u, 7u}) {  // each says in its own way: the best
    EXPECT_EQ(Ids(together[greedy].ids.begin(), together[greedy].ids.begin() + 6), kBaseGreedy) << greedy;
  }
}

// ---- perplexity and benchmarks --------------------------------------------------------------------------------------

Result perplexity(const TempFolder& folder, const std::string& text, std::vector<std::string> flags) {
  std::vector<std::string> arguments = {
      "perplexity", folder.path(), folder.write("text.txt", text), "--prefill", "f32", "--decode", "f32", "--kv", "f32",
      "--backend",  "cpu"};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  return test::fut(arguments);
}

TEST(Cases, PerplexityWithAndWithoutBos_I02) {
  const TempFolder folder;
  write_fixture(folder);
  const auto run = [&](std::vector<std::string> flags) {
    flags.push_back("--json");
    return json::parse(perplexity(folder, "Hello world", flags).out);
  };
  const json with = run({}), without = run({"--no-bos"}), windows = run({"--ctx-size", "8"});
  EXPECT_NEAR(with["nll"].get<double>(), 65.206474, 1e-4);
  EXPECT_NEAR(with["ppl"].get<double>(), 375.350883, 5e-3);
  EXPECT_EQ(with["tokens"], 11);
  EXPECT_NEAR(without["nll"].get<double>(), 59.566720, 1e-4);
  EXPECT_NEAR(without["ppl"].get<double>(), 386.322314, 5e-3);
  EXPECT_EQ(without["tokens"], 10);
  EXPECT_EQ(windows["tokens"], 11);
  EXPECT_EQ(windows["windows"], 2);
  EXPECT_EQ(windows["bos"], true);
  test::write_byte_tokenizer(folder, false);  // its post-processor adds none
  const json by_tokenizer = run({});
  EXPECT_EQ(by_tokenizer["bos"], false);
  EXPECT_EQ(by_tokenizer["nll"], without["nll"]);
}

TEST(Cases, PerplexitySaysAllThatItsNumberDependsOn_I04) {
  const TempFolder folder;
  write_fixture(folder);
  const std::string text = "one\r\ntwo <|eot|> three";
  const Result result = perplexity(folder, text, {"--ctx-size", "8", "--stride", "3"});
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* words :
       {"sha256 ", "22 bytes", "22 of 22, 22 scored", "of 8 tokens, stride 3", "BOS at the start of each, never scored",
        "prefill f32", "decode f32, KV f32; scored by prefill", "nll ", "ppl "}) {
    EXPECT_NE(result.out.find(words), std::string::npos) << words << " is not in " << result.out;
  }
  EXPECT_NE(perplexity(folder, text, {"--no-bos"}).out.find("no BOS"), std::string::npos);
}

TEST(Cases, PerplexityOfTextsOfAnyLength_I01) {
  const TempFolder folder;
  Fixture uniform;
  uniform.build =
      R"({"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":1,"num_key_value_heads":1})";
  uniform.lm_head = "zero";
  write_fixture(folder, uniform);
  for (const size_t length : {1u, 2u, 255u, 256u, 257u, 1000u, 100000u}) {
    std::string text;
    while (text.size() < length) text += "ab\r\n<|eot|>\n";
    const Result result =
        perplexity(folder, text.substr(0, length), {"--json", "--ctx-size", length < 1000 ? "16" : "256"});
    const json report = json::parse(result.out);
    EXPECT_EQ(report["tokens"], length);
    EXPECT_NEAR(report["ppl"].get<double>(), 259.0, 1e-6);
  }
  EXPECT_EQ(perplexity(folder, "", {}).code, 1);
  EXPECT_EQ(perplexity(folder, "", {}).out, "");
}

/// The times that speeds are made of are those of the clock on the wall, and every token is counted once.
TEST(Cases, TimesAndCountsOfGenerateAreTrue_I04) {
  const TempFolder folder;
  Fixture fixture;
  fixture.build = R"({"hidden_size":256,"intermediate_size":768,"max_position_embeddings":1024})";
  write_fixture(folder, fixture);
  const auto engine = Engine::load(folder.path(), f32());
  Request request;
  request.ids = Ids(500, 65);
  request.max_tokens = 256;
  request.sampling.temperature = 0;
  request.ignore_end_tokens = true;
  engine->generate({request});  // warm
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(engine->generate({request})[0].ids.size(), 256u);
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const Timing timing = engine->last_timing();
  EXPECT_EQ(timing.prefill_tokens, 500);
  EXPECT_EQ(timing.decode_tokens, 255);  // the first comes from the prefill
  EXPECT_LE(timing.prefill_seconds + timing.decode_seconds, wall);
  EXPECT_GE(timing.prefill_seconds + timing.decode_seconds, 0.95 * wall);
  // An end token ends the count, too.
  request.ignore_end_tokens = false;
  request.ids = engine->tokenize("Hello world");
  const Completion answer = engine->generate({request})[0];
  EXPECT_EQ(engine->last_timing().decode_tokens,
            static_cast<int64_t>(answer.ids.size()) - (answer.finish_reason == "stop" ? 0 : 1));
}

}  // namespace
}  // namespace fut
