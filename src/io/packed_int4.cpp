#include "io/packed_int4.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/parallel.h"
#include "io/json.h"
#include "layout/int4_fragment.h"

namespace fut {
namespace {

using nlohmann::json;

constexpr int64_t kGrainElements = 1 << 16;
/// Nibble of a word that holds AWQ's row n % 8.
constexpr std::array<int, 8> kAwqPlace = {0, 4, 1, 5, 2, 6, 3, 7};

uint32_t word_at(const uint8_t* words, int64_t index) {
  uint32_t word;
  memcpy(&word, words + index * 4, sizeof word);
  return word;
}

std::string shape_text(const std::vector<int64_t>& shape) { return json(shape).dump(); }

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

const StoredTensor* find(const StoredTensors& stored, const std::string& name) {
  const auto found = stored.find(name);
  return found == stored.end() ? nullptr : found->second;
}

const StoredTensor& part(const StoredTensors& stored, const std::string& name, const TensorInfo& of) {
  const StoredTensor* const tensor = find(stored, name);
  FUT_CHECK(tensor, of.file, ": tensor ", printable(of.name), ": expected ", printable(name), " beside it");
  return *tensor;
}

void require_shape(const StoredTensor& tensor, const char* type, const std::vector<int64_t>& shape,
                   const TensorInfo& of) {
  const TensorInfo& info = tensor.info;
  FUT_CHECK(info.type == type && info.shape == shape, of.file, ": tensor ", printable(of.name), ": ",
            printable(info.name), " is ", printable(info.type), " ", shape_text(info.shape), ", expected ", type, " ",
            shape_text(shape));
}

}  // namespace

int Nibbles::at(int64_t n, int64_t k) const {
  const int64_t word = (along_n ? n / 8 : n) * n_stride + (along_n ? k : k / 8) * k_stride;
  const auto place = static_cast<size_t>((along_n ? n : k) % 8);
  return static_cast<int>(word_at(words, word) >> 4 * (interleaved ? kAwqPlace[place] : static_cast<int>(place)) & 15);
}

PackedInt4 PackedInt4::pack_quantized(const std::string& name, const StoredTensors& stored) {
  const StoredTensor &packed = *stored.at(name + "_packed"), &scale = part(stored, name + "_scale", packed.info);
  const std::string where = cat(packed.info.file, ": tensor ", printable(packed.info.name));
  FUT_CHECK(!stored.contains(name), where, ": ", printable(name), " is there as well");
  const auto [rows, columns] = read_pair(part(stored, name + "_shape", packed.info));
  FUT_CHECK(rows > 0 && columns > 0, where, ": ", printable(name), "_shape is [", rows, ", ", columns, "]");
  const int64_t row_words = (columns - 1) / 8 + 1;
  FUT_CHECK(packed.info.type == "I32" && packed.info.shape == (std::vector<int64_t>{rows, row_words}), where,
            ": expected 4-bit codes as I32 (", rows, ", ", row_words, ")");
  const std::vector<int64_t>& scale_shape = scale.info.shape;
  const int64_t groups = scale_shape.size() == 2 ? scale_shape[1] : 0;
  FUT_CHECK(groups > 0 && scale_shape[0] == rows && columns % groups == 0, where, ": ", printable(scale.info.name),
            " does not have ", rows, " rows of equal groups of the ", columns, " columns");
  // With short last groups excluded, only powers of two make the group size certain: 96 columns in 2 groups could be
  // groups of 48 or of 64.
  FUT_CHECK(groups == 1 || std::has_single_bit(static_cast<uint64_t>(columns / groups)), where, ": groups of ",
            columns / groups, " columns, expected a power of two");
  PackedInt4 made;
  made.info_ = {name, "pack-quantized", {rows, columns}, packed.info.file};
  made.codes_ = {packed.data, row_words, 1};
  if (const StoredTensor* const zero = find(stored, name + "_zero_point")) {
    require_shape(*zero, "I32", {(rows - 1) / 8 + 1, groups}, packed.info);
    made.zeros_ = {zero->data, groups, 1, true};
  }
  made.scales_ = &scale;
  made.groups_ = groups;
  if (const StoredTensor* const order = find(stored, name + "_g_idx")) made.take_order(*order);
  return made;
}

PackedInt4 PackedInt4::qweight(const std::string& name, const StoredTensors& stored, const QweightConfig& config) {
  const std::string base = name.substr(0, name.size() - strlen("weight"));
  const StoredTensor& codes = *stored.at(base + "qweight");
  const StoredTensor &scales = part(stored, base + "scales", codes.info),
                     &zeros = part(stored, base + "qzeros", codes.info);
  const std::string where = cat(codes.info.file, ": tensor ", printable(codes.info.name));
  FUT_CHECK(!stored.contains(name), where, ": ", printable(name), " is there as well");
  const auto matrix = [&](const StoredTensor& tensor) {
    const std::vector<int64_t>& shape = tensor.info.shape;
    FUT_CHECK(shape.size() == 2 && shape[0] > 0 && shape[1] > 0, where, ": ", printable(tensor.info.name), " is ",
              shape_text(shape), ", expected a matrix");
    return std::pair(shape[0], shape[1]);
  };
  const auto [down, across] = matrix(codes);
  const auto [groups, rows] = matrix(scales);
  const bool awq = config.awq || (!config.gptq && across * 8 == rows);
  const int64_t columns = awq ? down : down * 8;
  FUT_CHECK(rows % 8 == 0 && across == (awq ? rows / 8 : rows) && codes.info.type == "I32", where, ": is ",
            printable(codes.info.type), " ", shape_text(codes.info.shape), " beside ", printable(scales.info.name), " ",
            shape_text(scales.info.shape), ", not the 4-bit codes of ", awq ? "AWQ" : "GPTQ");
  FUT_CHECK(columns % groups == 0, where, ": ", columns, " columns in ", groups, " groups of ",
            printable(scales.info.name), ", which are not equal");
  FUT_CHECK(config.group == 0 || columns / groups == (config.group < 0 ? columns : config.group), where, ": ", columns,
            " columns in ", groups, " groups of ", printable(scales.info.name), ", but ", config.file,
            " says group_size ", config.group);
  require_shape(zeros, "I32", {groups, rows / 8}, codes.info);
  PackedInt4 made;
  made.info_ = {name, awq ? "awq" : "gptq", {rows, columns}, codes.info.file};
  made.codes_ = awq ? Nibbles{codes.data, 1, across, true, true} : Nibbles{codes.data, 1, across};
  made.zeros_ = {zeros.data, 1, rows / 8, true, awq};
  if (!awq) {
    made.zero_shift_ = config.second_version ? 0 : 1;
    // Some write one version under the other's name. Where all are 8, the first ones tell.
    const uint32_t first = word_at(zeros.data, 0);
    if (config.symmetric && first == 0x77777777) made.zero_shift_ = 1;
    if (config.symmetric && first == 0x88888888) made.zero_shift_ = 0;
  }
  made.scales_ = &scales;
  made.scales_by_group_ = true;
  made.groups_ = groups;
  if (const StoredTensor* const order = find(stored, base + "g_idx"); order && !awq) made.take_order(*order);
  return made;
}

/// Keeps the group of every column, unless they lie in order. All 0 or all -1: nobody filled it in.
void PackedInt4::take_order(const StoredTensor& g_idx) {
  const int64_t columns = info_.shape[1], group = columns / groups_;
  const std::string where = cat(g_idx.info.file, ": tensor ", printable(g_idx.info.name));
  FUT_CHECK(g_idx.info.type == "I32" && g_idx.info.shape == std::vector<int64_t>{columns}, where, ": is ",
            printable(g_idx.info.type), " ", shape_text(g_idx.info.shape), ", expected I32 [", columns, "]");
  group_of_.resize(static_cast<size_t>(columns));
  memcpy(group_of_.data(), g_idx.data, group_of_.size() * sizeof(int32_t));
  const auto all = [&](int32_t value) {
    return std::all_of(group_of_.begin(), group_of_.end(), [&](int32_t g) { return g == value; });
  };
  bool in_order = all(0) || all(-1);
  if (!in_order) {
    in_order = true;
    for (int64_t k = 0; k < columns; ++k) {
      const int32_t g = group_of_[k];
      FUT_CHECK(g >= 0 && g < groups_, where, ": column ", k, " is in group ", g, " of ", groups_);
      in_order = in_order && g == k / group;
    }
  }
  if (in_order) group_of_.clear();
}

std::vector<float> PackedInt4::read(int64_t first_row, int64_t count) const {
  Checkpoint::check_rows(info_, first_row, count);
  const std::vector<float> scales = read_floats(*scales_, 0, Checkpoint::rows_of(scales_->info));
  const int64_t rows = info_.shape[0], columns = info_.shape[1], group = columns / groups_;
  std::vector<float> values(static_cast<size_t>(count * columns));
  parallel_for(count, kGrainElements / columns + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scale(static_cast<size_t>(groups_));
    std::vector<int> zero(scale.size());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = first_row + i;
      for (int64_t g = 0; g < groups_; ++g) {
        scale[g] = scales[scales_by_group_ ? g * rows + n : n * groups_ + g];
        zero[g] = zero_at(n, g);
      }
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t g = group_of_.empty() ? k / group : group_of_[k];
        values[i * columns + k] = scale[g] * static_cast<float>(codes_.at(n, k) - zero[g]);
      }
    }
  });
  return values;
}

int PackedInt4::own_group(std::string* why) const {
  const auto refuse = [&](const std::string& reason) {
    if (why) *why = reason;
    return 0;
  };
  if (!group_of_.empty()) return refuse("groups that are not consecutive columns (activation order)");
  const int64_t stored = info_.shape[1] / groups_;
  int own = 0;
  for (const int group : {128, 64, 32}) {
    if (!own && (groups_ == 1 || stored % group == 0)) own = group;
  }
  if (!own) return refuse(cat("groups of ", stored));
  for (int64_t n = 0; zeros_.words && n < info_.shape[0]; ++n) {
    for (int64_t g = 0; g < groups_; ++g) {
      if (zero_at(n, g) != kInt4Zero) return refuse(cat("zero points other than ", kInt4Zero));
    }
  }
  if (scales_->info.type == "F16") return own;
  const std::vector<float> scales = read_floats(*scales_, 0, Checkpoint::rows_of(scales_->info));
  const bool halves = std::all_of(scales.begin(), scales.end(), [](float s) { return to_f32(to_half(s)) == s; });
  return halves ? own : refuse("scales that are not halves");
}

HostWeight PackedInt4::codes() const {
  const int64_t rows = info_.shape[0], columns = info_.shape[1], group = columns / groups_;
  HostWeight out = empty_weight(Dtype::int4, own_group(nullptr), rows, columns);
  const std::vector<float> scales = read_floats(*scales_, 0, Checkpoint::rows_of(scales_->info));
  parallel_for(rows, kGrainElements / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      uint8_t* const row = out.data.data() + n * out.row_bytes();
      for (int64_t k = 0; k < columns; ++k) row[k / 2] |= static_cast<uint8_t>(codes_.at(n, k) << 4 * (k % 2));
      for (int64_t g = 0; g < out.groups(); ++g) {
        const int64_t from = g * out.group / group;
        out.group_scale[n * out.groups() + g] =
            to_half(scales[scales_by_group_ ? from * rows + n : n * groups_ + from]);
      }
    }
  });
  return out;
}

// ---- what the checkpoint says of itself -----------------------------------------------------------------------------

namespace {

/// The first of the keys that is there and not null.
json value_of(const json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (const json value = object.value(key, json()); !value.is_null()) return value;
  }
  return {};
}

/// A string in lower case; "" if the keys are not there.
std::string word_of(const json& object, std::initializer_list<const char*> keys, const std::string& file) {
  const json value = value_of(object, keys);
  if (value.is_null()) return "";
  FUT_CHECK(value.is_string(), file, ": ", *keys.begin(), " is ", shown(value), ", expected a string");
  std::string word = value.get<std::string>();
  for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return word;
}

}  // namespace

QweightConfig read_qweight_config(const std::string& folder, const std::string& config,
                                  const std::string& config_file) {
  QweightConfig out;
  out.file = config_file;
  json said = parse_json(config, config_file).value("quantization_config", json());
  for (const char* name : {"quantize_config.json", "quant_config.json"}) {
    const std::filesystem::path path = std::filesystem::path(folder) / name;
    std::error_code ignored;
    if (!said.is_null() || !std::filesystem::exists(path, ignored)) continue;
    out.file = path.string();
    said = parse_json_file(out.file);
  }
  if (said.is_null()) said = json::object();
  FUT_CHECK(said.is_object(), out.file, ": quantization_config is ", shown(said), ", expected an object");
  const std::string method = word_of(said, {"quant_method"}, out.file);
  FUT_CHECK(method.empty() || method == "gptq" || method == "awq", out.file, ": quant_method is ", printable(method),
            ", expected gptq or awq, whose qweight tensors are read");
  const json bits = value_of(said, {"bits", "w_bit"});
  FUT_CHECK(bits.is_null() || bits == 4, out.file, ": bits is ", shown(bits),
            ", expected 4: other codes of GPTQ and AWQ are not supported");
  std::string format = word_of(said, {"checkpoint_format", "format"}, out.file);
  if (format.empty() && method != "gptq") format = word_of(said, {"version"}, out.file);  // AWQ's key for it
  const bool of_gptq = format == "gptq" || format == "gptq_v2", of_awq = format == "gemm";
  FUT_CHECK(format.empty() || (of_gptq && method != "awq") || (of_awq && method != "gptq"), out.file,
            ": the format of its ", method, " tensors is ", printable(format),
            ", expected gptq, gptq_v2, or of AWQ gemm");
  FUT_CHECK(value_of(said, {"is_marlin_format"}) != true, out.file,
            ": is_marlin_format: Marlin's order is not supported");
  out.gptq = method == "gptq" || of_gptq;
  out.awq = method == "awq" || of_awq;
  out.second_version = format == "gptq_v2";
  out.symmetric = value_of(said, {"sym"}) == true;
  const json group = value_of(said, {"group_size", "q_group_size"});
  FUT_CHECK(group.is_null() || (group.is_number_integer() && (group == -1 || (group >= 1 && group <= 1 << 30))),
            out.file, ": group_size is ", shown(group), ", expected a positive number or -1");
  // "dynamic" gives some tensors a size of their own.
  if (!group.is_null() && value_of(said, {"dynamic"}).empty()) out.group = group.get<int64_t>();
  return out;
}

}  // namespace fut
