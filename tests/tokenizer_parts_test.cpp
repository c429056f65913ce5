// What tokenizers are made of: pieces, UTF-8, merges.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "io/bpe.h"
#include "io/pretokenizer.h"
#include "io/unicode_tables.h"
#include "io/utf8.h"

namespace fut {
namespace {

using Ids = std::vector<int32_t>;

// ---- Pieces and UTF-8 -----------------------------------------------------------------------------------------------

std::vector<std::string> pieces(const std::vector<Split>& rules, const std::string& text) {
  std::vector<std::string> found;
  PreTokenizer(rules).split(text, [&](std::string_view piece) { found.emplace_back(piece); });
  return found;
}

TEST(PreTokenizer, Gpt2) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces({Split::gpt2}, "I'll  say 'twas 2024's"),
            (Pieces{"I", "'ll", " ", " say", " '", "twas", " 2024", "'s"}));
  EXPECT_EQ(pieces({Split::gpt2}, "I'LL\n\nx!?  \t"), (Pieces{"I", "'", "LL", "\n", "\n", "x", "!?", "  \t"}));
  EXPECT_EQ(pieces({Split::gpt2}, "\u00A0\u00A0x\u0301 ²"), (Pieces{"\u00A0", "\u00A0", "x", "\u0301", " ²"}));
}

TEST(PreTokenizer, Llama3AndQwen2) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces({Split::llama3}, "we'LL (it's) 12345 !?\r\n\n x"),
            (Pieces{"we", "'LL", " (", "it", "'s", ")", " ", "123", "45", " !?\r\n\n", " x"}));
  EXPECT_EQ(pieces({Split::llama3}, "a  \n \t\n  b"), (Pieces{"a", "  \n \t\n", " ", " b"}));
  EXPECT_EQ(pieces({Split::llama3}, "x'\u017Fy"), (Pieces{"x", "'\u017F", "y"}));  // folds to s under (?i)
  EXPECT_EQ(pieces({Split::qwen2}, "_a 123"), (Pieces{"_a", " ", "1", "2", "3"}));
}

TEST(PreTokenizer, Digits) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces({Split::single_digit, Split::gpt2}, "in 2024 ok"), (Pieces{"in", " ", "2", "0", "2", "4", " ok"}));
  EXPECT_EQ(pieces({Split::single_digit, Split::gpt2}, "x  7"), (Pieces{"x", "  ", "7"}));
  EXPECT_EQ(pieces({Split::digit_run}, "a12Ⅷb"), (Pieces{"a", "12Ⅷ", "b"}));
}

TEST(PreTokenizer, InvalidBytesAreSymbols) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces({Split::gpt2}, "ab\xFF\xC3 z\xE2\x82"), (Pieces{"ab", "\xFF\xC3", " z", "\xE2\x82"}));
  EXPECT_EQ(pieces({Split::llama3}, "\xE2\x82z"), (Pieces{"\xE2\x82", "z"}));
}

TEST(PreTokenizer, PiecesAddUpToAnyBytes) {
  std::mt19937 random(3);
  const std::string alphabet = "aZ09 \n\r\t'sl!\xC2\xA0\xE3\x80\xF0\x9F\x99\xFF";
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int n = static_cast<int>(random() % 30); n > 0; --n) text += alphabet[random() % alphabet.size()];
    for (const Split rule : {Split::gpt2, Split::llama3, Split::qwen2, Split::single_digit, Split::digit_run}) {
      std::string joined;
      for (const std::string& piece : pieces({rule}, text)) {
        EXPECT_FALSE(piece.empty());
        joined += piece;
      }
      EXPECT_EQ(joined, text);
    }
  }
}

template <size_t n>
bool in_order(const CodeRange (&table)[n]) {
  for (size_t i = 0; i < n; ++i) {
    if (table[i].first > table[i].last || (i > 0 && table[i - 1].last >= table[i].first)) return false;
  }
  return true;
}

TEST(UnicodeTables, AreInOrder) {
  EXPECT_TRUE(in_order(kLetters));
  EXPECT_TRUE(in_order(kNumbers));
  EXPECT_TRUE(in_order(kSpaces));
}

std::string made_valid(std::string_view bytes) {
  std::string text;
  if (append_valid_utf8(text, bytes) < bytes.size()) append_utf8(text, kReplacement);
  return text;
}

TEST(Utf8, ReplacesMaximalSubparts) {
  const std::string r = "\uFFFD";
  EXPECT_EQ(made_valid("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64"),
            "a" + r + r + r + "b" + r + "c" + r + r + "d");
  EXPECT_EQ(made_valid("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");  // overlong
  EXPECT_EQ(made_valid("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");  // surrogates
  EXPECT_EQ(made_valid("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(made_valid("\xF0\x9F\xA6"), r);
}

TEST(Utf8, EveryCodePointComesBack) {
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    std::string text;
    append_utf8(text, code);
    const Utf8Char c = utf8_at(text, 0);
    ASSERT_TRUE(c.state == Utf8::valid && c.code == code && c.length == text.size()) << static_cast<uint32_t>(code);
  }
}

// ---- Merging --------------------------------------------------------------------------------------------------------

/// The definition: again and again the leftmost of the lowest-ranked pairs.
Ids merged_slowly(const std::map<std::pair<int32_t, int32_t>, MergeTable::Merge>& merges, Ids symbols) {
  for (;;) {
    size_t best = symbols.size();
    MergeTable::Merge merge{INT32_MAX, 0};
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = merges.find({symbols[i], symbols[i + 1]});
      if (found != merges.end() && found->second.rank < merge.rank) best = i, merge = found->second;
    }
    if (best == symbols.size()) return symbols;
    symbols[best] = merge.result;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, MergesLowestRankFirst) {
  std::mt19937 random(5);
  for (int round = 0; round < 800; ++round) {
    // A token is made by one merge or several, of tokens that are there already, as in a trained vocabulary.
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::map<std::pair<int32_t, int32_t>, MergeTable::Merge> merges;
    MergeTable table(20);
    for (int32_t i = 0; i < 20; ++i) {
      // Scores of SentencePiece may make a merge come before those that its halves need, and several come at once.
      const int32_t rank = round % 2 ? static_cast<int32_t>(random() % 8) : i;
      const auto left = static_cast<int32_t>(random() % tokens.size()),
                 right = static_cast<int32_t>(random() % tokens.size());
      const std::string text = tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
      if (merges.count({left, right})) continue;
      const auto result = static_cast<int32_t>(std::find(tokens.begin(), tokens.end(), text) - tokens.begin());
      if (result == static_cast<int32_t>(tokens.size())) tokens.push_back(text);
      merges[{left, right}] = {rank, result};
      table.set(left, right, {rank, result});
    }
    Ids symbols;
    constexpr int kLengths[] = {1, 2, 40, 63, 64, 65, 66, 400};  // short words and long ones are merged differently
    const int length = kLengths[random() % std::size(kLengths)];
    const uint32_t letters = 1 + random() % 3;
    for (int n = 0; n < length; ++n) symbols.push_back(static_cast<int32_t>(random() % letters));
    const Ids expected = merged_slowly(merges, symbols);
    apply_merges(table, symbols);
    EXPECT_EQ(symbols, expected) << "round " << round;
  }
}

TEST(Bpe, SpellingOfBytes) {
  EXPECT_EQ(bytes_of_spelling("Ġthe"), " the");
  EXPECT_EQ(bytes_of_spelling("Ċ"), "\n");
  EXPECT_EQ(bytes_of_spelling("Ã©"), "é");
  EXPECT_EQ(bytes_of_spelling("Ń"), "\xAD");
  EXPECT_EQ(bytes_of_spelling("a b"), std::nullopt);
  EXPECT_EQ(bytes_of_spelling("你"), std::nullopt);
}

}  // namespace
}  // namespace fut
