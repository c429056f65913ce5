#include "io/hf_folder.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/parallel.h"
#include "io/json.h"
#include "io/packed_int4.h"
#include "io/safetensors.h"

namespace fut {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kWeightsFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int64_t kGrainElements = 1 << 16;

/// False for a dangling link too, and for what cannot be looked at: opening it will say why.
bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string read_text(const std::string& path) { return std::string(MappedFile(path).text()); }

/// The text of a file that must hold a JSON object.
std::string read_json_object(const std::string& path) {
  const json value = parse_json_file(path);
  FUT_CHECK(value.is_object(), path, ": is ", shown(value), ", expected a JSON object");
  return read_text(path);
}

/// Shards lie beside their index. Only the name is judged: a symlink may point anywhere, as it does in the hub's cache.
void require_plain_name(const std::string& name, const std::string& tensor, const std::string& index) {
  const bool plain = !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
                     std::none_of(name.begin(), name.end(), [](char c) {
                       return c == '/' || c == '\\' || static_cast<uint8_t>(c) < 0x20 || c == 0x7f;
                     });
  FUT_CHECK(plain, index, ": tensor ", printable(tensor), " is said to be in \"", printable(name),
            "\", expected the name of a file in the same folder");
}

/// Tensor name to shard name, as the index has it.
std::map<std::string, std::string> read_index(const std::string& path) {
  const json index = parse_json_file(path);
  FUT_CHECK(index.is_object() && index.contains("weight_map"), path, ": is ", shown(index),
            ", expected an object with the object \"weight_map\"");
  const json& weight_map = index["weight_map"];
  FUT_CHECK(weight_map.is_object(), path, ": weight_map is ", shown(weight_map), ", expected an object");
  std::map<std::string, std::string> shard_of;
  for (const auto& [tensor, shard] : weight_map.items()) {
    FUT_CHECK(shard.is_string(), path, ": the shard of tensor ", printable(tensor), " is ", shown(shard),
              ", expected the name of a file");
    require_plain_name(shard.get_ref<const std::string&>(), tensor, path);
    shard_of.emplace(tensor, shard.get<std::string>());
  }
  FUT_CHECK(!shard_of.empty(), path, ": weight_map is empty");
  return shard_of;
}

void require_all_present(const std::set<std::string>& shards, const std::string& folder) {
  std::string missing;
  size_t count = 0;
  for (const std::string& shard : shards) {
    if (!is_there(fs::path(folder) / shard)) missing += cat(count++ ? ", " : "", shard);
  }
  FUT_CHECK(count == 0, folder, ": ", count, " of the ", shards.size(), " files that ", kIndexFile,
            " names are missing (incomplete download?): ", missing);
}

[[noreturn]] void fail_without_weights(const std::string& folder) {
  size_t count = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) count += entry.path().extension() == ".safetensors";
  fail(folder, ": found neither ", kWeightsFile, " nor ", kIndexFile, ", only ", count, " other .safetensors files");
}

/// Extents of the blocks that share a scale in an FP8 checkpoint, if its scales are neither one nor one a row.
std::pair<int64_t, int64_t> fp8_block_of(const json& config, const std::string& path) {
  const json quantisation = config.value("quantization_config", json());
  const json block = quantisation.is_object() ? quantisation.value("weight_block_size", json()) : json();
  if (block.is_null()) return {128, 128};
  const auto extent = [&](size_t i) {
    const bool fits = block.is_array() && block.size() == 2 && block[i].is_number_unsigned() &&
                      block[i].get<uint64_t>() >= 1 && block[i].get<uint64_t>() <= 1 << 20;
    FUT_CHECK(fits, path, ": weight_block_size is ", printable(block.dump()), ", expected two numbers from 1 to 2^20");
    return block[i].get<int64_t>();
  };
  return {extent(0), extent(1)};
}

class HfFolder final : public Checkpoint {
 public:
  explicit HfFolder(const std::string& folder);

  std::string config_json() const override { return config_; }
  std::string config_place() const override { return file("config.json"); }
  std::string generation_config_json() const override { return generation_config_; }
  std::vector<TensorInfo> tensors() const override;
  const TensorInfo* find(const std::string& name) const override;
  std::vector<float> read_rows(const std::string& name, int64_t first, int64_t count) const override;
  void drop_pages() const override {
    for (const SafetensorsFile& shard : shards_) shard.drop_pages();
  }
  int int4_group(const std::string& name, std::string* why) const override;
  HostWeight int4_codes(const std::string& name) const override;
  const uint8_t* raw(const std::string& name, int64_t* size_bytes) const override;
  std::unique_ptr<Tokenizer> tokenizer() const override;
  std::map<std::string, std::string> tokenizer_files() const override;
  std::string chat_template() const override;

 private:
  std::string file(const char* name) const { return (fs::path(path_) / name).string(); }
  void open_shard(const std::string& name);
  void open_indexed_shards();
  void add_packed();
  const StoredTensor& stored(const std::string& name) const;
  const StoredTensor& scale_of(const TensorInfo& info) const;
  std::vector<float> read_e4m3(const StoredTensor& tensor, int64_t first, int64_t count) const;

  std::string config_, generation_config_ = "{}";
  std::pair<int64_t, int64_t> fp8_block_;  // rows and columns of an FP8 tensor that share a scale
  std::vector<SafetensorsFile> shards_;
  StoredTensors stored_;
  std::map<std::string, PackedInt4> packed_;
};

HfFolder::HfFolder(const std::string& folder) {
  path_ = folder;
  config_ = read_json_object(file("config.json"));
  fp8_block_ = fp8_block_of(json::parse(config_), file("config.json"));
  if (is_there(file("generation_config.json"))) generation_config_ = read_json_object(file("generation_config.json"));
  std::error_code ignored;
  if (is_there(file(kWeightsFile)) || fs::is_symlink(file(kWeightsFile), ignored)) {
    open_shard(kWeightsFile);
  } else if (is_there(file(kIndexFile))) {
    open_indexed_shards();
  } else {
    fail_without_weights(folder);
  }
  for (const SafetensorsFile& shard : shards_) {
    for (const StoredTensor& tensor : shard.tensors()) {
      const auto [known, added] = stored_.emplace(tensor.info.name, &tensor);
      FUT_CHECK(added, tensor.info.file, ": tensor ", printable(tensor.info.name), " is also in ",
                known->second->info.file);
    }
  }
  add_packed();
}

void HfFolder::add_packed() {
  std::optional<QweightConfig> config;
  for (const auto& [name, tensor] : stored_) {
    if (name.ends_with(".weight_packed")) {
      const std::string weight = name.substr(0, name.size() - strlen("_packed"));
      packed_.emplace(weight, PackedInt4::pack_quantized(weight, stored_));
    } else if (name.ends_with(".qweight")) {
      const std::string weight = name.substr(0, name.size() - strlen("qweight")) + "weight";
      if (!config) config = read_qweight_config(path_, config_, file("config.json"));
      packed_.emplace(weight, PackedInt4::qweight(weight, stored_, *config));
    }
  }
}

void HfFolder::open_shard(const std::string& name) { shards_.emplace_back(file(name.c_str())); }

void HfFolder::open_indexed_shards() {
  const auto shard_of = read_index(file(kIndexFile));
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shard_of) names.insert(shard);
  require_all_present(names, path_);
  std::set<std::pair<std::string, std::string>> held;  // (tensor, shard's path)
  for (const std::string& name : names) {
    open_shard(name);
    for (const StoredTensor& tensor : shards_.back().tensors()) held.emplace(tensor.info.name, tensor.info.file);
  }
  for (const auto& [tensor, shard] : shard_of) {
    FUT_CHECK(held.contains({tensor, file(shard.c_str())}), file(kIndexFile), ": tensor ", printable(tensor),
              " is said to be in ", shard, ", which does not hold it");
  }
}

std::vector<TensorInfo> HfFolder::tensors() const {
  std::vector<TensorInfo> all;
  for (const auto& [name, tensor] : stored_) all.push_back(tensor->info);
  for (const auto& [name, tensor] : packed_) all.push_back(tensor.info());
  return all;
}

const TensorInfo* HfFolder::find(const std::string& name) const {
  if (const auto found = packed_.find(name); found != packed_.end()) return &found->second.info();
  const auto found = stored_.find(name);
  return found == stored_.end() ? nullptr : &found->second->info;
}

const StoredTensor& HfFolder::stored(const std::string& name) const {
  const auto found = stored_.find(name);
  if (found != stored_.end()) return *found->second;
  const auto packed = packed_.find(name);
  FUT_CHECK(packed == packed_.end(), path_, ": tensor ", printable(name), " is ", packed->second.info().type,
            ": it has bytes only as the codes and scales beside it");
  fail(path_, ": tensor ", printable(name), " not found");
}

const uint8_t* HfFolder::raw(const std::string& name, int64_t* size_bytes) const {
  const StoredTensor& tensor = stored(name);
  if (size_bytes) *size_bytes = tensor.size_bytes;
  return tensor.data;
}

std::vector<float> HfFolder::read_rows(const std::string& name, int64_t first, int64_t count) const {
  if (const auto found = packed_.find(name); found != packed_.end()) return found->second.read(first, count);
  const StoredTensor& tensor = stored(name);
  return tensor.info.type == "F8_E4M3" ? read_e4m3(tensor, first, count) : read_floats(tensor, first, count);
}

int HfFolder::int4_group(const std::string& name, std::string* why) const {
  const auto found = packed_.find(name);
  return found == packed_.end() ? 0 : found->second.own_group(why);
}

HostWeight HfFolder::int4_codes(const std::string& name) const {
  const auto found = packed_.find(name);
  return found == packed_.end() ? Checkpoint::int4_codes(name) : found->second.codes();
}

/// The scale beside an FP8 tensor, under either of its names; whatever "inv" says, both are multiplied by.
const StoredTensor& HfFolder::scale_of(const TensorInfo& info) const {
  const auto scale = stored_.find(info.name + "_scale"), inverse = stored_.find(info.name + "_scale_inv");
  const std::string where = cat(info.file, ": tensor ", printable(info.name), ": F8_E4M3");
  FUT_CHECK(scale != stored_.end() || inverse != stored_.end(), where, " without ", printable(info.name), "_scale or ",
            printable(info.name), "_scale_inv");
  FUT_CHECK(scale == stored_.end() || inverse == stored_.end(), where, " with both ", printable(info.name),
            "_scale and ", printable(info.name), "_scale_inv");
  return *(scale != stored_.end() ? scale : inverse)->second;
}

std::vector<float> HfFolder::read_e4m3(const StoredTensor& tensor, int64_t first, int64_t count) const {
  const TensorInfo& info = tensor.info;
  const StoredTensor& scale = scale_of(info);
  const std::vector<int64_t>& shape = scale.info.shape;
  const std::vector<float> scales = read_floats(scale, 0, rows_of(scale.info));
  const int64_t rows = info.shape.empty() ? 1 : info.shape[0];
  const int64_t columns = rows ? tensor.size_bytes / rows : 0;
  const auto scale_count = static_cast<int64_t>(scales.size());
  int64_t block_rows = rows, block_columns = columns;  // that share a scale
  if (scale_count > 1 && scale_count == rows && shape[0] == rows) {
    block_rows = 1;
  } else if (scale_count != 1) {
    const auto blocks = [](int64_t extent, int64_t block) { return extent / block + (extent % block != 0); };
    std::tie(block_rows, block_columns) = fp8_block_;
    const bool tiles = info.shape.size() == 2 &&
                       shape == std::vector<int64_t>{blocks(rows, block_rows), blocks(columns, block_columns)};
    FUT_CHECK(tiles, info.file, ": tensor ", printable(info.name), ": F8_E4M3 of ", rows, " rows with ", scale_count,
              " scales, expected one, one a row, or one a block of ", block_rows, " x ", block_columns);
  }
  if (check_rows(info, first, count)) first = 0, count = rows;
  std::vector<float> values(static_cast<size_t>(count * columns));
  if (values.empty()) return values;  // rows without columns may be as many as the file likes to say
  const int64_t blocks_a_row = (columns - 1) / block_columns + 1;
  parallel_for(count, kGrainElements / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = first + i;
      const float* const row_scales = scales.data() + row / block_rows * blocks_a_row;
      for (int64_t k = 0; k < columns; ++k) {
        values[i * columns + k] = to_f32(E4m3{tensor.data[row * columns + k]}) * row_scales[k / block_columns];
      }
    }
  });
  return values;
}

std::unique_ptr<Tokenizer> HfFolder::tokenizer() const {
  FUT_CHECK(is_there(file("tokenizer.json")) || is_there(file("tokenizer.model")), file("tokenizer.json"),
            ": no such file, nor a tokenizer.model; the folder has no tokenizer");
  return Tokenizer::from_hf_folder(path_);
}

std::map<std::string, std::string> HfFolder::tokenizer_files() const {
  std::map<std::string, std::string> files;
  for (const char* name : {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                           "chat_template.jinja"}) {
    if (is_there(file(name))) files.emplace(name, read_text(file(name)));
  }
  return files;
}

/// chat_template.jinja comes before tokenizer_config.json, whose entry is a string or a list of named templates.
std::string HfFolder::chat_template() const {
  if (is_there(file("chat_template.jinja"))) return read_text(file("chat_template.jinja"));
  const std::string path = file("tokenizer_config.json");
  if (!is_there(path)) return "";
  const json config = parse_json_file(path);
  FUT_CHECK(config.is_object(), path, ": is ", shown(config), ", expected a JSON object");
  const json source = config.value("chat_template", json());
  if (source.is_null()) return "";
  if (source.is_string()) return source.get<std::string>();
  FUT_CHECK(source.is_array(), path, ": chat_template is ", shown(source), ", expected a string or a list");
  for (const json& entry : source) {
    const bool named = entry.is_object() && entry.contains("name") && entry.contains("template");
    FUT_CHECK(named && entry["template"].is_string(), path, ": chat_template holds ", shown(entry),
              ", expected an object with name and template");
    if (entry["name"] == "default") return entry["template"].get<std::string>();
  }
  fail(path, ": no chat_template named \"default\"");
}

}  // namespace

std::unique_ptr<Checkpoint> open_hf_folder(const std::string& folder) { return std::make_unique<HfFolder>(folder); }

}  // namespace fut
