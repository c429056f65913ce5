#include "io/hf_folder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <tuple>

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

/// Consecutive elements or rows.
struct Span {
  int64_t first, count;
};

std::vector<float> read_f64(const StoredTensor& tensor, Span elements) {
  std::vector<float> values(static_cast<size_t>(elements.count));
  const uint8_t* const data = tensor.data + elements.first * static_cast<int64_t>(sizeof(double));
  for (size_t i = 0; i < values.size(); ++i) {
    double value;
    memcpy(&value, data + i * sizeof(value), sizeof(value));
    // Beyond float's range the conversion of C++ is undefined; infinity is what every other program makes of it.
    constexpr double kLargest = std::numeric_limits<float>::max();
    values[i] = std::fabs(value) <= kLargest || !std::isfinite(value)
                    ? static_cast<float>(value)
                    : std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(value > 0 ? 1 : -1));
  }
  return values;
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
  std::vector<float> read_plain(const StoredTensor& tensor, Span rows) const;
  std::vector<float> read_plain(const StoredTensor& tensor) const {
    return read_plain(tensor, {0, rows_of(tensor.info)});
  }
  const StoredTensor& scale_of(const TensorInfo& info) const;
  std::vector<float> read_e4m3(const StoredTensor& tensor, Span rows) const;
  std::vector<float> read_packed(const TensorInfo& tensor, Span rows) const;

  std::string config_, generation_config_ = "{}";
  std::pair<int64_t, int64_t> fp8_block_;  // rows and columns of an FP8 tensor that share a scale
  std::vector<SafetensorsFile> shards_;
  std::map<std::string, const StoredTensor*> stored_;
  std::map<std::string, TensorInfo> packed_;
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

/// Checks the parts of a pack-quantized tensor against each other, so that reading needs no check.
void HfFolder::add_pack_quantized(const std::string& name) {
  const TensorInfo& packed = stored(name + "_packed").info;
  const std::string where = cat(packed.file, ": tensor ", printable(packed.name));
  FUT_CHECK(!stored_.contains(name + "_g_idx"), where, ": has ", printable(name), "_g_idx, which is not supported yet");
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
  if (const auto zero = stored_.find(name + "_zero_point"); zero != stored_.end()) {
    const TensorInfo& info = zero->second->info;
    FUT_CHECK(info.type == "I32" && info.shape == (std::vector<int64_t>{(rows - 1) / 8 + 1, groups}), where, ": ",
              printable(info.name), " is no I32 (", (rows - 1) / 8 + 1, ", ", groups, ")");
  }
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

std::vector<float> HfFolder::read_rows(const std::string& name, int64_t first, int64_t count) const {
  if (const auto found = packed_.find(name); found != packed_.end()) return read_packed(found->second, {first, count});
  const StoredTensor& tensor = stored(name);
  return tensor.info.type == "F8_E4M3" ? read_e4m3(tensor, {first, count}) : read_plain(tensor, {first, count});
}

std::vector<float> HfFolder::read_plain(const StoredTensor& tensor, Span rows) const {
  // Only a type whose size the header check knows has a size to be relied on.
  const int64_t element_bytes = safetensors_element_bytes(tensor.info.type);
  const BlockFormat* const format = element_bytes ? find_block_format(tensor.info.type) : nullptr;
  FUT_CHECK(format || tensor.info.type == "F64", tensor.info.file, ": tensor ", printable(tensor.info.name),
            ": unsupported dtype ", printable(tensor.info.type), ", expected F64, F32, F16 or BF16");
  check_rows(tensor.info, rows.first, rows.count);
  const int64_t all_rows = rows_of(tensor.info), width = all_rows ? tensor.size_bytes / element_bytes / all_rows : 0;
  const Span elements{rows.first * width, rows.count * width};
  if (!format) return read_f64(tensor, elements);
  std::vector<float> values(static_cast<size_t>(elements.count));
  const uint8_t* const data = tensor.data + elements.first * element_bytes;
  parallel_for(elements.count, kGrainElements, [&](int64_t begin, int64_t end) {
    format->to_floats(data + begin * element_bytes, end - begin, values.data() + begin);
  });
  return values;
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

std::vector<float> HfFolder::read_e4m3(const StoredTensor& tensor, Span span) const {
  const TensorInfo& info = tensor.info;
  const StoredTensor& scale = scale_of(info);
  const std::vector<int64_t>& shape = scale.info.shape;
  const std::vector<float> scales = read_plain(scale);
  const int64_t rows = info.shape.empty() ? 1 : info.shape[0];
  const int64_t columns = rows ? tensor.size_bytes / rows : 0;
  const auto count = static_cast<int64_t>(scales.size());
  int64_t block_rows = rows, block_columns = columns;  // that share a scale
  if (count > 1 && count == rows && shape[0] == rows) {
    block_rows = 1;
  } else if (count != 1) {
    const auto blocks = [](int64_t extent, int64_t block) { return extent / block + (extent % block != 0); };
    std::tie(block_rows, block_columns) = fp8_block_;
    const bool tiles = info.shape.size() == 2 &&
                       shape == std::vector<int64_t>{blocks(rows, block_rows), blocks(columns, block_columns)};
    FUT_CHECK(tiles, info.file, ": tensor ", printable(info.name), ": F8_E4M3 of ", rows, " rows with ", count,
              " scales, expected one, one a row, or one a block of ", block_rows, " x ", block_columns);
  }
  if (check_rows(info, span.first, span.count)) span = {0, rows};
  std::vector<float> values(static_cast<size_t>(span.count * columns));
  if (values.empty()) return values;  // rows without columns may be as many as the file likes to say
  const int64_t blocks_a_row = (columns - 1) / block_columns + 1;
  parallel_for(span.count, kGrainElements / (columns + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = span.first + i;
      const float* const row_scales = scales.data() + row / block_rows * blocks_a_row;
      for (int64_t k = 0; k < columns; ++k) {
        values[i * columns + k] = to_f32(E4m3{tensor.data[row * columns + k]}) * row_scales[k / block_columns];
      }
    }
  });
  return values;
}

std::vector<float> HfFolder::read_packed(const TensorInfo& tensor, Span span) const {
  check_rows(tensor, span.first, span.count);
  const uint8_t* const codes = stored(tensor.name + "_packed").data;
  const std::vector<float> scales = read_plain(stored(tensor.name + "_scale"));
  const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
  const int64_t groups = static_cast<int64_t>(scales.size()) / rows, group = columns / groups;
  const int64_t row_bytes = (columns + 7) / 8 * 4;
  const auto zero_points = stored_.find(tensor.name + "_zero_point");
  // Of eight rows in a word, unlike the codes.
  const auto zero_of = [&](int64_t row, int64_t g) {
    if (zero_points == stored_.end()) return 8;
    return zero_points->second->data[(row / 8 * groups + g) * 4 + row % 8 / 2] >> 4 * (row % 2) & 15;
  };
  std::vector<float> values(static_cast<size_t>(span.count * columns));
  parallel_for(span.count, kGrainElements / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = span.first + i;
      for (int64_t k = 0; k < columns; ++k) {
        const int q = codes[row * row_bytes + k / 2] >> 4 * (k % 2) & 15;
        const int64_t g = k / group;
        values[i * columns + k] = scales[row * groups + g] * static_cast<float>(q - zero_of(row, g));
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
