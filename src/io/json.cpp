#include "io/json.h"

#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "io/mapped_file.h"

namespace fut {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

/// Sees every event of the parser and throws at what the parser would let pass.
class Strictness {
 public:
  explicit Strictness(const std::string& what) : what_(what) {}

  void see(json::parse_event_t event, const json& value) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        FUT_CHECK(open_.size() < kMaxDepth, what_, ": JSON nested deeper than ", kMaxDepth);
        open_.emplace_back();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end: open_.pop_back(); break;
      case json::parse_event_t::key: {
        const auto& key = value.get_ref<const std::string&>();
        FUT_CHECK(open_.back().insert(key).second, what_, ": duplicate JSON key \"", printable(key), "\"");
        break;
      }
      case json::parse_event_t::value: break;
    }
  }

 private:
  const std::string& what_;
  std::vector<std::unordered_set<std::string>> open_;  // keys so far of each open object; arrays have none
};

}  // namespace

json parse_json(std::string_view text, const std::string& what) {
  Strictness strictness(what);
  try {
    return json::parse(text.begin(), text.end(), [&](int, json::parse_event_t event, json& value) {
      strictness.see(event, value);
      return true;
    });
  } catch (const json::parse_error& error) {  // its text quotes the input at any length, so only the place is kept
    if (error.byte > text.size()) fail(what, ": JSON ends too early, after ", text.size(), " bytes");
    fail(what, ": invalid JSON at byte ", error.byte, " of ", text.size());
  } catch (const json::exception&) {
    fail(what, ": JSON holds a number that no double can hold");
  }
}

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
