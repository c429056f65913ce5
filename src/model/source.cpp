#include "model/source.h"

#include <filesystem>
#include <limits>

#include "base/error.h"
#include "io/json.h"

namespace fut {
namespace {

using Json = nlohmann::json;

constexpr int kMetadataVersion = 1;

/// `count` numbers from `low` on that a float can hold.
std::vector<float> read_floats(const Json& list, size_t count, double low, const std::string& what) {
  FUT_CHECK(list.is_array() && list.size() == count, what, " is ", shown(list), ", expected ", count, " numbers");
  constexpr double kLargest = std::numeric_limits<float>::max();
  std::vector<float> values;
  for (const Json& value : list) {
    const bool fits = value.is_number() && value.get<double>() >= low && value.get<double>() <= kLargest;
    FUT_CHECK(fits, what, " holds ", shown(value), ", expected numbers from ", low, " to ", kLargest);
    values.push_back(value.get<float>());
  }
  return values;
}

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

}  // namespace

void read_metadata(const std::string& what, ModelSource& source) {
  const Json json = parse_json_file(what);
  FUT_CHECK(json.is_object(), what, ": is ", shown(json), ", expected a JSON object");
  const Json* version = member(json, "version");
  FUT_CHECK(version && *version == kMetadataVersion, what, ": expected version ", kMetadataVersion, ", found ",
            version ? shown(*version) : "none");
  const size_t layers = source.config.layers, width = source.config.kv_heads * source.config.head_dim;
  if (const Json* rotations = member(json, "rotations")) {
    FUT_CHECK(rotations->is_object(), what, ": rotations is ", shown(*rotations), ", expected an object");
    const Json* value = member(*rotations, "value");
    FUT_CHECK(!value || value->is_boolean(), what, ": rotations.value is ", shown(*value), ", expected true or false");
    source.value_rotation = value && value->get<bool>();
  }
  if (const Json* amax = member(json, "activation_amax")) {
    FUT_CHECK(amax->is_object(), what, ": activation_amax is ", shown(*amax), ", expected an object");
    const auto magnitudes = [&](const char* key) {
      const Json* list = member(*amax, key);
      return read_floats(list ? *list : Json(), layers, 0, cat(what, ": activation_amax.", key));
    };
    source.calibration.attention_amax = magnitudes("attention");
    source.calibration.swiglu_amax = magnitudes("swiglu");
  }
  if (const Json* means = member(json, "key_mean")) {
    FUT_CHECK(means->is_array() && means->size() == layers, what, ": key_mean is ", shown(*means),
              ", expected a list of ", layers, " layers");
    constexpr double kLowest = std::numeric_limits<float>::lowest();
    for (const Json& mean : *means)
      source.calibration.key_mean.push_back(read_floats(mean, width, kLowest, what + ": key_mean"));
  }
}

std::unique_ptr<Tokenizer> ModelSource::tokenizer() const {
  return tokenizer_folder.empty() ? decode->tokenizer() : Tokenizer::from_hf_folder(tokenizer_folder);
}

ModelSource ModelSource::open(const std::string& path) {
  namespace fs = std::filesystem;
  ModelSource source;
  source.path = path;
  const std::string metadata = (fs::path(path) / kMetadataFile).string();
  std::error_code ignored;
  const bool ours = fs::is_regular_file(metadata, ignored);
  source.decode = Checkpoint::open(ours ? (fs::path(path) / "decode").string() : path);
  if (ours) {
    source.prefill = Checkpoint::open((fs::path(path) / "prefill").string());
    source.tokenizer_folder = path;
  }
  source.config = parse_config(source.decode->config_json(), source.decode->generation_config_json(),
                               source.decode->config_place());
  if (ours) read_metadata(metadata, source);
  return source;
}

std::string metadata_json(const ModelSource& source, int group, bool residual_rotation,
                          const Calibration& calibration) {
  Json json;
  json["version"] = kMetadataVersion;
  json["source"] = std::filesystem::path(source.path).filename().string();
  json["group_size"] = group;
  json["rotations"] = {{"value", true}, {"residual", residual_rotation}};
  json["activation_amax"] = nullptr;
  json["key_mean"] = nullptr;
  if (!calibration.swiglu_amax.empty()) {
    json["activation_amax"] = {{"attention", calibration.attention_amax}, {"swiglu", calibration.swiglu_amax}};
  }
  if (!calibration.key_mean.empty()) json["key_mean"] = calibration.key_mean;
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";  // a path need not be UTF-8
}

}  // namespace fut
