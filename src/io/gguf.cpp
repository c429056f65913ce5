#include "io/gguf.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>
#include <set>

#include "base/error.h"
#include "io/gguf_blocks.h"

namespace fut {
namespace {

enum ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kText,
  kArray,
  kU64,
  kI64,
  kF64,
  kValueTypes
};

struct ValueTypeInfo {
  const char* name;
  uint64_t bytes;  // 0: not of fixed size
};

constexpr ValueTypeInfo kValueTypeInfo[kValueTypes] = {{"u8", 1},  {"i8", 1},  {"u16", 2},  {"i16", 2},    {"u32", 4},
                                                       {"i32", 4}, {"f32", 4}, {"bool", 1}, {"string", 0}, {"array", 0},
                                                       {"u64", 8}, {"i64", 8}, {"f64", 8}};

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kSmallestKeyValue = kLengthBytes + 4 + 1;         // an empty key, the type, one byte
constexpr uint64_t kSmallestTensorEntry = kLengthBytes + 4 + 4 + 8;  // an empty name, no extents, type, offset
constexpr int64_t kMaxExtents = 4;
constexpr uint64_t kDefaultAlignment = 32, kMaxAlignment = 1 << 20;

/// Names by the format's type number, for messages; find_block_format says which of them are read.
std::string type_name(uint32_t type) {
  static const std::map<uint32_t, const char*> kNames = {
      {0, "F32"},      {1, "F16"},     {2, "Q4_0"},     {3, "Q4_1"},   {6, "Q5_0"},    {7, "Q5_1"},   {8, "Q8_0"},
      {9, "Q8_1"},     {10, "Q2_K"},   {11, "Q3_K"},    {12, "Q4_K"},  {13, "Q5_K"},   {14, "Q6_K"},  {15, "Q8_K"},
      {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},
      {23, "IQ4_XS"},  {24, "I8"},     {25, "I16"},     {26, "I32"},   {27, "I64"},    {28, "F64"},   {29, "IQ1_M"},
      {30, "BF16"},    {34, "TQ1_0"},  {35, "TQ2_0"},   {39, "MXFP4"}};
  const auto found = kNames.find(type);
  return found == kNames.end() ? std::to_string(type) : found->second;
}

template <class T>
T load(const char* bytes) {
  T value;
  memcpy(&value, bytes, sizeof(T));
  return value;
}

/// The double with the fewest digits that rounds to `value`: 1e-5f gives 1e-5, as config.json would say.
double shortest(float value) {
  char digits[32] = {};
  double shortest = value;
  std::from_chars(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr, shortest);
  return shortest;
}

/// An integer of any width; unsigned ones beyond 2^63 - 1 are refused.
int64_t load_integer(uint32_t type, const char* bytes, const std::string& where) {
  switch (type) {
    case kU8: return load<uint8_t>(bytes);
    case kI8: return load<int8_t>(bytes);
    case kU16: return load<uint16_t>(bytes);
    case kI16: return load<int16_t>(bytes);
    case kU32: return load<uint32_t>(bytes);
    case kI32: return load<int32_t>(bytes);
    case kI64: return load<int64_t>(bytes);
    case kU64: {
      const auto value = load<uint64_t>(bytes);
      FUT_CHECK(value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), where, " is ", value,
                ", expected at most 2^63 - 1");
      return static_cast<int64_t>(value);
    }
    default: fail(where, " is of type ", kValueTypeInfo[type].name, ", expected an integer");
  }
}

}  // namespace

/// Walks through the file; whatever would pass its end is refused.
class GgufFile::Reader {
 public:
  explicit Reader(const MappedFile& file) : file_(file) {}

  uint64_t position() const { return position_; }
  uint64_t left() const { return file_.size() - position_; }

  std::string_view bytes(uint64_t count, const char* what) {
    FUT_CHECK(count <= left(), file_.path(), ": ", what, " of ", count, " bytes at ", position_,
              " passes the end of the file, which has ", file_.size(), " bytes");
    const auto taken = file_.text().substr(position_, count);
    position_ += count;
    return taken;
  }

  template <class T>
  T number(const char* what) {
    return load<T>(bytes(sizeof(T), what).data());
  }

  std::string_view text(const char* what) { return bytes(number<uint64_t>(what), what); }

  /// A count of things of which each takes at least `smallest` bytes.
  uint64_t count(uint64_t smallest, const std::string& what) {
    const auto count = number<uint64_t>(what.c_str());
    FUT_CHECK(count <= left() / smallest, file_.path(), ": ", count, " ", what, " do not fit the ", left(),
              " bytes that are left of ", file_.size(), " (incomplete download?)");
    return count;
  }

  GgufValue value(const std::string& key) {
    GgufValue value{value_type(key), false, 1, {}};
    if (value.type == kArray) {
      value.is_array = true;
      value.type = value_type(key);
      FUT_CHECK(value.type != kArray, file_.path(), ": key ", printable(key), ": arrays of arrays are not supported");
      const uint64_t element_bytes = kValueTypeInfo[value.type].bytes;
      value.count = count(element_bytes ? element_bytes : kLengthBytes, cat("array elements of key ", printable(key)));
    }
    const uint64_t begin = position_;
    if (value.type == kText) {
      for (uint64_t i = 0; i < value.count; ++i) text("string");
    } else {
      bytes(value.count * kValueTypeInfo[value.type].bytes, "value");
    }
    value.data = file_.text().substr(begin, position_ - begin);
    return value;
  }

 private:
  uint32_t value_type(const std::string& key) {
    const auto type = number<uint32_t>("value type");
    FUT_CHECK(type < kValueTypes, file_.path(), ": key ", printable(key), ": unknown value type ", type);
    return type;
  }

  const MappedFile& file_;
  uint64_t position_ = 0;
};

GgufFile::GgufFile(const std::string& path) : file_(path) {
  Reader reader(file_);
  FUT_CHECK(file_.text().starts_with("GGUF"), path, ": is no GGUF file: it begins with \"",
            printable(file_.text().substr(0, 4)), "\"");
  reader.bytes(4, "magic");
  const auto version = reader.number<uint32_t>("version");
  FUT_CHECK(version != 0x02000000 && version != 0x03000000, path, ": big-endian GGUF is not supported");
  FUT_CHECK(version == 2 || version == 3, path, ": GGUF version ", version, ", expected 2 or 3");
  const auto tensor_count = reader.count(kSmallestTensorEntry, "tensors");
  const auto value_count = reader.count(kSmallestKeyValue, "metadata keys");
  for (uint64_t i = 0; i < value_count; ++i) {
    const std::string key(reader.text("key"));
    FUT_CHECK(values_.emplace(key, reader.value(key)).second, path, ": duplicate key ", printable(key));
  }
  const auto alignment = static_cast<uint64_t>(integer("general.alignment").value_or(kDefaultAlignment));
  FUT_CHECK(std::has_single_bit(alignment) && alignment <= kMaxAlignment, path, ": general.alignment is ", alignment,
            ", expected a power of two up to ", kMaxAlignment);
  std::set<std::string> names;
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < tensor_count; ++i) {
    tensors_.push_back(read_tensor(reader));
    const std::string& name = tensors_.back().name;
    FUT_CHECK(names.insert(name).second, path, ": duplicate tensor ", printable(name));
    offsets.push_back(reader.number<uint64_t>("tensor offset"));
    FUT_CHECK(offsets.back() % alignment == 0, path, ": tensor ", printable(name), ": offset ", offsets.back(),
              " is no multiple of the alignment ", alignment);
  }
  place_tensors(std::move(offsets), (reader.position() + alignment - 1) / alignment * alignment);
}

/// Everything of a table entry but the offset that ends it.
GgufTensor GgufFile::read_tensor(Reader& reader) const {
  GgufTensor tensor{std::string(reader.text("tensor name")), {}, {}, 1, nullptr, 0};
  const std::string where = cat(path(), ": tensor ", printable(tensor.name));
  const auto extent_count = reader.number<uint32_t>("extent count");
  FUT_CHECK(extent_count <= kMaxExtents, where, ": ", extent_count, " extents, expected at most ", kMaxExtents);
  for (uint32_t i = 0; i < extent_count; ++i) {
    const auto extent = reader.number<uint64_t>("extent");
    const bool fits = extent > 0 && extent <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) &&
                      !__builtin_mul_overflow(tensor.elements, static_cast<int64_t>(extent), &tensor.elements);
    FUT_CHECK(fits, where, ": extent ", extent, " is 0 or too large");
    tensor.extents.push_back(static_cast<int64_t>(extent));
  }
  tensor.type = type_name(reader.number<uint32_t>("tensor type"));
  if (const BlockFormat* format = find_block_format(tensor.type)) {
    const int64_t row = tensor.extents.empty() ? 1 : tensor.extents[0];
    FUT_CHECK(row % format->elements == 0, where, ": rows of ", row, " values are no multiple of ", tensor.type,
              "'s blocks of ", format->elements);
    FUT_CHECK(!__builtin_mul_overflow(tensor.elements / format->elements, format->bytes, &tensor.size_bytes), where,
              ": size overflows");
  }
  return tensor;
}

void GgufFile::place_tensors(std::vector<uint64_t> offsets, uint64_t data_start) {
  std::vector<size_t> order(tensors_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  FUT_CHECK(tensors_.empty() || data_start <= file_.size(), path(), ": truncated: tensors begin at ", data_start,
            ", the file has ", file_.size(), " bytes");
  const uint64_t data_bytes = file_.size() - data_start;
  uint64_t end = 0;
  for (const size_t i : order) {
    GgufTensor& tensor = tensors_[i];
    const auto size = static_cast<uint64_t>(tensor.size_bytes);
    const std::string where = cat(path(), ": tensor ", printable(tensor.name));
    FUT_CHECK(offsets[i] <= data_bytes && size <= data_bytes - offsets[i], where, ": truncated: ", size, " bytes at ",
              offsets[i], " of the data, the file holds ", data_bytes, " (incomplete download?)");
    FUT_CHECK(offsets[i] >= end, where, ": begins at ", offsets[i], " of the data, inside another that ends at ", end);
    end = offsets[i] + size;
    tensor.data = file_.data() + data_start + offsets[i];
  }
}

const GgufValue* GgufFile::find(const std::string& key, bool array) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return nullptr;
  FUT_CHECK(found->second.is_array == array, path(), ": key ", printable(key), " is ",
            array ? "a single value, expected an array" : "an array, expected a single value");
  return &found->second;
}

std::optional<int64_t> GgufFile::integer(const std::string& key) const {
  const GgufValue* const value = find(key, false);
  if (!value) return std::nullopt;
  return load_integer(value->type, value->data.data(), cat(path(), ": key ", key));
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const GgufValue* const value = find(key, false);
  if (!value) return std::nullopt;
  if (value->type == kF32) return shortest(load<float>(value->data.data()));
  if (value->type == kF64) return load<double>(value->data.data());
  return static_cast<double>(*integer(key));
}

std::optional<bool> GgufFile::boolean(const std::string& key) const {
  const GgufValue* const value = find(key, false);
  if (!value) return std::nullopt;
  FUT_CHECK(value->type == kBool, path(), ": key ", key, " is of type ", kValueTypeInfo[value->type].name,
            ", expected bool");
  return value->data[0] != 0;
}

std::optional<std::string> GgufFile::text(const std::string& key) const {
  const GgufValue* const value = find(key, false);
  if (!value) return std::nullopt;
  FUT_CHECK(value->type == kText, path(), ": key ", key, " is of type ", kValueTypeInfo[value->type].name,
            ", expected string");
  return std::string(value->data.substr(kLengthBytes));
}

std::optional<std::vector<std::string>> GgufFile::texts(const std::string& key) const {
  const GgufValue* const value = find(key, true);
  if (!value) return std::nullopt;
  FUT_CHECK(value->type == kText, path(), ": key ", key, " is an array of ", kValueTypeInfo[value->type].name,
            ", expected strings");
  std::vector<std::string> texts;
  texts.reserve(value->count);
  for (std::string_view rest = value->data; !rest.empty();) {
    const auto length = load<uint64_t>(rest.data());
    texts.emplace_back(rest.substr(kLengthBytes, length));
    rest.remove_prefix(kLengthBytes + length);
  }
  return texts;
}

std::optional<std::vector<int64_t>> GgufFile::integers(const std::string& key) const {
  const GgufValue* const value = find(key, true);
  if (!value) return std::nullopt;
  const uint64_t bytes = kValueTypeInfo[value->type].bytes;
  FUT_CHECK(bytes > 0, path(), ": key ", key, " is an array of strings, expected integers");
  std::vector<int64_t> integers;
  integers.reserve(value->count);
  const std::string where = cat(path(), ": key ", key);
  for (uint64_t i = 0; i < value->count; ++i) {
    integers.push_back(load_integer(value->type, value->data.data() + i * bytes, where));
  }
  return integers;
}

std::optional<std::vector<float>> GgufFile::floats(const std::string& key) const {
  const GgufValue* const value = find(key, true);
  if (!value) return std::nullopt;
  FUT_CHECK(value->type == kF32, path(), ": key ", key, " is an array of ", kValueTypeInfo[value->type].name,
            ", expected f32");
  std::vector<float> floats;
  floats.reserve(value->count);
  for (uint64_t i = 0; i < value->count; ++i) floats.push_back(load<float>(value->data.data() + i * sizeof(float)));
  return floats;
}

}  // namespace fut
