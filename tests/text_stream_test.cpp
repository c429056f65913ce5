// Streaming: stop strings that lie across tokens, characters that do, and that no piece ever has to be taken back.
#include "engine/text_stream.h"

#include <gtest/gtest.h>

#include "support/fixture_model.h"

namespace fut {
namespace {

class TextStreamTest : public testing::Test {
 protected:
  TextStreamTest() {
    test::write_byte_tokenizer(folder_);
    tokenizer_ = Tokenizer::from_hf_folder(folder_.path());
  }

  struct Result {
    std::string text;
    bool stopped;
    size_t tokens;  ///< taken until it stopped
  };

  /// Every byte is a token. Checks on the way that what is given out is a start of what comes in the end.
  Result stream(const std::string& bytes, const std::vector<std::string>& stop) const {
    TextStream stream(*tokenizer_, stop);
    Result result{"", false, 0};
    std::vector<std::string> seen;
    for (unsigned char byte : bytes) {
      result.text += stream.add(byte);
      seen.push_back(result.text);
      ++result.tokens;
      if (stream.stopped()) break;
    }
    result.text += stream.finish();
    result.stopped = stream.stopped();
    for (const std::string& s : seen) EXPECT_EQ(result.text.compare(0, s.size(), s), 0);
    EXPECT_EQ(stream.finish(), "") << "nothing follows the end";
    return result;
  }

  void expect_text(const std::vector<std::string>& stop, const std::string& text, bool stopped = true) const {
    const Result got = stream("alpha beta gamma", stop);
    EXPECT_EQ(got.text, text);
    EXPECT_EQ(got.stopped, stopped) << text;
  }

  test::TempFolder folder_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(TextStreamTest, EndsRightBeforeTheEarliestStop_G06) {
  expect_text({"ta ga"}, "alpha be");
  expect_text({"beta", "bet"}, "alpha ");
  expect_text({"bet", "beta"}, "alpha ");
  expect_text({"a"}, "");
  expect_text({"gamma"}, "alpha beta ");
  expect_text({"gamma", "zeta", "be", " b", "mm"}, "alpha");
  expect_text({"alpha beta gamma"}, "");
}

TEST_F(TextStreamTest, StopsThatNeverCome_G06) {
  expect_text({}, "alpha beta gamma", false);
  expect_text({""}, "alpha beta gamma", false);
  expect_text({"", "delta"}, "alpha beta gamma", false);
  expect_text({"gammas"}, "alpha beta gamma", false);
  expect_text({std::string(4000, 'x'), "beta gammA"}, "alpha beta gamma", false);
}

TEST_F(TextStreamTest, AStopInsideAStopThatFails_G06) {
  EXPECT_EQ(stream("aabaabaac", {"aabaac"}).text, "aab");
  EXPECT_EQ(stream("xabcabd", {"abcd", "abd"}).text, "xabc");
  EXPECT_EQ(stream("aaaa", {"aaa"}).text, "");
}

TEST_F(TextStreamTest, TextIsHeldBackNoLongerThanNeeded_G06) {
  TextStream stream(*tokenizer_, {"beta"});
  std::string text;
  for (unsigned char byte : std::string("alpha ")) text += stream.add(byte);
  EXPECT_EQ(text, "alpha ");
  EXPECT_EQ(stream.add('b'), "");
  EXPECT_EQ(stream.add('e'), "");
  EXPECT_EQ(stream.add('d'), "bed");
  EXPECT_EQ(stream.finish(), "");
}

TEST_F(TextStreamTest, CharactersComeWhole_C07) {
  const std::string text = "gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80!";
  TextStream stream(*tokenizer_, {});
  std::string all;
  for (unsigned char byte : text) {
    const std::string piece = stream.add(byte);
    EXPECT_FALSE(!piece.empty() && (piece[0] & 0xc0) == 0x80) << "half a character";
    all += piece;
  }
  EXPECT_EQ(all, text);
  EXPECT_EQ(this->stream("a\xc3", {}).text, "a\xef\xbf\xbd");
  EXPECT_EQ(this->stream("a\xff"
                         "b",
                         {})
                .text,
            "a\xef\xbf\xbd"
            "b");
}

/// A stop string may begin inside a character: the text before that character is what remains.
TEST_F(TextStreamTest, AStopThatBeginsInsideACharacter_G06) {
  const Result got = stream("gr\xc3\xbc\xc3\x9f", {"\xc3\x9f"});
  EXPECT_EQ(got.text, "gr\xc3\xbc");
  EXPECT_TRUE(got.stopped);
  const Result inside = stream("gr\xc3\xbc!", {"\xbc!"});
  EXPECT_EQ(inside.text, "gr");
  EXPECT_TRUE(inside.stopped);
}

TEST_F(TextStreamTest, ControlTokensHaveNoText) {
  TextStream stream(*tokenizer_, {});
  EXPECT_EQ(stream.add('a') + stream.add(258) + stream.add('b') + stream.add(100000) + stream.finish(), "ab");
}

TEST_F(TextStreamTest, TheRestMayCompleteAStop_G06) {
  const Result got = stream("ab\xc3", {"b\xef\xbf\xbd"});  // the dangling byte turns into U+FFFD at the end
  EXPECT_EQ(got.text, "a");
  EXPECT_TRUE(got.stopped);
}

}  // namespace
}  // namespace fut
