// Text to ids and back: published ids for Llama-3, hand-made vocabularies for the rules, and files that must be
// refused.
#include "io/tokenizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "base/error.h"
#include "io/utf8.h"
#include "support/runs.h"

namespace fut {
namespace {

using Ids = std::vector<int32_t>;
namespace fs = std::filesystem;

const std::string kData = FUT_SOURCE_DIR "/../shared/data";

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// A folder that goes when the test ends.
class Folder {
 public:
  Folder() {
    std::string path = (fs::temp_directory_path() / "fut_tokenizer_XXXXXX").string();
    if (!mkdtemp(path.data())) throw std::runtime_error("no temporary folder");
    path_ = path;
  }
  ~Folder() { fs::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::unique_ptr<Tokenizer> load(const std::string& tokenizer_json, const std::string& config_json = "") {
  const Folder folder;
  folder.write("tokenizer.json", tokenizer_json);
  if (!config_json.empty()) folder.write("tokenizer_config.json", config_json);
  return Tokenizer::from_hf_folder(folder.path());
}

/// The message with which loading fails; empty if it does not.
std::string refusal(const std::string& tokenizer_json, const std::string& config_json = "") {
  try {
    load(tokenizer_json, config_json);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_refused(const std::string& json, const std::string& named, const std::string& config = "") {
  const std::string message = refusal(json, config);
  EXPECT_NE(message.find(named), std::string::npos) << "\"" << message << "\" does not name " << named;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error("not in the text: " + from);
  return text.replace(at, from.size(), to);
}

Ids text_ids(const Tokenizer& tokenizer, std::string_view text) {
  return tokenizer.encode(text, false, ControlTokens::as_text);
}

/// GPT-2's spelling of a byte, as it stands in a JSON string.
std::string json_spelling(int byte) {
  int others = 0;
  const auto visible = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255); };
  for (int b = 0; b < byte; ++b) others += !visible(b);
  std::string text = byte == '"' || byte == '\\' ? "\\" : "";
  append_utf8(text, static_cast<char32_t>(visible(byte) ? byte : 256 + others));
  return text;
}

const std::string kByteLevel = R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";

/// The fixture of the failure cases: the 256 bytes, three control tokens, a template that puts <|bos|> first.
std::string byte_fixture(const std::string& more_vocabulary = "", const std::string& merges = "",
                         const std::string& more_added = "") {
  std::string vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary += (byte ? "," : "") + ("\"" + json_spelling(byte) + "\":" + std::to_string(byte));
  }
  return R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[
    {"id":256,"content":"<|bos|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
    {"id":257,"content":"<|eos|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
    {"id":258,"content":"<|eot|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true})" +
         more_added + R"(],"normalizer":null,"pre_tokenizer":)" + kByteLevel +
         R"(,"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|bos|>","type_id":0}},
    {"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<|bos|>":{"id":"<|bos|>","ids":[256],
    "tokens":["<|bos|>"]}}},"decoder":)" +
         kByteLevel + R"(,"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,
    "end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{)" +
         vocabulary + more_vocabulary + "},\"merges\":[" + merges + "]}}";
}

std::string made_valid(std::string_view bytes) {
  std::string text;
  if (append_valid_utf8(text, bytes) < bytes.size()) append_utf8(text, kReplacement);
  return text;
}

// ---- Llama-3 --------------------------------------------------------------------------------------------------------

class Llama3 : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string packed = kData + "/tokenizers/llama3/tokenizer.json.gz";
    if (!fs::exists(packed)) return;
    const Folder folder;
    const std::string command = "gzip -dc '" + packed + "' > '" + folder.path() + "/tokenizer.json'";
    if (std::system(command.c_str()) != 0) return;
    folder.write("tokenizer_config.json", read_file(kData + "/tokenizers/llama3/tokenizer_config.json"));
    tokenizer_ = Tokenizer::from_hf_folder(folder.path()).release();
  }
  static void TearDownTestSuite() { delete tokenizer_; }
  void SetUp() override {
    if (!tokenizer_) GTEST_SKIP() << "no " << kData << "/tokenizers/llama3, or no gzip";
  }
  static Ids ids(std::string_view text) { return text_ids(*tokenizer_, text); }

  static const Tokenizer* tokenizer_;
};
const Tokenizer* Llama3::tokenizer_ = nullptr;

TEST_F(Llama3, PublishedVectors) {
  const std::string inputs = read_file(kData + "/tokenizers/llama3/vectors.inp"), mark = "\n__ggml_vocab_test__\n";
  std::ifstream outputs(kData + "/tokenizers/llama3/vectors.out");
  int count = 0;
  for (size_t at = 0, end = 0; end != std::string::npos; ++count) {
    end = inputs.find(mark, at);  // what comes after the last mark is a string too, the empty one
    const std::string text = inputs.substr(at, end - at);
    std::string line;
    std::getline(outputs, line);
    std::istringstream numbers(line);
    const Ids expected{std::istream_iterator<int32_t>(numbers), {}};
    EXPECT_EQ(ids(text), expected) << text;
    EXPECT_EQ(tokenizer_->decode(expected), text);
    at = end + mark.size();
  }
  EXPECT_EQ(count, 47);
}

TEST_F(Llama3, SplitsDigitsContractionsAndLineEnds_C01_C06) {
  const std::vector<std::pair<std::string, Ids>> cases = {
      {"3333+777?", {8765, 18, 10, 15831, 30}},
      {"12345678901", {4513, 10961, 16474, 1721}},
      {"x1234", {87, 4513, 19}},
      {"'RE we'Ve I'M", {95253, 584, 6, 43712, 358, 28703}},
      {"a\r\n\r\nb", {64, 881, 65}},
      {"a \n b", {64, 720, 293}},
      {"a\n\n\n  b", {64, 1432, 220, 293}},
      {"   x", {256, 865}},
      {"x   ", {87, 262}},
      {"x\u00A0y", {87, 4194, 88}},
      {"x\u3000y", {87, 23249, 88}},
      {"  \n  ", {2355, 256}},
      {"def f(x):\n    return x\n", {755, 282, 2120, 997, 262, 471, 865, 198}},
      {"half½ ² ³ ① Ⅷ ٣٤٥٦",
       {38106, 27154, 220, 30556, 220, 44301, 220, 118075, 220, 71567, 100, 220, 117413, 124079, 124043, 149, 99}},
      {"", {}},
      {"\U0001F999", {9468, 99, 247}},
      {"\U0001F468\u200D\U0001F469\u200D\U0001F467\u200D\U0001F466",
       {9468, 239, 101, 102470, 9468, 239, 102, 102470, 9468, 239, 100, 102470, 9468, 239, 99}},
      {std::string(1, '\0'), {188}},
      {"\uFFFD", {5809}},
      {"x\u0085y", {87, 116360, 88}},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(ids(text), expected) << text;
    EXPECT_EQ(tokenizer_->decode(expected), text);
  }
}

TEST_F(Llama3, WikiText) {
  const std::string text = read_file(kData + "/text/wiki.test.raw");
  if (text.empty()) GTEST_SKIP() << "no " << kData << "/text/wiki.test.raw";
  const Ids wiki = ids(text);
  EXPECT_EQ(wiki.size(), 289076u);
  EXPECT_EQ(tokenizer_->decode(wiki), text);
}

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST_F(Llama3, LongRunsTakeLinearTime_C08) {
  struct Run {
    std::string unit;
    int count;
    size_t tokens;
    Ids ends;
  };
  const std::vector<Run> runs = {
      {"a", 100000, 12500, {70540, 70540}},      {"_", 50000, 782, {48032, 48032, 7841}},
      {" ", 10000, 79, {58040, 58040, 338}},     {"\n", 5000, 157, {80183, 80183, 6087}},
      {"!", 20000, 2500, {51767, 51767, 51767}}, {"1", 100001, 33334, {}},
      {"é", 3000, 3000, {978, 978, 978}},
  };
  for (const Run& run : runs) {
    Ids found;
    EXPECT_LT(test::seconds([&] { found = ids(repeated(run.unit, run.count)); }), 1.0) << run.unit;
    ASSERT_EQ(found.size(), run.tokens) << run.unit;
    EXPECT_TRUE(std::equal(run.ends.rbegin(), run.ends.rend(), found.rbegin())) << run.unit;
  }
  EXPECT_LT(test::seconds([&] { EXPECT_EQ(ids(repeated("a", 1'600'000)).size(), 200'000u); }), 4.0);
}

TEST_F(Llama3, AnyRunAtFiveMegabytesASecond_C08) {
  test::expect_any_run_at_five_megabytes_a_second([&](const std::string& text) { return ids(text); },
                                                  [&](const Ids& found) { return tokenizer_->decode(found); });
}

std::vector<std::string> streamed(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder decoder(tokenizer);
  std::vector<std::string> pieces;
  for (const int32_t id : ids) pieces.push_back(decoder.add(id));
  pieces.push_back(decoder.finish());
  return pieces;
}

TEST_F(Llama3, StreamsWholeCharacters_C07) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(streamed(*tokenizer_, {9468, 99, 247}), (Pieces{"", "", "\U0001F999", ""}));
  EXPECT_EQ(streamed(*tokenizer_, {9468, 99}), (Pieces{"", "", "\uFFFD"}));
  EXPECT_EQ(streamed(*tokenizer_, {1232, 364, 1874}), (Pieces{"':", " '", "search", ""}));
}

TEST_F(Llama3, ControlTokens) {
  const std::string text = "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>";
  EXPECT_EQ(tokenizer_->encode(text, true, ControlTokens::parsed),
            (Ids{128000, 128006, 882, 128007, 271, 6151, 128009}));
  const Ids as_text = ids(text);
  EXPECT_LT(*std::max_element(as_text.begin(), as_text.end()), 128000);
  EXPECT_EQ(tokenizer_->decode(as_text), text);
  EXPECT_EQ(tokenizer_->bytes(128009), "");
  EXPECT_EQ(tokenizer_->bos(), 128000);
  EXPECT_EQ(tokenizer_->eos(), Ids{128009});
  EXPECT_TRUE(tokenizer_->adds_bos());
  EXPECT_EQ(tokenizer_->size(), 128256);
}

// ---- tokenizer.json -------------------------------------------------------------------------------------------------

TEST(TokenizerJson, ByteFixture) {
  const auto tokenizer = load(byte_fixture(), R"({"bos_token":"<|bos|>","eos_token":{"content":"<|eos|>"}})");
  EXPECT_EQ(tokenizer->encode("Hi<|eot|>", true, ControlTokens::parsed), (Ids{256, 'H', 'i', 258}));
  EXPECT_EQ(tokenizer->encode("Hi<|eot|>", false, ControlTokens::as_text),
            (Ids{'H', 'i', '<', '|', 'e', 'o', 't', '|', '>'}));
  EXPECT_EQ(tokenizer->encode("<|bos|>hi", true, ControlTokens::parsed), (Ids{256, 256, 'h', 'i'}));
  EXPECT_EQ(tokenizer->bos(), 256);
  EXPECT_EQ(tokenizer->eos(), Ids{257});
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->size(), 259);
  for (const int32_t id : {-1, 256, 258, 259, 1 << 30}) EXPECT_EQ(tokenizer->bytes(id), "") << id;
}

TEST(TokenizerJson, AnyBytesComeBack) {
  const auto tokenizer = load(byte_fixture(",\"aa\":259,\"\\u00c3\\u00a9\":260", "\"a a\",[\"\\u00c3\",\"\\u00a9\"]"));
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (unsigned n = random() % 64; n > 0; --n) text += static_cast<char>(random() % 3 ? random() % 256 : 'a');
    EXPECT_EQ(tokenizer->decode(text_ids(*tokenizer, text)), text);
  }
  EXPECT_EQ(text_ids(*tokenizer, std::string("a\0aa\xC3\xA9\xC3", 7)), (Ids{'a', 0, 259, 260, 0xC3}));
}

TEST(TokenizerJson, StreamNeverHoldsBackText_C07) {
  const auto tokenizer = load(byte_fixture());
  EXPECT_EQ(streamed(*tokenizer, {0x4D, 0xDA, 0x9B, 0xA2, 0x04, 0x4F}),
            (std::vector<std::string>{"M", "", "\u069B", "\uFFFD", "\x04", "O", ""}));
  EXPECT_EQ(streamed(*tokenizer, {0xF0, 'x', 258, 999, 0xE2}),
            (std::vector<std::string>{"", "\uFFFDx", "", "", "", "\uFFFD"}));
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    Ids ids;
    for (unsigned n = random() % 40; n > 0; --n)
      ids.push_back(static_cast<int32_t>(random() % 4 ? 0x80 + random() % 128 : 'x'));
    std::string joined;
    for (const std::string& piece : streamed(*tokenizer, ids)) joined += piece;
    EXPECT_EQ(joined, made_valid(tokenizer->decode(ids)));
  }
}

std::string toy(const std::string& merges) {
  return R"({"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2," ":3," a":4},"merges":[)" + merges + "]}}";
}

TEST(TokenizerJson, MergesAsStringsAndAsPairs_C09) {
  EXPECT_EQ(text_ids(*load(toy(R"("a b")")), "ab"), Ids{2});
  EXPECT_EQ(text_ids(*load(toy(R"(["a","b"])")), "ab"), Ids{2});
  EXPECT_EQ(text_ids(*load(toy(R"("a b",[" ","a"])")), "ab a"), (Ids{2, 4}));
  EXPECT_EQ(load(toy(""))->decode({4, 2}), " aab");
}

TEST(TokenizerJson, RefusesBrokenMerges_C09) {
  expect_refused(toy(R"("a x")"), "\"x\"");
  expect_refused(toy(R"("b a")"), "\"ba\"");
  for (const char* merge :
       {R"("ab")", R"("a  b")", R"(" ab")", R"("a b c")", "7", R"(["a"])", R"(["a",1])", R"(["a","b","c"])"}) {
    expect_refused(toy(merge), "merge");
  }
  expect_refused(replaced(toy(""), ",\"merges\":[]", ""), "merges");
  expect_refused(replaced(toy(""), "[]", "\"a b\""), "merges");
}

TEST(TokenizerJson, RefusesUnknownPartsByName_C09) {
  const std::string good = byte_fixture();
  ASSERT_EQ(refusal(good), "");
  const auto with_pre = [&](const std::string& pre) {
    return replaced(good, "\"pre_tokenizer\":" + kByteLevel, "\"pre_tokenizer\":" + pre);
  };
  expect_refused(with_pre(R"({"type":"FooBar"})"), "FooBar");
  expect_refused(with_pre(R"({"type":"Metaspace","replacement":"_"})"), "replacement");
  expect_refused(
      with_pre(
          R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\d+"},"behavior":"Isolated"}]})"),
      "unknown pattern \\d+");
  expect_refused(with_pre(R"({"type":"Split","pattern":{"String":" "},"behavior":"Isolated"})"), "Regex");
  expect_refused(with_pre("{\"type\":\"Sequence\",\"pretokenizers\":[" + kByteLevel + ",{\"type\":\"Digits\"}]}"),
                 "Digits");
  expect_refused(replaced(good, R"("normalizer":null)", R"("normalizer":{"type":"NFKC"})"), "NFKC");
  expect_refused(replaced(good, R"("type":"BPE")", R"("type":"Unigram")"), "Unigram");
  expect_refused(replaced(good, R"("type":"BPE")", R"("type":"WordPiece")"), "WordPiece");
  expect_refused(replaced(good, R"("byte_fallback":false)", R"("byte_fallback":true)"), "ByteLevel");
  expect_refused(replaced(good, R"("dropout":null)", R"("dropout":0.1)"), "dropout");
  expect_refused(replaced(good, R"("end_of_word_suffix":null)", R"("end_of_word_suffix":"</w>")"),
                 "end_of_word_suffix");
  expect_refused(replaced(good, "\"TemplateProcessing\"", "\"BertProcessing\""), "BertProcessing");
  expect_refused(replaced(good, "\"decoder\":" + kByteLevel, R"("decoder":{"type":"WordPiece"})"), "WordPiece");
  expect_refused(replaced(good, R"("single_word":false)", R"("single_word":true)"), "single_word");
  expect_refused(replaced(toy(""), "\"vocab\"", "\"unk_token\":\"a\",\"vocab\""), "unk_token");
}

TEST(TokenizerJson, RefusesHostileFiles) {
  const std::string good = byte_fixture();
  expect_refused("", "tokenizer.json");
  expect_refused("[]", "expected an object");
  expect_refused("{}", "model");
  expect_refused(R"({"model":7})", "expected an object");
  expect_refused(std::string(100000, '['), "nested");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":-2"), "-2");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":16777216"), "16777216");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":16777215"), "16777215");  // for a table of five tokens
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":18446744073709551615"), "18446744073709551615");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":2.5"), "2.5");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":\"2\""), "token id");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"ab\":1"), "id 1");
  expect_refused(replaced(toy(""), "\"ab\":2", "\"a\":2"), "duplicate");
  expect_refused(replaced(toy(""), R"({"a":0,"b":1,"ab":2," ":3," a":4})", "[]"), "vocab");
  expect_refused(replaced(good, "\"id\":258", "\"id\":257"), "257");
  expect_refused(replaced(good, "\"id\":258", "\"id\":65"), "65");
  expect_refused(replaced(good, "<|eot|>", "<|eos|>"), "<|eos|>");
  expect_refused(replaced(good, "<|eot|>", "A"), "\"A\"");
  expect_refused(replaced(good, "\"special\":true", "\"special\":1"), "special");
  expect_refused(replaced(good, "\"ids\":[256]", "\"ids\":[300]"), "300");
  expect_refused(replaced(good, "\"ids\":[256]", "\"ids\":[]"), "one token");
  expect_refused(good, "eos_token", R"({"eos_token":"<|none|>"})");
  expect_refused(good, "expected a string", R"({"eos_token":[]})");
  expect_refused(good, "true or false", R"({"eos_token":null,"add_bos_token":1})");
}

TEST(TokenizerJson, WhoDecidesAboutBos_C10) {
  const std::string with_template = byte_fixture();
  const size_t begin = with_template.find("\"post_processor\":") + 17, end = with_template.find(",\"decoder\"");
  const std::string without = std::string(with_template).replace(begin, end - begin, kByteLevel);
  const std::string yes = R"({"bos_token":"<|bos|>","add_bos_token":true})";
  EXPECT_TRUE(load(with_template)->adds_bos());
  EXPECT_TRUE(load(with_template, R"({"bos_token":"<|bos|>","add_bos_token":false})")->adds_bos());
  EXPECT_FALSE(load(without)->adds_bos());
  EXPECT_FALSE(load(without, R"({"bos_token":"<|bos|>"})")->adds_bos());
  EXPECT_EQ(load(without, yes)->encode("a", true, ControlTokens::parsed), (Ids{256, 'a'}));
  EXPECT_EQ(load(without, yes)->encode("a", false, ControlTokens::parsed), Ids{'a'});
  expect_refused(without, "names none", R"({"add_bos_token":true})");
  const std::string text_only = replaced(with_template, R"({"SpecialToken":{"id":"<|bos|>","type_id":0}},)", "");
  EXPECT_FALSE(load(text_only, yes)->adds_bos());
}

TEST(TokenizerJson, AddedTokens) {
  const auto tokenizer = load(byte_fixture("", "",
                                           R"(,{"id":259,"content":"<|eot|>x","special":true},
      {"id":260,"content":"<tool>","special":false,"normalized":true},{"id":261,"content":"ll","lstrip":true,"special":true},
      {"id":262,"content":"rr","rstrip":true,"special":false,"normalized":false},{"id":263,"content":"ol>","special":false,
      "normalized":false})"));
  const auto parsed = [&](std::string_view text) { return tokenizer->encode(text, false, ControlTokens::parsed); };
  EXPECT_EQ(parsed("<|eot|>y<|eot|>x"), (Ids{258, 'y', 259}));       // the longest
  EXPECT_EQ(parsed("<|eo<|eot|>"), (Ids{'<', '|', 'e', 'o', 258}));  // a start that comes to nothing
  EXPECT_EQ(parsed("<tool"), (Ids{'<', 't', 'o', 'o', 'l'}));
  EXPECT_EQ(parsed("<tool>"), (Ids{'<', 't', 'o', 263}));          // the second pass sees what the first left
  EXPECT_EQ(parsed("a \u3000ll b"), (Ids{'a', 261, ' ', 'b'}));    // white space before goes with it
  EXPECT_EQ(parsed("a rr \n\u00A0b"), (Ids{'a', ' ', 262, 'b'}));  // and after
  EXPECT_EQ(parsed("rr  ll"), (Ids{262, 261}));
  EXPECT_EQ(text_ids(*tokenizer, " ll rr c"),
            (Ids{' ', 'l', 'l', ' ', 262, 'c'}));  // user-defined ones also in plain text
  EXPECT_EQ(tokenizer->decode({260, 261, 262}), "<tool>rr");
}

/// Encodes parts in turn: own, data, own, data ...
Ids marked_ids(const Tokenizer& tokenizer, const std::vector<std::string>& parts) {
  std::string text, marks;
  for (size_t i = 0; i < parts.size(); ++i) {
    text += parts[i];
    marks += std::string(parts[i].size(), i % 2 ? '\1' : '\0');
  }
  return tokenizer.encode_marked(text, marks);
}

TEST(TokenizerJson, ControlTokensOnlyWhereNothingIsData_C11) {
  const auto tokenizer = load(byte_fixture("", "", R"(,{"id":259,"content":"<|eot|>x","special":true},
      {"id":260,"content":"<tool>","special":false,"normalized":true})"),
                              R"({"bos_token":"<|bos|>","eos_token":{"content":"<|eos|>"},"pad_token":"<pad>"})");
  EXPECT_EQ(marked_ids(*tokenizer, {"<|eot|>", "<|eot|>", "<|eot|>"}),
            (Ids{258, '<', '|', 'e', 'o', 't', '|', '>', 258}));
  EXPECT_EQ(marked_ids(*tokenizer, {"<|eot|>x"}), Ids{259});
  EXPECT_EQ(marked_ids(*tokenizer, {"<|eot|>", "x"}), (Ids{258, 'x'}));  // the longer token would take in data
  EXPECT_EQ(marked_ids(*tokenizer, {"<|eot", "|>"}), (Ids{'<', '|', 'e', 'o', 't', '|', '>'}));
  EXPECT_EQ(marked_ids(*tokenizer, {"", "<|eo", "t|>"}), (Ids{'<', '|', 'e', 'o', 't', '|', '>'}));
  EXPECT_EQ(marked_ids(*tokenizer, {"", "<|", "<|eot|>"}), (Ids{'<', '|', 258}));
  EXPECT_EQ(marked_ids(*tokenizer, {"", "<tool>"}), Ids{260});  // for users, not for control
  EXPECT_EQ(tokenizer->encode_marked("<|eot|>", ""), Ids{258});
  EXPECT_THROW(tokenizer->encode_marked("<|eot|>", std::string(3, '\0')), Error);
  const std::map<std::string, std::string> named = {
      {"bos_token", "<|bos|>"}, {"eos_token", "<|eos|>"}, {"pad_token", "<pad>"}};
  EXPECT_EQ(tokenizer->special_tokens(), named);
  EXPECT_EQ(load(byte_fixture())->special_tokens().at("bos_token"), "<|bos|>");
}

TEST(TokenizerJson, MarkedTextIsCutAsAWhole) {
  const auto tokenizer = load(byte_fixture(",\"ab\":259", "\"a b\""));
  EXPECT_EQ(marked_ids(*tokenizer, {"a", "b"}), Ids{259});  // pieces know nothing of marks
  EXPECT_LT(test::seconds([&] { marked_ids(*tokenizer, {repeated("<|eo", 1'000'000), "x"}); }), 4.0);
}

TEST(TokenizerJson, PrefixSpaceAndIgnoredMerges) {
  const std::string merges = "\"a b\",\"ab c\"", vocabulary = ",\"ab\":259,\"abc\":260,\"abcd\":261";
  const std::string plain = byte_fixture(vocabulary, merges);
  EXPECT_EQ(text_ids(*load(plain), "abcd"), (Ids{260, 'd'}));
  EXPECT_EQ(text_ids(*load(replaced(plain, "\"fuse_unk\"", "\"ignore_merges\":true,\"fuse_unk\"")), "abcd abcd"),
            (Ids{261, ' ', 260, 'd'}));
  const auto spaced = load(replaced(plain, "\"add_prefix_space\":false", "\"add_prefix_space\":true"));
  EXPECT_EQ(spaced->encode("a<|eot|>b<|eot|> c", false, ControlTokens::parsed),
            (Ids{' ', 'a', 258, ' ', 'b', 258, ' ', 'c'}));
  EXPECT_EQ(text_ids(*spaced, ""), Ids{});
}

// ---- GGUF vocabularies ----------------------------------------------------------------------------------------------

BpeVocabulary small_vocabulary() {
  BpeVocabulary v;
  v.tokens = {"<|end|>", "<|im|>", "a", "b", "Ġ", "1", "2", "Ġa", "12", "ab", "<tool>", "[PAD]"};
  v.token_types = {3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 4, 5};
  v.merges = {"1 2", "Ġ a", "a b"};
  v.pre = "smollm";
  v.bos = 1;
  v.eos = {0};
  return v;
}

TEST(BpeVocabularyTest, SmolLm) {
  const auto tokenizer = Tokenizer::from_vocabulary(small_vocabulary(), "x.gguf");
  EXPECT_EQ(text_ids(*tokenizer, "ab a12"), (Ids{9, 7, 5, 6}));  // digits stay apart although "12" is a token
  EXPECT_EQ(text_ids(*tokenizer, "a\tb"), (Ids{2, 3}));          // a byte without a token is left out
  EXPECT_EQ(tokenizer->encode("<|im|>a<tool>", true, ControlTokens::parsed), (Ids{1, 2, 10}));
  EXPECT_EQ(text_ids(*tokenizer, "<|im|>a<tool>"), (Ids{2, 10}));
  EXPECT_EQ(tokenizer->decode({0, 7, 10, 11}), " a<tool>");  // control and unused tokens have no text
  EXPECT_FALSE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eos(), Ids{0});
  EXPECT_EQ(tokenizer->size(), 12);
}

TEST(BpeVocabularyTest, FamilyOrFileDecides) {
  BpeVocabulary v = small_vocabulary();
  v.pre = "llama-bpe";
  v.merges = {};
  // Llama-3's family puts a BOS first and takes whole pieces ("12", "ab") as they are; GPT-2's does neither.
  EXPECT_EQ(Tokenizer::from_vocabulary(v, "x")->encode("12ab", true, ControlTokens::parsed), (Ids{1, 8, 9}));
  v.add_bos = false;
  v.ignore_merges = false;
  EXPECT_EQ(Tokenizer::from_vocabulary(v, "x")->encode("12ab", true, ControlTokens::parsed), (Ids{5, 6, 2, 3}));
  v = small_vocabulary();
  v.pre = "gpt-2";
  EXPECT_EQ(Tokenizer::from_vocabulary(v, "x")->encode("12 a", true, ControlTokens::parsed), (Ids{8, 7}));
  v.add_bos = true;
  EXPECT_EQ(Tokenizer::from_vocabulary(v, "x")->encode("12 a", true, ControlTokens::parsed), (Ids{1, 8, 7}));
}

TEST(BpeVocabularyTest, RefusesWhatDoesNotFit) {
  const auto refused = [](auto change) {
    BpeVocabulary v = small_vocabulary();
    change(v);
    try {
      Tokenizer::from_vocabulary(v, "x.gguf");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect_named = [&](auto change, const std::string& named) {
    const std::string message = refused(change);
    EXPECT_EQ(message.find("x.gguf: "), 0u) << message;
    EXPECT_NE(message.find(named), std::string::npos) << message;
  };
  EXPECT_EQ(refused([](BpeVocabulary&) {}), "");
  expect_named([](BpeVocabulary& v) { v.pre = "deepseek-llm"; }, "deepseek-llm");
  expect_named([](BpeVocabulary& v) { v.token_types.pop_back(); }, "11 token types");
  expect_named([](BpeVocabulary& v) { v.token_types[2] = 9; }, "type 9");
  expect_named([](BpeVocabulary& v) { v.tokens.clear(); }, "empty");
  expect_named([](BpeVocabulary& v) { v.tokens[3] = "a"; }, "both \"a\"");
  expect_named([](BpeVocabulary& v) { v.merges[0] = "12"; }, "\"12\"");
  expect_named([](BpeVocabulary& v) { v.merges[0] = "1 x"; }, "\"x\"");
  expect_named([](BpeVocabulary& v) { v.bos = 12; }, "12");
  expect_named([](BpeVocabulary& v) { v.eos = {0, -5}; }, "-5");
  expect_named([](BpeVocabulary& v) { v.bos = -1, v.add_bos = true; }, "names none");
}

}  // namespace
}  // namespace fut
