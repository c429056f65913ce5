#include "io/json.h"

#include <vector>

#include "base/error.h"
#include "io/mapped_file.h"

namespace fut {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

/// Builds the value from the parser's events, and throws at what a parser lets pass. (The parser's own filter looks
/// through all of an object's members whenever one of them ends, which takes quadratic time.)
class StrictReader final : public json::json_sax_t {
 public:
  StrictReader(const std::string& what, size_t text_bytes) : what_(what), text_bytes_(text_bytes) {}

  json take() { return std::move(root_); }

  bool null() override { return put(nullptr), true; }
  bool boolean(bool value) override { return put(value), true; }
  bool number_integer(int64_t value) override { return put(value), true; }
  bool number_unsigned(uint64_t value) override { return put(value), true; }
  bool number_float(double value, const std::string&) override { return put(value), true; }
  bool string(std::string& value) override { return put(std::move(value)), true; }
  bool binary(json::binary_t&) override { return false; }  // is no JSON
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }

  bool key(std::string& name) override {
    const auto [member, added] = open_.back()->get_ref<json::object_t&>().emplace(name, nullptr);
    FUT_CHECK(added, what_, ": duplicate JSON key \"", printable(name), "\"");
    member_ = &member->second;
    return true;
  }

  /// The exception's text quotes the input at any length, so only the place is kept.
  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception& error) override {
    if (!dynamic_cast<const json::parse_error*>(&error)) fail(what_, ": JSON holds a number that no double can hold");
    if (byte > text_bytes_) fail(what_, ": JSON ends too early, after ", text_bytes_, " bytes");
    fail(what_, ": invalid JSON at byte ", byte, " of ", text_bytes_);
  }

 private:
  /// The place of a new value: the root, the next element of an array, or the member whose key was read.
  json* put(json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (open_.back()->is_object()) return &(*member_ = std::move(value));
    return &open_.back()->get_ref<json::array_t&>().emplace_back(std::move(value));
  }

  bool open(json value) {
    FUT_CHECK(open_.size() < kMaxDepth, what_, ": JSON nested deeper than ", kMaxDepth);
    open_.push_back(put(std::move(value)));
    return true;
  }

  const std::string& what_;
  const size_t text_bytes_;
  json root_;
  std::vector<json*> open_;  // objects and arrays that have not ended; none of them moves before those in it have
  json* member_ = nullptr;
};

}  // namespace

json parse_json(std::string_view text, const std::string& what) {
  // The parser takes a NUL for the end of its input. JSON has no place for one, not even in a string.
  const size_t nul = text.find('\0');
  FUT_CHECK(nul == text.npos, what, ": invalid JSON at byte ", nul + 1, " of ", text.size(), ", a NUL");
  StrictReader reader(what, text.size());
  json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

std::string shown(const json& value) { return printable(value.dump(-1, ' ', false, json::error_handler_t::replace)); }

std::string json_text(const json& value, int indent, const std::string& what) {
  try {
    return value.dump(indent);
  } catch (const json::type_error&) {
    fail(what, ": holds a text that is no UTF-8, which JSON cannot hold");
  }
}

json parse_json_file(const std::string& path, uint64_t max_bytes) {
  const MappedFile file(path);
  FUT_CHECK(file.size() <= max_bytes, path, ": ", file.size(), " bytes of JSON, expected at most ", max_bytes);
  return parse_json(file.text(), path);
}

}  // namespace fut
