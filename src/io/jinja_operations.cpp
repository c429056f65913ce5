// Operators, subscripts and the methods of texts and dictionaries, as Python defines them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "io/jinja_runtime.h"
#include "io/mapped_file.h"
#include "io/utf8.h"

namespace fut::jinja {
namespace {

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

/// Arithmetic on whole numbers, which Python has of any size and we have of 64 bits.
Value whole_arithmetic(const std::string& sign, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  if (sign == "+") {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (sign == "-") {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (sign == "*") {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if (sign == "**") {
    if (b < 0) return Value::number(std::pow(static_cast<double>(a), static_cast<double>(b)));
    FUT_CHECK(b <= 64 || (a >= -1 && a <= 1), a, " ** ", b, " is too large");
    result = 1;
    for (int64_t i = a >= -1 && a <= 1 ? b % 2 + (b > 1 ? 2 : 0) : b; i > 0; --i) {
      overflow |= __builtin_mul_overflow(result, a, &result);
    }
  } else {  // // and %, which round down
    FUT_CHECK(b != 0, "division by zero");
    if (b == -1) return sign == "%" ? Value::integer(0) : whole_arithmetic("-", 0, a);
    const int64_t rest = a % b;
    const bool below = rest != 0 && (rest < 0) != (b < 0);
    result = sign == "%" ? rest + (below ? b : 0) : a / b - (below ? 1 : 0);
  }
  FUT_CHECK(!overflow, a, " ", sign, " ", b, " is too large");
  return Value::integer(result);
}

Value float_arithmetic(const std::string& sign, double a, double b) {
  if (sign == "+") return Value::number(a + b);
  if (sign == "-") return Value::number(a - b);
  if (sign == "*") return Value::number(a * b);
  if (sign == "**") return Value::number(std::pow(a, b));
  FUT_CHECK(b != 0, "division by zero");
  if (sign == "/") return Value::number(a / b);
  if (sign == "//") return Value::number(std::floor(a / b));
  const double rest = std::fmod(a, b);
  return Value::number(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
}

Value joined(const Text& a, const Text& b, Limits& limits) {
  require_unsafe(a), require_unsafe(b);
  limits.bytes(a.size() + b.size());
  Text text = a;
  text.append(b);
  return Value::text(std::move(text));
}

Value repeated(const Value& value, int64_t count, Limits& limits) {
  count = std::max<int64_t>(count, 0);
  if (const Text* text = value.as_text()) {
    FUT_CHECK(text->size() == 0 || count <= static_cast<int64_t>(kMaxTextBytes / text->size()), "a text times ", count,
              " is too large");
    limits.bytes(text->size() * static_cast<size_t>(count));
    Text result;
    for (int64_t i = 0; text->size() > 0 && i < count; ++i) result.append(*text);
    return Value::text(std::move(result));
  }
  const Items& items = value.as_list()->items;
  FUT_CHECK(items.empty() || count <= Limits::kMaxRange, "a list times ", count, " is too large");
  limits.items(items.size() * static_cast<size_t>(count));
  Items result;
  for (int64_t i = 0; !items.empty() && i < count; ++i) result.insert(result.end(), items.begin(), items.end());
  return Value::list(std::move(result), value.as_list()->is_tuple);
}

void require_defined(const Value& value) {
  FUT_CHECK(!value.is_undefined(), "\"", printable(value.missing_name()), "\" is undefined");
}

/// Below zero, zero or above.
int ordering(const std::string& sign, const Value& a, const Value& b, Limits& limits) {
  require_defined(a), require_defined(b);
  if (a.as_text() && b.as_text()) {
    limits.bytes(std::min(a.as_text()->size(), b.as_text()->size()));
    return a.as_text()->bytes().compare(b.as_text()->bytes());  // the order of UTF-8 is that of the code points
  }
  const auto x = a.as_number(), y = b.as_number();
  FUT_CHECK(x && y, a.kind(), " ", sign, " ", b.kind(), " is not defined");
  if (const auto i = a.as_integer(), j = b.as_integer(); i && j) return *i < *j ? -1 : *i > *j;
  return *x < *y ? -1 : *x > *y;
}

bool contains(const Value& container, const Value& item, Limits& limits) {
  if (const Text* text = container.as_text()) {
    FUT_CHECK(item.as_text(), item.kind(), " in a text is not defined");
    limits.search(text->bytes(), item.as_text()->bytes());
    return text->bytes().find(item.as_text()->bytes()) != std::string_view::npos;
  }
  if (const Dict* dict = container.as_dict()) {
    limits.step(static_cast<int64_t>(dict->entries.size()));
    return item.as_text() && dict->find(item.as_text()->bytes());
  }
  const Items items = iterate(container, limits);
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& other) { return compare("==", other, item, limits); });
}

/// What == has to look at.
int64_t size_of(const Value& value, int64_t room) {
  if (const Text* text = value.as_text()) return static_cast<int64_t>(text->size() / 64);
  int64_t size = 1;
  const auto add = [&](const Value& part) { size += size < room ? size_of(part, room - size) : 0; };
  if (const List* list = value.as_list()) std::for_each(list->items.begin(), list->items.end(), add);
  if (const Dict* dict = value.as_dict()) {
    for (const auto& [key, part] : dict->entries) add(part);
    size += static_cast<int64_t>(dict->entries.size() * dict->entries.size());  // each key is looked for
  }
  return size;
}

int64_t clamped(int64_t index, int64_t size, int64_t low, int64_t high) {
  return std::clamp(index < 0 ? index + size : index, low, high);
}

/// The positions that Python's [start:stop:step] names.
std::vector<size_t> slice_positions(int64_t size, const Value& start, const Value& stop, const Value& step) {
  const auto part = [](const Value& value, int64_t otherwise) {
    if (value.is_none()) return otherwise;
    FUT_CHECK(value.as_integer(), "a slice by ", value.kind());
    return std::clamp(*value.as_integer(), -kAll / 2, kAll / 2);
  };
  const int64_t by = part(step, 1);
  FUT_CHECK(by != 0, "a slice with step zero");
  const int64_t low = by < 0 ? -1 : 0, high = by < 0 ? size - 1 : size;
  const int64_t first = start.is_none() ? (by < 0 ? high : low) : clamped(part(start, 0), size, low, high);
  const int64_t end = stop.is_none() ? (by < 0 ? low : high) : clamped(part(stop, 0), size, low, high);
  std::vector<size_t> positions;
  for (int64_t i = first; by > 0 ? i < end : i > end; i += by) positions.push_back(static_cast<size_t>(i));
  return positions;
}

Text character(const Text& text, const std::vector<size_t>& starts, size_t index) {
  return text.part(starts[index], starts[index + 1] - starts[index]);
}

// ---- methods

std::optional<std::string> optional_text(const Bound& arguments, std::string_view parameter) {
  const Value* value = arguments.find(parameter);
  if (!value || value->is_none()) return std::nullopt;
  return arguments.text(parameter, "");
}

/// By a separator, from the left or from the right; without one by runs of white space, which are dropped at the ends.
Items split_text(const Text& text, const std::optional<std::string>& separator, int64_t most, bool from_right,
                 Limits& limits) {
  std::vector<std::pair<size_t, size_t>> gaps;  // between pieces: begin and end
  const std::string_view bytes = text.bytes();
  if (separator) {
    FUT_CHECK(!separator->empty(), "split with an empty separator");
    limits.search(bytes, *separator);
    for (size_t at = 0; (at = bytes.find(*separator, at)) != std::string_view::npos; at += separator->size()) {
      limits.items(1);
      gaps.emplace_back(at, at + separator->size());
    }
  }
  Items pieces;
  if (!separator) {
    const std::vector<size_t> starts = characters(bytes);
    FUT_CHECK(most < 0, "split without a separator but with a limit is not supported");
    size_t begin = std::string_view::npos;
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      const bool space = is_space(utf8_at(bytes, starts[i]).code);
      if (!space && begin == std::string_view::npos) begin = starts[i];
      if (space && begin != std::string_view::npos) {
        pieces.push_back(Value::text(text.part(begin, starts[i] - begin)));
        begin = std::string_view::npos;
      }
    }
    if (begin != std::string_view::npos) pieces.push_back(Value::text(text.part(begin)));
    limits.items(pieces.size());
    return pieces;
  }
  if (most >= 0 && gaps.size() > static_cast<size_t>(most)) {
    const auto extra = static_cast<std::ptrdiff_t>(gaps.size() - static_cast<size_t>(most));
    from_right ? gaps.erase(gaps.begin(), gaps.begin() + extra) : gaps.erase(gaps.end() - extra, gaps.end());
  }
  limits.items(gaps.size() + 1);
  limits.bytes(text.size());
  size_t begin = 0;
  for (const auto& [gap, after] : gaps) {
    pieces.push_back(Value::text(text.part(begin, gap - begin)));
    begin = after;
  }
  pieces.push_back(Value::text(text.part(begin)));
  return pieces;
}

bool begins_or_ends(const Text& text, const Value& with, bool begins) {
  if (const List* list = with.as_list(); list && list->is_tuple) {
    return std::any_of(list->items.begin(), list->items.end(),
                       [&](const Value& one) { return begins_or_ends(text, one, begins); });
  }
  FUT_CHECK(with.as_text(), begins ? "startswith" : "endswith", " takes a text or a tuple, found ", with.kind());
  const std::string_view part = with.as_text()->bytes();
  return begins ? text.bytes().starts_with(part) : text.bytes().ends_with(part);
}

using TextMethod = Value (*)(const Text& self, const Bound& arguments, Limits& limits);
struct TextMethodEntry {
  std::string_view name;
  std::vector<std::string_view> parameters;
  size_t required;
  TextMethod run;
};

template <bool left, bool right>
Value strip_method(const Text& self, const Bound& arguments, Limits& limits) {
  const auto chars = optional_text(arguments, "chars");
  limits.bytes(self.size());
  if (chars) limits.search(self.bytes(), *chars);
  return Value::text(stripped(self, left, right, chars));
}

template <bool from_right>
Value split_method(const Text& self, const Bound& arguments, Limits& limits) {
  return Value::list(
      split_text(self, optional_text(arguments, "sep"), arguments.integer("maxsplit", -1), from_right, limits));
}

template <bool from_right>
Value find_method(const Text& self, const Bound& arguments, Limits& limits) {
  const std::string part = arguments.text("sub", "");
  limits.search(self.bytes(), part);
  const size_t at = from_right ? self.bytes().rfind(part) : self.bytes().find(part);
  if (at == std::string_view::npos) return Value::integer(-1);
  return Value::integer(static_cast<int64_t>(characters(self.bytes().substr(0, at)).size() - 1));
}

Value join_method(const Text& self, const Bound& arguments, Limits& limits) {
  Text result;
  bool first = true;
  for (const Value& item : iterate(*arguments.find("iterable"), limits)) {
    FUT_CHECK(item.as_text(), "join takes texts, found ", item.kind());
    limits.bytes(self.size() + item.as_text()->size());
    require_short(result.size());
    require_unsafe(*item.as_text());
    if (!first) result.append(self);
    result.append(*item.as_text());
    first = false;
  }
  return Value::text(std::move(result));
}

Value count_method(const Text& self, const Bound& arguments, Limits& limits) {
  const std::string part = arguments.text("sub", "");
  limits.search(self.bytes(), part);
  if (part.empty()) return Value::integer(static_cast<int64_t>(characters(self.bytes()).size()));
  int64_t count = 0;
  for (size_t at = 0; (at = self.bytes().find(part, at)) != std::string_view::npos; at += part.size()) ++count;
  return Value::integer(count);
}

const std::vector<TextMethodEntry>& text_methods() {
  static const std::vector<TextMethodEntry> methods = {
      {"strip", {"chars"}, 0, strip_method<true, true>},
      {"lstrip", {"chars"}, 0, strip_method<true, false>},
      {"rstrip", {"chars"}, 0, strip_method<false, true>},
      {"split", {"sep", "maxsplit"}, 0, split_method<false>},
      {"rsplit", {"sep", "maxsplit"}, 0, split_method<true>},
      {"find", {"sub"}, 1, find_method<false>},
      {"rfind", {"sub"}, 1, find_method<true>},
      {"count", {"sub"}, 1, count_method},
      {"join", {"iterable"}, 1, join_method},
      {"startswith",
       {"prefix"},
       1,
       [](const Text& self, const Bound& a, Limits&) {
         return Value::boolean(begins_or_ends(self, *a.find("prefix"), true));
       }},
      {"endswith",
       {"suffix"},
       1,
       [](const Text& self, const Bound& a, Limits&) {
         return Value::boolean(begins_or_ends(self, *a.find("suffix"), false));
       }},
      {"replace",
       {"old", "new", "count"},
       2,
       [](const Text& self, const Bound& a, Limits& limits) {
         a.text("old", ""), a.text("new", "");
         return Value::text(
             replaced(self, *a.find("old")->as_text(), *a.find("new")->as_text(), a.integer("count", -1), limits));
       }},
      {"upper",
       {},
       0,
       [](const Text& self, const Bound&, Limits&) { return Value::text(changed_case(self, true, "upper")); }},
      {"lower",
       {},
       0,
       [](const Text& self, const Bound&, Limits&) { return Value::text(changed_case(self, false, "lower")); }},
      {"capitalize",
       {},
       0,
       [](const Text& self, const Bound&, Limits&) { return Value::text(capitalized(self, false, "capitalize")); }},
      {"title",
       {},
       0,
       [](const Text& self, const Bound&, Limits&) { return Value::text(capitalized(self, true, "title")); }},
  };
  return methods;
}

const TextMethodEntry* find_text_method(std::string_view name) {
  for (const TextMethodEntry& entry : text_methods()) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

bool is_dict_method(std::string_view name) {
  return name == "items" || name == "keys" || name == "values" || name == "get";
}

Value call_dict_method(const Dict& dict, const std::string& name, const Arguments& arguments, Limits& limits) {
  if (name == "get") {
    const Bound bound(arguments, {"key", "default"}, 1, "get");
    const Text* key = bound.find("key")->as_text();
    const Value *found = key ? dict.find(key->bytes()) : nullptr, *otherwise = bound.find("default");
    limits.step(static_cast<int64_t>(dict.entries.size()));
    return found ? *found : otherwise ? *otherwise : Value::none();
  }
  const Bound none(arguments, {}, 0, name);
  Items items;
  limits.items(dict.entries.size() * 3);
  for (const auto& [key, value] : dict.entries) {
    items.push_back(name == "keys"     ? Value::text(key)
                    : name == "values" ? value
                                       : Value::list({Value::text(key), value}, true));
  }
  return Value::list(std::move(items));
}

/// The fields of `loop`.
Value loop_attribute(const Value& value, const Loop& loop, const std::string& name) {
  const auto index = static_cast<int64_t>(loop.index), length = static_cast<int64_t>(loop.items.size());
  if (name == "index0") return Value::integer(index);
  if (name == "index") return Value::integer(index + 1);
  if (name == "revindex0") return Value::integer(length - index - 1);
  if (name == "revindex") return Value::integer(length - index);
  if (name == "first") return Value::boolean(index == 0);
  if (name == "last") return Value::boolean(index + 1 == length);
  if (name == "length") return Value::integer(length);
  if (name == "depth0" || name == "depth") return Value::integer(name == "depth");  // it counts recursive loops only
  if (name == "previtem") return index == 0 ? Value::undefined("previtem") : loop.items[loop.index - 1];
  if (name == "nextitem") return index + 1 == length ? Value::undefined("nextitem") : loop.items[loop.index + 1];
  if (name == "cycle") return Value::object(std::make_shared<Method>(value, name));
  fail("loop.", printable(name), " is not supported");
}

}  // namespace

void Limits::step(int64_t count) {
  steps_ += count;
  FUT_CHECK(steps_ <= kMaxSteps, "the template takes more than ", kMaxSteps, " steps");
}

void Limits::items(size_t count) {
  FUT_CHECK(count <= static_cast<size_t>(kMaxSteps), "the template takes more than ", kMaxSteps, " steps");
  step(4 * static_cast<int64_t>(count));
}

void Limits::bytes(size_t count) {
  require_short(count);
  FUT_CHECK(count <= static_cast<size_t>(kMaxBytes) - static_cast<size_t>(bytes_), "the template makes more than ",
            kMaxBytes >> 20, " MiB of text");
  bytes_ += static_cast<int64_t>(count);
}

Items iterate(const Value& value, Limits& limits) {
  Items items;
  if (const List* list = value.as_list()) {
    limits.items(list->items.size());
    return list->items;
  }
  if (const Dict* dict = value.as_dict()) {
    limits.items(dict->entries.size());
    for (const auto& [key, unused] : dict->entries) items.push_back(Value::text(key));
    return items;
  }
  if (const Text* text = value.as_text()) {
    const std::vector<size_t> starts = characters(text->bytes());
    limits.items(starts.size() * 2);
    for (size_t i = 0; i + 1 < starts.size(); ++i) items.push_back(Value::text(character(*text, starts, i)));
    return items;
  }
  FUT_CHECK(value.is_undefined(), "a loop over ", value.kind());
  return items;
}

Value get_item(const Value& value, const Value& key) {
  require_defined(value), require_defined(key);
  const Text* name = key.as_text();
  if (const Dict* dict = value.as_dict(); dict && name) {
    if (const Value* found = dict->find(name->bytes())) return *found;
  }
  const auto index = key.as_integer();
  if (const List* list = value.as_list(); list && index) {
    const auto size = static_cast<int64_t>(list->items.size());
    if (*index >= -size && *index < size) return list->items[static_cast<size_t>(*index < 0 ? *index + size : *index)];
    return Value::undefined(cat("item ", *index));
  }
  if (const Text* text = value.as_text(); text && index) {
    const std::vector<size_t> starts = characters(text->bytes());
    const auto size = static_cast<int64_t>(starts.size()) - 1;
    if (*index < -size || *index >= size) return Value::undefined(cat("character ", *index));
    return Value::text(character(*text, starts, static_cast<size_t>(*index < 0 ? *index + size : *index)));
  }
  return name ? get_attribute(value, std::string(name->bytes())) : Value::undefined(cat("item of ", value.kind()));
}

Value get_attribute(const Value& value, const std::string& name) {
  require_defined(value);
  if (const Dict* dict = value.as_dict()) {
    if (is_dict_method(name)) return Value::object(std::make_shared<Method>(value, name));
    const Value* found = dict->find(name);
    return found ? *found : Value::undefined(name);
  }
  if (value.as_text() && find_text_method(name)) return Value::object(std::make_shared<Method>(value, name));
  if (const auto* space = value.as<Namespace>()) {
    const auto found = space->values.find(name);
    return found == space->values.end() ? Value::undefined(name) : found->second;
  }
  if (const auto* loop = value.as<Loop>()) return loop_attribute(value, *loop, name);
  return Value::undefined(name);
}

Value get_slice(const Value& value, const Value& start, const Value& stop, const Value& step, Limits& limits) {
  if (const List* list = value.as_list()) {
    limits.items(list->items.size());
    Items items;
    for (size_t i : slice_positions(static_cast<int64_t>(list->items.size()), start, stop, step)) {
      items.push_back(list->items[i]);
    }
    return Value::list(std::move(items), list->is_tuple);
  }
  require_defined(value);
  const Text* text = value.as_text();
  FUT_CHECK(text, "a slice of ", value.kind());
  limits.bytes(text->size());
  const std::vector<size_t> starts = characters(text->bytes());
  const auto positions = slice_positions(static_cast<int64_t>(starts.size()) - 1, start, stop, step);
  if (positions.empty()) return Value::text("");
  if (step.is_none() || step == Value::integer(1)) {
    return Value::text(text->part(starts[positions.front()], starts[positions.back() + 1] - starts[positions.front()]));
  }
  Text result;
  for (size_t i : positions) result.append(character(*text, starts, i));
  return Value::text(std::move(result));
}

Value binary(const std::string& sign, const Value& a, const Value& b, Limits& limits) {
  if (sign == "~") return joined(to_text(a), to_text(b), limits);
  require_defined(a), require_defined(b);
  if (sign == "+" && a.as_text() && b.as_text()) return joined(*a.as_text(), *b.as_text(), limits);
  if (sign == "+" && a.as_list() && b.as_list() && a.as_list()->is_tuple == b.as_list()->is_tuple) {
    Items items = a.as_list()->items;
    items.insert(items.end(), b.as_list()->items.begin(), b.as_list()->items.end());
    limits.items(items.size());
    return Value::list(std::move(items), a.as_list()->is_tuple);
  }
  if (sign == "*" && (a.as_text() || a.as_list()) && b.as_integer()) return repeated(a, *b.as_integer(), limits);
  if (sign == "*" && (b.as_text() || b.as_list()) && a.as_integer()) return repeated(b, *a.as_integer(), limits);
  FUT_CHECK(sign != "%" || !a.as_text(), "formatting a text with % is not supported");
  const auto x = a.as_number(), y = b.as_number();
  FUT_CHECK(x && y, a.kind(), " ", sign, " ", b.kind(), " is not defined");
  if (a.as_integer() && b.as_integer() && sign != "/") return whole_arithmetic(sign, *a.as_integer(), *b.as_integer());
  return float_arithmetic(sign, *x, *y);
}

Value negative(const Value& value) {
  require_defined(value);
  if (const auto i = value.as_integer()) return whole_arithmetic("-", 0, *i);
  FUT_CHECK(value.is_float(), "minus ", value.kind(), " is not defined");
  return Value::number(-*value.as_number());
}

bool compare(const std::string& sign, const Value& a, const Value& b, Limits& limits) {
  if (sign == "in") return contains(b, a, limits);
  if (sign == "not in") return !contains(b, a, limits);
  if (sign == "==" || sign == "!=") {
    limits.step(std::min(size_of(a, Limits::kMaxSteps), size_of(b, Limits::kMaxSteps)));
    return (a == b) == (sign == "==");
  }
  if (a.as_number() && b.as_number() && (std::isnan(*a.as_number()) || std::isnan(*b.as_number()))) return false;
  const int order = ordering(sign, a, b, limits);
  return sign == "<" ? order < 0 : sign == "<=" ? order <= 0 : sign == ">" ? order > 0 : order >= 0;
}

Value call_method(const Method& method, const Arguments& arguments, Limits& limits) {
  if (const Dict* dict = method.self.as_dict()) return call_dict_method(*dict, method.method, arguments, limits);
  if (const auto* loop = method.self.as<Loop>()) {
    FUT_CHECK(!arguments.positional.empty() && arguments.named.empty(), "loop.cycle takes values");
    return arguments.positional[loop->index % arguments.positional.size()];
  }
  const TextMethodEntry& entry = *find_text_method(method.method);
  const Bound bound(arguments, entry.parameters, entry.required, method.method);
  limits.bytes(method.self.as_text()->size());
  return entry.run(*method.self.as_text(), bound, limits);
}

Text changed_case(const Text& text, bool upper, const char* what) {
  Text result;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text.bytes()[i];
    FUT_CHECK(static_cast<unsigned char>(c) < 0x80, what, " of a text that is not all ASCII is not supported");
    if (upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z') c ^= 0x20;
    result.append(std::string_view(&c, 1), text.is_data(i));
  }
  return result;
}

Text capitalized(const Text& text, bool each_word, const char* what) {
  Text result;
  bool start = true;
  const Text lower = changed_case(text, false, what), upper = changed_case(text, true, what);
  for (size_t i = 0; i < text.size(); ++i) {
    result.append((start ? upper : lower).part(i, 1));
    const bool letter = upper.bytes()[i] >= 'A' && upper.bytes()[i] <= 'Z';
    start = each_word && !letter;
  }
  return result;
}

void require_unsafe(const Text& text) {
  FUT_CHECK(!text.is_safe(), "joining a text marked safe with another is not supported");
}

Text replaced(const Text& text, const Text& old, const Text& other, int64_t count, Limits& limits) {
  require_unsafe(text), require_unsafe(other);
  limits.search(text.bytes(), old.bytes());
  FUT_CHECK(old.size() > 0, "replacing an empty text is not supported");
  Text result;
  size_t begin = 0;
  for (size_t at = 0; count != 0 && (at = text.bytes().find(old.bytes(), at)) != std::string_view::npos; --count) {
    limits.bytes(other.size());
    require_short(result.size());
    result.append(text.part(begin, at - begin));
    result.append(other);
    begin = at += old.size();
  }
  result.append(text.part(begin));
  return result;
}

}  // namespace fut::jinja
