#include "io/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "base/error.h"
#include "io/mapped_file.h"
#include "io/utf8.h"

namespace fut::jinja {
namespace {

/// Python's repr of a float: the shortest digits that read back as the same number, with an exponent only where that is
/// below -4 or above 15.
std::string float_text(double value) {
  char buffer[32];
  const auto scientific = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  const std::string text(buffer, scientific.ptr);
  const int exponent = std::stoi(text.substr(text.find('e') + 1));
  if (exponent < -4 || exponent > 15) return text;
  const auto fixed = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed);
  const std::string plain(buffer, fixed.ptr);
  return plain.find('.') == std::string::npos ? plain + ".0" : plain;
}

/// What Python's repr escapes: controls, separators, invisible formats, private use. Code points that no character has
/// yet are written as they are.
bool is_shown(char32_t code) {
  if (code < 0x20 || (code >= 0x7f && code <= 0xa0) || code == 0xad) return false;
  if (is_space(code) && code != ' ') return false;
  const bool format = (code >= 0x600 && code <= 0x605) || code == 0x61c || code == 0x6dd || code == 0x70f ||
                      (code >= 0x200b && code <= 0x200f) || (code >= 0x202a && code <= 0x202e) ||
                      (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) ||
                      (code >= 0xe0001 && code <= 0xe007f);
  const bool private_use = (code >= 0xe000 && code <= 0xf8ff) || code >= 0xf0000;
  return !format && !private_use;
}

void append_repr(Text& out, const Text& text) {
  const bool single = text.bytes().find('\'') == std::string::npos, twice = text.bytes().find('"') != std::string::npos;
  const char quote = single || twice ? '\'' : '"';
  out.append(std::string_view(&quote, 1));
  append_escaped(out, text, [&](char32_t code) -> std::string {
    if (code == '\\' || code == static_cast<char32_t>(quote)) return {'\\', static_cast<char>(code)};
    if (code == '\n') return "\\n";
    if (code == '\r') return "\\r";
    if (code == '\t') return "\\t";
    if (is_shown(code)) return "";
    return code < 0x100 ? "\\x" + hex(code, 2) : code < 0x10000 ? "\\u" + hex(code, 4) : "\\U" + hex(code, 8);
  });
  out.append(std::string_view(&quote, 1));
}

void append_python(Text& out, const Value& value) {
  require_short(out.size());
  if (const Text* text = value.as_text()) {
    append_repr(out, *text);
  } else if (const List* list = value.as_list()) {
    out.append(list->is_tuple ? "(" : "[");
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i) out.append(", ");
      append_python(out, list->items[i]);
    }
    out.append(!list->is_tuple ? "]" : list->items.size() == 1 ? ",)" : ")");
  } else if (const Dict* dict = value.as_dict()) {
    out.append("{");
    for (size_t i = 0; i < dict->entries.size(); ++i) {
      if (i) out.append(", ");
      append_repr(out, dict->entries[i].first);
      out.append(": ");
      append_python(out, dict->entries[i].second);
    }
    out.append("}");
  } else if (value.is_undefined()) {
    out.append("Undefined");
  } else {
    out.append(scalar_text(value));
  }
}

}  // namespace

void require_short(size_t bytes) {
  FUT_CHECK(bytes <= kMaxTextBytes, "the template makes a text of more than ", kMaxTextBytes >> 20, " MiB");
}

std::string scalar_text(const Value& value) {
  if (value.is_none()) return "None";
  if (value.is_boolean()) return value.truth() ? "True" : "False";
  if (value.is_integer()) return std::to_string(*value.as_integer());
  const double number = *value.as_number();
  if (std::isnan(number)) return "nan";
  return std::isinf(number) ? number < 0 ? "-inf" : "inf" : float_text(number);
}

std::string hex(char32_t code, int digits) {
  std::string text(static_cast<size_t>(digits), '0');
  for (int i = digits - 1; i >= 0; --i, code >>= 4) text[static_cast<size_t>(i)] = "0123456789abcdef"[code & 15];
  return text;
}

void append_escaped(Text& out, const Text& text, const std::function<std::string(char32_t)>& escape) {
  const std::string_view bytes = text.bytes();
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Char c = utf8_at(bytes, at);
    const std::string other = escape(c.code);
    if (other.empty()) {
      out.append(text.part(at, c.length));
    } else {
      out.append(other, text.is_data(at));
    }
    at += c.length;
  }
}

Text Text::part(size_t begin, size_t count) const {
  Text result;
  result.bytes_ = bytes_.substr(begin, count);
  if (!marks_.empty()) result.marks_ = marks_.substr(begin, count);
  return result;
}

Text Text::as_safe() const {
  Text result = *this;
  result.is_safe_ = true;
  return result;
}

void Text::append(const Text& other) {
  if (other.marks_.empty()) return append(other.bytes_);
  marks_.resize(bytes_.size());
  bytes_ += other.bytes_;
  marks_ += other.marks_;
}

void Text::append(std::string_view own, bool is_data) {
  if (is_data) marks_.resize(bytes_.size());
  bytes_ += own;
  if (is_data || !marks_.empty()) marks_.resize(bytes_.size(), is_data ? '\1' : '\0');
}

std::vector<size_t> characters(std::string_view text) {
  std::vector<size_t> starts;
  for (size_t at = 0; at < text.size(); at += utf8_at(text, at).length) starts.push_back(at);
  starts.push_back(text.size());
  return starts;
}

bool is_space(char32_t code) {
  return (code >= 9 && code <= 13) || (code >= 0x1c && code <= 0x20) || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f ||
         code == 0x205f || code == 0x3000;
}

Text stripped(const Text& text, bool left, bool right, const std::optional<std::string>& chars) {
  const std::string_view bytes = text.bytes();
  const std::vector<size_t> starts = characters(bytes);
  const auto goes = [&](size_t i) {
    const std::string_view one = bytes.substr(starts[i], starts[i + 1] - starts[i]);
    if (!chars) return is_space(utf8_at(bytes, starts[i]).code);
    const std::vector<size_t> set = characters(*chars);
    for (size_t c = 0; c + 1 < set.size(); ++c) {
      if (std::string_view(*chars).substr(set[c], set[c + 1] - set[c]) == one) return true;
    }
    return false;
  };
  size_t begin = 0, end = starts.size() - 1;
  while (left && begin < end && goes(begin)) ++begin;
  while (right && begin < end && goes(end - 1)) --end;
  return text.part(starts[begin], starts[end] - starts[begin]);
}

Value Value::list(std::vector<Value> items, bool is_tuple) {
  List list{std::move(items), is_tuple, 1};
  for (const Value& item : list.items) {
    FUT_CHECK(!item.is_object(), item.kind(), " in a list is not supported");
    list.depth = std::max(list.depth, item.depth() + 1);
  }
  FUT_CHECK(list.depth <= kMaxValueDepth, "lists and dictionaries nest deeper than ", kMaxValueDepth);
  return Value(std::make_shared<const List>(std::move(list)));
}

Value Value::dict(std::vector<std::pair<Text, Value>> entries) {
  Dict dict;
  dict.entries.reserve(entries.size());
  std::unordered_map<std::string_view, size_t> places;
  for (auto& [key, value] : entries) {
    FUT_CHECK(!value.is_object(), value.kind(), " in a dictionary is not supported");
    dict.depth = std::max(dict.depth, value.depth() + 1);
    const auto [place, is_new] = places.emplace(key.bytes(), dict.entries.size());
    if (is_new) {
      dict.entries.emplace_back(key, std::move(value));  // a copy: places looks into the original
    } else {
      dict.entries[place->second].second = std::move(value);
    }
  }
  FUT_CHECK(dict.depth <= kMaxValueDepth, "lists and dictionaries nest deeper than ", kMaxValueDepth);
  return Value(std::make_shared<const Dict>(std::move(dict)));
}

std::optional<int64_t> Value::as_integer() const {
  if (const bool* b = std::get_if<bool>(&value_)) return *b ? 1 : 0;
  if (const int64_t* i = std::get_if<int64_t>(&value_)) return *i;
  return std::nullopt;
}

std::optional<double> Value::as_number() const {
  if (const double* d = std::get_if<double>(&value_)) return *d;
  const auto i = as_integer();
  return i ? std::optional(static_cast<double>(*i)) : std::nullopt;
}

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (const Text* text = as_text()) return text->size() > 0;
  if (const List* list = as_list()) return !list->items.empty();
  if (const Dict* dict = as_dict()) return !dict->entries.empty();
  const auto number = as_number();
  return !number || *number != 0;
}

int Value::depth() const {
  if (const List* list = as_list()) return list->depth;
  if (const Dict* dict = as_dict()) return dict->depth;
  return 0;
}

std::string Value::kind() const {
  if (is_undefined()) return cat("\"", printable(missing_name()), "\", which is undefined");
  if (is_none()) return "none";
  if (is_boolean()) return "a boolean";
  if (is_integer()) return "an integer";
  if (is_float()) return "a float";
  if (as_text()) return "a text";
  if (const List* list = as_list()) return list->is_tuple ? "a tuple" : "a list";
  if (as_dict()) return "a dictionary";
  return std::get<std::shared_ptr<Object>>(value_)->name();
}

bool operator==(const Value& a, const Value& b) {
  if (const auto x = a.as_number(), y = b.as_number(); x && y) {
    const auto i = a.as_integer(), j = b.as_integer();
    return i && j ? *i == *j : *x == *y;
  }
  if (a.value_.index() != b.value_.index()) return false;
  if (a.is_undefined() || a.is_none()) return true;
  if (a.as_text()) return a.as_text()->bytes() == b.as_text()->bytes();
  if (a.as_list()) return a.as_list()->is_tuple == b.as_list()->is_tuple && a.as_list()->items == b.as_list()->items;
  if (a.is_object()) return std::get<std::shared_ptr<Object>>(a.value_) == std::get<std::shared_ptr<Object>>(b.value_);
  const Dict &left = *a.as_dict(), &right = *b.as_dict();
  return left.entries.size() == right.entries.size() &&
         std::all_of(left.entries.begin(), left.entries.end(), [&](const auto& entry) {
           const Value* other = right.find(entry.first.bytes());
           return other && entry.second == *other;
         });
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name.bytes() == key) return &value;
  }
  return nullptr;
}

Text to_text(const Value& value) {
  if (const Text* text = value.as_text()) return *text;
  Text out;
  FUT_CHECK(!value.is_object(), value.kind(), " as text is not supported");
  if (!value.is_undefined()) append_python(out, value);
  return out;
}

}  // namespace fut::jinja
