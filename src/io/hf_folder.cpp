#include "io/hf_folder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "base/error.h"
#include "base/parallel.h"
#include "io/gguf_blocks.h"
#include "io/json.h"
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
  FUT_CHECK(parse_json_file(path).is_object(), path, ": is no JSON object");
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
  const auto weight_map = index.is_object() ? index.find("weight_map") : index.end();
  FUT_CHECK(index.is_object() && weight_map != index.end() && weight_map->is_object(), path,
            ": expected an object with the object \"weight_map\"");
  std::map<std::string, std::string> shard_of;
  for (const auto& [tensor, shard] : weight_map->items()) {
    FUT_CHECK(shard.is_string(), path, ": the shard of tensor ", printable(tensor), " is no string");
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

/// The two integers of a weight_shape tensor.
std::pair<int64_t, int64_t> read_pair(const StoredTensor& tensor) {
  const TensorInfo& info = tensor.info;
  const bool wide = info.type == "I64";
  FUT_CHECK((wide || info.type == "I32") && info.shape == std::vector<int64_t>{2}, info.file, ": tensor ",
            printable(info.name), ": expected two integers");
  int64_t wide_pair[2];
  int32_t pair[2];
  if (wide) {
    memcpy(wide_pair, tensor.data, sizeof(wide_pair));
    return {wide_pair[0], wide_pair[1]};
  }
  memcpy(pair, tensor.data, sizeof(pair));
  return {pair[0], pair[1]};
}

class HfFolder final : public Checkpoint {
 public:
  explicit HfFolder(const std::string& folder);

  std::string config_json() const override { return config_; }
  std::string generation_config_json() const override { return generation_config_; }
  std::vector<TensorInfo> tensors() const override;
  const TensorInfo* find(const std::string& name) const override;
  std::vector<float> read_f32(const std::string& name) const override;
  const uint8_t* raw(const std::string& name, int64_t* size_bytes) const override;
  std::unique_ptr<Tokenizer> tokenizer() const override;
  std::map<std::string, std::string> tokenizer_files() const override;
  std::string chat_template() const override;

 private:
  std::string file(const char* name) const { return (fs::path(path_) / name).string(); }
  void open_shard(const std::string& name);
  void open_indexed_shards();
  void add_pack_quantized(const std::string& name);
  const StoredTensor& stored(const std::string& name) const;
  std::vector<float> read_plain(const StoredTensor& tensor) const;
  std::vector<float> read_e4m3(const StoredTensor& tensor) const;
  std::vector<float> read_packed(const TensorInfo& tensor) const;

  std::string config_, generation_config_ = "{}";
  std::vector<SafetensorsFile> shards_;
  std::map<std::string, const StoredTensor*> stored_;
  std::map<std::string, TensorInfo> packed_;
};

HfFolder::HfFolder(const std::string& folder) {
  path_ = folder;
  config_ = read_json_object(file("config.json"));
  if (is_there(file("generation_config.json"))) generation_config_ = read_json_object(file("generation_config.json"));
  if (is_there(file(kWeightsFile))) {
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
  for (const auto& [name, tensor] : stored_) {
    FUT_CHECK(!name.ends_with(".qweight") && !name.ends_with(".qzeros"), tensor->info.file, ": tensor ",
              printable(name), ": the GPTQ and AWQ layouts are not supported yet");
    if (name.ends_with(".weight_packed")) add_pack_quantized(name.substr(0, name.size() - strlen("_packed")));
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

/// Checks the three parts of a pack-quantized tensor against each other, so that reading needs no check.
void HfFolder::add_pack_quantized(const std::string& name) {
  const TensorInfo& packed = stored(name + "_packed").info;
  const std::string where = cat(packed.file, ": tensor ", printable(packed.name));
  for (const char* part : {"_zero_point", "_g_idx"}) {
    FUT_CHECK(!stored_.contains(name + part), where, ": has ", printable(name), part, ", which is not supported yet");
  }
  FUT_CHECK(!stored_.contains(name), where, ": ", printable(name), " is there as well");
  FUT_CHECK(stored_.contains(name + "_scale") && stored_.contains(name + "_shape"), where, ": expected ",
            printable(name), "_scale and _shape beside it");
  const auto [rows, columns] = read_pair(stored(name + "_shape"));
  const TensorInfo& scale = stored(name + "_scale").info;
  FUT_CHECK(rows > 0 && columns > 0, where, ": ", printable(name), "_shape is [", rows, ", ", columns, "]");
  FUT_CHECK(packed.type == "I32" && packed.shape == (std::vector<int64_t>{rows, (columns - 1) / 8 + 1}), where,
            ": expected 4-bit codes as I32 (", rows, ", ", (columns - 1) / 8 + 1, ")");
  const int64_t groups = scale.shape.size() == 2 ? scale.shape[1] : 0;
  FUT_CHECK(groups > 0 && scale.shape[0] == rows && columns % groups == 0, where, ": ", printable(scale.name),
            " does not have ", rows, " rows of equal groups of the ", columns, " columns");
  // With short last groups excluded, only powers of two make the group size certain: 96 columns in 2 groups could be
  // groups of 48 or of 64.
  FUT_CHECK(groups == 1 || std::has_single_bit(static_cast<uint64_t>(columns / groups)), where, ": groups of ",
            columns / groups, " columns, expected a power of two");
  packed_[name] = {name, "pack-quantized", {rows, columns}, packed.file};
}

std::vector<TensorInfo> HfFolder::tensors() const {
  std::vector<TensorInfo> all;
  for (const auto& [name, tensor] : stored_) all.push_back(tensor->info);
  for (const auto& [name, tensor] : packed_) all.push_back(tensor);
  return all;
}

const TensorInfo* HfFolder::find(const std::string& name) const {
  if (const auto found = packed_.find(name); found != packed_.end()) return &found->second;
  const auto found = stored_.find(name);
  return found == stored_.end() ? nullptr : &found->second->info;
}

const StoredTensor& HfFolder::stored(const std::string& name) const {
  const auto found = stored_.find(name);
  if (found != stored_.end()) return *found->second;
  FUT_CHECK(!packed_.contains(name), path_, ": tensor ", printable(name), " is pack-quantized: it has bytes only as ",
            printable(name), "_packed");
  fail(path_, ": tensor ", printable(name), " not found");
}

const uint8_t* HfFolder::raw(const std::string& name, int64_t* size_bytes) const {
  const StoredTensor& tensor = stored(name);
  if (size_bytes) *size_bytes = tensor.size_bytes;
  return tensor.data;
}

std::vector<float> HfFolder::read_f32(const std::string& name) const {
  if (const auto found = packed_.find(name); found != packed_.end()) return read_packed(found->second);
  const StoredTensor& tensor = stored(name);
  return tensor.info.type == "F8_E4M3" ? read_e4m3(tensor) : read_plain(tensor);
}

std::vector<float> HfFolder::read_plain(const StoredTensor& tensor) const {
  // Only a type whose size the header check knows has a size to be relied on.
  const int64_t element_bytes = safetensors_element_bytes(tensor.info.type);
  const BlockFormat* const format = element_bytes ? find_block_format(tensor.info.type) : nullptr;
  FUT_CHECK(format, tensor.info.file, ": tensor ", printable(tensor.info.name), ": unsupported dtype ",
            printable(tensor.info.type), ", expected F32, F16 or BF16");
  std::vector<float> values(static_cast<size_t>(tensor.size_bytes / element_bytes));
  parallel_for(static_cast<int64_t>(values.size()), kGrainElements, [&](int64_t begin, int64_t end) {
    format->to_floats(tensor.data + begin * element_bytes, end - begin, values.data() + begin);
  });
  return values;
}

std::vector<float> HfFolder::read_e4m3(const StoredTensor& tensor) const {
  const TensorInfo& info = tensor.info;
  const std::string where = cat(info.file, ": tensor ", printable(info.name), ": F8_E4M3");
  const auto found = stored_.find(info.name + "_scale");
  FUT_CHECK(found != stored_.end(), where, " without ", printable(info.name), "_scale");
  const int64_t rows = info.shape.empty() ? 1 : info.shape[0];
  const int64_t columns = rows ? tensor.size_bytes / rows : 0;
  const std::vector<int64_t>& shape = found->second->info.shape;
  const std::vector<float> scales = read_plain(*found->second);
  const auto count = static_cast<int64_t>(scales.size());
  FUT_CHECK(count == 1 || (count == rows && shape[0] == rows), where, " of ", rows, " rows with ", count,
            " scales, expected one, or one a row");
  std::vector<float> values(static_cast<size_t>(tensor.size_bytes));
  if (values.empty()) return values;  // rows without columns may be as many as the file likes to say
  parallel_for(rows, kGrainElements / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * columns; i < end * columns; ++i) {
      values[i] = to_f32(E4m3{tensor.data[i]}) * scales[count == 1 ? 0 : i / columns];
    }
  });
  return values;
}

std::vector<float> HfFolder::read_packed(const TensorInfo& tensor) const {
  const uint8_t* const codes = stored(tensor.name + "_packed").data;
  const std::vector<float> scales = read_plain(stored(tensor.name + "_scale"));
  const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
  const int64_t groups = static_cast<int64_t>(scales.size()) / rows, group = columns / groups;
  const int64_t row_bytes = (columns + 7) / 8 * 4;
  std::vector<float> values(static_cast<size_t>(rows * columns));
  parallel_for(rows, kGrainElements / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < columns; ++k) {
        const int q = codes[row * row_bytes + k / 2] >> 4 * (k % 2) & 15;
        values[row * columns + k] = scales[row * groups + k / group] * static_cast<float>(q - 8);
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
  FUT_CHECK(config.is_object(), path, ": is no JSON object");
  const json source = config.value("chat_template", json());
  if (source.is_null()) return "";
  if (source.is_string()) return source.get<std::string>();
  FUT_CHECK(source.is_array(), path, ": chat_template is neither a string nor a list");
  for (const json& entry : source) {
    const bool named = entry.is_object() && entry.contains("name") && entry.contains("template");
    FUT_CHECK(named && entry["template"].is_string(), path, ": an entry of chat_template lacks its name or template");
    if (entry["name"] == "default") return entry["template"].get<std::string>();
  }
  fail(path, ": no chat_template named \"default\"");
}

}  // namespace

std::unique_ptr<Checkpoint> open_hf_folder(const std::string& folder) { return std::make_unique<HfFolder>(folder); }

}  // namespace fut
