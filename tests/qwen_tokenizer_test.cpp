// Tokenizers built like Qwen2's and Qwen3's: text in form C, their split. Ids are those of the package tokenizers
// (scripts/judges/qwen_tokenizer.py); normal forms those of Unicode's own test file for the cases that it is known for.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "io/nfc.h"
#include "io/tokenizer.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

using nlohmann::json;
using test::expect_refused;
using test::TempFolder;
using Ids = std::vector<int32_t>;

const std::string kFolder = FUT_SOURCE_DIR "/tests/tokenizers/";

std::unique_ptr<Tokenizer> load(const json& file) {
  const TempFolder folder;
  folder.write("tokenizer.json", file.dump());
  return Tokenizer::from_hf_folder(folder.path());
}

json stored() { return json::parse(test::read_file(kFolder + "qwen.json")); }

std::string nfc(const std::string& text) { return to_nfc(text).value_or(text); }

TEST(NfcTest, DecomposesOrdersAndComposes) {
  EXPECT_EQ(nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(nfc("caf\u00e9"), "caf\u00e9");
  EXPECT_EQ(nfc("s\u0307\u0323"), "\u1e69");
  EXPECT_EQ(nfc("\u1e9b\u0323"), "\u1e9b\u0323");
  EXPECT_EQ(nfc("\u0344"), "\u0308\u0301");              // never composed again
  EXPECT_EQ(nfc("\u212b"), "\u00c5");                    // a singleton
  EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");              // excluded from composition
  EXPECT_EQ(nfc("\u1100\u1161\u11a8"), "\uac01");        // Hangul
  EXPECT_EQ(nfc("\uac00\u11a8\u11a8"), "\uac01\u11a8");  // one trailing consonant
  EXPECT_EQ(nfc("\u1100\u1161\u11a7"), "\uac00\u11a7");  // which U+11A7 is not
  EXPECT_EQ(nfc("a\u0315\u0300\u05ae\u0300b"), "\u00e0\u05ae\u0300\u0315b");
  EXPECT_EQ(nfc("\u0b47\u0300\u0b3e"), "\u0b47\u0300\u0b3e");  // blocked
  EXPECT_EQ(nfc("\U0001d15e"), "\U0001d157\U0001d165");
  EXPECT_EQ(nfc("\u0301"), "\u0301");
  EXPECT_EQ(nfc(""), "");
}

TEST(NfcTest, LeavesWhatIsNoTextAlone) {
  EXPECT_EQ(to_nfc("plain"), std::nullopt);
  EXPECT_EQ(to_nfc("\xff\xcc"), std::nullopt);
  EXPECT_EQ(nfc("e\xff\u0301"), "e\xff\u0301");
  EXPECT_EQ(nfc("\xffo\u0308\xc3"), "\xff\u00f6\xc3");
  EXPECT_EQ(nfc("e\u0301\xcc"), "\u00e9\xcc");
  const std::string zero("e\0\xcc\x81", 4);
  EXPECT_EQ(nfc(zero), zero);
}

TEST(NfcTest, LongRunsTakeLinearTime_C08) {
  std::string marks = "a";
  for (int i = 0; i < 200000; ++i) marks += i % 2 ? "\u0301" : "\u0323";
  const auto start = std::chrono::steady_clock::now();
  const std::string normal = nfc(marks);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_EQ(normal.substr(0, 5), "\u1ea1\u0323");
  EXPECT_EQ(normal.size(), marks.size());
}

TEST(QwenTokenizerTest, IdsOfThePackageTokenizers) {
  const auto tokenizer = load(stored());
  const json vectors = json::parse(test::read_file(kFolder + "qwen_vectors.json"));
  EXPECT_GT(vectors["texts"].size(), 50u);
  for (const json& each : vectors["texts"]) {
    const std::string text = each["text"];
    const Ids ids = tokenizer->encode(text, false, ControlTokens::parsed);
    EXPECT_EQ(ids, each["ids"].get<Ids>()) << text;
    const bool control = text.find("<|") != std::string::npos;
    EXPECT_TRUE(control || tokenizer->decode(ids) == nfc(text)) << text;
  }
}

/// GGUF says of the text only that it is split as Qwen2 does; the normal form belongs to that.
TEST(QwenTokenizerTest, GgufVocabulariesGiveTheSameIds) {
  const json file = stored();
  BpeVocabulary vocabulary;
  vocabulary.tokens.resize(file["model"]["vocab"].size() + file["added_tokens"].size());
  vocabulary.token_types.assign(vocabulary.tokens.size(), 1);
  for (const auto& [spelling, id] : file["model"]["vocab"].items()) vocabulary.tokens[id.get<size_t>()] = spelling;
  for (const json& added : file["added_tokens"]) {
    vocabulary.tokens[added["id"].get<size_t>()] = added["content"];
    vocabulary.token_types[added["id"].get<size_t>()] = added["special"] == true ? 3 : 4;
  }
  for (const json& merge : file["model"]["merges"])
    vocabulary.merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  vocabulary.pre = "qwen2";
  const auto from_gguf = Tokenizer::from_vocabulary(vocabulary, "x.gguf"),
             exported = load(json::parse(tokenizer_json(vocabulary, "x.gguf")));
  for (const json& each : json::parse(test::read_file(kFolder + "qwen_vectors.json"))["texts"]) {
    const std::string text = each["text"];
    EXPECT_EQ(from_gguf->encode(text, false, ControlTokens::parsed), each["ids"].get<Ids>()) << text;
    EXPECT_EQ(exported->encode(text, false, ControlTokens::parsed), each["ids"].get<Ids>()) << text;
  }
}

/// Text from a message stays text whatever its normal form is, and is normalised on either side of a control token.
TEST(QwenTokenizerTest, ControlTokensAreFoundOutsideDataAlone) {
  const auto tokenizer = load(stored());
  const std::string text = "e\u0301<|im_end|>e\u0301<|im_end|>";
  std::string marks(text.size(), '\0');
  std::fill(marks.begin(), marks.begin() + static_cast<int64_t>(text.size() / 2), '\1');
  const Ids ids = tokenizer->encode_marked(text, marks),
            end = tokenizer->encode("<|im_end|>", false, ControlTokens::parsed);
  ASSERT_EQ(end.size(), 1u);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), end[0]), 1);
  EXPECT_EQ(ids.back(), end[0]);
  EXPECT_EQ(tokenizer->decode(ids), "\u00e9<|im_end|>\u00e9");
}

TEST(QwenTokenizerTest, OtherNormalisersAreRefused) {
  for (const char* type : {"NFD", "NFKC", "Lowercase"}) {
    json file = stored();
    file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", type}}}}};
    expect_refused([&] { load(file); }, {"tokenizer.json", type});
  }
  json listed = stored();
  listed["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
  EXPECT_EQ(load(listed)->encode("e\u0301", false, ControlTokens::as_text),
            load(stored())->encode("\u00e9", false, ControlTokens::as_text));
  json special = stored();
  special["added_tokens"][0]["normalized"] = true;
  expect_refused([&] { load(special); }, {"<|endoftext|>", "normalized", "special", "NFC"});
  json composed = stored();
  composed["added_tokens"][3]["normalized"] = true;
  composed["added_tokens"][3]["content"] = "e\u0301";
  expect_refused([&] { load(composed); }, {"not in NFC"});
}

}  // namespace
}  // namespace fut
