// What this project writes for other programs. What it reads of theirs: hf_folder_test, foreign_int4_test.
#include <gtest/gtest.h>

#include "engine/quantize.h"
#include "futransformer/engine.h"
#include "io/checkpoint.h"
#include "quant/quantisers.h"
#include "support/fixture_model.h"

namespace fut {
namespace {

using test::TempFolder;
using test::write_fixture;
using Json = nlohmann::json;

void quantize(const TempFolder& source, int group, const std::string& out = "out") {
  const auto quantiser = find_quantiser("rtn").make({});
  QuantizeOptions options;
  options.group = group;
  options.quantiser = quantiser.get();
  quantize_model(source.path(), source.file(out), options);
}

/// config.json of both folders, and the tensors' names and types, made from the fixture.
class WrittenFolders : public testing::Test {
 protected:
  WrittenFolders() {
    write_fixture(source_, {.config = R"({"dtype":"float32","torch_dtype":"float32"})"});
    quantize(source_, 32);
  }

  Json config(const std::string& phase) const {
    return Json::parse(test::read_file(source_.file("out/" + phase + "/config.json")));
  }

  std::string type(const std::string& phase, const std::string& tensor) const {
    const auto checkpoint = Checkpoint::open(source_.file("out/" + phase));
    const TensorInfo* const info = checkpoint->find(tensor);
    return info ? info->type + " " + Json(info->shape).dump() : "none";
  }

  TempFolder source_;
};

/// The keys by which vLLM's loader of compressed-tensors chooses a kernel (its get_scheme and _get_scheme_from_parts),
/// and the parameters that the kernel then asks of the file.
TEST_F(WrittenFolders, SayWhatVllmAsksFor) {
  for (const std::string phase : {"decode", "prefill"}) {
    const Json written = config(phase), quantisation = written["quantization_config"];
    EXPECT_EQ(written["torch_dtype"], "bfloat16");
    EXPECT_FALSE(written.contains("dtype"));  // would count before torch_dtype
    EXPECT_EQ(quantisation["quant_method"], "compressed-tensors");
    EXPECT_EQ(quantisation["quantization_status"], "compressed");
    EXPECT_EQ(quantisation["ignore"], Json{"lm_head"});  // all other Linear modules, fused ones by their parts
    EXPECT_TRUE(quantisation["kv_cache_scheme"].is_null());
    ASSERT_EQ(quantisation["config_groups"].size(), 1u);
    const Json scheme = quantisation["config_groups"]["group_0"], weights = scheme["weights"];
    EXPECT_EQ(scheme["targets"], Json{"Linear"});
    EXPECT_TRUE(scheme["output_activations"].is_null());
    EXPECT_EQ(weights["symmetric"], true);
    EXPECT_EQ(weights["dynamic"], false);
    EXPECT_TRUE(weights["actorder"].is_null());
  }
  const Json int4 = config("decode")["quantization_config"], fp8 = config("prefill")["quantization_config"];
  EXPECT_EQ(int4["format"], "pack-quantized");
  const Json int4_scheme = int4["config_groups"]["group_0"];
  EXPECT_TRUE(int4_scheme["input_activations"].is_null());
  EXPECT_EQ(int4_scheme["weights"]["num_bits"], 4);
  EXPECT_EQ(int4_scheme["weights"]["type"], "int");
  EXPECT_EQ(int4_scheme["weights"]["strategy"], "group");
  EXPECT_EQ(int4_scheme["weights"]["group_size"], 32);
  EXPECT_EQ(fp8["format"], "float-quantized");
  const Json fp8_scheme = fp8["config_groups"]["group_0"];
  for (const char* what : {"weights", "input_activations"}) {
    EXPECT_EQ(fp8_scheme[what]["num_bits"], 8);
    EXPECT_EQ(fp8_scheme[what]["type"], "float");
  }
  EXPECT_EQ(fp8_scheme["weights"]["strategy"], "channel");
  EXPECT_EQ(fp8_scheme["input_activations"]["strategy"], "token");
  EXPECT_EQ(fp8_scheme["input_activations"]["dynamic"], true);

  const std::string down = "model.layers.1.mlp.down_proj.weight";  // (64, 96)
  EXPECT_EQ(type("decode", down + "_packed"), "I32 [64,12]");
  EXPECT_EQ(type("decode", down + "_scale"), "F16 [64,3]");
  EXPECT_EQ(type("decode", down + "_shape"), "I64 [2]");
  EXPECT_EQ(type("decode", "lm_head.weight"), "BF16 [259,64]");
  EXPECT_EQ(type("prefill", down), "F8_E4M3 [64,96]");
  EXPECT_EQ(type("prefill", down + "_scale"), "F32 [64,1]");
}

std::vector<int32_t> greedy(const std::string& path, int group = 0) {
  EngineOptions options;
  options.backend = "cpu";
  options.threads = 1;
  options.group_size = group;
  Request request;
  request.prompt = "Hello world";
  request.max_tokens = 6;
  request.sampling.temperature = 0;
  return Engine::load(path, options)->generate({request})[0].ids;
}

/// The fixture's down_proj has 96 inputs, the others 64.
TEST(WrittenFolder, GroupsMustDivideWhatOthersShallReadButNotWhatIsLoaded_D03) {
  const TempFolder source;
  write_fixture(source);
  for (const int group : {64, 128}) {
    const std::string inputs = group == 64 ? "down_proj has 96 inputs" : "q_proj has 64 inputs";
    test::expect_refused([&] { quantize(source, group); }, {inputs, cat("no multiple of the group size ", group)});
    EXPECT_FALSE(std::filesystem::exists(source.file("out")));
    EXPECT_EQ(greedy(source.path(), group).size(), 6u);  // with a short last group
  }
  test::expect_refused([&] { quantize(source, 48); }, {"group size 48", "32, 64 or 128"});
}

TEST(WrittenFolder, ATiedHeadStaysTheEmbeddingAndIsNotQuantised_D06) {
  const TempFolder source;
  write_fixture(source, {.config = R"({"tie_word_embeddings":true})", .lm_head = "no"});
  quantize(source, 32);
  const std::vector<float> embedding = Checkpoint::open(source.path())->read_f32("model.embed_tokens.weight");
  for (const std::string part : {"", "/decode", "/prefill"}) {
    SCOPED_TRACE(part);
    EXPECT_EQ(greedy(source.file("out") + part), std::vector<int32_t>(6, 100));
    if (part.empty()) continue;
    const auto written = Checkpoint::open(source.file("out") + part);
    EXPECT_EQ(written->find("lm_head.weight"), nullptr);
    const std::vector<float> stored = written->read_f32("model.embed_tokens.weight");
    ASSERT_EQ(stored.size(), embedding.size());
    for (size_t i = 0; i < stored.size(); ++i) ASSERT_EQ(stored[i], to_f32(to_bf16(embedding[i]))) << i;
    const TempFolder again;
    test::expect_refused([&] { quantize_model(source.file("out") + part, again.file("out"), {}); },
                         {"quantised already"});
  }
  test::expect_refused([&] { quantize_model(source.file("out"), source.file("twice"), {}); }, {"quantised already"});
}

}  // namespace
}  // namespace fut
