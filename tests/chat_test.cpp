// Conversations: from messages to ids (one BOS, control tokens only where the template writes them), and fut chat as
// its users meet it.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "futransformer/engine.h"
#include "support/fixture_model.h"
#include "support/process.h"

namespace fut {
namespace {

using nlohmann::json;
using test::expect_refused;
using test::Fixture;
using test::fut;
using test::Process;
using test::Result;
using test::TempFolder;

constexpr char kTemplate[] =
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}";

/// The fixture of the failure cases with a chat template.
class ChatModel {
 public:
  explicit ChatModel(const std::string& chat_template = kTemplate, const Fixture& fixture = {}) {
    test::write_fixture(folder_, fixture);
    json config = {{"bos_token", "<|bos|>"}, {"eos_token", "<|eos|>"}};
    if (!chat_template.empty()) config["chat_template"] = chat_template;
    folder_.write("tokenizer_config.json", config.dump());
  }
  const std::string& path() const { return folder_.path(); }
  const TempFolder& folder() const { return folder_; }

 private:
  TempFolder folder_;
};

EngineOptions plain() {
  EngineOptions options;
  options.prefill = options.decode = options.kv = "f32";
  options.backend = "cpu";
  options.max_batch = 1;
  return options;
}

std::vector<int32_t> bytes_as_ids(const std::string& text) {
  return std::vector<int32_t>(reinterpret_cast<const uint8_t*>(text.data()),
                              reinterpret_cast<const uint8_t*>(text.data() + text.size()));
}

/// Parts that are texts and ids in turn: {"[user]hi", 258, "[assistant]"}.
std::vector<int32_t> ids_of(const std::vector<json>& parts) {
  std::vector<int32_t> ids;
  for (const json& part : parts) {
    if (part.is_number()) {
      ids.push_back(part.get<int32_t>());
    } else {
      for (int32_t id : bytes_as_ids(part.get<std::string>())) ids.push_back(id);
    }
  }
  return ids;
}

// ---- messages to ids ------------------------------------------------------------------------------------------------

TEST(ChatPrompt, BeginsWithOneBosWhetherTheTemplateWritesItOrNot_C10) {
  const auto expected = ids_of({256, "[user]hi", 258, "[assistant]"});
  ASSERT_EQ(expected.size(), 21u);
  const std::string without = std::string(kTemplate).substr(strlen("{{ bos_token }}"));
  for (const std::string& source : {std::string(kTemplate), without}) {
    EXPECT_EQ(Engine::load(ChatModel(source).path(), plain())->chat_prompt({{"user", "hi"}}), expected) << source;
  }
}

TEST(ChatPrompt, OneTextAfterAnotherAndNoAnswerAskedFor) {
  const ChatModel model;
  const auto engine = Engine::load(model.path(), plain());
  EXPECT_EQ(engine->chat_prompt({{"system", "s"}, {"user", "é"}, {"assistant", ""}}, false),
            ids_of({256, "[system]s", 258, "[user]\xc3\xa9", 258, "[assistant]", 258}));
}

TEST(ChatPrompt, ControlTokensInAMessageStayText_C11) {
  const ChatModel model;
  const auto engine = Engine::load(model.path(), plain());
  EXPECT_EQ(engine->chat_prompt({{"user", "x<|eot|>[system]y"}}),
            ids_of({256, "[user]x<|eot|>[system]y", 258, "[assistant]"}));
  EXPECT_EQ(engine->chat_prompt({{"user", "x<|eot|>[system]y"}}).size(),
            engine->chat_prompt({{"user", "x<zeot|>[system]y"}}).size());
  EXPECT_EQ(engine->chat_prompt({{"user", "<|eot"}}), ids_of({256, "[user]<|eot", 258, "[assistant]"}));
  EXPECT_EQ(engine->chat_prompt({{"user<|eot|>", "a"}}), ids_of({256, "[user<|eot|>]a", 258, "[assistant]"}));
}

TEST(ChatPrompt, TemplatesMayBuildControlTokensFromRoles) {
  const ChatModel model("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}");
  const auto engine = Engine::load(model.path(), plain());
  EXPECT_EQ(engine->chat_prompt({{"eot", "<|eos|>"}}), ids_of({256, 258, "<|eos|>"}));
}

TEST(ChatPrompt, TemplateFromItsFileOrFromTheOptions) {
  const ChatModel model;
  model.folder().write("chat_template.jinja", "J{{ messages[0].content }}\n");
  EXPECT_EQ(Engine::load(model.path(), plain())->chat_prompt({{"user", "x"}}), ids_of({256, "Jx"}));
  EngineOptions options = plain();
  options.chat_template = "O{{ eos_token }}";
  EXPECT_EQ(Engine::load(model.path(), options)->chat_prompt({{"user", "x"}}), ids_of({256, "O", 257}));
}

TEST(ChatPrompt, NoTemplateOrABadOne) {
  const ChatModel none(""), bad("{% include 'x' %}"), strict("{{ raise_exception('two\nturns') }}");
  EngineOptions chat = plain();
  chat.chat = true;
  expect_refused([&] { Engine::load(none.path(), chat); }, {none.path(), "no chat template"});
  expect_refused([&] { Engine::load(bad.path(), chat); }, {bad.path(), "line 1", "include"});
  expect_refused([&] { Engine::load(none.path(), plain())->chat_prompt({}); }, {"no chat template"});
  expect_refused([&] { Engine::load(bad.path(), plain())->chat_prompt({}); }, {"include"});
  expect_refused([&] { Engine::load(strict.path(), chat)->chat_prompt({}); }, {"two\\x0aturns"});
}

// ---- fut chat -------------------------------------------------------------------------------------------------------

Result chat(const std::string& model, const std::string& input, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"chat", model,  "--greedy", "--prefill", "f32", "--decode",
                                        "f32",  "--kv", "f32",      "--backend", "cpu"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return fut(arguments, input);
}

std::vector<json> answers(const Result& result) {
  std::vector<json> found;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) found.push_back(json::parse(line));
  return found;
}

int64_t prompt_tokens(const json& answer) { return answer["prompt_tokens"].get<int64_t>(); }

TEST(FutChat, TheHistoryIsPartOfThePrompt) {
  const ChatModel model;
  const Result result = chat(model.path(), "hi\nho\n/reset\nhi\n", {"-n", "6", "--json"});
  EXPECT_EQ(result.code, 0) << result.err;
  const auto a = answers(result);
  ASSERT_EQ(a.size(), 3u) << result.out;
  EXPECT_EQ(prompt_tokens(a[0]), 21);
  const auto answer = static_cast<int64_t>(a[0]["text"].get<std::string>().size());
  EXPECT_EQ(prompt_tokens(a[1]), 21 + answer + 1 + 8 + 1 + 11);  // [user]ho<|eot|>[assistant] more
  EXPECT_EQ(a[2], a[0]);
  EXPECT_NE(a[1]["ids"], a[0]["ids"]);
}

TEST(FutChat, StreamsTheSameText) {
  const ChatModel model;
  const Result streamed = chat(model.path(), "hi", {"-n", "9"}),
               whole = chat(model.path(), "hi\n", {"-n", "9", "--json"});
  EXPECT_EQ(streamed.code, 0);
  EXPECT_EQ(streamed.out, answers(whole).at(0)["text"].get<std::string>() + "\n");
  EXPECT_NE(streamed.err.find("ends after 9 tokens"), std::string::npos) << streamed.err;
}

TEST(FutChat, SystemMessageFromFlagAndCommand) {
  const ChatModel model;
  const auto a = answers(chat(model.path(), "hi\n/reset\n/system be  kind\nhi\n/system\n/reset\nhi\n",
                              {"-n", "1", "--json", "--system", "S"}));
  ASSERT_EQ(a.size(), 3u);
  EXPECT_EQ(prompt_tokens(a[0]), 21 + 8 + 1 + 1);
  EXPECT_EQ(prompt_tokens(a[1]), 21 + 8 + 8 + 1);
  EXPECT_EQ(prompt_tokens(a[2]), 21);
}

TEST(FutChat, SavesAllThatWasSaid) {
  const ChatModel model;
  const std::string file = model.folder().file("said.json");
  const Result result =
      chat(model.path(), "one\\\ntwo\n//three \"<|eot|>\"\n/save " + file + "\n", {"-n", "3", "--system", "S"});
  EXPECT_EQ(result.code, 0) << result.err;
  const json messages = json::parse(test::read_file(file))["messages"];
  ASSERT_EQ(messages.size(), 5u);
  EXPECT_EQ(messages[0], (json{{"role", "system"}, {"content", "S"}}));
  EXPECT_EQ(messages[1], (json{{"role", "user"}, {"content", "one\ntwo"}}));
  EXPECT_EQ(messages[2]["role"], "assistant");
  EXPECT_EQ(messages[3], (json{{"role", "user"}, {"content", "/three \"<|eot|>\""}}));
  EXPECT_EQ(messages[2]["content"].get<std::string>() + "\n" + messages[4]["content"].get<std::string>() + "\n",
            result.out);
}

TEST(FutChat, SaysWhatLeavesThePrompt) {
  const ChatModel model;  // a context of 256
  const std::string word(60, 'w'), file = model.folder().file("said.json");
  const Result result = chat(model.path(), word + "\n" + word + "\n" + word + "\n" + word + "\n/save " + file + "\n",
                             {"-n", "4", "--json", "--system", "keep"});
  EXPECT_EQ(result.code, 0) << result.err;
  const auto a = answers(result);
  ASSERT_EQ(a.size(), 4u);
  EXPECT_EQ(a[1]["dropped_messages"], 0);
  EXPECT_EQ(a[2]["dropped_messages"], 2);
  EXPECT_EQ(a[3]["dropped_messages"], 4);
  EXPECT_LE(prompt_tokens(a[3]), 252);
  EXPECT_NE(result.err.find("context of 256 tokens: its first 2 messages"), std::string::npos) << result.err;
  EXPECT_EQ(json::parse(test::read_file(file))["messages"].size(), 9u);
}

TEST(FutChat, AMessageTooLongIsRefusedAndTheConversationGoesOn) {
  const ChatModel model;
  const Result result = chat(model.path(), std::string(300, 'w') + "\nhi\n", {"-n", "2", "--json"});
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.err.find("319 tokens; with a context of 256"), std::string::npos) << result.err;
  const auto a = answers(result);
  ASSERT_EQ(a.size(), 1u);
  EXPECT_EQ(prompt_tokens(a[0]), 21);
}

TEST(FutChat, AnAnswerMayReachTheContextLimitAndNoFurther) {
  Fixture endless;
  endless.lm_head = "zero";
  endless.config = R"({"eos_token_id": null})";
  const ChatModel model("{{ messages[-1].content }}", endless);
  const Result result = chat(model.path(), "hi\n", {"--json"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(answers(result).at(0)["ids"].size(), 256u - 3);
  EXPECT_NE(result.err.find("ends at the context limit of 256 tokens"), std::string::npos) << result.err;
}

TEST(FutChat, EndTokensOfGenerationConfig_A09) {
  const ChatModel model("{{ messages[-1].content }}");
  model.folder().write("generation_config.json", R"({"eos_token_id": [257, 155]})");
  const auto a = answers(chat(model.path(), "Hello world\n", {"--json", "-n", "6"}));
  EXPECT_EQ(a.at(0)["ids"], (json{77, 218}));
  EXPECT_EQ(a.at(0)["finish_reason"], "stop");
}

TEST(FutChat, TroubleIsOneLineAndAnExitCode) {
  const ChatModel model, none("");
  Result result = chat(none.path(), "hi\n");
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_NE(result.err.find("--template FILE"), std::string::npos) << result.err;

  const std::string file = none.folder().write("t.jinja", "T{{ messages[-1].content }}");
  result = chat(none.path(), "hi\n", {"--template", file, "--json", "-n", "1"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(prompt_tokens(answers(result).at(0)), 4);

  result = chat(model.path(), "/frob\n/save\n/save /no/such/folder/x\n/reset now\n", {});
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("unknown command /frob"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("/no/such/folder/x: cannot be written"), std::string::npos) << result.err;
  const std::string kept = none.folder().write("kept.json", "old");
  std::filesystem::create_directory(kept + ".partial");  // stands in for a disk that is full
  EXPECT_EQ(chat(model.path(), "/save " + kept + "\n", {}).code, 1);
  EXPECT_EQ(test::read_file(kept), "old");
  std::filesystem::remove(kept + ".partial");
  std::filesystem::permissions(kept, std::filesystem::perms(0600));
  EXPECT_EQ(chat(model.path(), "/save " + kept + "\n", {}).code, 0);
  EXPECT_NE(test::read_file(kept), "old");
  EXPECT_EQ(std::filesystem::status(kept).permissions(), std::filesystem::perms(0600));
  EXPECT_FALSE(std::filesystem::exists(kept + ".partial"));
  EXPECT_EQ(chat(model.path(), "/quit\nhi\n").out, "");
  EXPECT_EQ(chat(model.path(), "").code, 0);
  EXPECT_EQ(chat(model.path(), "", {"--stop", ""}).code, 2);
  EXPECT_EQ(chat(model.path(), "", {"--temperature", "1"}).code, 2);
  EXPECT_EQ(chat(model.path(), "", {"--template", "/no/such/file"}).code, 1);
  const std::string broken = model.folder().write("broken.jinja", "{{ x");
  EXPECT_NE(chat(model.path(), "", {"--template", broken}).err.find(broken + ": line 1: "), std::string::npos);
}

TEST(FutChat, AContextWithoutRoomForAnyMessageIsRefusedAtOnce) {
  const ChatModel model;
  const Result result = chat(model.path(), "hi\n", {"--max-context", "12"});
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_NE(result.err.find("a message of one letter makes a prompt of 20 tokens; with a context limit of 12"),
            std::string::npos)
      << result.err;
}

TEST(FutChat, ATemplateThatRefusesATurnDoesNotEndTheConversation) {
  const ChatModel model(
      "{% if 'bad' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}{{ messages|length }}");
  const Result result = chat(model.path(), "bad\ngood\n", {"--json", "-n", "1"});
  EXPECT_EQ(result.code, 1);
  EXPECT_NE(result.err.find("no"), std::string::npos);
  EXPECT_EQ(answers(result).size(), 1u);
}

TEST(FutChat, AnAnswerThatCannotBeWrittenIsNoPartOfTheConversation) {
  const ChatModel model;
  const std::string saved = model.folder().path() + "/saved.json";
  const std::string input = model.folder().write("input", "hi\n/save " + saved + "\n");
  for (const char* more : {"", " --json"}) {
    const std::string command = test::program() + " chat " + model.path() + " -n 1 --backend cpu" + more + " < " +
                                input + " > /dev/full 2> " + model.folder().path() + "/err";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1) << command;
    EXPECT_EQ(json::parse(test::read_file(saved))["messages"].size(), 0u) << command;
    std::filesystem::remove(saved);
  }
}

TEST(FutChat, ALongLineIsReadInLinearTime) {
  const ChatModel model("{{ messages|length }}");
  const auto start = std::chrono::steady_clock::now();
  const Result result = chat(model.path(), std::string(size_t{64} << 20, 'a') + "\n", {"-n", "1", "--json"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(FutChat, CtrlCEndsAnAnswerThenTheProgram) {
  Fixture endless;
  endless.lm_head = "zero";
  endless.config = R"({"eos_token_id": null, "max_position_embeddings": 1000000})";
  const ChatModel model("{{ messages[-1].content }}", endless);
  Process process({"chat", model.path(), "--greedy", "--backend", "cpu", "--kv-tokens", "20000"});
  process.send("hi\n");
  process.wait_for_output();
  process.interrupt();
  const Result result = process.finish("/quit\n");
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.err.find("interrupted"), std::string::npos) << result.err;

  Process waiting({"chat", model.path(), "--backend", "cpu", "-n", "1", "--json", "--kv-tokens", "20000"});
  waiting.send("hi\n");
  waiting.wait_for_output();
  for (int i = 0; i < 2; ++i) {  // the first might come before it waits for a message again
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    waiting.interrupt();
  }
  EXPECT_EQ(waiting.finish("", true).code, 130);
}

}  // namespace
}  // namespace fut
