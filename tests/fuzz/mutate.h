// Changes that suit any format, any text and any JSON.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz.h"

namespace fut::fuzz {

/// Numbers at which arithmetic changes its mind: 0, powers of two and their neighbours, of all widths.
uint64_t odd_number(Random& random);

/// Overwrites, inserts, removes, repeats or moves some bytes; now and then takes some of `other`.
void mutate_bytes(std::string& bytes, Random& random, std::string_view other = {});

/// Texts that parsers stumble over: empty, long, control characters, broken UTF-8, names of other fields.
std::string odd_text(Random& random, const std::vector<std::string>& words);

/// JSON as a tree whose scalars and keys stay as the file spells them, so that what is no JSON can be written too.
struct JsonTree {
  enum class Kind { scalar, array, object };
  Kind kind = Kind::scalar;
  std::string text = {};                                     // of a scalar
  std::vector<std::pair<std::string, JsonTree>> parts = {};  // a key with its quotes (none in an array), and the value

  JsonTree* find(std::string_view key);  ///< without quotes
};

JsonTree parse_json_tree(std::string_view valid);
std::string to_text(const JsonTree& tree);
std::string quoted(std::string_view text);  ///< as JSON, but for bytes that are no UTF-8, which stay
JsonTree json_scalar(std::string text);

/// One to a few changes to values, keys and structure. `words`: keys and strings that mean something to the parser.
void mutate_json(JsonTree& root, Random& random, const std::vector<std::string>& words);

/// The same for a text; in one of ten cases bytes change as well, and only they if it is no JSON (any more).
std::string mutated_json(const std::string& text, Random& random, const std::vector<std::string>& words);

/// A safetensors file with another header, data or length (safetensors_fuzz.cpp).
std::string mutated_safetensors(const std::string& file, Random& random);

}  // namespace fut::fuzz
