#include "io/jinja_lexer.h"

#include <algorithm>

#include "base/error.h"
#include "io/jinja_value.h"
#include "io/mapped_file.h"
#include "io/utf8.h"

namespace fut::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_name_part(char c) { return is_name_start(c) || is_digit(c); }

/// Line ends as \n, and the last one dropped.
std::string normalised(std::string_view source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    text += source[i] == '\r' ? '\n' : source[i];
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& what) : source_(normalised(source)), what_(what) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t tag = next_tag();
      if (tag == std::string::npos) {
        add_data(source_.substr(at_));
        at_ = source_.size();
        break;
      }
      read_tag(tag);
    }
    add(Token::Kind::end, "");
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  char peek(size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0'; }

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(what_, ": line ", line_, ": ", parts...);
  }

  void add(Token::Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }

  void add_data(std::string text) {
    if (!text.empty()) add(Token::Kind::data, std::move(text));
  }

  /// Moves on by so many bytes.
  void skip(size_t count) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<long>(at_), source_.begin() + static_cast<long>(at_ + count), '\n'));
    at_ += count;
  }

  void skip_space() {
    while (at_ < source_.size()) {
      const Utf8Char c = utf8_at(source_, at_);
      if (c.state != Utf8::valid || !is_space(c.code)) return;
      skip(c.length);
    }
  }

  size_t next_tag() const {
    size_t at = at_;
    while ((at = source_.find('{', at)) != std::string::npos) {
      const char next = at + 1 < source_.size() ? source_[at + 1] : '\0';
      if (next == '{' || next == '%' || next == '#') return at;
      ++at;
    }
    return at;
  }

  /// The text before a tag, and then the tag. A minus in the tag takes all white space before it; otherwise a block or
  /// comment that stands first in its line takes the blanks before it, unless it has a plus.
  void read_tag(size_t tag) {
    const char kind = source_[tag + 1], sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    add_data(before_tag(std::string(rest().substr(0, tag - at_)), sign, kind != '{'));
    skip(tag - at_ + (sign == '-' || sign == '+' ? 3 : 2));
    if (kind == '#') return read_comment();
    if (kind == '%' && read_raw()) return;
    add(kind == '{' ? Token::Kind::print_begin : Token::Kind::block_begin, "");
    read_inside(kind == '{');
  }

  std::string before_tag(std::string text, char sign, bool may_strip) const {
    if (sign == '-') {
      text = std::string(stripped(Text(text), false, true).bytes());
    } else if (sign != '+' && may_strip) {
      const size_t line_start = text.rfind('\n') + 1;  // 0 if there is none
      const std::string blanks = text.substr(line_start);
      if ((line_start > 0 || at_line_start_) && stripped(Text(blanks), true, true).size() == 0) text.resize(line_start);
    }
    return text;
  }

  /// What follows the closing bracket of a block or comment: with a minus all white space goes, without a sign one line
  /// end does.
  void finish_block(char sign) {
    skip(sign == '\0' ? 2 : 3);
    const size_t begin = at_;
    if (sign == '-') skip_space();
    if (sign == '\0' && peek() == '\n') skip(1);
    at_line_start_ = at_ > begin && source_[at_ - 1] == '\n';
  }

  void read_comment() {
    const size_t close = source_.find("#}", at_);
    if (close == std::string::npos) refuse("a comment is not closed");
    const char before = close > at_ ? source_[close - 1] : '\0';
    const char sign = before == '-' || before == '+' ? before : '\0';
    skip(close - at_ - (sign ? 1 : 0));
    finish_block(sign);
  }

  /// {% raw %} up to {% endraw %}, both of which it must be at; false if it is another block.
  bool read_raw() {
    const size_t begin = at_;
    const int line = line_;
    skip_space();
    if (!rest().starts_with("raw") || is_name_part(peek(3))) return at_ = begin, line_ = line, false;
    skip(3);
    skip_space();
    const char sign = peek() == '-' ? '-' : '\0';
    if (rest().substr(sign ? 1 : 0, 2) != "%}") refuse("expected %} after raw");
    skip(sign ? 3 : 2);
    if (sign) skip_space();
    at_line_start_ = sign && source_[at_ - 1] == '\n';
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 2)) {
      size_t name = tag + 2;
      const char left = name < source_.size() ? source_[name] : '\0';
      if (left == '-' || left == '+') ++name;
      while (name < source_.size() && is_space(static_cast<unsigned char>(source_[name]))) ++name;
      if (std::string_view(source_).substr(name, 6) != "endraw") continue;
      size_t close = name + 6;
      while (close < source_.size() && is_space(static_cast<unsigned char>(source_[close]))) ++close;
      const char right = close < source_.size() && source_[close] != '%' ? source_[close] : '\0';
      if (std::string_view(source_).substr(close + (right ? 1 : 0), 2) != "%}") continue;
      add_data(before_tag(std::string(rest().substr(0, tag - at_)), left, true));
      skip(close - at_);
      finish_block(right);
      return true;
    }
    refuse("raw without endraw");
  }

  /// Tokens up to the end of a print or a block. Inside brackets what looks like its end is none.
  void read_inside(bool is_print) {
    std::string open;
    for (;;) {
      skip_space();
      if (at_ >= source_.size()) refuse(is_print ? "{{" : "{%", " is not closed");
      if (open.empty() && read_end(is_print)) return;
      const char c = peek();
      if (is_name_start(c)) {
        size_t length = 1;
        while (is_name_part(peek(length))) ++length;
        add(Token::Kind::name, std::string(rest().substr(0, length)));
        skip(length);
      } else if (is_digit(c)) {
        read_number();
      } else if (c == '\'' || c == '"') {
        read_text(c);
      } else {
        read_sign(open);
      }
    }
  }

  bool read_end(bool is_print) {
    const char sign = peek() == '-' || (peek() == '+' && !is_print) ? peek() : '\0';
    if (rest().substr(sign ? 1 : 0, 2) != (is_print ? "}}" : "%}")) return false;
    add(is_print ? Token::Kind::print_end : Token::Kind::block_end, "");
    if (!is_print) return finish_block(sign), true;
    skip(sign ? 3 : 2);
    if (sign) skip_space();
    at_line_start_ = sign && source_[at_ - 1] == '\n';
    return true;
  }

  void read_number() {
    size_t length = 0;
    while (is_digit(peek(length))) ++length;
    const auto digits_after = [&](size_t at) {
      while (is_digit(peek(at))) ++at;
      return at;
    };
    const size_t whole = length;
    if (peek(length) == '.' && is_digit(peek(length + 1))) length = digits_after(length + 1);
    if (peek(length) == 'e' || peek(length) == 'E') {
      const size_t sign = peek(length + 1) == '-' || peek(length + 1) == '+' ? 1 : 0;
      if (is_digit(peek(length + 1 + sign))) length = digits_after(length + 1 + sign);
    }
    const bool fraction = length > whole;
    if (is_name_part(peek(length)))
      refuse("the number ", printable(rest().substr(0, length + 1)), "... is not supported");
    add(fraction ? Token::Kind::number : Token::Kind::integer, std::string(rest().substr(0, length)));
    skip(length);
  }

  void read_text(char quote) {
    std::string text;
    size_t at = 1;
    for (; at_ + at < source_.size() && peek(at) != quote; ++at) {
      if (peek(at) == '\\') {
        at = append_escape(text, at + 1);
      } else {
        text += peek(at);
      }
    }
    if (at_ + at >= source_.size()) refuse("a text is not closed");
    add(Token::Kind::text, std::move(text));
    skip(at + 1);
  }

  /// Python's escapes, from the character after the backslash on; returns the position of the last one used.
  size_t append_escape(std::string& text, size_t at) const {
    const char c = peek(at);
    constexpr std::string_view kNames = "abfnrtv\\'\"", kCodes = "\a\b\f\n\r\t\v\\'\"";
    if (const size_t simple = kNames.find(c); simple != kNames.npos && c != '\0') {
      text += kCodes[simple];
    } else if (c == '\n') {  // the line goes on
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      char32_t code = 0;
      for (size_t i = 1; i <= digits; ++i) {
        const size_t digit = std::string_view("0123456789abcdef").find(static_cast<char>(peek(at + i) | 0x20));
        if (digit == std::string_view::npos) refuse("\\", c, " needs ", digits, " hexadecimal digits");
        code = code << 4 | static_cast<char32_t>(digit);
      }
      if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) refuse("\\", c, hex(code, 8), " is no character");
      append_utf8(text, code);
      return at + digits;
    } else if (c >= '0' && c <= '7') {
      char32_t code = 0;
      size_t digits = 0;
      for (; digits < 3 && peek(at + digits) >= '0' && peek(at + digits) <= '7'; ++digits) {
        code = code * 8 + static_cast<char32_t>(peek(at + digits) - '0');
      }
      append_utf8(text, code);
      return at + digits - 1;
    } else if (c == 'N') {
      refuse("\\N{...} is not supported");
    } else {  // as Python does with a backslash that means nothing
      text += '\\';
      text += c;
    }
    return at;
  }

  void read_sign(std::string& open) {
    constexpr std::string_view kPairs[] = {"//", "**", "==", "!=", ">=", "<="};
    std::string sign(1, peek());
    for (const std::string_view pair : kPairs) {
      if (rest().starts_with(pair)) sign = pair;
    }
    if (sign.size() == 1 && std::string_view("+-/*%~[](){}><=.:|,;").find(sign[0]) == std::string_view::npos) {
      refuse("unexpected character ", printable(rest().substr(0, utf8_at(source_, at_).length)));
    }
    const char c = sign[0];
    if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != c) refuse("unexpected ", c);
      open.pop_back();
    }
    add(Token::Kind::sign, sign);
    skip(sign.size());
  }

  const std::string source_;
  const std::string& what_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
};

}  // namespace

std::vector<Token> tokenize_template(std::string_view source, const std::string& what) {
  return Lexer(source, what).run();
}

}  // namespace fut::jinja
