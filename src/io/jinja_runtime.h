// What a running template works with: limits, arguments, objects, and the operations on values.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/jinja_ast.h"

namespace fut::jinja {

/// Templates come with models, and models from anywhere: all of a template's work is counted.
class Limits {
 public:
  static constexpr int64_t kMaxSteps = 10'000'000, kMaxBytes = int64_t{256} << 20, kMaxRange = 100'000;
  static constexpr int kMaxRecursion = 500;

  void step(int64_t count = 1);  ///< nodes and comparisons
  void items(size_t count);      ///< values put into lists and dictionaries
  void bytes(size_t count);      ///< of text made on the way
  /// A search for `needle`, whose worst case is the product of the lengths.
  void search(std::string_view text, std::string_view needle) {
    step(1 + static_cast<int64_t>(static_cast<double>(text.size()) * static_cast<double>(needle.size()) / 4096));
  }

 private:
  int64_t steps_ = 0, bytes_ = 0;
};

struct Arguments {
  Items positional = {};
  std::vector<std::pair<std::string, Value>> named = {};
};

/// Arguments matched to parameters. `what` is for messages: "filter trim".
class Bound {
 public:
  Bound(const Arguments& arguments, const std::vector<std::string_view>& parameters, size_t required,
        const std::string& what);

  /// nullptr if it was not given.
  const Value* find(std::string_view parameter) const;
  // Of the type asked for, or refused; `otherwise` if not given.
  std::string text(std::string_view parameter, const std::string& otherwise) const;
  int64_t integer(std::string_view parameter, int64_t otherwise) const;
  bool flag(std::string_view parameter, bool otherwise) const;

 private:
  std::string what_;
  std::map<std::string, Value, std::less<>> values_;
};

// ---- objects

struct Namespace final : Object {
  std::map<std::string, Value> values;
  std::string name() const override { return "a namespace"; }
};

struct Loop final : Object {
  Items items;
  size_t index = 0;
  std::string name() const override { return "a loop"; }
};

/// A function that every template can call.
struct Function final : Object {
  std::string function;
  explicit Function(std::string f) : function(std::move(f)) {}
  std::string name() const override { return "the function " + function; }
};

/// A method with what it belongs to, before it is called.
struct Method final : Object {
  Value self;
  std::string method;
  Method(Value s, std::string m) : self(std::move(s)), method(std::move(m)) {}
  std::string name() const override { return "the method " + method; }
};

struct Scope {
  std::shared_ptr<Scope> parent;
  std::map<std::string, Value, std::less<>> names;
};

struct Macro final : Object {
  const Statement* statement;
  std::weak_ptr<Scope> scope;  ///< weak, because that scope holds the macro
  Macro(const Statement* s, std::weak_ptr<Scope> where) : statement(s), scope(std::move(where)) {}
  std::string name() const override { return "the macro " + statement->name; }
};

// ---- operations; all of them throw Error without a place, which render() adds

/// What a loop over `value` meets: items, keys, or characters.
Items iterate(const Value& value, Limits& limits);
Value get_item(const Value& value, const Value& key);
Value get_attribute(const Value& value, const std::string& name);
Value get_slice(const Value& value, const Value& start, const Value& stop, const Value& step, Limits& limits);
Value binary(const std::string& sign, const Value& a, const Value& b, Limits& limits);
Value negative(const Value& value);
bool compare(const std::string& sign, const Value& a, const Value& b, Limits& limits);
Value call_method(const Method& method, const Arguments& arguments, Limits& limits);

Value apply_filter(const std::string& name, const Value& input, const Arguments& arguments, Limits& limits);
bool apply_test(const std::string& name, const Value& input, const Arguments& arguments, Limits& limits);

/// ASCII alone is changed; a text with other characters is refused, since Python would change some of those.
Text changed_case(const Text& text, bool upper, const char* what);
/// First letter large, the others small: of the text, or of each of its words.
Text capitalized(const Text& text, bool each_word, const char* what);
void require_unsafe(const Text& text);  ///< see Text::as_safe()
Text replaced(const Text& text, const Text& old, const Text& other, int64_t count, Limits& limits);

}  // namespace fut::jinja
