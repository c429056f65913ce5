// Tiny models whose losses and greedy tokens are known from a double-precision oracle outside this project, and
// stories260K, whose loss and text are known from its own publication.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>

#include "futransformer/engine.h"
#include "support/fixture_model.h"

namespace fut {
namespace {

using test::expect_refused;
using test::Fixture;
using test::TempFolder;
using test::write_fixture;

using Ids = std::vector<int32_t>;

EngineOptions precision(const std::string& prefill, const std::string& decode, const std::string& kv) {
  EngineOptions options;
  options.prefill = prefill;
  options.decode = decode;
  options.kv = kv;
  options.backend = "cpu";
  options.kv_tokens = 2048;
  options.max_batch = 2;
  options.threads = 1;  // these models are too small for two
  return options;
}

std::unique_ptr<Engine> load(const TempFolder& folder, const EngineOptions& options) {
  return Engine::load(folder.path(), options);
}

Ids greedy(Engine& engine, const Ids& prompt, int64_t count) {
  Request request;
  request.ids = prompt;
  request.max_tokens = count;
  request.sampling.temperature = 0;
  const Completion answer = engine.generate({request})[0];
  EXPECT_EQ(answer.error, "");
  return answer.ids;
}

const std::string kText = "Hello world";

struct Known {
  const char* name;
  Fixture fixture;
  double nll;  ///< over the 11 bytes of the text behind BOS
  Ids greedy;
};

const std::string kLlama3 =
    R"({"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,)"
    R"("original_max_position_embeddings":32}})";
const std::string kLlama3Floats = R"({"rope_scaling":{"type":"llama3","factor":8.0,"low_freq_factor":1.0,)"
                                  R"("high_freq_factor":4.0,"original_max_position_embeddings":32.0}})";

std::vector<Known> known_models() {
  const Ids base = {77, 218, 155, 162, 4, 79}, scaled = {77, 218, 60, 99, 218, 60},
            four_kv = {199, 6, 124, 188, 103, 164};
  std::vector<Known> models;
  const auto add = [&](const char* name, const Fixture& fixture, double nll, const Ids& ids) {
    models.push_back({name, fixture, nll, ids});
  };
  add("base", {}, 65.206474, base);
  add("D1 llama3", {.config = kLlama3}, 65.111521, scaled);
  add("D2 llama3 in floats", {.config = kLlama3Floats}, 65.111521, scaled);
  add("D3 linear", {.config = R"({"rope_scaling":{"type":"linear","factor":4}})"}, 64.999500, scaled);
  // transformers 5.24 in F32 gives these.
  add("dynamic", {.config = R"({"rope_scaling":{"rope_type":"dynamic","factor":4}})"}, 65.206471, base);
  add("yarn", {.config = R"({"rope_scaling":{"type":"yarn","factor":4,"original_max_position_embeddings":32}})"},
      65.362425, {77, 218, 9, 199, 113, 77});
  const auto yarn = [](const char* more) {
    return cat(R"({"rope_scaling":{"rope_type":"yarn","factor":4.0)", more, "}}");
  };
  add("Y1 yarn", {.config = yarn(R"(,"original_max_position_embeddings":64)")}, 65.387622, {77, 218, 9, 199, 24, 110});
  add("Y2 yarn, its factor given", {.config = yarn(R"(,"original_max_position_embeddings":64,"attention_factor":1.0)")},
      65.317559, {77, 218, 9, 199, 54, 138});
  add("Y3 yarn, trained length not given", {.config = yarn("")}, 65.369444, {77, 218, 9, 199, 24, 110});
  add("yarn, newer layout",
      {.config = R"({"rope_parameters":{"rope_type":"yarn","rope_theta":500000,"factor":8,"mscale":0.7,)"
                 R"("mscale_all_dim":1.5,"original_max_position_embeddings":16}})"},
      65.060389, {77, 218, 60, 26, 218, 60});
  add("D5 null", {.config = R"({"rope_scaling":null})"}, 65.206474, base);
  add("H1 explicit head_dim",
      {.build = R"({"hidden_size":52,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":16})"}, 66.501831,
      {5, 160, 14, 144, 109, 14});
  add("H2 no KV head count", {.build = R"({"num_key_value_heads":4})", .drop = {"num_key_value_heads"}}, 68.284537,
      four_kv);
  add("H3 null KV head count", {.build = R"({"num_key_value_heads":4})", .config = R"({"num_key_value_heads":null})"},
      68.284537, four_kv);
  add("H4 null head_dim", {.config = R"({"head_dim":null})"}, 65.206474, base);
  add("R2 stored inv_freq", {.inv_freq = true}, 65.206474, base);
  add("K1 BF16, misnamed", {.config = R"({"torch_dtype":"float16"})", .stored = "BF16"}, 65.200575, {});
  add("K1 dtype", {.config = R"({"dtype":"bfloat16"})", .drop = {"torch_dtype"}, .stored = "BF16"}, 65.200575, {});
  add("K1 no dtype", {.drop = {"torch_dtype"}, .stored = "BF16"}, 65.200575, {});
  add("V2 padded vocabulary", {.build = R"({"vocab_size":320})"}, 71.274592, {153, 47, 129, 191, 106, 52});
  add("B1 biases", {.config = R"({"attention_bias":true,"mlp_bias":true})", .attention_bias = true, .mlp_bias = true},
      71.222059, {43, 99, 43, 99, 43, 99});
  add("R3 half rotary", {.config = R"({"partial_rotary_factor":0.5})"}, 64.623402, {77, 218, 155, 117, 89, 82});
  add("W1 ratio 3", {.build = R"({"hidden_size":96,"num_attention_heads":6,"num_key_value_heads":2})"}, 69.103750,
      {110, 65, 152, 148, 202, 164});
  return models;
}

TEST(FixtureModelsTest, LossAndGreedyTokensInF32_A01_A03_A05_A06_A07_A10_B10) {
  for (const Known& known : known_models()) {
    const TempFolder folder;
    write_fixture(folder, known.fixture);
    const auto engine = load(folder, precision("f32", "f32", "f32"));
    const Ids ids = engine->tokenize(kText);
    ASSERT_EQ(ids, (Ids{256, 72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100}));
    for (bool decode : {false, true}) {
      ScoreOptions options;
      options.context = 256;
      options.decode = decode;
      const Score score = engine->score({ids.begin() + 1, ids.end()}, options);
      EXPECT_EQ(score.tokens, 11) << known.name;
      EXPECT_TRUE(score.bos);
      EXPECT_NEAR(score.nll, known.nll, 1e-4) << known.name << (decode ? ", decode" : ", prefill");
    }
    if (known.greedy.empty()) continue;
    EXPECT_EQ(greedy(*engine, ids, 6), known.greedy) << known.name;
  }
}

TEST(FixtureModelsTest, LogitsOfKnownTokens_A01_B10) {
  const auto top = [](const Fixture& fixture) {
    const TempFolder folder;
    write_fixture(folder, fixture);
    const auto engine = load(folder, precision("f32", "f32", "f32"));
    Ids ids = engine->tokenize(kText, false);
    ids.push_back(0);  // a target after the last position of the text
    float logit = 0;
    ScoreOptions options;
    options.context = 256;
    engine->score(ids, options, [&](int64_t index, double, const float* logits) {
      if (index < 11) return;
      logit = *std::max_element(logits, logits + 259);
      EXPECT_EQ(logits[77], logit);
    });
    return logit;
  };
  EXPECT_NEAR(top({.config = R"({"rope_scaling":{"type":"linear","factor":4}})"}), 2.17748, 1e-5);
  EXPECT_NEAR(top({.stored = "BF16"}), 2.37934, 1e-5);
}

TEST(FixtureModelsTest, WhatWouldRunWronglyIsRefused_A01_A05_A06) {
  struct Case {
    Fixture fixture;
    std::vector<std::string> words;
  };
  const Case cases[] = {
      {{.config = R"({"rope_scaling":{"rope_type":"longrope","factor":4}})"}, {"longrope", "rope"}},
      {{.config = R"({"num_key_value_heads":3})"}, {"num_attention_heads 4", "num_key_value_heads 3"}},
      {{.config = R"({"num_hidden_layers":1})"}, {"model.layers.1.", "the configuration says 1 layers"}},
      {{.attention_bias = true, .mlp_bias = true}, {"model.layers.0.mlp.down_proj.bias", "no such bias"}},
      {{.config = R"({"attention_bias":true,"mlp_bias":true})"}, {"model.layers.0.self_attn.q_proj.bias", "not found"}},
      {{.config = R"({"intermediate_size":100})"}, {"gate_proj", "(96, 64)", "(100, 64)"}},
      {{.config = R"({"num_hidden_layers":3})"}, {"model.layers.2.", "not found"}},
      {{.lm_head = "no"}, {"lm_head.weight", "not found"}},
      {{.config = R"({"vocab_size":260})"}, {"model.embed_tokens.weight", "(259, 64)", "(260, 64)"}}};
  for (const Case& c : cases) {
    const TempFolder folder;
    write_fixture(folder, c.fixture);
    expect_refused([&] { load(folder, precision("f32", "f32", "f32")); }, c.words);
  }
}

TEST(FixtureModelsTest, DynamicRopeEndsAtTheTrainedLength_A04) {
  const TempFolder folder;
  write_fixture(folder, {.config = R"({"rope_scaling":{"rope_type":"dynamic","factor":4}})"});
  EngineOptions options = precision("f32", "f32", "f32");
  options.max_context = 256;
  EXPECT_EQ(Engine::load(folder.path(), options)->info().context, 256);
  options.max_context = 257;
  expect_refused([&] { Engine::load(folder.path(), options); }, {"257", "own limit of 256", "dynamic", "cached"});
}

/// What a long text would do to the rotation of a short one behind it: nothing, as windows of the trained length are
/// all that there is.
TEST(FixtureModelsTest, DynamicRopeLeavesShortTextsAlone_A04) {
  const TempFolder folder;
  write_fixture(folder, {.config = R"({"max_position_embeddings":8,"rope_scaling":{"type":"dynamic","factor":2.0}})"});
  const auto engine = load(folder, precision("f32", "f32", "f32"));
  const auto score = [&](const std::string& text) {
    ScoreOptions options;
    options.context = 8;
    return engine->score(engine->tokenize(text, false), options);
  };
  const double whole = score(kText).nll;
  const Score hello = score("Hello");
  EXPECT_EQ(hello.tokens, 5);
  EXPECT_NEAR(hello.nll, 32.193161, 1e-4);
  EXPECT_EQ(score(kText).nll, whole);
  EXPECT_EQ(score("Hello").nll, hello.nll);
  ScoreOptions longer;
  longer.context = 12;
  expect_refused([&] { engine->score(engine->tokenize(kText, false), longer); }, {"12", "8"});
}

TEST(FixtureModelsTest, TiedHeadsReadTheEmbedding_D06) {
  const TempFolder tied, copied;
  write_fixture(tied, {.config = R"({"tie_word_embeddings":true})", .lm_head = "no"});
  write_fixture(copied, {.lm_head = "copy"});
  for (const char* decode : {"f32", "int4"}) {
    const auto a = load(tied, precision("f32", decode, "f32")), b = load(copied, precision("f32", decode, "f32"));
    const Ids ids = a->tokenize(kText);
    EXPECT_EQ(greedy(*a, ids, 6), greedy(*b, ids, 6));
    // Its own embedding is what a random residual stream still resembles most: a token repeats itself.
    EXPECT_EQ(greedy(*a, ids, 6), Ids(6, 100)) << decode;
  }
}

TEST(FixtureModelsTest, EveryCombinationOfPrecisionsRuns) {
  const TempFolder folder;
  write_fixture(folder);
  Ids ids;
  for (int i = 0; i < 100; ++i) ids.push_back(i * 37 % 256);  // more than a page
  for (const char* prefill : {"f32", "bf16", "fp8"}) {
    for (const char* decode : {"f32", "bf16", "fp8", "int4"}) {
      for (const char* kv : {"f32", "bf16", "fp8", "int4"}) {
        const auto engine = load(folder, precision(prefill, decode, kv));
        EXPECT_EQ(greedy(*engine, ids, 6).size(), 6u);
        for (bool by_steps : {false, true}) {
          ScoreOptions options;
          options.context = 256;
          options.decode = by_steps;
          const Score score = engine->score(ids, options, [&](int64_t, double, const float* logits) {
            for (int i = 0; i < 259; ++i)
              ASSERT_TRUE(std::isfinite(logits[i])) << prefill << "-" << decode << "-" << kv;
          });
          EXPECT_EQ(score.tokens, 100);
          EXPECT_NEAR(score.nll / 100, 6.0, 0.5) << prefill << "-" << decode << "-" << kv;
        }
      }
    }
  }
}

/// Last position's logits of a prompt of `length`.
std::vector<float> last_logits(Engine& engine, bool decode, int64_t length) {
  Ids ids;
  for (int64_t i = 0; i <= length; ++i) ids.push_back(static_cast<int32_t>(i * 53 % 256));
  ScoreOptions options;
  options.context = 256;
  options.decode = decode;
  options.add_bos = false;
  std::vector<float> last;
  engine.score(ids, options, [&](int64_t, double, const float* logits) { last.assign(logits, logits + 259); });
  return last;
}

/// The largest relative distance of logits to those of an F32 run, over prompts around a page's length and both phases.
double worst_error(const TempFolder& folder, const std::string& kind) {
  const auto exact = load(folder, precision("f32", "f32", "f32"));
  const auto engine = load(folder, precision(kind == "int4" ? "fp8" : kind, kind, kind));
  double worst = 0;
  for (int64_t length : {1, 63, 64, 65}) {
    for (bool decode : {false, true}) {
      const std::vector<float> want = last_logits(*exact, decode, length), got = last_logits(*engine, decode, length);
      double error = 0, size = 0;
      for (int i = 0; i < 259; ++i) {
        EXPECT_TRUE(std::isfinite(got[i])) << kind << ", length " << length;
        error += std::pow(double{got[i]} - want[i], 2);
        size += std::pow(double{want[i]}, 2);
      }
      worst = std::max(worst, std::sqrt(error / size));
    }
  }
  return worst;
}

Fixture loud(const std::vector<std::string>& tensors, float factor) {
  Fixture fixture;
  fixture.edit = [=](const std::string& name, std::vector<float>& values) {
    if (std::find(tensors.begin(), tensors.end(), name) == tensors.end()) return;
    for (float& value : values) value *= factor;
  };
  return fixture;
}

/// Layer 0's gate and up times 400: silu(g) * u passes 65504. The distances are those of the weights' own rounding: at
/// most 0.008 (BF16), 0.10 (FP8) and 0.19 (INT4) were measured.
TEST(FixtureModelsTest, SwigluBeyondHalfPrecision_D08) {
  const TempFolder folder;
  write_fixture(folder, loud({"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"}, 400.0f));
  EXPECT_LT(worst_error(folder, "bf16"), 0.02);
  EXPECT_LT(worst_error(folder, "fp8"), 0.15);
  EXPECT_LT(worst_error(folder, "int4"), 0.3);
}

/// Query weights times 1000: scores pass 65504 and attention picks one token. Which one is for FP8 and INT4 a matter of
/// rounding: there the result only has to be a number.
TEST(FixtureModelsTest, ScoresBeyondHalfPrecision_D08) {
  const TempFolder folder;
  write_fixture(folder,
                loud({"model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"}, 1000.0f));
  EXPECT_LT(worst_error(folder, "bf16"), 0.05);
  EXPECT_LT(worst_error(folder, "fp8"), 2.0);
  EXPECT_LT(worst_error(folder, "int4"), 2.0);
}

// ---- stories260K

const std::string kShared = FUT_SOURCE_DIR "/../shared/data/";

/// llama2.c's vocabulary: scores and strings; text is first cut into characters, then the pair with the best score is
/// merged again and again.
class StoriesVocabulary {
 public:
  explicit StoriesVocabulary(const std::string& path) {
    const std::string bytes = test::read_file(path);
    size_t at = 4;  // behind the length of the longest token
    while (at + 8 <= bytes.size()) {
      float score;
      int32_t length;
      memcpy(&score, bytes.data() + at, 4);
      memcpy(&length, bytes.data() + at + 4, 4);
      tokens_.push_back(bytes.substr(at + 8, length));
      scores_.push_back(score);
      at += 8 + length;
    }
    for (size_t id = tokens_.size(); id-- > 0;) ids_[tokens_[id]] = static_cast<int32_t>(id);
  }

  /// A space goes first; a character without a token becomes its bytes, which stand from id 3 on.
  Ids encode(const std::string& text) const {
    Ids ids;
    const std::string spaced = " " + text;
    for (size_t at = 0, end; at < spaced.size(); at = end) {
      for (end = at + 1; end < spaced.size() && (spaced[end] & 0xc0) == 0x80;) ++end;
      const int32_t id = find(spaced.substr(at, end - at));
      if (id >= 0) ids.push_back(id);
      for (size_t i = at; id < 0 && i < end; ++i) ids.push_back(static_cast<unsigned char>(spaced[i]) + 3);
    }
    while (merge_best(ids)) {
    }
    return ids;
  }

  size_t size() const { return tokens_.size(); }

  std::string decode(const Ids& ids) const {
    std::string text;
    for (int32_t id : ids) text += tokens_[id];
    return text;
  }

 private:
  int32_t find(const std::string& token) const {
    const auto it = ids_.find(token);
    return it == ids_.end() ? -1 : it->second;
  }

  bool merge_best(Ids& ids) const {
    float best = -std::numeric_limits<float>::infinity();
    size_t at = 0;
    int32_t merged = -1;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const int32_t id = find(tokens_[ids[i]] + tokens_[ids[i + 1]]);
      if (id >= 0 && scores_[id] > best) best = scores_[id], at = i, merged = id;
    }
    if (merged < 0) return false;
    ids[at] = merged;
    ids.erase(ids.begin() + static_cast<int64_t>(at) + 1);
    return true;
  }

  std::vector<std::string> tokens_;
  std::vector<float> scores_;
  std::map<std::string, int32_t> ids_;
};

/// The five stories of the sample, BOS before each.
std::vector<Ids> stories(const StoriesVocabulary& vocabulary) {
  const std::string all = test::read_file(kShared + "text/tinystories_sample.txt"), border = "<|endoftext|>";
  std::vector<Ids> out;
  for (size_t at = 0, end; (end = all.find(border, at)) != std::string::npos; at = end + border.size()) {
    const size_t first = all.find_first_not_of(" \n", at), last = all.find_last_not_of(" \n", end - 1);
    Ids ids = vocabulary.encode(all.substr(first, last + 1 - first));
    ids.insert(ids.begin(), 1);
    out.push_back(ids);
  }
  return out;
}

TEST(StoriesTest, LossAndTextOfBothHeadWidths) {
  if (!std::filesystem::exists(kShared + "models")) GTEST_SKIP() << kShared << " is not there";
  const StoriesVocabulary vocabulary(kShared + "models/stories260K/tok512.bin");
  ASSERT_EQ(vocabulary.size(), 512u);
  const TempFolder wide;
  const std::string source = kShared + "models/stories260K-hf-hd128/";
  std::filesystem::copy(source + "config.json", wide.file("config.json"));
  ASSERT_EQ(std::system(cat("gzip -dc '", source, "model.safetensors.gz' > ", wide.file("model.safetensors")).c_str()),
            0);
  std::vector<std::string> texts;
  for (const std::string& path : {kShared + "models/stories260K-hf", wide.path()}) {
    const auto engine = Engine::load(path, precision("f32", "f32", "f32"));
    double nll = 0;
    int64_t tokens = 0;
    for (const Ids& story : stories(vocabulary)) {
      ScoreOptions options;
      options.context = 512;
      const Score score = engine->score(story, options);
      nll += score.nll;
      tokens += score.tokens;
    }
    EXPECT_EQ(tokens, 1804);
    EXPECT_NEAR(nll / static_cast<double>(tokens), 1.2664, 5e-5) << path;
    texts.push_back(vocabulary.decode(greedy(*engine, {1}, 256)));
  }
  EXPECT_EQ(texts[0].compare(0, 54, " Once upon a time, there was a little girl named Lily."), 0) << texts[0];
  EXPECT_EQ(texts[0], texts[1]);
}

}  // namespace
}  // namespace fut
