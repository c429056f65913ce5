// Cutting text into the pieces that BPE merges within.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fut {

/// The rules that published tokenizers use, each written out by hand: their regular expressions need look-ahead and
/// Unicode classes, which std::regex lacks. A byte that is no UTF-8 counts as a symbol (no letter, number or space).
enum class Split {
  gpt2,          ///< GPT-2's pattern
  llama3,        ///< Llama-3's: any case of 's, numbers in groups of three, line ends apart
  qwen2,         ///< Llama-3's with each number character alone
  single_digit,  ///< each number character alone, the rest in one piece
  digit_run,     ///< numbers apart from the rest
};

/// The rule that a tokenizer.json writes as this regular expression, which is compared as text.
std::optional<Split> split_of_regex(std::string_view regex);

/// The regular expression of a rule that split_of_regex() knows.
std::string_view regex_of_split(Split rule);

/// How many bytes the first piece of `text` (not empty) has.
size_t first_piece(Split rule, std::string_view text);

/// Rules applied one after the other, each to the pieces of the one before; none: the text in one piece.
class PreTokenizer {
 public:
  explicit PreTokenizer(std::vector<Split> rules = {}) : rules_(std::move(rules)) {}

  /// Calls `piece` for every piece in order; together they are the text.
  void split(std::string_view text, const std::function<void(std::string_view)>& piece) const { cut(0, text, piece); }

 private:
  void cut(size_t rule, std::string_view text, const std::function<void(std::string_view)>& piece) const;

  std::vector<Split> rules_;
};

size_t leading_space(std::string_view text);   ///< bytes of white space at the start
size_t trailing_space(std::string_view text);  ///< and at the end

}  // namespace fut
