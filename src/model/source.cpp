#include "model/source.h"

#include <filesystem>

#include "base/error.h"
#include "io/json.h"

namespace fut {
namespace {

using Json = nlohmann::json;

constexpr int kMetadataVersion = 1;

std::vector<float> read_floats(const Json& list, size_t count, const std::string& what) {
  FUT_CHECK(list.is_array() && list.size() == count, what, ": is ", shown(list), ", expected ", count, " numbers");
  std::vector<float> values;
  for (const Json& value : list) {
    FUT_CHECK(value.is_number(), what, " holds ", shown(value), ", expected a number");
    values.push_back(value.get<float>());
  }
  return values;
}

/// futransformer.json -> source.calibration and the rotations that are in the weights.
void read_metadata(const Json& json, const std::string& what, ModelSource& source) {
  FUT_CHECK(json.is_object() && json.value("version", Json()) == kMetadataVersion, what, ": expected version ",
            kMetadataVersion, ", found ", shown(json.is_object() ? json.value("version", Json()) : json));
  const size_t layers = source.config.layers;
  const Json rotations = json.value("rotations", Json::object());
  FUT_CHECK(rotations.is_object(), what, ": rotations is ", shown(rotations), ", expected an object");
  source.value_rotation = rotations.value("value", Json(false)) == true;
  if (const auto scales = json.find("activation_amax"); scales != json.end() && !scales->is_null()) {
    FUT_CHECK(scales->is_object(), what, ": activation_amax is ", shown(*scales), ", expected an object");
    source.calibration.attention_amax =
        read_floats(scales->value("attention", Json()), layers, what + ": activation_amax.attention");
    source.calibration.swiglu_amax =
        read_floats(scales->value("swiglu", Json()), layers, what + ": activation_amax.swiglu");
  }
  if (const auto means = json.find("key_mean"); means != json.end() && !means->is_null()) {
    FUT_CHECK(means->is_array() && means->size() == layers, what, ": key_mean is ", shown(*means),
              ", expected a list of ", layers, " layers");
    const size_t width = source.config.kv_heads * source.config.head_dim;
    for (const Json& mean : *means)
      source.calibration.key_mean.push_back(read_floats(mean, width, what + ": key_mean"));
  }
}

}  // namespace

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
  if (ours) read_metadata(parse_json_file(metadata), metadata, source);
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
