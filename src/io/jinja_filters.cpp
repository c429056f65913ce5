// Filters and tests by name. One that is not here is refused when it is reached, so that a template may use it in a
// part that a plain conversation never comes to.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "io/jinja_runtime.h"
#include "io/mapped_file.h"

namespace fut::jinja {
namespace {

struct Call {
  const Value& input;
  const Bound& arguments;
  Limits& limits;
};

struct Entry {
  std::string_view name;
  std::vector<std::string_view> parameters;
  size_t required;
  Value (*run)(const Call& call);
};

Text text_of(const Call& call) {
  Text text = to_text(call.input);
  call.limits.bytes(text.size());
  return text;
}

/// "a.b" of an item; 0 as well as a name.
Value attribute_of(Value value, const Value& path, Limits& limits) {
  if (path.as_integer()) return get_item(value, path);
  FUT_CHECK(path.as_text(), "an attribute is a text, found ", path.kind());
  std::string_view rest = path.as_text()->bytes();
  for (bool more = true; more;) {
    const size_t dot = rest.find('.');
    const std::string_view name = rest.substr(0, dot);
    int64_t index = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
    const bool is_index = error == std::errc() && end == name.data() + name.size();
    value = get_item(value, is_index ? Value::integer(index) : Value::text(std::string(name)));
    limits.step();
    more = dot != std::string_view::npos;
    rest.remove_prefix(more ? dot + 1 : rest.size());
  }
  return value;
}

Value trim(const Call& call) {
  const Value* chars = call.arguments.find("chars");
  if (chars && !chars->is_none())
    return Value::text(stripped(text_of(call), true, true, call.arguments.text("chars", "")));
  return Value::text(stripped(text_of(call), true, true));
}

Value length(const Call& call) {
  call.limits.step();
  if (const List* list = call.input.as_list()) return Value::integer(static_cast<int64_t>(list->items.size()));
  if (const Dict* dict = call.input.as_dict()) return Value::integer(static_cast<int64_t>(dict->entries.size()));
  if (call.input.is_undefined()) return Value::integer(0);
  FUT_CHECK(call.input.as_text(), "the length of ", call.input.kind());
  return Value::integer(static_cast<int64_t>(characters(text_of(call).bytes()).size()) - 1);
}

Value default_value(const Call& call) {
  const Value* given = call.arguments.find("default_value");
  const bool absent = call.input.is_undefined() || (call.arguments.flag("boolean", false) && !call.input.truth());
  return !absent ? call.input : given ? *given : Value::text("");
}

Value join(const Call& call) {
  const Value *attribute = call.arguments.find("attribute"), *separator = call.arguments.find("d");
  Text result;
  const Text between = separator ? to_text(*separator) : Text();
  bool first = true;
  for (const Value& item : iterate(call.input, call.limits)) {
    const Text text = to_text(attribute && !attribute->is_none() ? attribute_of(item, *attribute, call.limits) : item);
    call.limits.bytes(between.size() + text.size());
    require_short(result.size());
    require_unsafe(text);
    if (!first) result.append(between);
    result.append(text);
    first = false;
  }
  return Value::text(std::move(result));
}

Value first_item(const Call& call) {
  const Items items = iterate(call.input, call.limits);
  return items.empty() ? Value::undefined("the first item of nothing") : items.front();
}

Value last_item(const Call& call) {
  const Items items = iterate(call.input, call.limits);
  return items.empty() ? Value::undefined("the last item of nothing") : items.back();
}

Value tojson(const Call& call) {
  JsonStyle style;
  style.ascii = call.arguments.flag("ensure_ascii", false);
  style.sort_keys = call.arguments.flag("sort_keys", false);
  if (const Value* indent = call.arguments.find("indent"); indent && !indent->is_none()) {
    const int64_t width = call.arguments.integer("indent", 0);
    FUT_CHECK(width >= 0 && width <= 16, "tojson with an indent of ", width, ", expected 0 to 16");
    style.indent = static_cast<int>(width);
    style.item_separator = ",";
  }
  if (const Value* separators = call.arguments.find("separators"); separators && !separators->is_none()) {
    const List* pair = separators->as_list();
    FUT_CHECK(pair && pair->items.size() == 2 && pair->items[0].as_text() && pair->items[1].as_text(),
              "the separators of tojson are two texts, found ", separators->kind());
    style.item_separator = pair->items[0].as_text()->bytes();
    style.key_separator = pair->items[1].as_text()->bytes();
  }
  Text text = to_json(call.input, style);
  call.limits.bytes(text.size());
  return Value::text(std::move(text));
}

Value to_integer(const Call& call) {
  const Value* given = call.arguments.find("default");
  const Value otherwise = given ? *given : Value::integer(0);
  if (const auto i = call.input.as_integer()) return Value::integer(*i);
  double number = 0;
  if (call.input.is_float()) number = *call.input.as_number();
  if (const Text* text = call.input.as_text()) {
    const Text trimmed = stripped(*text, true, true);
    std::string_view digits = trimmed.bytes();
    if (digits.starts_with('+')) digits.remove_prefix(1);
    int64_t whole = 0;
    const char* const end = digits.data() + digits.size();
    if (const auto [stop, error] = std::from_chars(digits.data(), end, whole); error == std::errc() && stop == end) {
      return Value::integer(whole);
    }
    const auto [stop, error] = std::from_chars(digits.data(), end, number);
    if (error != std::errc() || stop != end) return otherwise;
  } else if (!call.input.is_float()) {
    return otherwise;
  }
  return std::abs(number) < 9e18 ? Value::integer(static_cast<int64_t>(number)) : otherwise;
}

Value to_float(const Call& call) {
  const Value* given = call.arguments.find("default");
  if (const auto number = call.input.as_number()) return Value::number(*number);
  if (const Text* text = call.input.as_text()) {
    const Text trimmed = stripped(*text, true, true);
    const char *begin = trimmed.bytes().data(), *end = begin + trimmed.size();
    double number = 0;
    if (const auto [stop, error] = std::from_chars(begin, end, number); error == std::errc() && stop == end) {
      return Value::number(number);
    }
  }
  return given ? *given : Value::number(0);
}

Value indent(const Call& call) {
  const Value* width = call.arguments.find("width");
  const int64_t spaces = width && width->as_text() ? 0 : call.arguments.integer("width", 4);
  FUT_CHECK(spaces >= 0 && spaces <= 1000, "indent by ", spaces);
  const std::string prefix = width && width->as_text() ? std::string(width->as_text()->bytes())
                                                       : std::string(static_cast<size_t>(spaces), ' ');
  const bool first = call.arguments.flag("first", false), blank = call.arguments.flag("blank", false);
  const Text text = text_of(call);
  Text result;
  bool is_first = true;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.bytes().find('\n', begin), text.size());
    const Text line = text.part(begin, end - begin);
    call.limits.bytes(prefix.size());
    require_short(result.size());
    if (!is_first) result.append(text.part(begin - 1, 1));
    if (is_first ? first : blank || line.size() > 0) result.append(prefix);
    result.append(line);
    is_first = false;
    begin = end + 1;
  }
  return Value::text(std::move(result));
}

/// What Jinja compares when it sorts without regard to case.
Value sort_key(const Value& value, bool case_sensitive) {
  const Text* text = value.as_text();
  return text && !case_sensitive ? Value::text(changed_case(*text, false, "sorting")) : value;
}

Items sorted(Items items, const std::function<Value(const Value&)>& key, bool reverse, Limits& limits) {
  std::vector<std::pair<Value, Value>> keyed;
  for (Value& item : items) keyed.emplace_back(key(item), item);
  const auto below = [&](const auto& a, const auto& b) { return compare("<", a.first, b.first, limits); };
  std::stable_sort(keyed.begin(), keyed.end(),
                   [&](const auto& a, const auto& b) { return reverse ? below(b, a) : below(a, b); });
  for (size_t i = 0; i < items.size(); ++i) items[i] = std::move(keyed[i].second);
  return items;
}

Value sort(const Call& call) {
  const Value* attribute = call.arguments.find("attribute");
  const bool case_sensitive = call.arguments.flag("case_sensitive", false);
  const auto key = [&](const Value& item) {
    return sort_key(attribute && !attribute->is_none() ? attribute_of(item, *attribute, call.limits) : item,
                    case_sensitive);
  };
  return Value::list(sorted(iterate(call.input, call.limits), key, call.arguments.flag("reverse", false), call.limits));
}

Items pairs_of(const Dict& dict, Limits& limits) {
  Items pairs;
  limits.items(dict.entries.size() * 3);
  for (const auto& [key, value] : dict.entries) pairs.push_back(Value::list({Value::text(key), value}, true));
  return pairs;
}

Value dictsort(const Call& call) {
  const Dict* dict = call.input.as_dict();
  FUT_CHECK(dict, "dictsort of ", call.input.kind());
  const std::string by = call.arguments.text("by", "key");
  FUT_CHECK(by == "key" || by == "value", "dictsort by \"", printable(by), "\"");
  const bool case_sensitive = call.arguments.flag("case_sensitive", false);
  const auto key = [&](const Value& pair) {
    return sort_key(pair.as_list()->items[by == "key" ? 0 : 1], case_sensitive);
  };
  return Value::list(sorted(pairs_of(*dict, call.limits), key, call.arguments.flag("reverse", false), call.limits));
}

Value items_filter(const Call& call) {
  if (call.input.is_undefined()) return Value::list({});
  FUT_CHECK(call.input.as_dict(), "items of ", call.input.kind());
  return Value::list(pairs_of(*call.input.as_dict(), call.limits));
}

Value reverse(const Call& call) {
  Items items = iterate(call.input, call.limits);
  std::reverse(items.begin(), items.end());
  if (!call.input.as_text()) return Value::list(std::move(items));
  Text text;
  for (const Value& item : items) text.append(*item.as_text());
  return Value::text(std::move(text));
}

Value unique(const Call& call) {
  Items result;
  for (const Value& item : iterate(call.input, call.limits)) {
    const Value key = sort_key(item, false);
    const auto same = [&](const Value& other) { return compare("==", sort_key(other, false), key, call.limits); };
    if (std::none_of(result.begin(), result.end(), same)) result.push_back(item);
  }
  return Value::list(std::move(result));
}

Value replace(const Call& call) {
  call.arguments.text("old", ""), call.arguments.text("new", "");
  const Value* count = call.arguments.find("count");
  return Value::text(replaced(text_of(call), *call.arguments.find("old")->as_text(),
                              *call.arguments.find("new")->as_text(),
                              count && !count->is_none() ? call.arguments.integer("count", -1) : -1, call.limits));
}

const std::vector<Entry>& filters() {
  static const std::vector<Entry> entries = {
      {"trim", {"chars"}, 0, trim},
      {"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, 0, tojson},
      {"length", {}, 0, length},
      {"count", {}, 0, length},
      {"default", {"default_value", "boolean"}, 0, default_value},
      {"d", {"default_value", "boolean"}, 0, default_value},
      {"join", {"d", "attribute"}, 0, join},
      {"first", {}, 0, first_item},
      {"last", {}, 0, last_item},
      {"string", {}, 0, [](const Call& call) { return Value::text(text_of(call)); }},
      {"safe", {}, 0, [](const Call& call) { return Value::text(text_of(call).as_safe()); }},
      {"list", {}, 0, [](const Call& call) { return Value::list(iterate(call.input, call.limits)); }},
      {"upper", {}, 0, [](const Call& call) { return Value::text(changed_case(text_of(call), true, "upper")); }},
      {"lower", {}, 0, [](const Call& call) { return Value::text(changed_case(text_of(call), false, "lower")); }},
      {"capitalize",
       {},
       0,
       [](const Call& call) { return Value::text(capitalized(text_of(call), false, "capitalize")); }},
      {"int", {"default"}, 0, to_integer},
      {"float", {"default"}, 0, to_float},
      {"replace", {"old", "new", "count"}, 2, replace},
      {"items", {}, 0, items_filter},
      {"dictsort", {"case_sensitive", "by", "reverse"}, 0, dictsort},
      {"sort", {"reverse", "case_sensitive", "attribute"}, 0, sort},
      {"reverse", {}, 0, reverse},
      {"unique", {}, 0, unique},
      {"indent", {"width", "first", "blank"}, 0, indent},
  };
  return entries;
}

Value same(const Call& call) {
  return Value::boolean(compare("==", call.input, *call.arguments.find("other"), call.limits));
}
Value different(const Call& call) { return Value::boolean(!same(call).truth()); }
template <char relation, bool or_equal>
Value ordered(const Call& call) {
  const std::string sign = std::string(1, relation) + (or_equal ? "=" : "");
  return Value::boolean(compare(sign, call.input, *call.arguments.find("other"), call.limits));
}
Value is_number(const Call& call) { return Value::boolean(call.input.as_number().has_value()); }
template <int rest>
Value remainder_is(const Call& call) {
  const auto number = call.input.as_integer();
  FUT_CHECK(number, rest ? "odd" : "even", " of ", call.input.kind());
  return Value::boolean((*number % 2 != 0) == (rest == 1));
}

const std::vector<Entry>& tests() {
  static const std::vector<Entry> entries = {
      {"defined", {}, 0, [](const Call& call) { return Value::boolean(!call.input.is_undefined()); }},
      {"undefined", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_undefined()); }},
      {"none", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_none()); }},
      {"string", {}, 0, [](const Call& call) { return Value::boolean(call.input.as_text() != nullptr); }},
      {"mapping", {}, 0, [](const Call& call) { return Value::boolean(call.input.as_dict() != nullptr); }},
      {"iterable",
       {},
       0,
       [](const Call& call) {
         return Value::boolean(call.input.as_text() || call.input.as_list() || call.input.as_dict() ||
                               call.input.is_undefined());
       }},
      {"sequence",
       {},
       0,
       [](const Call& call) {
         return Value::boolean(call.input.as_text() || call.input.as_list() || call.input.as_dict());
       }},
      {"number", {}, 0, is_number},
      {"integer", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_integer()); }},
      {"float", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_float()); }},
      {"boolean", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_boolean()); }},
      {"true", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_boolean() && call.input.truth()); }},
      {"false", {}, 0, [](const Call& call) { return Value::boolean(call.input.is_boolean() && !call.input.truth()); }},
      {"callable",
       {},
       0,
       [](const Call& call) {
         return Value::boolean(call.input.as<Function>() || call.input.as<Method>() || call.input.as<Macro>());
       }},
      {"odd", {}, 0, remainder_is<1>},
      {"even", {}, 0, remainder_is<0>},
      {"divisibleby",
       {"num"},
       1,
       [](const Call& call) {
         return Value::boolean(binary("%", call.input, *call.arguments.find("num"), call.limits) == Value::integer(0));
       }},
      {"equalto", {"other"}, 1, same},
      {"eq", {"other"}, 1, same},
      {"==", {"other"}, 1, same},
      {"ne", {"other"}, 1, different},
      {"!=", {"other"}, 1, different},
      {"lt", {"other"}, 1, ordered<'<', false>},
      {"le", {"other"}, 1, ordered<'<', true>},
      {"gt", {"other"}, 1, ordered<'>', false>},
      {"ge", {"other"}, 1, ordered<'>', true>},
      {"in",
       {"seq"},
       1,
       [](const Call& call) {
         return Value::boolean(compare("in", call.input, *call.arguments.find("seq"), call.limits));
       }},
  };
  return entries;
}

const Entry* find(const std::vector<Entry>& entries, std::string_view name) {
  for (const Entry& entry : entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

/// The arguments from `begin` on, with all the named ones.
Arguments rest_of(const Arguments& arguments, size_t begin) {
  Arguments rest{{}, arguments.named};
  if (begin < arguments.positional.size()) {
    rest.positional.assign(arguments.positional.begin() + static_cast<std::ptrdiff_t>(begin),
                           arguments.positional.end());
  }
  return rest;
}

std::string name_argument(const Arguments& arguments, size_t index, const std::string& filter) {
  FUT_CHECK(index < arguments.positional.size() && arguments.positional[index].as_text(), filter,
            " needs a name as its argument ", index + 1);
  return std::string(arguments.positional[index].as_text()->bytes());
}

/// map('name', arguments ...) or map(attribute=..., default=...).
Value map_items(const Value& input, const Arguments& arguments, Limits& limits) {
  Items result;
  if (!input.truth()) return Value::list({});  // none, too, as Jinja has it
  if (arguments.positional.empty()) {
    const Bound bound(arguments, {"attribute", "default"}, 1, "map");
    for (const Value& item : iterate(input, limits)) {
      Value value = attribute_of(item, *bound.find("attribute"), limits);
      if (const Value* otherwise = bound.find("default"); otherwise && value.is_undefined()) value = *otherwise;
      result.push_back(std::move(value));
    }
    return Value::list(std::move(result));
  }
  const std::string name = name_argument(arguments, 0, "map");
  FUT_CHECK(name != "map" && !name.starts_with("select") && !name.starts_with("reject"), "map(\"", name,
            "\") is not supported");
  const Arguments rest = rest_of(arguments, 1);
  for (const Value& item : iterate(input, limits)) result.push_back(apply_filter(name, item, rest, limits));
  return Value::list(std::move(result));
}

/// select, reject, selectattr and rejectattr: by truth, or by a test.
Value select_items(const std::string& filter, const Value& input, const Arguments& arguments, Limits& limits) {
  const bool by_attribute = filter.ends_with("attr"), keep = filter.starts_with("select");
  const size_t test_at = by_attribute ? 1 : 0;
  FUT_CHECK(!by_attribute || !arguments.positional.empty(), filter, " needs an attribute");
  const bool has_test = arguments.positional.size() > test_at;
  const std::string test = has_test ? name_argument(arguments, test_at, filter) : "";
  const Arguments rest = rest_of(arguments, test_at + 1);
  Items result;
  if (!input.truth()) return Value::list({});
  for (const Value& item : iterate(input, limits)) {
    const Value value = by_attribute ? attribute_of(item, arguments.positional[0], limits) : item;
    if ((has_test ? apply_test(test, value, rest, limits) : value.truth()) == keep) result.push_back(item);
  }
  return Value::list(std::move(result));
}

}  // namespace

Bound::Bound(const Arguments& arguments, const std::vector<std::string_view>& parameters, size_t required,
             const std::string& what)
    : what_(what) {
  FUT_CHECK(arguments.positional.size() <= parameters.size(), what, " takes at most ", parameters.size(),
            " arguments, found ", arguments.positional.size());
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_.emplace(parameters[i], arguments.positional[i]);
  for (const auto& [name, value] : arguments.named) {
    FUT_CHECK(std::find(parameters.begin(), parameters.end(), name) != parameters.end(), what, " has no argument \"",
              printable(name), "\" here");
    FUT_CHECK(values_.emplace(name, value).second, what, ": the argument ", name, " is given twice");
  }
  for (size_t i = 0; i < required; ++i) {
    FUT_CHECK(values_.contains(parameters[i]), what, " needs the argument ", parameters[i]);
  }
}

const Value* Bound::find(std::string_view parameter) const {
  const auto found = values_.find(parameter);
  return found == values_.end() ? nullptr : &found->second;
}

std::string Bound::text(std::string_view parameter, const std::string& otherwise) const {
  const Value* value = find(parameter);
  if (!value) return otherwise;
  FUT_CHECK(value->as_text(), what_, ": ", parameter, " is a text, found ", value->kind());
  return std::string(value->as_text()->bytes());
}

int64_t Bound::integer(std::string_view parameter, int64_t otherwise) const {
  const Value* value = find(parameter);
  if (!value) return otherwise;
  FUT_CHECK(value->as_integer(), what_, ": ", parameter, " is an integer, found ", value->kind());
  return *value->as_integer();
}

bool Bound::flag(std::string_view parameter, bool otherwise) const {
  const Value* value = find(parameter);
  return value ? value->truth() : otherwise;
}

Value apply_filter(const std::string& name, const Value& input, const Arguments& arguments, Limits& limits) {
  limits.step();
  if (name == "map") return map_items(input, arguments, limits);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
    return select_items(name, input, arguments, limits);
  }
  const Entry* entry = find(filters(), name);
  FUT_CHECK(entry, "the filter \"", printable(name), "\" is not supported");
  return entry->run({input, Bound(arguments, entry->parameters, entry->required, "filter " + name), limits});
}

bool apply_test(const std::string& name, const Value& input, const Arguments& arguments, Limits& limits) {
  limits.step();
  const Entry* entry = find(tests(), name);
  FUT_CHECK(entry, "the test \"", printable(name), "\" is not supported");
  return entry->run({input, Bound(arguments, entry->parameters, entry->required, "test " + name), limits}).truth();
}

}  // namespace fut::jinja
