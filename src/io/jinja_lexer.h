// A template cut into tokens, with white space control as chat templates are rendered by transformers: trim_blocks,
// lstrip_blocks, no newline kept at the very end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fut::jinja {

struct Token {
  enum class Kind {
    data,         ///< text between tags
    print_begin,  ///< {{
    print_end,
    block_begin,  ///< {%
    block_end,
    name,
    text,  ///< a string literal, escapes resolved
    integer,
    number,
    sign,  ///< an operator or bracket
    end
  };
  Kind kind;
  std::string text;
  int line;
};

/// Comments are gone, {% raw %} has become data. `what` begins every message, which then names the line. The last token
/// is Kind::end.
std::vector<Token> tokenize_template(std::string_view source, const std::string& what);

}  // namespace fut::jinja
