#include "prompts.h"

#include "base/error.h"
#include "io/json.h"
#include "io/mapped_file.h"
#include "ranges.h"

namespace fut::app {
namespace {

using nlohmann::json;

/// One line of a prompts file on its way into a request. Every message begins with file and line.
class PromptLine {
 public:
  PromptLine(std::string where, std::string_view text) : where_(std::move(where)), json_(parse_json(text, where_)) {}

  Request over(Request request) const {
    if (json_.is_string()) {
      request.prompt = json_.get<std::string>();
      return request;
    }
    FUT_CHECK(json_.is_object(), where_, ": found ", shown(json_), ", expected {\"prompt\": ...} or a string");
    FUT_CHECK(json_.contains("prompt"), where_, ": \"prompt\" is missing in ", shown(json_));
    for (const auto& [key, value] : json_.items()) take(request, key, value);
    return request;
  }

 private:
  void take(Request& request, const std::string& key, const json& value) const {
    Sampling& sampling = request.sampling;
    if (key == "prompt") {
      FUT_CHECK(value.is_string(), where_, ": \"prompt\" is ", shown(value), ", expected a string");
      request.prompt = value.get<std::string>();
    } else if (value.is_null()) {
      return;
    } else if (key == "max_tokens") {
      request.max_tokens = integer(key, value, kMaxTokensRange);
    } else if (key == "temperature") {
      sampling.temperature = number(key, value, kTemperatureRange);
    } else if (key == "top_k") {
      sampling.top_k = integer(key, value, kTopKRange);
    } else if (key == "top_p") {
      sampling.top_p = number(key, value, kFractionRange);
    } else if (key == "min_p") {
      sampling.min_p = number(key, value, kFractionRange);
    } else if (key == "seed") {
      sampling.seed = static_cast<uint64_t>(integer(key, value, kSeedRange));
    } else if (key == "stop") {
      request.stop = stops(value);
    } else {
      fail(where_, ": unknown key \"", printable(key),
           "\"; known: prompt, max_tokens, temperature, top_k, top_p, min_p, seed, stop");
    }
  }

  int64_t integer(const std::string& key, const json& value, IntegerRange range) const {
    const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
    FUT_CHECK(fits && contains(range, value.get<int64_t>()), where_, ": ", key, " ", shown(value), ": expected ",
              describe(range));
    return value.get<int64_t>();
  }

  float number(const std::string& key, const json& value, NumberRange range) const {
    FUT_CHECK(value.is_number() && contains(range, value.get<double>()), where_, ": ", key, " ", shown(value),
              ": expected ", describe(range));
    return value.get<float>();
  }

  std::vector<std::string> stops(const json& value) const {
    std::vector<std::string> found;
    for (const json& stop : value.is_array() ? value : json::array({value})) {
      FUT_CHECK(stop.is_string() && !stop.get_ref<const std::string&>().empty(), where_, ": stop holds ", shown(stop),
                ", expected a string, or a list of strings, none of them empty");
      found.push_back(stop.get<std::string>());
    }
    return found;
  }

  std::string where_;
  json json_;
};

}  // namespace

std::vector<Request> parse_prompts(std::string_view text, const std::string& path, const Request& standard) {
  std::vector<Request> requests;
  size_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view bytes = text.substr(begin, end - begin);
    ++line;
    if (bytes.find_first_not_of(" \t\r") != bytes.npos) {
      requests.push_back(PromptLine(cat(path, ":", line), bytes).over(standard));
    }
    begin = end + 1;
  }
  FUT_CHECK(!requests.empty(), path, ": no prompts in ", text.size(),
            " bytes; expected a JSON object or string a line");
  return requests;
}

}  // namespace fut::app
