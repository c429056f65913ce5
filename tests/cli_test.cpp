// The program as its users meet it: exit codes, what goes to stdout and what to stderr, JSON, Ctrl-C, closed pipes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "io/safetensors.h"
#include "support/process.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

using nlohmann::json;
using test::fut;
using test::Process;
using test::Result;
using test::TempFolder;

size_t lines(const std::string& text) { return static_cast<size_t>(std::count(text.begin(), text.end(), '\n')); }

/// GPT-2's byte-to-character table, as UTF-8.
std::string character_of(int byte) {
  static const std::vector<int> table = [] {
    std::vector<int> codes(256);
    for (int b = 0, next = 256; b < 256; ++b) {
      const bool shown = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      codes[static_cast<size_t>(b)] = shown ? b : next++;
    }
    return codes;
  }();
  const int code = table[static_cast<size_t>(byte)];
  if (code < 128) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
}

/// A random Llama of two layers whose tokens are the 256 bytes, BOS (256) and two control tokens.
class TinyModel {
 public:
  explicit TinyModel(int64_t context, bool zero_head = false) {
    const json config = {{"architectures", {"LlamaForCausalLM"}},
                         {"model_type", "llama"},
                         {"hidden_act", "silu"},
                         {"hidden_size", 64},
                         {"intermediate_size", 128},
                         {"num_hidden_layers", 2},
                         {"num_attention_heads", 4},
                         {"num_key_value_heads", 2},
                         {"max_position_embeddings", context},
                         {"rms_norm_eps", 1e-5},
                         {"rope_theta", 10000.0},
                         {"vocab_size", 259},
                         {"tie_word_embeddings", false},
                         {"bos_token_id", 256}};
    folder_.write("config.json", config.dump());
    folder_.write("tokenizer.json", tokenizer().dump());
    write_weights(zero_head);
  }

  std::string path() const { return folder_.path(); }

 private:
  static json tokenizer() {
    json vocabulary, added = json::array();
    for (int b = 0; b < 256; ++b) vocabulary[character_of(b)] = b;
    const char* control[] = {"<|bos|>", "<|eos|>", "<|eot|>"};
    for (int i = 0; i < 3; ++i) {
      added.push_back({{"id", 256 + i},
                       {"content", control[i]},
                       {"special", true},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false}});
    }
    const json bos = {{"SpecialToken", {{"id", "<|bos|>"}, {"type_id", 0}}}};
    const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    return {{"version", "1.0"},
            {"added_tokens", added},
            {"normalizer", nullptr},
            {"pre_tokenizer",
             {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
            {"post_processor",
             {{"type", "TemplateProcessing"},
              {"single", {bos, text}},
              {"pair", {text}},
              {"special_tokens", {{"<|bos|>", {{"id", "<|bos|>"}, {"ids", {256}}, {"tokens", {"<|bos|>"}}}}}}}},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", json::array()}}}};
  }

  void write_weights(bool zero_head) {
    std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
        {"model.embed_tokens.weight", {259, 64}}, {"model.norm.weight", {64}}, {"lm_head.weight", {259, 64}}};
    for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
      const std::vector<std::pair<std::string, std::vector<int64_t>>> parts = {
          {"input_layernorm", {64}},      {"post_attention_layernorm", {64}}, {"self_attn.q_proj", {64, 64}},
          {"self_attn.k_proj", {32, 64}}, {"self_attn.v_proj", {32, 64}},     {"self_attn.o_proj", {64, 64}},
          {"mlp.gate_proj", {128, 64}},   {"mlp.up_proj", {128, 64}},         {"mlp.down_proj", {64, 128}}};
      for (const auto& [name, shape] : parts) shapes.emplace_back(layer + name + ".weight", shape);
    }
    SafetensorsWriter file(folder_.path() + "/model.safetensors");
    for (const auto& [name, shape] : shapes) file.declare(name, "F32", shape);
    std::mt19937 random(7);
    for (const auto& [name, shape] : shapes) {
      const bool norm = shape.size() == 1, zero = zero_head && name == "lm_head.weight";
      std::vector<float> values(static_cast<size_t>(norm ? shape[0] : shape[0] * shape[1]), norm ? 1.0f : 0.0f);
      std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(shape.back())));
      for (float& value : values) value = norm || zero ? value : normal(random);
      file.write(name, values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
    }
    file.finish();
  }

  TempFolder folder_;
};

const std::string& model() {
  static const TinyModel model(256);
  static const std::string path = model.path();
  return path;
}

/// Its head is all zeros: every token has probability 1 / 259.
const std::string& uniform_model() {
  static const TinyModel model(256, true);
  static const std::string path = model.path();
  return path;
}

/// Never done within a test.
const std::string& endless_model() {
  static const TinyModel model(1'000'000);
  static const std::string path = model.path();
  return path;
}

void expect_usage_error(const std::vector<std::string>& arguments, const std::string& words) {
  const Result result = fut(arguments);
  EXPECT_EQ(result.code, 2) << words;
  EXPECT_EQ(result.out, "") << words;
  EXPECT_EQ(lines(result.err), 1u) << result.err;
  EXPECT_TRUE(result.err.starts_with("fut: ")) << result.err;
  EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("--help"), std::string::npos) << result.err;
}

void expect_failure(const Result& result, const std::string& words, int code = 1) {
  EXPECT_EQ(result.code, code) << words;
  EXPECT_EQ(result.out, "") << words;
  EXPECT_EQ(lines(result.err), 1u) << result.err;
  EXPECT_TRUE(result.err.starts_with("fut: ")) << result.err;
  EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
}

TEST(Cli, HelpAndVersion) {
  const Result version = fut({"--version"});
  EXPECT_EQ(version.code, 0);
  const std::string build = test::read_file(FUT_SOURCE_DIR "/CMakeLists.txt");
  EXPECT_NE(build.find("VERSION " + version.out.substr(4, version.out.size() - 5) + " "), build.npos) << version.out;
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--help"},
                                             {"generate", "--help"},
                                             {"tokenize", "--help"},
                                             {"inspect", "--help"},
                                             {"perplexity", "--help"},
                                             {"bench", "--help"},
                                             {"bench", "model", "--help"}}) {
    const Result help = fut(arguments);
    EXPECT_EQ(help.code, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_NE(help.out.find("fut "), std::string::npos);
  }
}

TEST(Cli, WrongUsageIsOneLineAndExitCode2) {
  expect_usage_error({}, "verb");
  expect_usage_error({"write"}, "unknown verb write");
  expect_usage_error({"generate"}, "MODEL");
  expect_usage_error({"generate", model()}, "--prompt");
  expect_usage_error({"generate", model(), "-p", "a", "-f", "b"}, "exactly one");
  expect_usage_error({"generate", model(), "-p", "a", "--frobnicate"}, "--frobnicate");
  expect_usage_error({"generate", model(), "-p", "a", "--prefill", "int4"}, "--prefill int4");
  expect_usage_error({"generate", model(), "-p", "a", "--stop", ""}, "--stop");
  expect_usage_error({"generate", model(), "-p", "a", "--greedy", "--temperature", "1"}, "--greedy");
  expect_usage_error({"tokenize", model()}, "TEXT");
  expect_usage_error({"perplexity", model(), "x", "--ctx-size", "8", "--stride", "9"}, "--stride");
  expect_usage_error({"bench"}, "bench");
  expect_usage_error({"bench", "everything"}, "everything");
  expect_usage_error({"bench", "model", model(), "--pp", "0", "--tg", "0"}, "nothing to measure");
}

TEST(Cli, AnEmptyValueAfterAnEqualsSignTakesNothingElse) {
  expect_usage_error({"generate", model(), "--stop=", "--prompt", "a"}, "--stop: expected");
  expect_usage_error({"generate", model(), "-p", "a", "--kv=", "--greedy"}, "--kv : expected one of");
  EXPECT_NE(fut({"tokenize", model(), "--file=", "--json"}).err.find("name of the file"), std::string::npos);
  // A value, and what follows --, may look like such a flag.
  const Result from_stdin = fut({"tokenize", model(), "-f", "-"}, "--file=");
  EXPECT_EQ(fut({"tokenize", model(), "--", "--file="}).out, from_stdin.out);
  EXPECT_NE(fut({"tokenize", model(), "-f", "--file="}).err.find("--file=: cannot be opened"), std::string::npos);
}

TEST(Cli, NumbersOutOfRangeAreNamedWithTheirFlag_G01_G02) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> wrong = {
      {"--temperature", {"-1", "nan", "inf", "1e39", "warm", ""}},
      {"--top-p", {"1.0000001", "-0.1", "nan"}},
      {"--min-p", {"1.1", "-1"}},
      {"--top-k", {"-5", "1.5", "1e12", "99999999999999999999"}},
      {"--max-tokens", {"-2", "1e12", "1000000000000", "2.5", "nan"}},
      {"--seed", {"-1", "18446744073709551616"}},
      {"--threads", {"-1", "1e9"}},
      {"--max-batch", {"0"}},
      {"--group-size", {"0", "48"}},
      {"--kv-tokens", {"-1", "nan"}},
      {"--max-context", {"-1", "1.0"}}};
  for (const auto& [flag, values] : wrong) {
    for (const std::string& value : values)
      expect_usage_error({"generate", model(), "-p", "a", flag, value}, flag + " " + value);
  }
}

TEST(Cli, EdgesOfTheRangesAreAccepted_G01_G02) {
  for (const std::vector<std::string>& flags :
       std::vector<std::vector<std::string>>{{"--temperature", "0"},
                                             {"--temperature", "1e-45"},
                                             {"--temperature", "1e30"},
                                             {"--top-k", "0"},
                                             {"--top-k", "-1"},
                                             {"--top-k", "9999999"},
                                             {"--top-p", "0"},
                                             {"--top-p", "1"},
                                             {"--top-p", "1e-9"},
                                             {"--min-p", "0"},
                                             {"--min-p", "1"},
                                             {"--seed", "9223372036854775807"}}) {
    std::vector<std::string> arguments = {"generate", model(), "-p", "a", "-n", "2", "--json"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Result result = fut(arguments);
    EXPECT_EQ(result.code, 0) << flags[0] << " " << flags[1] << ": " << result.err;
  }
}

TEST(Cli, FailuresAreOneLineAndExitCode1) {
  expect_failure(fut({"generate", "/no/such/model", "-p", "a"}), "/no/such/model");
  expect_failure(fut({"generate", model(), "-f", "/no/such/file"}), "/no/such/file");
  expect_failure(fut({"generate", model(), "-p", std::string(255, 'a')}), "256");
  expect_failure(fut({"generate", model(), "-p", "a", "--backend", "cuda"}), "cuda");
  expect_failure(fut({"tokenize", "/no/such/model", "a"}), "/no/such/model");
  expect_failure(fut({"inspect", "/no/such/model"}), "/no/such/model");
  TempFolder folder;
  // What no file system can hold, in every place that looks before it opens.
  const std::string endless(300, 'x'), reason = "File name too long";
  folder.write("text", "some text");
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"quantize", model(), endless, "--group-size", "32"},
           {"generate", endless, "-p", "a"},
           {"tokenize", endless, "a"},
           {"chat", model(), "--template", endless},
           {"perplexity", model(), folder.path() + "/text", "--backend", "cpu", "--kl-base", endless}}) {
    const Result result = fut(arguments);
    expect_failure(result, reason);
    EXPECT_TRUE(result.err.starts_with("fut: " + endless)) << result.err;
  }
  expect_failure(fut({"quantize", model(), ""}), "name of the folder to write is empty");
  expect_failure(fut({"tokenize", "", "a"}), "name of the model is empty");
  folder.write("config.json", "{\"a\": 1, \n\"b\"");
  expect_failure(fut({"inspect", folder.path()}), "config.json");
}

TEST(Cli, OptionsThatTheModelCannotTakeAreWrongUsage_J04) {
  TempFolder folder;
  folder.write("one", "a");
  expect_failure(fut({"generate", model(), "-p", "a", "--max-context", "100000000"}), "256", 2);
  expect_failure(fut({"generate", model(), "-p", "a", "--kv-tokens", "10"}), "64", 2);
  expect_failure(fut({"perplexity", model(), folder.path() + "/one", "--ctx-size", "1000"}), "256", 2);
}

TEST(Cli, WhatCanBeRefusedIsRefusedBeforeTheWeightsAreRead) {
  TempFolder folder;  // a model without weights
  for (const char* name : {"config.json", "tokenizer.json"}) folder.write(name, test::read_file(model() + "/" + name));
  SafetensorsWriter file(folder.path() + "/model.safetensors");
  file.declare("nothing", "F32", {1});
  const float zero = 0;
  file.write("nothing", &zero, sizeof zero);
  file.finish();
  folder.write("empty", "");
  folder.write("text", "some text");
  const std::string& path = folder.path();
  const auto file_of = [&](const char* name) { return path + "/" + name; };
  expect_failure(fut({"generate", path, "-p", "a"}), "model.");  // a tensor that is missing
  expect_failure(fut({"generate", path, "-p", std::string(255, 'a')}), "no room for an answer");
  expect_failure(fut({"generate", path, "-p", "a", "-n", "100", "--kv-tokens", "64"}), "raise --kv-tokens");
  expect_failure(fut({"perplexity", path, file_of("empty")}), "nothing to score");
  expect_failure(fut({"perplexity", path, file_of("text"), "--ctx-size", "1000"}), "256", 2);
}

TEST(Cli, WhatIsPassedOverIsSaidOnce) {
  TempFolder folder;
  for (const char* name : {"config.json", "tokenizer.json", "model.safetensors"})
    folder.write(name, test::read_file(model() + "/" + name));
  folder.write("generation_config.json", R"({"eos_token_id": [257, 4711]})");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"generate", folder.path(), "-p", "a", "-n", "1", "--json", "--backend", "cpu"},
        {"inspect", folder.path()}}) {
    const Result result = fut(arguments);
    EXPECT_EQ(result.code, 0);
    EXPECT_EQ(lines(result.err), 1u) << result.err;
    EXPECT_NE(result.err.find("eos_token_id 4711 is beyond the vocabulary of 259"), std::string::npos) << result.err;
  }
}

TEST(Cli, AGroupSizeWithoutEffectIsSaid) {
  TempFolder folder;
  const std::string quantised = folder.file("quantised");
  ASSERT_EQ(fut({"quantize", model(), quantised + "/", "--group-size", "32"}).code, 0);  // as shells complete it
  const auto said = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> arguments = {"generate", quantised, "-p", "a", "-n", "1", "--json", "--backend", "cpu"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const Result result = fut(arguments);
    EXPECT_EQ(result.code, 0);
    return result.err;
  };
  EXPECT_NE(said({"--group-size", "64"}).find("group size 64 has no effect"), std::string::npos);
  EXPECT_EQ(said({"--group-size", "32"}), "");
  EXPECT_EQ(said({}), "");
}

TEST(Generate, TextOnStdoutSpeedOnStderr) {
  const Result result = fut({"generate", model(), "-p", "Hello", "-n", "6", "--seed", "3", "--backend", "cpu"});
  EXPECT_EQ(result.code, 0);
  EXPECT_TRUE(result.out.ends_with("\n"));
  EXPECT_EQ(lines(result.err), 1u) << result.err;
  for (const char* words : {"cpu", "prefill", "decode", "tok/s", "MiB"})
    EXPECT_NE(result.err.find(words), std::string::npos);

  const Result as_json =
      fut({"generate", model(), "-p", "Hello", "-n", "6", "--seed", "3", "--json", "--backend", "cpu"});
  EXPECT_EQ(as_json.err, "");
  const json answer = json::parse(as_json.out);
  EXPECT_EQ(answer.at("text").get<std::string>() + "\n", result.out);
  EXPECT_EQ(answer.at("ids").size(), 6u);
  EXPECT_EQ(answer.at("prompt_tokens"), 6);  // BOS and five bytes
  EXPECT_EQ(answer.at("finish_reason"), "length");
  for (const char* key : {"prefill_tok_s", "decode_tok_s"}) EXPECT_GT(answer.at(key).get<double>(), 0) << key;
  EXPECT_TRUE(answer.at("backend").get<std::string>().starts_with("cpu"));
}

TEST(Generate, PromptsReachTheModelByteForByte) {
  const std::vector<std::string> prompts = {"", "[a,b]", "-x", "generate", "--", "two\nlines\n", " %% ", "\xff\x80"};
  for (const std::string& prompt : prompts) {
    const Result direct = fut({"generate", model(), "-p", prompt, "-n", "4", "--greedy", "--json"});
    const Result piped = fut({"generate", model(), "-f", "-", "-n", "4", "--greedy", "--json"}, prompt);
    ASSERT_EQ(direct.code, 0) << direct.err;
    ASSERT_EQ(piped.code, 0) << piped.err;
    EXPECT_EQ(json::parse(direct.out).at("prompt_tokens"), prompt.size() + 1) << prompt;
    EXPECT_EQ(json::parse(direct.out).at("ids"), json::parse(piped.out).at("ids")) << prompt;
  }
}

TEST(Generate, MaxTokensUpToTheContextLimit_G08) {
  const auto answer = [](const std::string& prompt, const std::string& n) {
    return json::parse(fut({"generate", model(), "-p", prompt, "-n", n, "--json"}).out);
  };
  EXPECT_EQ(answer(std::string(249, 'a'), "6").at("ids").size(), 6u);
  EXPECT_EQ(answer(std::string(249, 'a'), "7").at("ids").size(), 6u);
  EXPECT_EQ(answer(std::string(254, 'a'), "-1").at("ids").size(), 1u);
  EXPECT_EQ(answer(std::string(100, 'a'), "-1").at("ids").size(), 256u - 101);
  const Result none = fut({"generate", model(), "-p", "a", "-n", "0"});
  EXPECT_EQ(none.code, 0);
  EXPECT_EQ(none.out, "");
}

TEST(Generate, StopStringsAndEcho_G06_G08) {
  const auto run = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"generate", model(), "-p", "Hello", "-n", "40", "--greedy"});
    return fut(flags).out;
  };
  std::string text = run({});
  text.pop_back();
  EXPECT_EQ(run({"--echo"}), "Hello" + text + "\n");
  const size_t ascii =
      std::distance(text.begin(), std::find_if(text.begin() + 5, text.end(), [](char c) { return c > ' '; }));
  ASSERT_LT(ascii, text.size());
  const std::string stop(1, text[ascii]);
  EXPECT_EQ(run({"--stop", "no such text", "--stop", stop}), text.substr(0, text.find(stop)) + "\n");
}

TEST(Prompts, OneLineAnAnswerInOrder) {
  const std::string file =
      "{\"prompt\": \"Hello\", \"max_tokens\": 3, \"temperature\": 0}\n"
      "\"one\"\r\n\n"
      "{\"prompt\": \"" +
      std::string(300, 'x') +
      "\"}\n"
      "{\"prompt\": \"Hello\", \"stop\": null, \"seed\": 5, \"top_k\": 0, \"top_p\": 1, \"min_p\": 0}";
  const Result result = fut({"generate", model(), "--prompts", "-", "-n", "4"}, file);
  EXPECT_EQ(result.code, 1);  // the third is too long
  ASSERT_EQ(lines(result.out), 4u);
  std::istringstream stream(result.out);
  std::vector<json> answers;
  for (std::string line; std::getline(stream, line);) answers.push_back(json::parse(line));
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(answers[i].at("index"), i);
  EXPECT_EQ(answers[0].at("ids").size(), 3u);
  EXPECT_EQ(answers[1].at("ids").size(), 4u);
  EXPECT_EQ(answers[2].at("finish_reason"), "error");
  EXPECT_NE(answers[2].at("error").get<std::string>().find("301"), std::string::npos);
  EXPECT_EQ(answers[3].at("ids").size(), 4u);
  const Result alone = fut({"generate", model(), "-p", "Hello", "-n", "3", "--greedy", "--json"});
  EXPECT_EQ(json::parse(alone.out).at("ids"), answers[0].at("ids"));
}

TEST(Prompts, ABadLineIsRefusedBeforeAnyWork_G05) {
  TempFolder folder;
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"Hello", "JSON"},
      {"{\"prompt\": \"a\"", "JSON"},
      {"[\"a\"]", "found [\"a\"], expected {\"prompt\""},
      {"{}", "\"prompt\" is missing in {}"},
      {"{\"prompt\": 5}", "\"prompt\" is 5, expected a string"},
      {"{\"prompt\": \"a\", \"max_token\": 5}", "max_token"},
      {"{\"prompt\": \"a\", \"prompt\": \"b\"}", "prompt"},
      {"{\"prompt\": \"a\", \"max_tokens\": 1.5}", "max_tokens 1.5"},
      {"{\"prompt\": \"a\", \"max_tokens\": -2}", "max_tokens -2"},
      {"{\"prompt\": \"a\", \"top_k\": \"3\"}", "top_k \"3\""},
      {"{\"prompt\": \"a\", \"top_p\": 1.0000001}", "top_p"},
      {"{\"prompt\": \"a\", \"temperature\": -1}", "temperature -1"},
      {"{\"prompt\": \"a\", \"temperature\": true}", "temperature true"},
      {"{\"prompt\": \"a\", \"stop\": [\"x\", \"\"]}", "stop holds \"\", expected"},
      {"{\"prompt\": \"a\", \"seed\": 18446744073709551615}", "seed"}};
  for (const auto& [line, words] : wrong) {
    folder.write("prompts.jsonl", "\"fine\"\n\n" + line + "\n");
    const Result result = fut({"generate", "/no/such/model", "--prompts", folder.path() + "/prompts.jsonl"});
    expect_failure(result, "prompts.jsonl:3: ");
    expect_failure(result, words);
  }
  folder.write("prompts.jsonl", "\n");
  expect_failure(fut({"generate", model(), "--prompts", folder.path() + "/prompts.jsonl"}), "no prompts in 1 bytes");
}

TEST(Tokenize, Ids) {
  EXPECT_EQ(fut({"tokenize", model(), "Hi!"}).out, "256 72 105 33\n");
  EXPECT_EQ(fut({"tokenize", model(), "Hi!", "--no-bos"}).out, "72 105 33\n");
  EXPECT_EQ(json::parse(fut({"tokenize", model(), "bench", "--json"}).out),
            json::parse("{\"ids\": [256, 98, 101, 110, 99, 104]}"));
  EXPECT_EQ(fut({"tokenize", model(), "--", "-x"}).out, "256 45 120\n");
  EXPECT_EQ(fut({"tokenize", model(), "-f", "-"}, "a<|eot|>").out, "256 97 60 124 101 111 116 124 62\n");
  EXPECT_EQ(fut({"tokenize", model(), "a<|eot|>", "--parse-control"}).out, "256 97 258\n");
  EXPECT_EQ(fut({"tokenize", model(), "", "--no-bos"}).out, "\n");
}

void expect_inspect_agrees_with_engine(const std::string& path) {
  const Result inspected = fut({"inspect", path, "--json"});
  const Result run = fut({"bench", "model", path, "--pp", "8", "--tg", "4", "--repeat", "1", "--json"});
  ASSERT_EQ(inspected.code, 0) << inspected.err;
  ASSERT_EQ(run.code, 0) << run.err;
  const json seen = json::parse(inspected.out), loaded = json::parse(run.out);
  for (const char* key : {"parameters", "prefill_weight_bytes", "decode_weight_bytes"}) {
    EXPECT_EQ(seen.at(key), loaded.at(key)) << key;
  }
  EXPECT_EQ(seen.at("embedding_and_head_bytes"),
            loaded.at("embedding_bytes").get<int64_t>() + loaded.at("head_bytes").get<int64_t>());
}

TEST(Inspect, AgreesWithWhatTheEngineLoads) {
  expect_inspect_agrees_with_engine(model());
  TempFolder folder;
  const std::string quantised = folder.file("quantised");  // in groups that no flag of inspect speaks of
  const Result made = fut({"quantize", model(), quantised, "--group-size", "32"});
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_EQ(made.out, "");
  expect_inspect_agrees_with_engine(quantised);
  EXPECT_EQ(fut({"tokenize", quantised, "Hi!"}).out, "256 72 105 33\n");
}

TEST(Inspect, ANameWithALineBreakStaysInItsLine) {
  const TempFolder folder;
  const std::string copy = folder.path() + "/two\nlines";
  std::filesystem::copy(model(), copy);
  EXPECT_EQ(lines(fut({"inspect", copy}).out), lines(fut({"inspect", model()}).out));
  const std::string text = folder.write("more\nlines", "To be, or not");
  const std::string base = folder.path() + "/base\nlines";
  const Result scored = fut({"perplexity", copy, text, "--backend", "cpu", "--kl-base", base});
  EXPECT_EQ(scored.out.find("\nlines"), std::string::npos) << scored.out;
  EXPECT_EQ(lines(scored.err), 1u) << scored.err;
  EXPECT_EQ(lines(fut({"quantize", copy, folder.path() + "/out\nlines"}).err), 1u);
}

TEST(Inspect, Numbers) {
  const json seen = json::parse(fut({"inspect", model(), "--json"}).out);
  EXPECT_EQ(seen.at("layers"), 2);
  EXPECT_EQ(seen.at("tokenizer").at("bos"), 256);
  EXPECT_EQ(seen.at("context_that_fits"), 256);
  // Two layers, J = 2 heads of E = 16: a bf16 key and a value take 2 * 16 * 2 bytes each.
  const json bf16 = json::parse(fut({"inspect", model(), "--kv", "bf16", "--json"}).out);
  EXPECT_EQ(bf16.at("kv_bytes_per_token"), 2 * 2 * 2 * 16 * 2);
  const Result text = fut({"inspect", model()});
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find("gate_up"), std::string::npos);
}

TEST(Bench, CountsWhatWasProduced_I04) {
  const Result result = fut({"bench", "model", model(), "--pp", "32", "--tg", "16", "--depth", "40", "--batch", "2",
                             "--repeat", "2", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const json report = json::parse(result.out);
  ASSERT_EQ(report.at("rows").size(), 2u);
  EXPECT_EQ(report.at("rows")[0].at("test"), "pp32");
  EXPECT_EQ(report.at("rows")[1].at("test"), "tg16 @ d40");
  for (const json& row : report.at("rows")) {
    EXPECT_EQ(row.at("tok_s_all").size(), 2u);
    EXPECT_GT(row.at("tok_s_low").get<double>(), 0);
    EXPECT_LE(row.at("tok_s_low"), row.at("tok_s"));
    EXPECT_LE(row.at("tok_s"), row.at("tok_s_high"));
    EXPECT_FALSE(row.contains("tokens_missing"));
  }
  EXPECT_GT(report.at("peak_bytes").get<int64_t>(), 1 << 20);
  EXPECT_NE(fut({"bench", "model", model(), "--pp", "8", "--tg", "8"}).out.find("| tg8 "), std::string::npos);
  TempFolder folder;
  const std::string latin1 = folder.file("mod\xe8le");  // a name that is no UTF-8 costs no results
  std::filesystem::create_symlink(model(), latin1);
  EXPECT_EQ(json::parse(fut({"bench", "model", latin1, "--pp", "8", "--tg", "0", "--json"}).out).at("rows").size(), 1u);
  const Result made = fut({"quantize", latin1, latin1 + "2", "--group-size", "32", "--json"});
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_GT(json::parse(made.out).at("decode_bytes").get<int64_t>(), 0);
}

TEST(Bench, MeasuresUpToTheModelsOwnContext) {
  const auto bench = [](const char* pp, const char* tg, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"bench", "model", model(), "--pp", pp, "--tg", tg, "--repeat", "1", "--backend", "cpu"});
    return fut(more);
  };
  EXPECT_EQ(bench("256", "254").code, 0);
  expect_failure(bench("257", "0"), "--pp 257 is beyond the context limit of 256", 2);
  expect_failure(bench("0", "255"), "--tg 255 needs a context of 257 tokens, the limit is 256", 2);
  expect_failure(bench("0", "8", {"--depth", "250"}), "--tg 8 needs a context of 259", 2);
  expect_failure(bench("9", "0", {"--max-context", "8"}), "--pp 9 is beyond the context limit of 8", 2);
}

// ---- perplexity

json perplexity(const std::string& path, const std::string& text, std::vector<std::string> flags) {
  TempFolder folder;
  folder.write("text.txt", text);
  flags.insert(flags.begin(), {"perplexity", path, folder.path() + "/text.txt", "--json"});
  const Result result = fut(flags);
  EXPECT_EQ(result.code, 0) << result.err;
  return json::parse(result.out);
}

TEST(Perplexity, UniformModelScoresEveryTokenOnce_I01) {
  const std::string text = "two\r\nlines, no newline at the end <|eot|> \xc3\xa4";
  for (const char* mode : {"prefill", "decode"}) {
    for (const std::vector<std::string>& cut :
         std::vector<std::vector<std::string>>{{"--ctx-size", "256"},
                                               {"--ctx-size", "16"},
                                               {"--ctx-size", "16", "--stride", "1"},
                                               {"--ctx-size", "16", "--stride", "16"},
                                               {}}) {
      std::vector<std::string> flags = {"--mode", mode};
      flags.insert(flags.end(), cut.begin(), cut.end());
      const json with_bos = perplexity(uniform_model(), text, flags);
      EXPECT_EQ(with_bos.at("tokens"), text.size());
      EXPECT_EQ(with_bos.at("bos"), true);
      EXPECT_NEAR(with_bos.at("ppl").get<double>(), 259.0, 1e-4);
      EXPECT_EQ(with_bos.at("mode"), mode);
      flags.push_back("--no-bos");
      const json without = perplexity(uniform_model(), text, flags);
      EXPECT_EQ(without.at("tokens"), text.size() - 1);
      EXPECT_EQ(without.at("bos"), false);
      EXPECT_NEAR(without.at("nll").get<double>(), static_cast<double>(text.size() - 1) * std::log(259.0), 1e-3);
    }
  }
}

TEST(Perplexity, ReportsTheTextItScored_I04) {
  // The digests are FIPS 180's own examples.
  EXPECT_EQ(perplexity(model(), "abc", {}).at("text_sha256"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const json report =
      perplexity(model(), "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", {"--tokens", "10"});
  EXPECT_EQ(report.at("text_sha256"), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(report.at("text_tokens"), 56);
  EXPECT_EQ(report.at("tokens"), 10);
  EXPECT_EQ(report.at("ctx_size"), 256);  // 512 is more than the model can do
}

TEST(Perplexity, NothingToScoreIsAFailure_I01) {
  TempFolder folder;
  folder.write("empty", "");
  folder.write("one", "a");
  expect_failure(fut({"perplexity", model(), folder.path() + "/empty"}), "nothing to score");
  expect_failure(fut({"perplexity", model(), folder.path() + "/one", "--no-bos"}), "nothing to score");
}

TEST(Perplexity, DivergenceFromABase) {
  TempFolder folder;
  const std::string text(std::string(120, 'a') + "The quick brown fox jumps over the lazy dog");
  const std::string base = folder.path() + "/base";
  const std::vector<std::string> exact = {"--prefill", "f32",        "--decode", "f32",       "--kv",
                                          "f32",       "--ctx-size", "64",       "--kl-base", base};
  EXPECT_FALSE(perplexity(model(), text, exact).contains("kl"));
  EXPECT_EQ(std::filesystem::file_size(base), 128 + text.size() * (259 * 2 + 4));
  EXPECT_FALSE(std::filesystem::exists(base + ".partial"));

  const json same = perplexity(model(), text, exact).at("kl");
  EXPECT_LT(same.at("max").get<double>(), 1e-6);
  EXPECT_EQ(same.at("top1_agreement"), 1.0);
  EXPECT_NEAR(same.at("nll_difference").get<double>(), 0, 1e-6);

  // Windows run side by side in decode: rows must still meet the tokens they belong to.
  std::vector<std::string> stepwise = exact;
  stepwise.insert(stepwise.end(), {"--mode", "decode"});
  EXPECT_LT(perplexity(model(), text, stepwise).at("kl").at("max").get<double>(), 1e-6);

  // Against the uniform model the mean divergence is log 259 minus the base's own entropy, so it is positive and less
  // than log 259; and its NLL is log 259, so the paired difference is known from the base's perplexity.
  std::vector<std::string> no_base(exact.begin(), exact.end() - 2);
  const double base_nll = perplexity(model(), text, no_base).at("nll");
  const json far = perplexity(uniform_model(), text, exact).at("kl");
  EXPECT_GT(far.at("mean").get<double>(), 0.01);
  EXPECT_LT(far.at("max").get<double>(), std::log(259.0));
  EXPECT_LE(far.at("mean"), far.at("p99"));
  EXPECT_LE(far.at("p99"), far.at("max"));
  EXPECT_NEAR(far.at("nll_difference").get<double>(), std::log(259.0) - base_nll / static_cast<double>(text.size()),
              1e-5);
  EXPECT_GT(far.at("nll_difference_se").get<double>(), 0);

  folder.write("other", "another text");
  folder.write("text", text);
  const auto run = [&](const std::string& file, const std::string& context, const std::string& base_file) {
    return fut({"perplexity", model(), folder.path() + "/" + file, "--ctx-size", context, "--kl-base", base_file,
                "--backend", "cpu"});
  };
  expect_failure(run("other", "64", base), "another text");
  expect_failure(run("text", "32", base), "context 64");
  expect_failure(run("text", "64", folder.path() + "/text"), "no base");
  expect_failure(run("text", "64", folder.path() + "/no/such/folder/base"), "cannot be written");
}

// ---- trouble from outside

TEST(Interrupt, CtrlCEndsCleanlyWithTheTextSoFar) {
  Process process({"generate", endless_model(), "-p", "a", "-n", "-1", "--max-batch", "1"});
  process.wait_for_output();
  process.interrupt();
  const Result result = process.finish();
  EXPECT_EQ(result.code, 130);
  EXPECT_GT(result.out.size(), 1u);
  EXPECT_TRUE(result.out.ends_with("\n"));
  EXPECT_NE(result.err.find("tok/s"), std::string::npos) << result.err;
}

TEST(Interrupt, PerplexityLeavesNoHalfWrittenBase) {
  TempFolder folder;
  folder.write("text", std::string(3'000'000, 'a'));
  const std::string base = folder.path() + "/base";
  const int signals[] = {SIGINT, SIGTERM, SIGHUP};
  for (const int signal : signals) {
    Process process({"perplexity", model(), folder.path() + "/text", "--mode", "decode", "--kl-base", base});
    while (!std::filesystem::exists(base + ".partial")) usleep(1000);
    process.interrupt(signal);
    EXPECT_EQ(process.finish().code, 128 + signal);
    EXPECT_FALSE(std::filesystem::exists(base));
    EXPECT_FALSE(std::filesystem::exists(base + ".partial")) << signal;
  }
}

TEST(Interrupt, QuantizeLeavesNoHalfWrittenFolder) {
  const int signals[] = {SIGINT, SIGTERM, SIGHUP};
  for (const int signal : signals) {
    TempFolder folder;
    folder.write("text", std::string(3'000'000, 'a'));  // hours of calibration
    Process process({"quantize", model(), folder.path() + "/out", "--group-size", "32", "--calib",
                     folder.path() + "/text", "--calib-samples", "100000", "--calib-seqlen", "256"});
    const auto files = [&] {
      return std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator());
    };
    while (files() == 1) usleep(1000);
    process.interrupt(signal);
    const Result result = process.finish();
    EXPECT_EQ(result.code, 128 + signal);
    EXPECT_EQ(result.err, "");
    EXPECT_EQ(files(), 1) << signal;
  }
}

TEST(Interrupt, EndsTheWaitForInput) {
  Process process({"quantize", model(), "/no/such/folder/out", "--calib", "-"});
  process.send("a");
  usleep(300'000);
  process.interrupt();
  const Result result = process.finish("", true);
  EXPECT_EQ(result.code, 130);
  EXPECT_EQ(result.err, "");
}

TEST(ClosedPipe, EndsQuietly) {
  Process process({"generate", endless_model(), "-p", "a", "-n", "-1", "--max-batch", "1", "--backend", "cpu"});
  process.wait_for_output();
  process.close_out();
  const Result result = process.finish();
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
}

// Whether the program was built without CUDA, or sees no card because none is visible: one line says which.
TEST(Backend, AutoSaysOnceWhyItIsTheCpu_J02) {
  TempFolder folder;
  folder.write("text", "some text");
  const std::vector<std::vector<std::string>> verbs = {
      {"generate", model(), "-p", "a", "-n", "1", "--json"},
      {"perplexity", model(), folder.path() + "/text", "--json"},
      {"bench", "model", model(), "--pp", "1", "--tg", "1", "--json"},
      {"bench", "op", "lm_head", "--shape", "smollm2-135m", "--repeat", "1", "--json"}};
  for (const char* visible : {"", "99"}) {
    setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    for (std::vector<std::string> arguments : verbs) {
      for (const bool said : {false, true}) {
        if (said) arguments.insert(arguments.end(), {"--backend", "auto"});
        const Result result = fut(arguments);
        EXPECT_EQ(result.code, 0) << result.err;
        EXPECT_EQ(lines(result.err), 1u) << result.err;
        EXPECT_TRUE(result.err.starts_with("fut: backend auto: cuda cannot be used: ")) << result.err;
        const bool built_without = result.err.find("this program was built without it") != std::string::npos;
        EXPECT_TRUE(built_without || result.err.find("no NVIDIA") != std::string::npos) << result.err;
      }
      arguments.back() = "cpu";
      EXPECT_EQ(fut(arguments).err, "");
      arguments.back() = "cuda";
      expect_failure(fut(arguments), "backend cuda: ");
    }
  }
}

TEST(OutOfMemory, IsOneLine_J04) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer needs more than any limit worth setting";
#endif
  TempFolder folder;
  const std::string text = folder.path() + "/text";
  folder.write("text", "");
  std::filesystem::resize_file(text, uint64_t{4} << 30);  // a hole: no disk is used
  expect_failure(Process({"tokenize", model(), "-f", text}, rlim_t{512} << 20).finish(), "out of memory while reading");
  expect_failure(fut({"generate", model(), "-p", "a", "--kv-tokens", "1000000000000"}), "KV cache");
}

TEST(Backend, EveryInstructionSetGivesTheSameLoss_J03) {
  TempFolder folder;
  folder.write("text", "A text of some fifty bytes, each of which is a token.");
  std::map<std::string, double> nll;
  for (const char* set : {"baseline", "avx2", "avx512"}) {
    setenv("FUT_SIMD", set, 1);
    const Result result = fut({"perplexity", model(), folder.path() + "/text", "--prefill", "f32", "--decode", "f32",
                               "--kv", "f32", "--backend", "cpu", "--json"});
    if (result.err.find("not on this machine") != std::string::npos) continue;
    ASSERT_EQ(result.code, 0) << result.err;
    const json report = json::parse(result.out);
    nll[set] = report["nll"].get<double>() / report["tokens"].get<double>();
  }
  unsetenv("FUT_SIMD");
  ASSERT_TRUE(nll.contains("baseline"));
  for (const auto& [set, loss] : nll) EXPECT_NEAR(loss, nll["baseline"], 1e-5) << set;
}

/// Quantises onto file systems of a few KiB, each larger than the last, in a mount namespace of the test's own: the
/// disk is full in every file that is written, until all of them fit.
TEST(OutOfDisk, LeavesNothingBehindAndSaysWhichFile_J04) {
  const TempFolder folder;
  const std::string disk = folder.path() + "/disk";
  std::filesystem::create_directory(disk);
  const auto shell = [&](const std::string& commands) {
    const std::string line = "unshare --user --map-root-user --mount sh -c '" + commands + "'";
    return WEXITSTATUS(std::system((line + " >" + folder.file("out") + " 2>" + folder.file("err")).c_str()));
  };
  const auto mount = [&](int kib) { return cat("mount -t tmpfs -o size=", kib, "k none ", disk, " || exit 77; "); };
  if (shell(mount(4)) != 0)
    GTEST_SKIP() << "no file system can be mounted here: " << test::read_file(folder.file("err"));
  std::set<std::string> full;
  int kib = 4;
  for (int code = 1; code != 0; kib += 8) {
    ASSERT_LT(kib, 4096);
    code = shell(cat(mount(kib), test::program(), " quantize ", model(), " ", disk, "/q --group-size 32; code=$?; ls ",
                     disk, "; exit $code"));
    const std::string left = test::read_file(folder.file("out")), said = test::read_file(folder.file("err"));
    if (code == 0) break;
    EXPECT_EQ(code, 1) << said;
    EXPECT_EQ(left, "") << kib << " KiB: half a model was left";
    EXPECT_EQ(lines(said), 1u) << said;
    EXPECT_NE(said.find("No space left on device"), std::string::npos) << said;
    const size_t slash = said.find("/q.partial-");
    ASSERT_NE(slash, std::string::npos) << said;
    const size_t name = said.find('/', slash + 1);
    full.insert(said.substr(name + 1, said.find(':', name) - name - 1));
  }
  EXPECT_TRUE(full.contains("decode/model.safetensors.partial")) << "never full while the weights were written";
  EXPECT_GE(full.size(), 3u);
}

TEST(OutOfMemory, NamesTheLimitOnTheProcess_J04) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the address sanitizer needs more than any limit worth setting";
#endif
  const auto limited = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> arguments = {"generate", model(), "-p", "a", "-n", "1", "--backend", "cpu"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return Process(arguments, rlim_t{512} << 20).finish();
  };
  expect_failure(limited({"--threads", "1000"}), "of the 512 MiB that ulimit -v allows");
  // The pool is sized from what the limit leaves, not from what the machine has.
  EXPECT_EQ(limited({"--threads", "1", "--max-batch", "4000"}).code, 0);
}

}  // namespace
}  // namespace fut
