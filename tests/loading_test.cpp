// What loading costs beside the weights themselves: measured on the program, in a process of its own.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "support/fixture_model.h"
#include "support/process.h"

namespace fut {
namespace {

using nlohmann::json;
using test::fut;
using test::Result;
using test::TempFolder;

constexpr int64_t kMiB = 1 << 20;

/// A Llama of one layer whose tables are nearly all of it: V x D of 40 MiB in BF16, the embedding and the head as one
/// or as two tensors.
void write_wide_model(const TempFolder& folder, bool tied) {
  constexpr int64_t D = 512, V = 40960;
  const json config = {{"model_type", "llama"},         {"hidden_size", D},         {"intermediate_size", D},
                       {"num_hidden_layers", 1},        {"num_attention_heads", 8}, {"num_key_value_heads", 8},
                       {"max_position_embeddings", 64}, {"rms_norm_eps", 1e-5},     {"vocab_size", V},
                       {"tie_word_embeddings", tied}};
  folder.write("config.json", config.dump());
  test::write_byte_tokenizer(folder);
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors = {
      {"model.embed_tokens", {V, D}},
      {"model.norm", {D}},
      {"model.layers.0.input_layernorm", {D}},
      {"model.layers.0.post_attention_layernorm", {D}}};
  for (const char* part : {"q_proj", "k_proj", "v_proj", "o_proj"})
    tensors.push_back({cat("model.layers.0.self_attn.", part), {D, D}});
  for (const char* part : {"gate_proj", "up_proj", "down_proj"})
    tensors.push_back({cat("model.layers.0.mlp.", part), {D, D}});
  if (!tied) tensors.push_back({"lm_head", {V, D}});
  SafetensorsWriter file(folder.path() + "/model.safetensors");
  for (const auto& [name, shape] : tensors) file.declare(name + ".weight", "BF16", shape);
  for (const auto& [name, shape] : tensors) {
    std::vector<Bf16> values(static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = to_bf16(static_cast<float>(i % 17) / 17.0f - 0.4f);
    file.write(name + ".weight", values.data(), static_cast<int64_t>(values.size() * sizeof(Bf16)));
  }
  file.finish();
}

class Loading : public ::testing::TestWithParam<bool> {};

// A table as floats is 80 MiB, a second copy of one 40, the pages of the file 40 or 80: none of them fits the bound. It
// leaves room for the program itself, a layer as floats and a piece of a table.
TEST_P(Loading, PeaksLittleAboveTheWeights) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer keeps what was freed";
#endif
  TempFolder folder;
  write_wide_model(folder, GetParam());
  const Result result =
      fut({"bench", "model", folder.path(), "--backend", "cpu", "--pp", "1", "--tg", "1", "--threads", "1", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const json report = json::parse(result.out);
  int64_t weights = 0;
  for (const char* part : {"prefill_weight_bytes", "decode_weight_bytes", "embedding_bytes", "head_bytes"})
    weights += report[part].get<int64_t>();
  EXPECT_GT(weights, 80 * kMiB);
  EXPECT_LT(report["peak_bytes"].get<int64_t>(), weights + 32 * kMiB);
  RecordProperty("beside_the_weights_kib", static_cast<int>((report["peak_bytes"].get<int64_t>() - weights) / 1024));
}

INSTANTIATE_TEST_SUITE_P(Heads, Loading, ::testing::Bool(),
                         [](const auto& tied) { return tied.param ? "tied" : "separate"; });

}  // namespace
}  // namespace fut
