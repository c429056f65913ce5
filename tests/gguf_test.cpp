#include "io/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "io/gguf_blocks.h"
#include "io/json.h"
#include "support/model_files.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::counting_bytes;
using test::expect_refused;
using test::GgufBuilder;
using test::TempFolder;

using Floats = std::vector<float>;

constexpr uint16_t kHalfOne = 0x3c00, kHalfTwo = 0x4000, kHalfMinusThree = 0xc200;

/// A one-layer model's metadata: hidden 32, 4 query heads and 2 KV heads of 8, one of them left out if `without` says
/// so.
GgufBuilder metadata(std::string_view without = "") {
  GgufBuilder gguf;
  const auto u32 = [&](std::string_view key, uint32_t value) {
    if (key != without) gguf.u32(key, value);
  };
  if (without != "general.architecture") gguf.text("general.architecture", "llama");
  u32("llama.embedding_length", 32);
  u32("llama.feed_forward_length", 64);
  u32("llama.block_count", 1);
  u32("llama.context_length", 16);
  u32("llama.attention.head_count", 4);
  u32("llama.attention.head_count_kv", 2);
  if (without != "llama.attention.layer_norm_rms_epsilon") gguf.f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  return gguf;
}

/// Two rows of embedding, all zero.
GgufBuilder& add_embedding(GgufBuilder& gguf) {
  return gguf.tensor("token_embd.weight", test::kGgmlF32, {32, 2}, bytes_of(Floats(64)));
}

class GgufTest : public testing::Test {
 protected:
  std::unique_ptr<Checkpoint> open(const GgufBuilder& gguf) const {
    return Checkpoint::open(folder_.write("model.gguf", gguf.bytes()));
  }
  nlohmann::json config(const GgufBuilder& gguf) const { return parse_json(open(gguf)->config_json(), "config"); }

  void expect_file_refused(std::string_view bytes, std::vector<std::string> words) const {
    const std::string path = folder_.write("model.gguf", bytes);
    words.push_back(path);
    expect_refused([&] { Checkpoint::open(path); }, words);
  }
  void expect_model_refused(const GgufBuilder& gguf, const std::vector<std::string>& words) const {
    expect_file_refused(gguf.bytes(), words);
  }

  TempFolder folder_;
};

TEST(GgufBlocks, DecodeByHand) {
  const auto decode = [](const char* type, const std::string& bytes, size_t count) {
    const BlockFormat* const format = find_block_format(type);
    Floats values(count);
    EXPECT_EQ(bytes.size() * static_cast<size_t>(format->elements), count * static_cast<size_t>(format->bytes));
    // One byte further on than the allocation begins: the format must not count on alignment.
    const std::string shifted = " " + bytes;
    format->to_floats(reinterpret_cast<const uint8_t*>(shifted.data()) + 1,
                      static_cast<int64_t>(count) / format->elements, values.data());
    return values;
  };
  EXPECT_EQ(decode("F32", bytes_of(Floats{1.5f, -2}), 2), (Floats{1.5f, -2}));
  EXPECT_EQ(decode("F16", bytes_of(std::vector<uint16_t>{kHalfTwo, kHalfMinusThree}), 2), (Floats{2, -3}));
  EXPECT_EQ(decode("BF16", bytes_of(std::vector<uint16_t>{0x3f80, 0xc000}), 2), (Floats{1, -2}));

  std::string nibbles(16, '\0');
  for (int i = 0; i < 16; ++i) nibbles[i] = static_cast<char>(i | (15 - i) << 4);
  const Floats q8 = decode("Q8_0", bytes_of(kHalfTwo) + counting_bytes(31) + "\x81", 32);
  const Floats q4_0 = decode("Q4_0", bytes_of(kHalfOne) + std::string(16, '\x88') + bytes_of(kHalfTwo) + nibbles, 64);
  const Floats q4_1 = decode("Q4_1", bytes_of(kHalfTwo) + bytes_of(kHalfMinusThree) + nibbles, 32);
  for (int i = 0; i < 16; ++i) {
    const auto low = static_cast<float>(i), high = static_cast<float>(15 - i);
    EXPECT_EQ(q8[i], 2 * low);
    EXPECT_EQ(q4_0[i], 0);
    EXPECT_EQ(q4_0[32 + i], 2 * (low - 8));
    EXPECT_EQ(q4_0[48 + i], 2 * (high - 8));
    EXPECT_EQ(q4_1[i], 2 * low - 3);
    EXPECT_EQ(q4_1[16 + i], 2 * high - 3);
  }
  EXPECT_EQ(q8[31], 2 * -127.0f);
  EXPECT_EQ(find_block_format("Q2_K"), nullptr);
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

TEST(GgufBlocks, ValuesOfThePackageGguf) {
  const auto vectors = nlohmann::json::parse(MappedFile(FUT_SOURCE_DIR "/tests/gguf_block_vectors.json").text());
  EXPECT_EQ(vectors.size(), 8u);
  for (const auto& [type, vector] : vectors.items()) {
    const std::string blocks = from_hex(vector["blocks"]), values = from_hex(vector["values"]);
    const BlockFormat* const format = find_block_format(type);
    ASSERT_NE(format, nullptr) << type;
    const int64_t count = static_cast<int64_t>(blocks.size()) / format->bytes;
    Floats decoded(static_cast<size_t>(count * format->elements));
    format->to_floats(reinterpret_cast<const uint8_t*>(blocks.data()), count, decoded.data());
    EXPECT_EQ(bytes_of(decoded), values) << type;
  }
}

TEST_F(GgufTest, SpeaksHuggingFace) {
  GgufBuilder gguf = metadata();
  gguf.f32("llama.rope.freq_base", 500000).u32("llama.rope.dimension_count", 8);
  gguf.u32("tokenizer.ggml.bos_token_id", 1).u32("tokenizer.ggml.eos_token_id", 0);
  gguf.text("tokenizer.chat_template", "{{x}}\n");
  add_embedding(gguf);
  for (const char* name :
       {"output_norm.weight", "blk.0.attn_v.bias", "blk.0.ffn_norm.weight", "blk.12.attn_norm.weight",
        "blk.0.attn_output.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight",
        "other.weight", "blk.x.ffn_up.weight", "blk.0.attn_q.scale"}) {
    gguf.tensor(name, test::kGgmlF32, {3}, bytes_of(Floats{1, 2, 3}));
  }
  const auto model = open(gguf);
  for (const char* name :
       {"model.norm.weight", "model.layers.0.self_attn.v_proj.bias", "model.layers.0.post_attention_layernorm.weight",
        "model.layers.12.input_layernorm.weight", "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight", "other.weight", "blk.x.ffn_up.weight", "blk.0.attn_q.scale"}) {
    ASSERT_NE(model->find(name), nullptr) << name;
    EXPECT_EQ(model->read_f32(name), (Floats{1, 2, 3})) << name;
  }
  EXPECT_EQ(model->tensors().size(), 12u);
  EXPECT_EQ(model->find("model.embed_tokens.weight")->shape, (std::vector<int64_t>{2, 32}));
  EXPECT_EQ(model->find("token_embd.weight"), nullptr);
  EXPECT_EQ(model->chat_template(), "{{x}}\n");
  EXPECT_EQ(model->generation_config_json(), "{}");

  const auto read = parse_json(model->config_json(), "config");
  const auto expected = nlohmann::json::parse(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu",
      "rope_theta": 500000.0, "rope_scaling": null, "vocab_size": 2, "tie_word_embeddings": true,
      "attention_bias": false, "mlp_bias": false, "bos_token_id": 1, "eos_token_id": [0]})");
  EXPECT_EQ(read, expected);
}

TEST_F(GgufTest, UntiesTheHeadAndTakesDefaults) {
  GgufBuilder gguf = metadata("llama.attention.head_count_kv");
  add_embedding(gguf).tensor("output.weight", test::kGgmlF32, {32, 2}, bytes_of(Floats(64)));
  const auto read = config(gguf);
  EXPECT_EQ(read.at("tie_word_embeddings"), false);
  EXPECT_EQ(read.at("num_key_value_heads"), 4);
  EXPECT_EQ(read.at("head_dim"), 8);
  EXPECT_EQ(read.at("rope_theta"), 10000.0);
  EXPECT_FALSE(read.contains("bos_token_id"));
  EXPECT_EQ(read.at("eos_token_id"), nlohmann::json::array());
}

TEST_F(GgufTest, PutsQueryAndKeyRowsRight_A07) {
  // A row's value says which row of Hugging Face's matrix it is. Stored: in each head of 8, the pairs (i, i + 4).
  const auto stored_rows = [](int heads) {
    std::vector<int> rows;
    for (int head = 0; head < heads; ++head) {
      for (const int row : {0, 4, 1, 5, 2, 6, 3, 7}) rows.push_back(8 * head + row);
    }
    return rows;
  };
  const auto matrix = [&](int heads) {
    Floats values;
    for (const int row : stored_rows(heads)) values.insert(values.end(), 32, static_cast<float>(row));
    return bytes_of(values);
  };
  std::string q8;  // one block a row, scale 1
  for (const int row : stored_rows(4)) q8 += bytes_of(kHalfOne) + std::string(32, static_cast<char>(row));
  Floats bias;
  for (const int row : stored_rows(2)) bias.push_back(static_cast<float>(row));

  GgufBuilder gguf = metadata();
  add_embedding(gguf)
      .tensor("blk.0.attn_q.weight", test::kGgmlF32, {32, 32}, matrix(4))
      .tensor("blk.0.attn_k.weight", test::kGgmlF32, {32, 16}, matrix(2))
      .tensor("blk.0.attn_k.bias", test::kGgmlF32, {16}, bytes_of(bias))
      .tensor("blk.1.attn_q.weight", test::kGgmlQ8_0, {32, 32}, q8)
      .tensor("blk.0.attn_v.weight", test::kGgmlF32, {32, 16}, matrix(2));
  const auto model = open(gguf);
  const auto first_column = [&](const std::string& name) {
    const Floats values = model->read_f32(name);
    Floats column;
    for (size_t i = 0; i < values.size(); i += 32) column.push_back(values[i]);
    return column;
  };
  Floats in_order(32);
  for (int i = 0; i < 32; ++i) in_order[i] = static_cast<float>(i);
  const Floats half(in_order.begin(), in_order.begin() + 16);
  EXPECT_EQ(first_column("model.layers.0.self_attn.q_proj.weight"), in_order);
  EXPECT_EQ(first_column("model.layers.1.self_attn.q_proj.weight"), in_order);
  EXPECT_EQ(first_column("model.layers.0.self_attn.k_proj.weight"), half);
  EXPECT_EQ(model->read_f32("model.layers.0.self_attn.k_proj.bias"), half);
  EXPECT_EQ(first_column("model.layers.0.self_attn.v_proj.weight")[1], 4);  // values are not rotated, so not reordered
  // Values may be read row by row; of queries and keys, whose rows lie elsewhere, only all.
  const std::string value = "model.layers.0.self_attn.v_proj.weight";
  const Floats all = model->read_f32(value);
  EXPECT_EQ(model->read_rows(value, 3, 2), Floats(all.begin() + 3 * 32, all.begin() + 5 * 32));
  expect_refused([&] { model->read_rows(value, 15, 2); }, {"v_proj.weight", "of 16"});
  const std::string query = "model.layers.1.self_attn.q_proj.weight";
  EXPECT_EQ(model->read_rows(query, 0, 32), model->read_f32(query));
  expect_refused([&] { model->read_rows(query, 0, 8); }, {"q_proj.weight", "reordered"});
  int64_t size = 0;
  const uint8_t* const raw = model->raw("model.layers.0.self_attn.k_proj.weight", &size);
  EXPECT_EQ(std::string(raw, raw + size), matrix(2));
}

/// llama2.c's files hold q and k as GGUF does (it rotates neighbours), and the same model exists as a Hugging Face
/// folder made by others: reading the one as GGUF must give the other.
TEST_F(GgufTest, AgreesWithAModelThatExistsInBothOrders) {
  const std::string models = FUT_SOURCE_DIR "/../shared/data/models/";
  if (!fs::exists(models + "stories260K")) GTEST_SKIP() << "no " << models << "stories260K";
  const std::string file = test::read_file(models + "stories260K/stories260K.bin");
  constexpr uint64_t kHidden = 64, kKv = 32, kLayers = 5, kVocabulary = 512;
  size_t position = 7 * sizeof(int32_t) + 4 * (kVocabulary * kHidden + kLayers * kHidden);  // header, embedding, norms
  GgufBuilder gguf;
  gguf.text("general.architecture", "llama").u32("llama.embedding_length", kHidden).u32("llama.block_count", kLayers);
  gguf.u32("llama.feed_forward_length", 172).u32("llama.context_length", 512);
  gguf.u32("llama.attention.head_count", 8).u32("llama.attention.head_count_kv", 4);
  gguf.f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  gguf.tensor("token_embd.weight", test::kGgmlF32, {kHidden, 1}, std::string(4 * kHidden, '\0'));
  for (const auto& [part, rows] : {std::pair{"attn_q", kHidden}, std::pair{"attn_k", kKv}}) {
    for (uint64_t layer = 0; layer < kLayers; ++layer, position += 4 * kHidden * rows) {
      gguf.tensor(cat("blk.", layer, ".", part, ".weight"), test::kGgmlF32, {kHidden, rows},
                  file.substr(position, 4 * kHidden * rows));
    }
  }
  const auto ours = open(gguf), theirs = Checkpoint::open(models + "stories260K-hf");
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    for (const char* part : {"q_proj", "k_proj"}) {
      const std::string name = cat("model.layers.", layer, ".self_attn.", part, ".weight");
      EXPECT_EQ(ours->read_f32(name), theirs->read_f32(name)) << name;
    }
  }
}

TEST_F(GgufTest, RefusesTypesItCannotReadWhenTheyAreRead) {
  GgufBuilder gguf = metadata();
  add_embedding(gguf)
      .tensor("a.weight", test::kGgmlQ2_K, {256}, counting_bytes(84))
      .tensor("b.weight", 77, {5}, "12345");
  const auto model = open(gguf);
  EXPECT_EQ(model->find("a.weight")->type, "Q2_K");
  expect_refused([&] { model->read_f32("a.weight"); }, {"a.weight", "Q2_K"});
  expect_refused([&] { model->raw("b.weight", nullptr); }, {"b.weight: type 77 is not supported"});
  expect_refused([&] { model->read_f32("c.weight"); }, {"c.weight", "not found"});
}

TEST_F(GgufTest, RefusesWhatIsNoGguf) {
  expect_file_refused("", {"no GGUF file"});
  expect_file_refused("GGU", {"no GGUF file"});
  expect_file_refused("GGML" + std::string(60, '\0'), {"no GGUF file", "GGML"});
  for (const uint32_t version : {0u, 1u, 4u, 0x03000000u}) {
    GgufBuilder gguf = metadata();
    gguf.version = version;
    expect_model_refused(gguf, {version > 4 ? "big-endian" : "version"});
  }
  GgufBuilder second = metadata();
  second.version = 2;
  EXPECT_EQ(config(add_embedding(second)).at("hidden_size"), 32);
}

TEST_F(GgufTest, RefusesCountsThatTheFileCannotHold) {
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  for (const uint64_t extra : {uint64_t{1} << 20, uint64_t{1} << 62, huge - 100}) {
    GgufBuilder values = metadata(), tensors = metadata();
    values.extra_values = extra;
    tensors.extra_tensors = extra;
    expect_model_refused(values, {"metadata keys", "do not fit"});
    expect_model_refused(tensors, {"tensors", "do not fit"});
  }
  const std::string head = "GGUF" + bytes_of(uint32_t{3}) + bytes_of(uint64_t{0}) + bytes_of(uint64_t{1});
  const std::string padding(64, '\0');
  expect_file_refused(head + bytes_of(huge) + padding, {"key of"});
  expect_model_refused(metadata().value("k", test::kGgufText, bytes_of(huge - 7)), {"string of"});
  expect_model_refused(metadata().value("k", 13, "1234"), {"key k", "unknown value type 13"});
  const auto array = [](uint32_t type, uint64_t count) {
    return bytes_of(type) + bytes_of(count) + std::string(64, '\0');
  };
  expect_model_refused(metadata().value("k", test::kGgufArray, array(test::kGgufU64, huge / 8 + 2)),
                       {"array elements"});
  expect_model_refused(metadata().value("k", test::kGgufArray, array(test::kGgufText, 1000)), {"array elements"});
  expect_model_refused(metadata().value("k", test::kGgufArray, array(test::kGgufArray, 1)), {"arrays of arrays"});
}

TEST_F(GgufTest, RefusesBadTensorTables) {
  const auto entry = [](const std::vector<uint64_t>& extents, uint64_t offset, uint32_t type = test::kGgmlF32) {
    return metadata().entry("t", type, extents, offset).data(std::string(128, '\0'));
  };
  constexpr uint64_t kHuge = uint64_t{1} << 62;
  expect_model_refused(entry({1, 1, 1, 1, 1}, 0), {"tensor t", "5 extents"});
  expect_model_refused(entry({0}, 0), {"tensor t", "extent 0"});
  expect_model_refused(entry({~uint64_t{0}}, 0), {"tensor t", "too large"});
  expect_model_refused(entry({kHuge, 4}, 0), {"tensor t", "too large"});
  expect_model_refused(entry({kHuge}, 0), {"tensor t", "size overflows"});
  expect_model_refused(entry({33}, 0), {"tensor t", "truncated", "132 bytes"});
  expect_model_refused(entry({8}, 128), {"tensor t", "truncated"});
  expect_model_refused(entry({8}, 16), {"tensor t", "alignment 32"});
  expect_model_refused(entry({8}, ~uint64_t{31}), {"tensor t", "truncated"});
  expect_model_refused(entry({33}, 0, test::kGgmlQ8_0), {"tensor t", "Q8_0", "33"});
  expect_model_refused(entry({32}, 0, test::kGgmlQ4_K), {"tensor t", "Q4_K", "32", "256"});
  expect_model_refused(entry({8}, 0).entry("t", test::kGgmlF32, {8}, 32), {"duplicate tensor t"});
  expect_model_refused(entry({9}, 0).entry("u", test::kGgmlF32, {8}, 32), {"tensor u", "inside another"});
  expect_model_refused(metadata().entry("t", test::kGgmlF32, {8}, 0), {"truncated"});
  expect_model_refused(metadata().u32("general.name", 1).u32("general.name", 2), {"duplicate key general.name"});
  GgufBuilder same = metadata();
  add_embedding(same).tensor("model.embed_tokens.weight", test::kGgmlF32, {1}, "1234");
  expect_model_refused(same, {"two tensors mean model.embed_tokens.weight"});
}

TEST_F(GgufTest, HonoursTheAlignment) {
  for (const uint32_t alignment : {0u, 3u, 48u, 1u << 21}) {
    expect_model_refused(metadata().u32("general.alignment", alignment), {"general.alignment", "power of two"});
  }
  GgufBuilder wide = metadata();
  wide.alignment = 256;
  wide.u32("general.alignment", 256);
  add_embedding(wide).tensor("t", test::kGgmlF32, {1}, bytes_of(5.0f));
  EXPECT_EQ(open(wide)->read_f32("t"), Floats{5});
}

TEST_F(GgufTest, RefusesMetadataThatMakesNoModel) {
  for (const char* key :
       {"llama.embedding_length", "llama.feed_forward_length", "llama.block_count", "llama.context_length",
        "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"}) {
    GgufBuilder gguf = metadata(key);
    expect_model_refused(add_embedding(gguf), {"no key", key});
  }
  GgufBuilder other = metadata("general.architecture");
  expect_model_refused(other, {"architecture \"\""});
  expect_model_refused(other.text("general.architecture", "qwen2moe"),
                       {"\"qwen2moe\"", "expected \"llama\", \"qwen2\" or \"qwen3\""});
  expect_model_refused(metadata(), {"token_embd.weight"});

  const auto with = [](std::string_view key, auto set) {
    GgufBuilder gguf = metadata(key);
    set(gguf);
    return add_embedding(gguf);
  };
  const auto with_u32 = [&](std::string_view key, uint32_t value) {
    return with(key, [&](GgufBuilder& gguf) { gguf.u32(key, value); });
  };
  const auto with_f32 = [&](std::string_view key, float value) {
    return with(key, [&](GgufBuilder& gguf) { gguf.f32(key, value); });
  };
  for (const auto& [key, value] :
       {std::pair{"llama.embedding_length", 0u}, std::pair{"llama.block_count", 1u << 30},
        std::pair{"llama.feed_forward_length", 1u << 31}, std::pair{"llama.attention.head_count", 0u},
        std::pair{"llama.attention.head_count_kv", 5u}, std::pair{"llama.context_length", 1u << 31},
        std::pair{"llama.attention.key_length", 1u}, std::pair{"tokenizer.ggml.bos_token_id", 1u << 31}}) {
    expect_model_refused(with_u32(key, value), {key, std::to_string(value)});
  }
  for (const float value :
       {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    expect_model_refused(with_f32("llama.rope.freq_base", value), {"llama.rope.freq_base"});
    expect_model_refused(with_f32("llama.attention.layer_norm_rms_epsilon", value), {"rms_epsilon"});
  }
  expect_model_refused(with_f32("llama.block_count", 1), {"llama.block_count", "f32", "integer"});
  expect_model_refused(with("llama.block_count", [](GgufBuilder& gguf) { gguf.i32s("llama.block_count", {1}); }),
                       {"llama.block_count is an array, expected a single value"});
  expect_model_refused(with("llama.block_count", [](GgufBuilder& gguf) { gguf.text("llama.block_count", "1"); }),
                       {"llama.block_count", "string"});
  expect_model_refused(
      with("general.alignment",
           [](GgufBuilder& gguf) { gguf.value("general.alignment", test::kGgufU64, bytes_of(~uint64_t{0})); }),
      {"general.alignment", "2^63"});
  expect_model_refused(with_u32("llama.attention.head_count", 5), {"5 heads", "32"});
  expect_model_refused(with_u32("llama.rope.dimension_count", 7), {"head width 7 (llama.rope.dimension_count) is odd"});
  expect_model_refused(with_u32("llama.attention.value_length", 16), {"value_length is 16, expected the head width"});
  expect_model_refused(with_u32("llama.expert_count", 8), {"llama.expert_count is 8", "experts"});
  expect_model_refused(with_u32("split.count", 2), {"split.count is 2"});
  GgufBuilder wide = with_u32("llama.rope.dimension_count", 10), uneven = with_u32("llama.rope.dimension_count", 3);
  expect_model_refused(wide.u32("llama.attention.key_length", 8), {"llama.rope.dimension_count is 10", "8"});
  expect_model_refused(uneven.u32("llama.attention.key_length", 8), {"llama.rope.dimension_count is 3", "even"});
  GgufBuilder rows = metadata();
  add_embedding(rows).tensor("blk.0.attn_k.weight", test::kGgmlF32, {4, 32}, bytes_of(Floats(128)));
  expect_model_refused(rows, {"blk.0.attn_k.weight", "32 rows", "2 heads of 8"});
}

TEST_F(GgufTest, TranslatesLinearScalingAndRefusesOthers) {
  const auto scaled = [&](const char* type, float factor) {
    GgufBuilder gguf = metadata();
    return add_embedding(gguf.text("llama.rope.scaling.type", type).f32("llama.rope.scaling.factor", factor));
  };
  EXPECT_EQ(config(scaled("linear", 4)).at("rope_scaling"),
            nlohmann::json::parse(R"({"rope_type":"linear","factor":4.0})"));
  EXPECT_TRUE(config(scaled("linear", 1)).at("rope_scaling").is_null());
  EXPECT_TRUE(config(scaled("none", 4)).at("rope_scaling").is_null());
  expect_model_refused(scaled("yarn", 4), {"llama.rope.scaling.type", "yarn"});
  expect_model_refused(scaled("linear", -4), {"llama.rope.scaling.factor"});
  GgufBuilder old = metadata();
  EXPECT_EQ(config(add_embedding(old.f32("llama.rope.scale_linear", 2))).at("rope_scaling").at("factor"), 2.0);
}

TEST_F(GgufTest, RecognisesLlama3Scaling) {
  // Published for head width 64, theta 5e5, factor 32: pairs 0-14 as they are, 15-17 blended, 18-31 divided by 32.
  const double blended[] = {1.290547928e-3, 4.295567966e-4, 9.708287803e-5};
  Floats factors(32, 1.0f);
  for (int i = 15; i < 18; ++i) factors[i] = static_cast<float>(std::pow(5e5, -2.0 * i / 64) / blended[i - 15]);
  for (int i = 18; i < 32; ++i) factors[i] = 32;
  const auto scaled = [](const Floats& values) {
    GgufBuilder gguf = metadata();
    gguf.u32("llama.rope.dimension_count", 64).f32("llama.rope.freq_base", 5e5f);
    return add_embedding(gguf).tensor("rope_freqs.weight", test::kGgmlF32, {values.size()}, bytes_of(values));
  };
  const auto expected = nlohmann::json::parse(R"({"rope_type":"llama3","factor":32.0,"low_freq_factor":1.0,
      "high_freq_factor":4.0,"original_max_position_embeddings":8192})");
  EXPECT_EQ(config(scaled(factors)).at("rope_scaling"), expected);
  expect_model_refused(scaled(Floats(31, 1.0f)), {"rope_freqs.weight", "31", "32"});
  expect_model_refused(scaled(factors).text("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 2),
                       {"rope_freqs.weight", "linear"});
  for (const float wrong : {1.01f * factors[16], std::numeric_limits<float>::quiet_NaN()}) {
    Floats changed = factors;
    changed[16] = wrong;
    expect_model_refused(scaled(changed), {"rope_freqs.weight[16]"});
  }
}

/// Tokens a, b, ab, and four that are control tokens or look like it.
GgufBuilder with_tokenizer(std::string_view model = "gpt2", int32_t last_type = 1) {
  GgufBuilder gguf = metadata();
  gguf.text("tokenizer.ggml.model", model).text("tokenizer.ggml.pre", "gpt-2");
  gguf.texts("tokenizer.ggml.tokens", {"a", "b", "ab", "<s>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>"});
  gguf.i32s("tokenizer.ggml.token_type", {1, 1, 1, 3, 3, 3, last_type});
  gguf.texts("tokenizer.ggml.merges", {"a b"});
  return add_embedding(gguf);
}

TEST_F(GgufTest, HandsOverTheTokenizer) {
  GgufBuilder gguf = with_tokenizer();
  gguf.u32("tokenizer.ggml.bos_token_id", 3)
      .u32("tokenizer.ggml.eos_token_id", 3)
      .u32("tokenizer.ggml.eot_token_id", 5);
  gguf.value("tokenizer.ggml.add_bos_token", test::kGgufBool, std::string(1, '\1'));
  const auto model = open(gguf);
  const auto tokenizer = model->tokenizer();
  EXPECT_EQ(tokenizer->encode("abb", true, ControlTokens::as_text), (std::vector<int32_t>{3, 2, 1}));
  EXPECT_EQ(tokenizer->bos(), 3);
  // As stated, then the control token of a known spelling; <|endoftext|> is a normal token here.
  EXPECT_EQ(tokenizer->eos(), (std::vector<int32_t>{3, 5, 4}));
  EXPECT_EQ(parse_json(model->config_json(), "config").at("eos_token_id"), nlohmann::json::parse("[3,5,4]"));
}

TEST_F(GgufTest, RefusesTokenizersItCannotUse) {
  const auto expect = [&](const GgufBuilder& gguf, const std::vector<std::string>& words) {
    const auto model = open(gguf);
    expect_refused([&] { model->tokenizer(); }, words);
  };
  GgufBuilder none = metadata();
  expect(add_embedding(none), {"model.gguf", "no key tokenizer.ggml.model"});
  expect(with_tokenizer("t5"), {"model.gguf", "tokenizer.ggml.model", "\"t5\""});
  expect(with_tokenizer("llama"), {"model.gguf", "tokenizer.ggml.scores"});
  expect(with_tokenizer("gpt2", 7), {"tokenizer.ggml.token_type", "7"});
  expect(with_tokenizer().u32("tokenizer.ggml.eos_token_id", 7), {"end token 7"});
  expect(with_tokenizer().u32("tokenizer.ggml.bos_token_id", 7), {"bos_token_id", "7"});
  expect(with_tokenizer().u32("tokenizer.ggml.add_bos_token", 1), {"add_bos_token", "bool"});
  GgufBuilder no_merges = metadata();
  no_merges.text("tokenizer.ggml.model", "gpt2").texts("tokenizer.ggml.tokens", {"a"});
  expect(add_embedding(no_merges), {"tokenizer.ggml.merges"});
}

/// Opens the file and uses all it offers; the number of tensors that could be read, -1 if the file was refused.
int tensors_read(const std::string& path) {
  int count = 0;
  const auto attempt = [&](auto&& action) {
    try {
      action();
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  std::unique_ptr<Checkpoint> model;
  if (!attempt([&] { model = Checkpoint::open(path); })) return -1;
  attempt([&] { model->tokenizer()->encode("ab", true, ControlTokens::parsed); });
  attempt([&] { model->chat_template(); });
  for (const TensorInfo& tensor : model->tensors()) count += attempt([&] { model->read_f32(tensor.name); });
  return count;
}

TEST_F(GgufTest, SurvivesTruncationAndFlippedBytes) {
  GgufBuilder gguf = with_tokenizer();
  gguf.u32("tokenizer.ggml.eos_token_id", 4).text("tokenizer.chat_template", "{{x}}");
  gguf.tensor("blk.0.attn_q.weight", test::kGgmlQ8_0, {32, 32}, counting_bytes(32 * 34));
  gguf.tensor("blk.0.attn_k.weight", test::kGgmlQ4_1, {32, 16}, counting_bytes(16 * 20));
  gguf.tensor("output_norm.weight", test::kGgmlBf16, {32}, counting_bytes(64));
  const std::string whole = gguf.bytes();
  const size_t header = whole.size() - 32 * 34 - 16 * 20 - 64 - 256;
  ASSERT_EQ(tensors_read(folder_.write("f", whole)), 4);
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(tensors_read(folder_.write("f", whole.substr(0, length))), -1) << length;
  }
  std::mt19937 random(3);
  int refused = 0, read_in_part = 0, read = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string flipped = whole;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      flipped[random() % header] ^= static_cast<char>(1 + random() % 255);
    }
    const int count = tensors_read(folder_.write("f", flipped));
    ++(count < 0 ? refused : count < 4 ? read_in_part : read);
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(read_in_part, 10);
  EXPECT_GT(read, 500);
}

}  // namespace
}  // namespace fut
