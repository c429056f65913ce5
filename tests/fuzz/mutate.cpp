#include "mutate.h"

#include <algorithm>

namespace fut::fuzz {
namespace {

constexpr size_t kMostBytes = 1 << 18;  // of a mutated file: more only makes inputs slow

/// Numbers as JSON spells them, some of which it does not allow.
constexpr const char* kJsonNumbers[] = {"0",
                                        "-0",
                                        "1",
                                        "-1",
                                        "2",
                                        "3",
                                        "7",
                                        "64",
                                        "255",
                                        "256",
                                        "65535",
                                        "65536",
                                        "16777215",
                                        "16777216",
                                        "2147483647",
                                        "2147483648",
                                        "-2147483648",
                                        "4294967295",
                                        "4294967296",
                                        "4611686018427387904",
                                        "9223372036854775807",
                                        "9223372036854775808",
                                        "-9223372036854775808",
                                        "-9223372036854775809",
                                        "18446744073709551615",
                                        "18446744073709551616",
                                        "0.5",
                                        "1.0",
                                        "-1.5",
                                        "1e-5",
                                        "1e10",
                                        "1e38",
                                        "1e39",
                                        "1e308",
                                        "1e309",
                                        "5e-324",
                                        "-1e400",
                                        "123456789012345678901234567890",
                                        "01",
                                        "+1",
                                        ".5",
                                        "NaN",
                                        "Infinity",
                                        "1e",
                                        "0x10"};
constexpr const char* kJsonWords[] = {"null", "true", "false", "[]", "{}", "\"\"", "[null]", "{\"\":0}", "nul", ""};

size_t small_count(Random& random) { return 1 + (random.chance(30) ? random.below(64) : random.below(8)); }

std::string odd_bytes(Random& random) {
  const uint64_t number = odd_number(random);
  std::string bytes;
  const size_t width = size_t{1} << random.below(4);
  const bool big_endian = random.chance(10);
  for (size_t i = 0; i < width; ++i) {
    bytes += static_cast<char>(number >> 8 * (big_endian ? width - 1 - i : i) & 0xff);
  }
  return bytes;
}

void mutate_bytes_once(std::string& bytes, Random& random, std::string_view other) {
  const size_t at = random.below(bytes.size() + 1), left = bytes.size() - at;
  const size_t count = std::min(small_count(random), left);
  switch (random.below(9)) {
    case 0:
      if (left) bytes[at] ^= static_cast<char>(1 << random.below(8));
      break;
    case 1:
      if (left) bytes[at] = static_cast<char>(random.next());
      break;
    case 2: {
      const std::string number = odd_bytes(random);
      bytes.replace(at, std::min(left, number.size()), number);
      break;
    }
    case 3: bytes.erase(at, count); break;
    case 4: bytes.insert(at, bytes.substr(random.below(bytes.size() + 1), small_count(random))); break;
    case 5: bytes.insert(at, small_count(random), static_cast<char>(random.next())); break;
    case 6: bytes.resize(random.chance(50) ? at : bytes.size() - std::min(bytes.size(), small_count(random))); break;
    case 7: {
      const std::string moved = bytes.substr(at, count);
      bytes.erase(at, count);
      bytes.insert(random.below(bytes.size() + 1), moved);
      break;
    }
    default:
      if (!other.empty()) {
        const size_t from = random.below(other.size());
        bytes.replace(at, random.chance(50) ? count : 0, other.substr(from, 1 + random.below(256)));
      }
  }
}

// ---- JSON

struct NoJson : std::runtime_error {
  NoJson() : std::runtime_error("fuzz: no JSON") {}
};

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  JsonTree value(int depth = 0) {
    if (depth > 500) throw NoJson();
    skip_space();
    JsonTree tree;
    const char open = peek();
    if (open != '{' && open != '[') {
      tree.text = open == '"' ? string() : word();
      return tree;
    }
    tree.kind = open == '{' ? JsonTree::Kind::object : JsonTree::Kind::array;
    ++at_;
    for (skip_space(); peek() != '}' && peek() != ']' && at_ < text_.size(); skip_space()) {
      std::string key;
      if (open == '{') {
        key = string();
        skip_space();
        ++at_;  // the colon
      }
      tree.parts.emplace_back(std::move(key), value(depth + 1));
      skip_space();
      if (peek() == ',') ++at_;
    }
    ++at_;
    return tree;
  }

 private:
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  std::string string() {
    const size_t begin = at_++;
    while (at_ < text_.size() && peek() != '"') at_ += peek() == '\\' ? 2 : 1;
    at_ = std::min(at_ + 1, text_.size());
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string word() {
    const size_t begin = at_;
    at_ = std::min(text_.find_first_of(",]}: \t\r\n", at_), text_.size());
    if (at_ == begin) throw NoJson();
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string_view text_;
  size_t at_ = 0;
};

void write(const JsonTree& tree, std::string& out) {
  if (tree.kind == JsonTree::Kind::scalar) {
    out += tree.text;
    return;
  }
  const bool object = tree.kind == JsonTree::Kind::object;
  out += object ? '{' : '[';
  for (size_t i = 0; i < tree.parts.size(); ++i) {
    if (i) out += ',';
    if (object) out += tree.parts[i].first + ":";
    write(tree.parts[i].second, out);
  }
  out += object ? '}' : ']';
}

void collect(JsonTree& tree, std::vector<JsonTree*>& all) {
  all.push_back(&tree);
  for (auto& [key, part] : tree.parts) collect(part, all);
}

/// `count` brackets around a value: deeper than parsers that recurse can bear.
std::string nested(Random& random, std::string inner) {
  const size_t depth = random.chance(80) ? 1 + random.below(80) : random.below(100'000);
  const bool object = random.chance(30);
  std::string text;
  for (size_t i = 0; i < depth; ++i) text += object ? "{\"a\":" : "[";
  text += std::move(inner);
  return text.append(depth, object ? '}' : ']');
}

std::string tweaked_number(std::string text, Random& random) {
  switch (random.below(5)) {
    case 0: return text.starts_with('-') ? text.substr(1) : "-" + text;
    case 1: return text + std::to_string(random.below(1000));
    case 2: return text + ".5";
    case 3: text.back() = text.back() == '9' ? '0' : static_cast<char>(text.back() + 1); return text;
    default: return std::to_string(odd_number(random));
  }
}

void change_scalar(JsonTree& node, Random& random, const std::vector<std::string>& words) {
  const bool number = !node.text.empty() && (node.text[0] == '-' || (node.text[0] >= '0' && node.text[0] <= '9'));
  const bool string = node.text.size() > 1 && node.text[0] == '"';
  if (number && random.chance(70)) {
    node.text = random.chance(50) ? tweaked_number(node.text, random) : random.pick(kJsonNumbers);
  } else if (string && random.chance(70)) {
    std::string text = node.text.substr(1, node.text.size() - 2);
    if (random.chance(50)) {
      mutate_bytes_once(text, random, "\\u0000\\ud800\\udc00\\n\\\"\\x");
      node.text = "\"" + text + "\"";
    } else {
      node.text = quoted(odd_text(random, words));
    }
  } else {
    node = json_scalar(random.chance(50)   ? random.pick(kJsonWords)
                       : random.chance(50) ? random.pick(kJsonNumbers)
                                           : quoted(odd_text(random, words)));
  }
}

void change_structure(JsonTree& node, std::vector<JsonTree*>& all, Random& random,
                      const std::vector<std::string>& words) {
  auto& parts = node.parts;
  const size_t at = random.below(parts.size() + 1);
  const auto place = parts.begin() + static_cast<std::ptrdiff_t>(at);
  switch (random.below(6)) {
    case 0:
      if (place != parts.end()) parts.erase(place);
      break;
    case 1:
      if (place != parts.end()) parts.insert(place, std::pair(*place));  // in an object: the same key twice
      break;
    case 2:
      if (place != parts.end()) place->first = quoted(odd_text(random, words));
      break;
    case 3: parts.insert(place, {quoted(odd_text(random, words)), JsonTree(*random.pick(all))}); break;
    case 4: parts.insert(place, {quoted(random.pick(words)), json_scalar(random.pick(kJsonNumbers))}); break;
    default: node.kind = node.kind == JsonTree::Kind::object ? JsonTree::Kind::array : JsonTree::Kind::object;
  }
}

}  // namespace

uint64_t odd_number(Random& random) {
  switch (random.below(6)) {
    case 0: return random.below(300);
    case 1: return random.next();
    case 2: return (uint64_t{1} << random.below(64)) - 1;
    case 3: return uint64_t{1} << random.below(64);
    case 4: return (uint64_t{1} << random.below(64)) + 1 + random.below(64);
    default: return -static_cast<uint64_t>(random.below(300));
  }
}

void mutate_bytes(std::string& bytes, Random& random, std::string_view other) {
  for (size_t count = 1 + random.below(4); count > 0; --count) mutate_bytes_once(bytes, random, other);
  if (bytes.size() > kMostBytes) bytes.resize(kMostBytes);
}

std::string odd_text(Random& random, const std::vector<std::string>& words) {
  static const std::string kTexts[] = {"",
                                       " ",
                                       "a",
                                       std::string(1, '\0'),
                                       "\n",
                                       "a\nb",
                                       "\x1b[31m",
                                       "\x7f",
                                       "\xff",
                                       "\xc3",
                                       "\xed\xa0\x80",
                                       "\xf4\x90\x80\x80",
                                       "\u00e9",
                                       "\u2581",
                                       "\u2028",
                                       "\U0001F600",
                                       "../x",
                                       "/",
                                       "%s%n",
                                       "{}",
                                       "\"",
                                       "\\",
                                       "-1",
                                       "0",
                                       "1e999",
                                       "__proto__"};
  if (random.chance(50) && !words.empty()) return random.pick(words);
  if (random.chance(80)) return random.pick(kTexts);
  return std::string(random.chance(80) ? random.below(300) : random.below(20'000), static_cast<char>(random.next()));
}

JsonTree* JsonTree::find(std::string_view key) {
  for (auto& [name, part] : parts) {
    if (name == quoted(key)) return &part;
  }
  return nullptr;
}

JsonTree parse_json_tree(std::string_view valid) { return JsonReader(valid).value(); }

std::string to_text(const JsonTree& tree) {
  std::string text;
  write(tree, text);
  return text;
}

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20) {
      result += byte == '\n' ? "\\n" : "\\u00";
      if (byte != '\n') result += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
    } else {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
  }
  return result + "\"";
}

JsonTree json_scalar(std::string text) { return {JsonTree::Kind::scalar, std::move(text), {}}; }

void mutate_json(JsonTree& root, Random& random, const std::vector<std::string>& words) {
  for (size_t count = 1 + random.below(random.chance(70) ? 2 : 6); count > 0; --count) {
    std::vector<JsonTree*> all;
    collect(root, all);
    JsonTree& node = *all[random.below(all.size())];
    const size_t what = random.below(20);
    if (what == 0) {
      node = json_scalar(nested(random, random.chance(50) ? "0" : to_text(node)));
    } else if (what <= 2) {
      node = JsonTree(*random.pick(all));
    } else if (node.kind != JsonTree::Kind::scalar && what < 18) {
      change_structure(node, all, random, words);
    } else {
      change_scalar(node, random, words);
    }
  }
}

std::string mutated_json(const std::string& text, Random& random, const std::vector<std::string>& words) {
  std::string result = text;
  bool is_json = true;
  try {
    JsonTree tree = parse_json_tree(text);
    mutate_json(tree, random, words);
    result = to_text(tree);
  } catch (const NoJson&) {
    is_json = false;
  }
  if (!is_json || random.chance(10)) mutate_bytes(result, random, text);
  if (result.size() > kMostBytes) result.resize(kMostBytes);
  return result;
}

}  // namespace fut::fuzz
