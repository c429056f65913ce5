// UTF-8, one character at a time, from bytes that need not be UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fut {

inline constexpr char32_t kReplacement = 0xFFFD;

enum class Utf8 {
  valid,
  invalid,   ///< no character begins with these bytes
  cut_short  ///< a character may begin here, but the text ends inside it
};

struct Utf8Char {
  char32_t code = kReplacement;
  size_t length =
      0;  ///< of the character; else of its maximal subpart (Unicode, section 3.9): what one U+FFFD replaces
  Utf8 state = Utf8::invalid;
};

/// The character at text[at]; `at` must be inside the text.
Utf8Char utf8_at(std::string_view text, size_t at);

void append_utf8(std::string& out, char32_t code);

/// Appends `bytes` to `out` with invalid parts as U+FFFD, up to a character cut short at the end. Returns the bytes
/// used.
size_t append_valid_utf8(std::string& out, std::string_view bytes);

}  // namespace fut
