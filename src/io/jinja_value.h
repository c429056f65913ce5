// What chat templates compute with: Python's values, as far as templates see them.
//
// Text remembers, byte by byte, whether it came from outside the template. That is how a user's "<|eot_id|>" is told
// from the template's own once both stand in one prompt.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace fut::jinja {

/// UTF-8 with a mark on every byte that is data. Positions and lengths are bytes; what templates count are characters,
/// see characters().
class Text {
 public:
  Text() = default;
  explicit Text(std::string bytes, bool is_data = false)
      : bytes_(std::move(bytes)), marks_(is_data ? std::string(bytes_.size(), '\1') : std::string()) {}

  std::string_view bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool is_data(size_t at) const { return !marks_.empty() && marks_[at] != 0; }
  /// A byte a byte of text, 0 for the template's own; empty if all is the template's own.
  std::string_view marks() const { return marks_; }

  Text part(size_t begin, size_t count = std::string::npos) const;
  void append(const Text& other);
  void append(std::string_view own, bool is_data = false);

  /// What the filter "safe" gives. Jinja escapes whatever is joined with it, for HTML; here that is refused.
  Text as_safe() const;
  bool is_safe() const { return is_safe_; }

 private:
  std::string bytes_, marks_;
  bool is_safe_ = false;
};

/// Where each character begins, and the end of the text; a byte that is no UTF-8 counts as a character.
std::vector<size_t> characters(std::string_view text);

/// What Python's str.isspace() and a regular expression's \s hold.
bool is_space(char32_t code);
/// `text` without white space, or without the characters in `chars`, at its ends.
Text stripped(const Text& text, bool left, bool right, const std::optional<std::string>& chars = {});

class Value;
struct List;
struct Dict;

/// A value with an identity: a namespace, a loop, something to call. They stay out of lists and dictionaries, so that
/// no value can hold itself.
struct Object {
  virtual ~Object() = default;
  virtual std::string name() const = 0;  ///< for messages: "a namespace"
};

struct Undefined {
  std::string what;  ///< the name that was looked for
};

class Value {
 public:
  Value() = default;  ///< undefined
  static Value undefined(std::string what) { return Value(Undefined{std::move(what)}); }
  static Value none() { return Value(nullptr); }
  static Value boolean(bool b) { return Value(b); }
  static Value integer(int64_t i) { return Value(i); }
  static Value number(double d) { return Value(d); }
  static Value text(Text t) { return Value(std::make_shared<const Text>(std::move(t))); }
  static Value text(std::string own) { return text(Text(std::move(own))); }
  static Value list(std::vector<Value> items, bool is_tuple = false);
  static Value dict(std::vector<std::pair<Text, Value>> entries);  ///< of equal keys the last counts
  static Value object(std::shared_ptr<Object> o) { return Value(std::move(o)); }

  bool is_undefined() const { return std::holds_alternative<Undefined>(value_); }
  bool is_none() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_boolean() const { return std::holds_alternative<bool>(value_); }
  bool is_integer() const { return std::holds_alternative<int64_t>(value_); }  ///< true and false are none
  bool is_float() const { return std::holds_alternative<double>(value_); }

  // nullptr or nothing for a value of another kind.
  const Text* as_text() const { return get<Text>(); }
  const List* as_list() const { return get<List>(); }
  const Dict* as_dict() const { return get<Dict>(); }
  template <class T>
  T* as() const {  ///< an Object of this class
    const auto* object = std::get_if<std::shared_ptr<Object>>(&value_);
    return object ? dynamic_cast<T*>(object->get()) : nullptr;
  }
  bool is_object() const { return std::holds_alternative<std::shared_ptr<Object>>(value_); }
  std::optional<int64_t> as_integer() const;  ///< true is 1, as in Python
  std::optional<double> as_number() const;

  bool truth() const;
  int depth() const;         ///< 0, or how deep lists and dictionaries nest
  std::string kind() const;  ///< for messages: "a list"
  const std::string& missing_name() const { return std::get<Undefined>(value_).what; }

  /// Python's ==.
  friend bool operator==(const Value& a, const Value& b);

 private:
  using Variant = std::variant<Undefined, std::nullptr_t, bool, int64_t, double, std::shared_ptr<const Text>,
                               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Object>>;
  template <class T>
  explicit Value(T value) : value_(std::move(value)) {}
  template <class T>
  const T* get() const {
    const auto* pointer = std::get_if<std::shared_ptr<const T>>(&value_);
    return pointer ? pointer->get() : nullptr;
  }

  Variant value_;
};

using Items = std::vector<Value>;

struct List {
  Items items;
  bool is_tuple = false;
  int depth = 1;
};

struct Dict {
  std::vector<std::pair<Text, Value>> entries;  ///< in the order in which they came, as Python keeps them
  int depth = 1;
  const Value* find(std::string_view key) const;
};

/// Deeper values are refused, which bounds every recursion over them.
inline constexpr int kMaxValueDepth = 64;

/// Of any one text, the result included: several times as many as a context holds. A list may hold another one many
/// times over, so that as a text it has no other bound.
inline constexpr size_t kMaxTextBytes = size_t{16} << 20;
void require_short(size_t bytes);  ///< of a text that is made

/// Python's str(): a text as it is, a list as Python writes it.
Text to_text(const Value& value);
std::string scalar_text(const Value& value);  ///< of none, a boolean or a number

/// Appends text in which some characters are written otherwise; what `escape` gives, unless that is empty, takes the
/// mark of its character.
void append_escaped(Text& out, const Text& text, const std::function<std::string(char32_t)>& escape);
std::string hex(char32_t code, int digits);

struct JsonStyle {
  bool ascii = false, sort_keys = false;
  std::optional<int> indent;  ///< spaces a level; none: one line
  std::string item_separator = ", ", key_separator = ": ";
};

/// Python's json.dumps(). What JSON cannot say (an undefined value, a namespace) is refused.
Text to_json(const Value& value, const JsonStyle& style);

/// From JSON; every string in it, and every key, is data. `what` begins every message.
Value value_from_json(std::string_view json, const std::string& what);

}  // namespace fut::jinja
