// JSON to template values and back.
#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "base/error.h"
#include "io/jinja_value.h"
#include "io/json.h"
#include "io/mapped_file.h"

namespace fut::jinja {
namespace {

void append_json_text(Text& out, const Text& text, bool ascii) {
  out.append("\"");
  append_escaped(out, text, [ascii](char32_t code) -> std::string {
    switch (code) {
      case '"': return "\\\"";
      case '\\': return "\\\\";
      case '\n': return "\\n";
      case '\r': return "\\r";
      case '\t': return "\\t";
      case '\f': return "\\f";
      case '\b': return "\\b";
      default: break;
    }
    if (code < 0x20 || (ascii && code >= 0x7f && code < 0x10000)) return "\\u" + hex(code, 4);
    if (!ascii || code < 0x10000) return "";
    return "\\u" + hex(0xd800 + ((code - 0x10000) >> 10), 4) + "\\u" + hex(0xdc00 + (code & 0x3ff), 4);
  });
  out.append("\"");
}

class JsonWriter {
 public:
  JsonWriter(Text& out, const JsonStyle& style) : out_(out), style_(style) {}

  void write(const Value& value, int level) {
    require_short(out_.size());
    if (const Text* text = value.as_text()) return append_json_text(out_, *text, style_.ascii);
    if (const List* list = value.as_list()) return write_list(*list, level);
    if (const Dict* dict = value.as_dict()) return write_dict(*dict, level);
    FUT_CHECK(!value.is_undefined() && !value.is_object(), "tojson of ", value.kind());
    if (value.is_none()) return out_.append("null");
    if (value.is_boolean()) return out_.append(value.truth() ? "true" : "false");
    const double number = *value.as_number();
    if (value.is_float() && std::isnan(number)) return out_.append("NaN");
    if (value.is_float() && std::isinf(number)) return out_.append(number < 0 ? "-Infinity" : "Infinity");
    out_.append(scalar_text(value));
  }

 private:
  void write_list(const List& list, int level) {
    if (list.items.empty()) return out_.append("[]");
    out_.append("[");
    for (size_t i = 0; i < list.items.size(); ++i) {
      begin_item(i, level + 1);
      write(list.items[i], level + 1);
    }
    end_items("]", level);
  }

  void write_dict(const Dict& dict, int level) {
    if (dict.entries.empty()) return out_.append("{}");
    auto entries = dict.entries;
    if (style_.sort_keys) {
      std::sort(entries.begin(), entries.end(),
                [](const auto& a, const auto& b) { return a.first.bytes() < b.first.bytes(); });
    }
    out_.append("{");
    for (size_t i = 0; i < entries.size(); ++i) {
      begin_item(i, level + 1);
      append_json_text(out_, entries[i].first, style_.ascii);
      out_.append(style_.key_separator);
      write(entries[i].second, level + 1);
    }
    end_items("}", level);
  }

  void begin_item(size_t index, int level) {
    if (index) out_.append(style_.item_separator);
    break_line(level);
  }
  void end_items(std::string_view close, int level) {
    break_line(level);
    out_.append(close);
  }
  void break_line(int level) {
    if (style_.indent) out_.append("\n" + std::string(static_cast<size_t>(*style_.indent * level), ' '));
  }

  Text& out_;
  const JsonStyle& style_;
};

/// Takes the parser's events. nlohmann's own values would sort the keys, and templates show them in the file's order.
class ValueBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit ValueBuilder(const std::string& what) : what_(what) {}

  Value take_result() { return std::move(result_); }

  bool null() override { return add(Value::none()); }
  bool boolean(bool value) override { return add(Value::boolean(value)); }
  bool number_integer(number_integer_t value) override { return add(Value::integer(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    FUT_CHECK(value <= uint64_t{INT64_MAX}, what_, ": the number ", value, " is too large");
    return add(Value::integer(static_cast<int64_t>(value)));
  }
  bool number_float(number_float_t value, const string_t&) override { return add(Value::number(value)); }
  bool string(string_t& value) override { return add(Value::text(Text(std::move(value), true))); }
  bool binary(binary_t&) override { return false; }

  bool start_object(size_t) override { return open(true); }
  bool start_array(size_t) override { return open(false); }
  bool key(string_t& value) override {
    FUT_CHECK(open_.back().keys.insert(value).second, what_, ": duplicate JSON key \"", printable(value), "\"");
    open_.back().key = std::move(value);
    return true;
  }
  bool end_object() override {
    Value value = Value::dict(std::move(open_.back().entries));
    open_.pop_back();
    return add(std::move(value));
  }
  bool end_array() override {
    Value value = Value::list(std::move(open_.back().items));
    open_.pop_back();
    return add(std::move(value));
  }
  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception&) override {
    fail(what_, ": invalid JSON at byte ", byte);
  }

 private:
  struct Container {
    bool is_object;
    Items items = {};
    std::vector<std::pair<Text, Value>> entries = {};
    std::unordered_set<std::string> keys = {};
    std::string key = {};
  };

  bool open(bool is_object) {
    FUT_CHECK(open_.size() + 1 < kMaxValueDepth, what_, ": JSON nested deeper than ", kMaxValueDepth - 1);
    open_.push_back({is_object});
    return true;
  }

  bool add(Value value) {
    if (open_.empty()) {
      result_ = std::move(value);
    } else if (open_.back().is_object) {
      open_.back().entries.emplace_back(Text(std::move(open_.back().key), true), std::move(value));
    } else {
      open_.back().items.push_back(std::move(value));
    }
    return true;
  }

  const std::string& what_;
  std::vector<Container> open_;
  Value result_;
};

}  // namespace

Text to_json(const Value& value, const JsonStyle& style) {
  Text out;
  JsonWriter(out, style).write(value, 0);
  return out;
}

Value value_from_json(std::string_view json, const std::string& what) {
  ValueBuilder builder(what);
  nlohmann::json::sax_parse(json.begin(), json.end(), &builder);
  return builder.take_result();
}

}  // namespace fut::jinja
