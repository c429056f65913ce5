// Texts of a kind without an end, which make a tokenizer slow if anything can.
#pragma once

#include <gtest/gtest.h>

#include <ctime>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "io/utf8.h"

namespace fut::test {

/// Processor time, since other programs may use the machine meanwhile.
template <class Work>
double seconds(Work work) {
  const std::clock_t start = std::clock();
  work();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

/// Name and text, each of at least `bytes` bytes: one character or a few for ever, and random ones that no split parts.
inline std::vector<std::pair<std::string, std::string>> endless_runs(size_t bytes) {
  std::vector<std::pair<std::string, std::string>> runs;
  for (const char* unit : {"ab",
                           "a",
                           " ",
                           "\n",
                           "\r\n",
                           "\t",
                           "1",
                           "1234567890",
                           "!",
                           "_",
                           "-=",
                           "é",
                           "thequickbrownfox",
                           "\U0001F600",
                           "\U0001F468\u200D\U0001F469\u200D\U0001F467",
                           "中文字符測試",
                           "こんにちは世界",
                           "안녕하세요",
                           "привет",
                           "مرحبا"}) {
    std::string text;
    while (text.size() < bytes) text += unit;
    runs.emplace_back(unit, text);
  }
  std::mt19937 random(1);
  const auto draw = [&](const std::string& name, auto character) {
    std::string text;
    while (text.size() < bytes) append_utf8(text, character());
    runs.emplace_back(name, text);
  };
  draw("random acgt", [&] { return static_cast<char32_t>("acgt"[random() % 4]); });
  draw("random lower case", [&] { return static_cast<char32_t>('a' + random() % 26); });
  draw("random letters", [&] { return static_cast<char32_t>((random() % 6 ? 'a' : 'A') + random() % 26); });
  draw("random signs", [&] { return static_cast<char32_t>("!@#$%^&*()-+=[]{}|;:<>,./?"[random() % 26]); });
  draw("random printable", [&] { return static_cast<char32_t>(33 + random() % 94); });
  draw("random CJK", [&] { return static_cast<char32_t>(0x4E00 + random() % 20000); });
  draw("random emoji", [&] { return static_cast<char32_t>(0x1F300 + random() % 0x300); });
  draw("letters and accents", [&] { return static_cast<char32_t>(random() % 2 ? 'a' : 0x300 + random() % 0x60); });
  return runs;
}

/// The best of three, because what shares the core slows it.
template <class Work>
double megabytes_a_second(size_t bytes, Work work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) best = std::min(best, seconds(work));
  return static_cast<double>(bytes) / 1e6 / best;
}

/// 5 MB/s or more on one core, whatever the run, and every byte back. One thread: encode has no others.
template <class Encode, class Decode>
void expect_any_run_at_five_megabytes_a_second(Encode encode, Decode decode) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers are slower than that";
#endif
  for (const auto& [name, text] : endless_runs(2'000'000)) {
    decltype(encode(text)) found;
    EXPECT_GT(megabytes_a_second(text.size(), [&] { found = encode(text); }), 5.0) << name;
    EXPECT_EQ(decode(found), text) << name;
  }
}

}  // namespace fut::test
