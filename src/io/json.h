// JSON from files that nobody vouches for. The one header that includes nlohmann: include it from .cpp files only.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fut {

/// Larger JSON files are refused. It is safetensors' own limit for headers.
inline constexpr uint64_t kMaxJsonBytes = 100'000'000;

/// Stricter than nlohmann's parse: a repeated key (of which that keeps the last) is refused by name, and so is nesting
/// deeper than 64. Invalid UTF-8 and trailing bytes are refused as well. `what` (the file) begins every message.
nlohmann::json parse_json(std::string_view text, const std::string& what);

/// A value as a message shows it: one line, not longer than a message should be.
std::string shown(const nlohmann::json& value);

/// `value` as a file's text. Error if a string in it is no UTF-8, which JSON cannot hold.
std::string json_text(const nlohmann::json& value, int indent, const std::string& what);

nlohmann::json parse_json_file(const std::string& path, uint64_t max_bytes = kMaxJsonBytes);

}  // namespace fut
