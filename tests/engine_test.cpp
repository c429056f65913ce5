// The engine: limits, batches, end tokens, stop strings, seeds, errors that stay with their request, scoring.
#include "futransformer/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "support/fixture_model.h"

namespace fut {
namespace {

using test::expect_refused;
using test::Fixture;
using test::TempFolder;
using test::write_fixture;

using Ids = std::vector<int32_t>;

EngineOptions f32_options() {
  EngineOptions options;
  options.prefill = options.decode = options.kv = "f32";
  options.backend = "cpu";
  options.threads = 1;  // the models are too small for two
  return options;
}

/// The two-precision path, as users get it.
EngineOptions default_options() {
  EngineOptions options;
  options.backend = "cpu";
  options.threads = 1;
  return options;
}

/// Ids of a made-up prompt.
Ids some_ids(int64_t length, int seed = 0) {
  Ids ids(length, 256);
  for (int64_t i = 1; i < length; ++i) ids[i] = static_cast<int32_t>((i * 89 + seed * 31 + i * i) % 256);
  return ids;
}

Request greedy_request(const Ids& ids, int64_t max_tokens) {
  Request request;
  request.ids = ids;
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0;
  return request;
}

class EngineTest : public testing::Test {
 protected:
  Engine& load(const Fixture& fixture = {}, const EngineOptions& options = f32_options()) {
    write_fixture(folder_, fixture);
    return reload(options);
  }
  Engine& reload(const EngineOptions& options) {
    engine_ = Engine::load(folder_.path(), options);
    return *engine_;
  }
  Completion ask(const Request& request) { return engine_->generate({request})[0]; }
  void expect_load_refused(const EngineOptions& options, const std::vector<std::string>& words) {
    EngineOptions watched = options;  // whatever is refused here is refused before any weight is read
    watched.on_load = [](const std::string& stage, int64_t, int64_t) { ADD_FAILURE() << stage << " came first"; };
    expect_refused([&] { Engine::load(folder_.path(), watched); }, words);
  }

  TempFolder folder_;
  std::unique_ptr<Engine> engine_;
};

// ---- limits

/// A zero head makes all logits equal: the answer is a row of id 0 and never ends by itself.
const Fixture kEndless{.config = R"({"eos_token_id":null})", .lm_head = "zero"};

TEST_F(EngineTest, PromptAndAnswerNeverExceedTheContext) {
  load(kEndless);
  EXPECT_EQ(engine_->info().context, 256);
  struct Case {
    int64_t prompt, max_tokens, expected;
  };
  constexpr Case kCases[] = {{250, 6, 6},  {250, 7, 6},  {250, 5, 5}, {249, 7, 7},
                             {249, -1, 7}, {255, -1, 1}, {255, 1, 1}, {255, 128, 1},
                             {1, -1, 255}, {1, 0, 0},    {255, 0, 0}, {250, 1000000000000, 6}};
  for (const Case& c : kCases) {
    const Completion answer = ask(greedy_request(some_ids(c.prompt), c.max_tokens));
    EXPECT_EQ(answer.error, "");
    EXPECT_EQ(answer.ids, Ids(c.expected, 0)) << c.prompt << " + " << c.max_tokens;
    EXPECT_EQ(answer.finish_reason, "length");
    EXPECT_EQ(answer.prompt_tokens, c.prompt);
  }
  for (int64_t length : {256, 257, 5000}) {
    const Completion answer = ask(greedy_request(some_ids(length), 6));
    EXPECT_EQ(answer.finish_reason, "error");
    EXPECT_NE(answer.error.find(std::to_string(length)), std::string::npos) << answer.error;
    EXPECT_NE(answer.error.find("256"), std::string::npos) << answer.error;
    EXPECT_TRUE(answer.ids.empty());
  }
  EXPECT_EQ(ask(greedy_request(some_ids(250), 6)).ids.size(), 6u) << "the next request is answered";
  for (int64_t length : {200, 256, 257}) {  // of 257 tokens nothing is run
    Request prefill = greedy_request(some_ids(length), 6);
    prefill.prefill_only = true;
    const Completion answer = ask(prefill);
    EXPECT_EQ(answer.finish_reason, length > 256 ? "error" : "length") << answer.error;
    EXPECT_TRUE(answer.ids.empty());
    EXPECT_EQ(engine_->last_timing().prefill_tokens, length > 256 ? 0 : length);
  }
  Request omitted = greedy_request(some_ids(255), 0);
  omitted.max_tokens = Request().max_tokens;
  EXPECT_EQ(ask(omitted).ids.size(), 1u);
}

TEST_F(EngineTest, ASmallerContextIsAsExact) {
  EngineOptions options = f32_options();
  options.max_context = 100;
  load(kEndless, options);
  EXPECT_EQ(engine_->info().context, 100);
  EXPECT_EQ(ask(greedy_request(some_ids(98), -1)).ids.size(), 2u);
  EXPECT_NE(ask(greedy_request(some_ids(100), 1)).error.find("100"), std::string::npos);
  options.max_context = 257;
  expect_load_refused(options, {"257", "256"});
  options.max_context = 100000000;
  expect_load_refused(options, {"100000000", "256"});
}

TEST_F(EngineTest, ASmallPoolQueuesRequestsAndNamesWhatCannotFit) {
  EngineOptions options = f32_options();
  options.kv_tokens = 130;  // three pages
  load(kEndless, options);
  EXPECT_EQ(engine_->info().kv_pool_tokens, 192);
  std::vector<Request> requests;
  for (int i = 0; i < 6; ++i) requests.push_back(greedy_request(some_ids(60 + i, i), 8));
  requests.push_back(greedy_request(some_ids(190), 8));
  requests.push_back(greedy_request(some_ids(190), 2));
  const std::vector<Completion> answers = engine_->generate(requests);
  for (size_t i : {0, 1, 2, 3, 4, 5}) EXPECT_EQ(answers[i].ids.size(), 8u);
  EXPECT_EQ(answers[6].finish_reason, "error");
  for (const char* word : {"198", "192", "--kv-tokens"})
    EXPECT_NE(answers[6].error.find(word), std::string::npos) << answers[6].error;
  EXPECT_EQ(answers[7].ids.size(), 2u);
  ScoreOptions score;
  score.context = 256;
  expect_refused([&] { engine_->score(some_ids(10), score); }, {"256", "192", "--kv-tokens"});
  score.context = 192;
  EXPECT_EQ(engine_->score(some_ids(10), score).tokens, 10);
}

TEST_F(EngineTest, APoolBeyondMemoryIsRefusedWithTheNumbers_J04) {
  write_fixture(folder_, {});
  EngineOptions options = default_options();
  options.kv_tokens = int64_t{64} * 1000000000;
  expect_load_refused(options, {"KV cache", "MiB", "free", "--kv-tokens", "--kv"});
  options.kv_tokens = 0;
  options.max_batch = 4096;
  EXPECT_GT(reload(options).info().kv_pool_tokens, 0);
}

TEST_F(EngineTest, OptionsOutOfRangeAreRefused) {
  write_fixture(folder_, {});
  const auto refused = [&](auto set, const std::vector<std::string>& words) {
    EngineOptions options = default_options();
    set(options);
    expect_load_refused(options, words);
  };
  refused([](EngineOptions& o) { o.prefill = "int4"; }, {"prefill", "int4", "fp8"});
  refused([](EngineOptions& o) { o.decode = "q4_0"; }, {"decode", "q4_0", "int4"});
  refused([](EngineOptions& o) { o.kv = ""; }, {"kv"});
  refused([](EngineOptions& o) { o.group_size = 48; }, {"48", "32, 64 or 128"});
  refused([](EngineOptions& o) { o.max_batch = 0; }, {"max batch 0"});
  refused([](EngineOptions& o) { o.max_batch = 5000; }, {"max batch 5000"});
  refused([](EngineOptions& o) { o.prefill_chunk = 0; }, {"chunk 0"});
  refused([](EngineOptions& o) { o.max_context = -1; }, {"negative"});
  refused([](EngineOptions& o) { o.kv_tokens = -1; }, {"negative"});
  refused([](EngineOptions& o) { o.prefill_scaling = "static"; }, {"static", "delayed"});
  refused([](EngineOptions& o) { o.prefill_scaling = "frozen"; }, {"frozen", "calibrated"});
  refused([](EngineOptions& o) { o.backend = "vulkan"; }, {"vulkan", "cpu"});
}

TEST_F(EngineTest, AutoFindsABackendAndCudaIsNeverReplacedSilently_J02) {
  EngineOptions options = default_options();
  options.backend = "auto";
  const ModelInfo automatic = load({}, options).info();
  EXPECT_FALSE(automatic.backend.empty());
  const auto told = std::count_if(automatic.warnings.begin(), automatic.warnings.end(),
                                  [](const std::string& line) { return line.starts_with("backend auto: "); });
  EXPECT_EQ(told, automatic.backend.starts_with("cpu"));
  options.backend = "cpu";
  EXPECT_TRUE(reload(options).info().warnings.empty());
  options.backend = "cuda";
  try {
    EXPECT_NE(reload(options).info().backend.find("cuda"), std::string::npos);
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("cuda"), std::string::npos) << error.what();
  }
}

// ---- batches

constexpr int64_t kLengths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200};

std::vector<Request> sixteen_requests() {
  std::vector<Request> requests;
  for (int64_t length : kLengths) {
    requests.push_back(greedy_request(some_ids(length, static_cast<int>(length)), 32));
    requests.back().ignore_end_tokens = true;
  }
  return requests;
}

std::vector<Ids> ids_of(const std::vector<Completion>& answers) {
  std::vector<Ids> all;
  for (const Completion& answer : answers) {
    EXPECT_EQ(answer.error, "");
    all.push_back(answer.ids);
  }
  return all;
}

TEST_F(EngineTest, AnswersDoNotDependOnTheirCompany) {
  const std::vector<Request> requests = sixteen_requests();
  for (const EngineOptions& precision : {f32_options(), default_options()}) {
    load({}, precision);
    std::vector<Ids> alone;
    for (const Request& request : requests) alone.push_back(ask(request).ids);
    for (const Ids& ids : alone) ASSERT_EQ(ids.size(), 32u);
    EXPECT_GT(std::set<Ids>(alone.begin(), alone.end()).size(), 8u)
        << "prompts must matter for this test to mean something";

    EXPECT_EQ(ids_of(engine_->generate(requests)), alone) << "together";
    std::vector<Request> reversed(requests.rbegin(), requests.rend());
    std::vector<Ids> back = ids_of(engine_->generate(reversed));
    EXPECT_EQ(std::vector<Ids>(back.rbegin(), back.rend()), alone) << "reversed";
    for (int64_t chunk : {7, 16, 64, 512}) {
      for (int threads : {1, 2}) {
        EngineOptions options = precision;
        options.prefill_chunk = chunk;
        options.threads = threads;
        options.max_batch = chunk == 64 ? 3 : 16;  // three at a time: others join while some are decoding
        EXPECT_EQ(ids_of(reload(options).generate(requests)), alone)
            << "chunk " << chunk << ", " << threads << " threads";
      }
    }
  }
}

/// Bit for bit: every token's likelihood, through prefill in chunks and with threads; through decode steps in batches.
TEST_F(EngineTest, LikelihoodsDoNotDependOnChunksThreadsOrBatches) {
  const Ids text = some_ids(700);
  const auto likelihoods = [&](const EngineOptions& options, bool decode) {
    std::vector<double> nll(text.size(), 0);
    ScoreOptions score;
    score.context = 256;
    score.decode = decode;
    reload(options).score(text, score, [&](int64_t index, double value, const float*) { nll[index] = value; });
    return nll;
  };
  write_fixture(folder_, {});
  for (const EngineOptions& precision : {f32_options(), default_options()}) {
    for (bool decode : {false, true}) {
      const std::vector<double> whole = likelihoods(precision, decode);
      for (int64_t chunk : {7, 16, 64}) {
        EngineOptions options = precision;
        options.prefill_chunk = chunk;
        options.threads = chunk == 16 ? 1 : 2;
        options.max_batch = chunk == 16 ? 1 : 2;
        EXPECT_EQ(likelihoods(options, decode), whole) << chunk << (decode ? ", decode" : ", prefill");
      }
      if (precision.kv != "f32") continue;
      EXPECT_EQ(likelihoods(precision, !decode), whole) << "both phases are the same arithmetic in F32";
    }
  }
}

/// Delayed scales follow what came before by design; the result stays near and finite.
TEST_F(EngineTest, DelayedScalingRuns) {
  EngineOptions options = default_options();
  options.prefill_scaling = "delayed";
  load({}, options);
  EXPECT_EQ(engine_->info().prefill_scaling, "delayed");
  ScoreOptions score;
  score.context = 64;
  const double delayed = engine_->score(some_ids(300), score).nll,
               exact = reload(default_options()).score(some_ids(300), score).nll;
  EXPECT_EQ(engine_->info().prefill_scaling, "exact");
  EXPECT_NE(delayed, exact);
  EXPECT_NEAR(delayed, exact, exact * 0.02);
}

// ---- end tokens, stop strings

const std::string kHello = "Hello world";  // greedy: 77 218 155 162 4 79 in F32

TEST_F(EngineTest, EndTokensAsAListAndFromEitherFile_A09) {
  Request request;
  request.prompt = kHello;
  request.max_tokens = 6;
  request.sampling.temperature = 0;
  const auto expect_stop = [&] {
    const Completion answer = ask(request);
    EXPECT_EQ(answer.ids, (Ids{77, 218}));
    EXPECT_EQ(answer.text, "M\xef\xbf\xbd");  // DA is left dangling
    EXPECT_EQ(answer.finish_reason, "stop");
    EXPECT_EQ(answer.prompt_tokens, 12);
  };
  load({.config = R"({"eos_token_id":[257,155]})"});
  expect_stop();
  write_fixture(folder_, {});
  folder_.write("generation_config.json", R"({"eos_token_id":[257,155]})");
  reload(f32_options());
  expect_stop();
  request.ignore_end_tokens = true;
  EXPECT_EQ(ask(request).ids, (Ids{77, 218, 155, 162, 4, 79}));
}

TEST_F(EngineTest, EndTokenZeroIsATokenLikeAnother_A09) {
  load({.config = R"({"eos_token_id":0})", .lm_head = "zero"});
  Request request;
  request.prompt = kHello;
  request.max_tokens = 6;
  request.sampling.temperature = 0;
  Completion answer = ask(request);
  EXPECT_TRUE(answer.ids.empty());
  EXPECT_EQ(answer.text, "");
  EXPECT_EQ(answer.finish_reason, "stop");
  load({.config = R"({"eos_token_id":null})"});
  answer = ask(request);
  EXPECT_EQ(answer.ids.size(), 6u);
  EXPECT_EQ(answer.finish_reason, "length");
}

/// A bigram model: no layer adds anything, and the head of byte b answers with the byte after b in "abcdefgh".
Fixture alphabet() {
  Fixture fixture;
  fixture.edit = [](const std::string& name, std::vector<float>& values) {
    if (name.find("o_proj") != std::string::npos || name.find("down_proj") != std::string::npos) {
      std::fill(values.begin(), values.end(), 0.0f);
    }
    if (name != "model.embed_tokens.weight" && name != "lm_head.weight") return;
    std::fill(values.begin(), values.end(), 0.0f);
    for (int b = 0; b < 26; ++b) {
      const int row = name == "lm_head.weight" ? 'a' + (b + 1) % 26 : 'a' + b;
      values[row * 64 + b] = 1.0f;
    }
  };
  return fixture;
}

TEST_F(EngineTest, StopStringsAcrossTokensNeverLeak_G06) {
  load(alphabet());
  const auto stream = [&](const std::vector<std::string>& stop) {
    Request request;
    request.prompt = "a";
    request.max_tokens = 20;
    request.sampling.temperature = 0;
    request.stop = stop;
    std::string streamed;
    const Completion answer = engine_->generate({request}, [&](size_t, std::string_view piece) {
      streamed += piece;
      return true;
    })[0];
    EXPECT_EQ(streamed, answer.text);
    EXPECT_EQ(answer.finish_reason, answer.text.size() < 20 ? "stop" : "length");
    return answer.text;
  };
  EXPECT_EQ(stream({}), "bcdefghijklmnopqrstu");
  EXPECT_EQ(stream({"fgh"}), "bcde");
  EXPECT_EQ(stream({"hij", "ghij", "k"}), "bcdef");
  EXPECT_EQ(stream({"b"}), "");
  EXPECT_EQ(stream({"u"}), "bcdefghijklmnopqrst");
  EXPECT_EQ(stream({"uv"}), "bcdefghijklmnopqrstu");
  EXPECT_EQ(stream({""}), "bcdefghijklmnopqrstu");
  EXPECT_EQ(stream({"x", "defx", "q", std::string(4000, 'e'), "zz"}), "bcdefghijklmnop");
}

// ---- sampling and errors

TEST_F(EngineTest, SeedsReproduceAndDiffer) {
  load();
  const auto answer = [&](uint64_t seed) {
    Request request = greedy_request(some_ids(20), 24);
    request.sampling = {1.0f, 0, 1.0f, 0.0f, seed};
    return ask(request).ids;
  };
  EXPECT_EQ(answer(1), answer(1));
  EXPECT_NE(answer(1), answer(2));
  Request one = greedy_request(some_ids(20), 24), two = one;
  one.sampling = two.sampling = {1.0f, 0, 1.0f, 0.0f, 1};
  two.sampling.seed = 2;
  const std::vector<Completion> both = engine_->generate({two, greedy_request(some_ids(20), 24), one});
  EXPECT_EQ(both[0].ids, answer(2));
  EXPECT_EQ(both[1].ids, ask(greedy_request(some_ids(20), 24)).ids);
  EXPECT_EQ(both[2].ids, answer(1));
}

TEST_F(EngineTest, OneRequestsErrorLeavesTheOthersAlone_G05) {
  load();
  const Request good = greedy_request(some_ids(10), 5);
  const Ids expected = ask(good).ids;
  std::vector<std::pair<Request, std::string>> bad;
  const auto add = [&](auto set, const std::string& word) {
    bad.push_back({good, word});
    set(bad.back().first);
  };
  add([](Request& r) { r.sampling.temperature = -1; }, "temperature");
  add([](Request& r) { r.sampling.top_k = -5; }, "top-k");
  add([](Request& r) { r.sampling.top_p = 1.5f; }, "top-p");
  add([](Request& r) { r.sampling.min_p = std::nanf(""); }, "min-p");
  add([](Request& r) { r.max_tokens = -2; }, "max tokens -2");
  add([](Request& r) { r.ids = {256, 259}; }, "token id 259");
  add([](Request& r) { r.ids = {-1}; }, "token id -1");
  add([](Request& r) { r.ids = some_ids(300); }, "300");
  std::vector<Request> requests;
  for (const auto& [request, word] : bad) requests.insert(requests.end(), {request, good});
  const std::vector<Completion> answers = engine_->generate(requests);
  for (size_t i = 0; i < bad.size(); ++i) {
    EXPECT_EQ(answers[2 * i].finish_reason, "error");
    EXPECT_NE(answers[2 * i].error.find(bad[i].second), std::string::npos) << answers[2 * i].error;
    EXPECT_TRUE(answers[2 * i].ids.empty());
    EXPECT_EQ(answers[2 * i + 1].ids, expected);
  }
  EXPECT_TRUE(engine_->generate({}).empty());
}

/// Two head entries of 3e38: for some prompts a logit becomes infinite or NaN, for others it does not.
TEST_F(EngineTest, RotaryTablesBeyondMemoryAreRefusedWithTheNumbers_J04) {
  Fixture fixture;
  fixture.build = R"({"num_attention_heads":1,"num_key_value_heads":1,"head_dim":1024})";
  fixture.config = R"({"max_position_embeddings":1073741824})";  // 4 TiB
  write_fixture(folder_, fixture);
  expect_load_refused(f32_options(), {"rotary tables", "1073741824", "4194304 MiB", "--max-context"});
  EngineOptions shorter = f32_options();
  shorter.max_context = 64;
  EXPECT_EQ(reload(shorter).info().context, 64);
}

TEST_F(EngineTest, AWeightThatIsNoNumberIsRefusedByFileAndTensor) {
  for (const char* name : {"model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
                           "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"}) {
    Fixture fixture;
    fixture.edit = [&](const std::string& tensor, std::vector<float>& values) {
      if (tensor == name) values[5] = std::nanf("");
    };
    const TempFolder folder;
    write_fixture(folder, fixture);
    test::expect_refused([&] { Engine::load(folder.path(), {}); }, {folder.path(), name, "nan"});
  }
}

TEST_F(EngineTest, BrokenLogitsEndOnlyTheirRequest_G01) {
  Fixture fixture;
  fixture.edit = [](const std::string& name, std::vector<float>& values) {
    if (name == "lm_head.weight") values[0] = values[1] = 3e38f;
  };
  load(fixture);
  std::vector<Request> requests;
  for (int i = 0; i < 64; ++i) requests.push_back(greedy_request({256, i}, 1));
  const std::vector<Completion> answers = engine_->generate(requests);
  int broken = 0;
  for (size_t i = 0; i < answers.size(); ++i) {
    EXPECT_EQ(answers[i].ids, ask(requests[i]).ids);
    EXPECT_EQ(answers[i].finish_reason == "error", answers[i].ids.empty());
    EXPECT_EQ(answers[i].finish_reason == "error", !answers[i].error.empty());
    broken += answers[i].finish_reason == "error";
  }
  EXPECT_GT(broken, 5);
  EXPECT_LT(broken, 59);
}

TEST_F(EngineTest, TheCallbackCancelsAll) {
  load(kEndless);
  const std::vector<Request> requests = {greedy_request(some_ids(5), 100), greedy_request(some_ids(7), 100)};
  int pieces = 0;
  const std::vector<Completion> answers = engine_->generate(requests, [&](size_t, std::string_view piece) {
    pieces += !piece.empty();
    return pieces < 10;
  });
  for (const Completion& answer : answers) {
    EXPECT_EQ(answer.finish_reason, "cancelled");
    EXPECT_EQ(answer.error, "");
    EXPECT_LT(answer.ids.size(), 10u);
  }
  EXPECT_FALSE(answers[0].ids.empty()) << "what was written stays";
  EXPECT_EQ(ask(requests[0]).ids.size(), 100u) << "pages were given back";
}

TEST_F(EngineTest, ALongPromptRunsInPassesAndCanBeCancelledBetweenThem) {
  EngineOptions options = f32_options();
  options.prefill_chunk = 7;
  load(kEndless, options);
  int asked = 0;
  const auto ask_until = [&](int limit) {
    asked = 0;
    return engine_->generate({greedy_request(some_ids(70), 1)}, [&](size_t, std::string_view piece) {
      asked += piece.empty();
      return asked < limit;
    })[0];
  };
  EXPECT_EQ(ask_until(1000).ids.size(), 1u);
  EXPECT_GE(asked, 10);  // 70 rows, at most 7 a pass
  const Completion cancelled = ask_until(3);
  EXPECT_EQ(cancelled.finish_reason, "cancelled");
  EXPECT_TRUE(cancelled.ids.empty());
  EXPECT_EQ(asked, 3);
}

TEST_F(EngineTest, ControlTokensInAPromptAreTextUnlessAskedFor_C11) {
  load(kEndless);
  Request request;
  request.prompt = "a<|eot|>";
  request.max_tokens = 0;
  EXPECT_EQ(ask(request).prompt_tokens, 1 + 8);
  request.parse_control_tokens = true;
  EXPECT_EQ(ask(request).prompt_tokens, 1 + 2);
  EXPECT_EQ(engine_->tokenize("a<|eot|>", true, true), (Ids{256, 97, 258}));
  EXPECT_EQ(engine_->detokenize({256, 97, 98}), "ab");
}

TEST_F(EngineTest, AnAddedTokenBeyondTheEmbeddingIsRefusedByTheRequestThatUsesIt_A10) {
  write_fixture(folder_, {});
  nlohmann::json tokenizer = nlohmann::json::parse(test::read_file(folder_.file("tokenizer.json")));
  tokenizer["added_tokens"].push_back({{"id", 259}, {"content", "<pad>"}, {"special", true}});
  folder_.write("tokenizer.json", tokenizer.dump());
  reload(f32_options());
  Request request;
  request.prompt = "a<pad>b";
  request.parse_control_tokens = true;
  request.max_tokens = 1;
  const Completion refused = ask(request);
  for (const char* word : {"259", "vocabulary of 259"})
    EXPECT_NE(refused.error.find(word), std::string::npos) << refused.error;
  request.prompt = "ab";
  EXPECT_EQ(ask(request).ids.size(), 1u);
}

/// Rows of the embedding that the tokenizer does not know have no text.
TEST_F(EngineTest, TokensWithoutTextAreHarmless_A10) {
  Fixture fixture{.build = R"({"vocab_size":320})"};
  fixture.edit = [](const std::string& name, std::vector<float>& values) {
    if (name != "lm_head.weight") return;
    std::fill(values.begin(), values.begin() + 296 * 64, 0.0f);  // every other logit is zero or random
    for (int i = 0; i < 64; ++i) values[297 * 64 + i] = -values[296 * 64 + i];
  };
  load(fixture);
  Request request = greedy_request(some_ids(10), 8);
  const Completion answer = ask(request);
  EXPECT_EQ(answer.error, "");
  EXPECT_EQ(answer.ids.size(), 8u);
  EXPECT_TRUE(std::any_of(answer.ids.begin(), answer.ids.end(), [](int32_t id) { return id > 258; }));
  EXPECT_LT(answer.text.size(), 8u);
}

TEST_F(EngineTest, WithoutATokenizerIdsStillWork) {
  load(kEndless);
  std::filesystem::remove(folder_.file("tokenizer.json"));
  reload(f32_options());
  EXPECT_EQ(ask(greedy_request({1, 2, 3}, 4)).ids, Ids(4, 0));
  Request text;
  text.prompt = kHello;
  EXPECT_NE(ask(text).error.find("tokenizer.json"), std::string::npos) << ask(text).error;
  Request stop = greedy_request({1}, 4);
  stop.stop = {"x"};
  EXPECT_NE(ask(stop).error.find("tokenizer.json"), std::string::npos);
  ScoreOptions options;
  options.context = 64;
  const Score score = engine_->score({1, 2, 3}, options);
  EXPECT_FALSE(score.bos);
  EXPECT_EQ(score.tokens, 2);
}

TEST_F(EngineTest, InfoAndTimingAreTold_I04) {
  load({}, default_options());
  const ModelInfo& info = engine_->info();
  EXPECT_EQ(info.architecture, "LlamaForCausalLM");
  EXPECT_EQ(info.prefill + " " + info.decode + " " + info.kv, "fp8 int4 int4");
  const int64_t layer = (64 + 2 * 32) * 64 + 64 * 64 + 3 * 96 * 64;
  EXPECT_EQ(info.parameters, 2 * (layer + 2 * 64) + 2 * 259 * 64 + 64);
  EXPECT_EQ(info.prefill_weight_bytes, 2 * (layer + 4 * (128 + 64 + 192 + 64)));  // a code each, a scale a row
  EXPECT_EQ(info.decode_weight_bytes, 2 * (8 + 4 + 12 + 4 * 2) * 544);            // tiles of 16 x 64; 96 takes two
  engine_->generate({greedy_request(some_ids(70), 9)});
  EXPECT_EQ(engine_->last_timing().prefill_tokens, 70);
  EXPECT_LE(engine_->last_timing().decode_tokens, 8);  // the first token comes from prefill
  EXPECT_GT(engine_->last_timing().prefill_seconds, 0);
}

// ---- scoring

struct Coverage {
  Score score;
  std::vector<int> times;
};

Coverage cover(Engine& engine, int64_t length, const ScoreOptions& options) {
  Coverage got;
  got.times.assign(length, 0);
  Ids ids(length);
  for (int64_t i = 0; i < length; ++i) ids[i] = static_cast<int32_t>(i * 7 % 256);
  got.score = engine.score(ids, options, [&](int64_t index, double nll, const float*) {
    EXPECT_NEAR(nll, std::log(259.0), 1e-12);
    ++got.times[index];
  });
  return got;
}

TEST_F(EngineTest, EveryTokenIsScoredOnceAndAUniformModelHasItsEntropy_I01) {
  Fixture tiny = kEndless;
  tiny.build =
      R"({"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":1,"num_key_value_heads":1})";
  load(tiny);
  for (int64_t length : {0, 1, 2, 12, 255, 256, 257, 1000}) {
    for (int64_t context : {16, 64, 256}) {
      for (int64_t stride : {int64_t{0}, int64_t{1}, int64_t{16}, int64_t{64}, context}) {
        if (length == 1000 && stride == 1) continue;  // slow, and like 257
        for (bool bos : {true, false}) {
          for (bool decode : {false, true}) {
            if (decode && length > 12 && stride != 0 && stride != 16) continue;
            ScoreOptions options;
            options.context = context;
            options.stride = stride;
            options.add_bos = bos;
            options.decode = decode;
            const int64_t expected = bos ? length : length - 1;
            if (expected <= 0) {
              expect_refused([&] { cover(*engine_, length, options); }, {"nothing to score", std::to_string(length)});
              continue;
            }
            const Coverage got = cover(*engine_, length, options);
            const std::string what = cat(length, " tokens, context ", context, ", stride ", stride, bos ? ", BOS" : "",
                                         decode ? ", decode" : "");
            ASSERT_EQ(got.score.tokens, expected) << what;
            ASSERT_EQ(got.score.bos, bos);
            ASSERT_NEAR(got.score.nll, static_cast<double>(expected) * std::log(259.0), 1e-9) << what;
            for (int64_t i = 0; i < length; ++i)
              ASSERT_EQ(got.times[i], i == 0 && !bos ? 0 : 1) << what << ", token " << i;
          }
        }
      }
    }
  }
}

TEST_F(EngineTest, ALongTextIsScoredToItsEnd) {
  load(kEndless);
  ScoreOptions options;
  options.context = 256;
  EXPECT_EQ(engine_->score(Ids(20000, 65), options).tokens, 20000);
}

TEST_F(EngineTest, BosStandsBeforeEveryWindow_I02) {
  load();
  const Ids text = engine_->tokenize(kHello, false);
  ScoreOptions options;
  options.context = 256;
  const auto nll = [&](const Ids& ids) { return engine_->score(ids, options).nll; };
  const Score with = engine_->score(text, options);
  EXPECT_TRUE(with.bos);
  EXPECT_EQ(with.tokens, 11);
  EXPECT_NEAR(with.nll, 65.206474, 1e-4);
  EXPECT_NEAR(std::exp(with.nll / 11), 375.350883, 4e-3);
  const double halves = nll({text.begin(), text.begin() + 7}) + nll({text.begin() + 7, text.end()});
  for (bool decode : {false, true}) {
    options.context = 8;
    options.decode = decode;
    const Score windows = engine_->score(text, options);
    EXPECT_EQ(windows.windows, 2);
    EXPECT_EQ(windows.tokens, 11);
    EXPECT_NEAR(windows.nll, halves, 1e-9);
  }
  options = {};
  options.context = 256;
  options.add_bos = false;
  const Score without = engine_->score(text, options);
  EXPECT_FALSE(without.bos);
  EXPECT_EQ(without.tokens, 10);
  EXPECT_NEAR(without.nll, 59.566720, 1e-4);
  test::write_byte_tokenizer(folder_, false);
  options.add_bos = true;
  const Score never = reload(f32_options()).score(text, options);
  EXPECT_FALSE(never.bos);
  EXPECT_EQ(never.nll, without.nll);
}

TEST_F(EngineTest, ScoringRefusesWhatItCannotDo) {
  load();
  ScoreOptions options;
  for (int64_t context : {-1, 0, 1, 257, 512}) {
    options.context = context;
    expect_refused([&] { engine_->score(some_ids(10), options); }, {"context size", std::to_string(context), "256"});
  }
  options.context = 64;
  for (int32_t id : {-1, 259}) expect_refused([&] { engine_->score({1, id}, options); }, {std::to_string(id), "259"});
}

}  // namespace
}  // namespace fut
