#include "io/pretokenizer.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "io/unicode_tables.h"
#include "io/utf8.h"

namespace fut {
namespace {

enum class Kind : unsigned char { symbol, letter, number, space, none /* past the end */ };

template <size_t n>
constexpr bool in_table(const CodeRange (&table)[n], char32_t code) {
  const auto* range =
      std::partition_point(std::begin(table), std::end(table), [code](const CodeRange& r) { return r.last < code; });
  return range != std::end(table) && range->first <= code;
}

constexpr Kind kind_of(char32_t code) {
  if (in_table(kLetters, code)) return Kind::letter;
  if (in_table(kNumbers, code)) return Kind::number;
  if (in_table(kSpaces, code)) return Kind::space;
  return Kind::symbol;
}

constexpr std::array<Kind, 128> kAscii = [] {
  std::array<Kind, 128> kinds{};
  for (char32_t code = 0; code < kinds.size(); ++code) kinds[code] = kind_of(code);
  return kinds;
}();

struct Char {
  Kind kind = Kind::none;
  size_t length = 0;
};

Char char_at(std::string_view text, size_t at) {
  if (at >= text.size()) return {};
  const auto byte = static_cast<unsigned char>(text[at]);
  if (byte < kAscii.size()) return {kAscii[byte], 1};
  const Utf8Char c = utf8_at(text, at);
  if (c.state != Utf8::valid) return {Kind::symbol, 1};
  return {kind_of(c.code), c.length};
}

bool is_line_end(char c) { return c == '\r' || c == '\n'; }

/// End of the characters of one kind from `at` on, at most `max` of them.
size_t run_end(std::string_view text, size_t at, Kind kind, size_t max = std::string_view::npos) {
  for (; max > 0; --max) {
    const Char c = char_at(text, at);
    if (c.kind != kind) break;
    at += c.length;
  }
  return at;
}

/// Bytes of 's 't 're 've 'm 'll 'd at the start. `any_case`: as (?i:...) matches, under which U+017F is an s too.
size_t contraction(std::string_view text, bool any_case) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  const auto letter = [&](size_t at) {
    const char c = at < text.size() ? text[at] : '\0';
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char first = letter(1), second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l')) return 3;
  return any_case && text.substr(1, 2) == "\u017F" ? 3 : 0;
}

/// Pieces of white space. The last character of a run is left to what follows it, unless nothing does; with
/// `line_ends`, the piece ends after the run's last line end if there is one.
size_t space_piece(std::string_view text, bool line_ends) {
  size_t end = 0, last = 0, after_line_end = 0;
  for (Char c = char_at(text, 0); c.kind == Kind::space; c = char_at(text, end)) {
    last = end;
    end += c.length;
    if (is_line_end(text[last])) after_line_end = end;
  }
  if (line_ends && after_line_end > 0) return after_line_end;
  return end == text.size() || last == 0 ? end : last;
}

/// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t gpt2_piece(std::string_view text) {
  if (const size_t length = contraction(text, false)) return length;
  const size_t start = text[0] == ' ' ? 1 : 0;
  const Kind kind = char_at(text, start).kind;
  if (kind == Kind::space || kind == Kind::none) return space_piece(text, false);
  return run_end(text, start, kind);
}

/// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
/// \s+(?!\S)|\s+
size_t llama3_piece(std::string_view text, size_t digits) {
  if (const size_t length = contraction(text, true)) return length;
  const Char first = char_at(text, 0);
  if (first.kind == Kind::number) return run_end(text, 0, Kind::number, digits);
  if (!is_line_end(text[0])) {
    const size_t letters = run_end(text, first.length, Kind::letter);
    if (first.kind == Kind::letter || letters > first.length) return letters;
  }
  const size_t start = text[0] == ' ' ? 1 : 0;
  size_t end = run_end(text, start, Kind::symbol);
  if (end == start) return space_piece(text, true);
  while (end < text.size() && is_line_end(text[end])) ++end;
  return end;
}

size_t digit_piece(std::string_view text, size_t digits) {
  size_t end = run_end(text, 0, Kind::number, digits);
  if (end > 0) return end;
  for (Char c = char_at(text, 0); c.kind != Kind::none && c.kind != Kind::number; c = char_at(text, end))
    end += c.length;
  return end;
}

}  // namespace

namespace {

constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

}  // namespace

std::optional<Split> split_of_regex(std::string_view regex) {
  if (regex == kGpt2) return Split::gpt2;
  if (regex == kLlama3) return Split::llama3;
  if (regex == kQwen2) return Split::qwen2;
  return std::nullopt;
}

std::string_view regex_of_split(Split rule) {
  switch (rule) {
    case Split::gpt2: return kGpt2;
    case Split::llama3: return kLlama3;
    case Split::qwen2: return kQwen2;
    default: return "";
  }
}

size_t first_piece(Split rule, std::string_view text) {
  switch (rule) {
    case Split::gpt2: return gpt2_piece(text);
    case Split::llama3: return llama3_piece(text, 3);
    case Split::qwen2: return llama3_piece(text, 1);
    case Split::single_digit: return digit_piece(text, 1);
    case Split::digit_run: return digit_piece(text, std::string_view::npos);
  }
  return text.size();
}

void PreTokenizer::cut(size_t rule, std::string_view text, const std::function<void(std::string_view)>& piece) const {
  if (rule == rules_.size()) return piece(text);
  while (!text.empty()) {
    const size_t length = first_piece(rules_[rule], text);
    cut(rule + 1, text.substr(0, length), piece);
    text.remove_prefix(length);
  }
}

size_t leading_space(std::string_view text) { return run_end(text, 0, Kind::space); }

size_t trailing_space(std::string_view text) {
  size_t start = text.size();
  while (start > 0) {
    size_t at = start - 1;
    while (at > 0 && start - at < 3 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
    const Char c = char_at(text, at);
    if (c.kind != Kind::space || at + c.length != start) break;
    start = at;
  }
  return text.size() - start;
}

}  // namespace fut
