#include "io/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "io/gguf_blocks.h"
#include "io/json.h"

namespace fut {
namespace {

using nlohmann::json;

constexpr uint64_t kPrefixBytes = 8;

/// Bytes of a tensor, or nothing if they do not fit 63 bits. `shape` holds no negative number.
std::optional<int64_t> bytes_of(int64_t element_bytes, const std::vector<int64_t>& shape) {
  int64_t bytes = element_bytes;
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

/// A count or offset: an integer from 0 to 2^63 - 1.
int64_t natural(const json& value, const std::string& where) {
  constexpr auto kLargest = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  FUT_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= kLargest, where,
            ": expected an integer from 0 to 2^63 - 1, found ", shown(value));
  return value.get<int64_t>();
}

const json& member(const json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  FUT_CHECK(found != object.end(), where, ": no \"", key, "\"");
  return *found;
}

std::string_view header_text(const MappedFile& file) {
  const std::string& path = file.path();
  FUT_CHECK(file.size() >= kPrefixBytes, path, ": ", file.size(), " bytes are too few for a safetensors file");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | file.data()[i];
  FUT_CHECK(length <= kMaxJsonBytes, path, ": header of ", length, " bytes, expected at most ", kMaxJsonBytes);
  FUT_CHECK(length <= file.size() - kPrefixBytes, path, ": truncated: the header alone promises ",
            kPrefixBytes + length, " bytes, the file has ", file.size());
  return file.text().substr(kPrefixBytes, length);
}

/// One tensor from its header entry; `data` points at the data section, whose end is checked by check_ranges.
StoredTensor stored_tensor(const std::string& name, const json& entry, const MappedFile& file, const uint8_t* data) {
  const std::string where = cat(file.path(), ": tensor ", printable(name));
  FUT_CHECK(entry.is_object(), where, ": is ", shown(entry), ", expected an object with dtype, shape and data_offsets");
  const json& type = member(entry, "dtype", where);
  const json& shape = member(entry, "shape", where);
  const json& offsets = member(entry, "data_offsets", where);
  FUT_CHECK(type.is_string(), where, ": dtype is ", shown(type), ", expected a string");
  FUT_CHECK(shape.is_array(), where, ": shape is ", shown(shape), ", expected an array");
  FUT_CHECK(offsets.is_array() && offsets.size() == 2, where, ": data_offsets is ", shown(offsets),
            ", expected two numbers");

  StoredTensor tensor{{name, type.get<std::string>(), {}, file.path()}, data, 0};
  for (const json& extent : shape) tensor.info.shape.push_back(natural(extent, where + ": shape"));
  const int64_t begin = natural(offsets[0], where + ": data_offsets");
  const int64_t end = natural(offsets[1], where + ": data_offsets");
  FUT_CHECK(begin <= end, where, ": data_offsets reversed: ", begin, " > ", end);
  tensor.size_bytes = end - begin;

  if (const int64_t element_bytes = safetensors_element_bytes(tensor.info.type)) {
    const auto bytes = bytes_of(element_bytes, tensor.info.shape);
    FUT_CHECK(bytes, where, ": shape ", printable(shape.dump()), " overflows");
    FUT_CHECK(*bytes == tensor.size_bytes, where, ": ", tensor.info.type, " of shape ", printable(shape.dump()),
              " takes ", *bytes, " bytes, data_offsets give ", tensor.size_bytes);
  }
  return tensor;
}

struct Range {
  int64_t begin, end;
  size_t tensor;
  auto operator<=>(const Range&) const = default;
};

/// The format wants ranges that tile the data section exactly. Sorts `ranges`.
void check_ranges(std::vector<Range>& ranges, const std::vector<StoredTensor>& tensors, uint64_t header_bytes,
                  const MappedFile& file) {
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (const Range& range : ranges) {
    FUT_CHECK(range.begin == end, file.path(), ": tensor ", printable(tensors[range.tensor].info.name), " begins at ",
              range.begin, " of the data, expected ", end,
              range.begin < end ? ": ranges overlap" : ": bytes of no tensor");
    end = range.end;
  }
  const uint64_t promised = kPrefixBytes + header_bytes + static_cast<uint64_t>(end);
  FUT_CHECK(promised <= file.size(), file.path(), ": truncated: the header promises ", promised,
            " bytes, the file has ", file.size(), " (incomplete download?)");
  FUT_CHECK(promised == file.size(), file.path(), ": ", file.size() - promised,
            " bytes after the last tensor: the header promises ", promised, " bytes, the file has ", file.size());
}

std::map<std::string, std::string> metadata_of(const json& entry, const std::string& path) {
  FUT_CHECK(entry.is_object(), path, ": __metadata__ is ", shown(entry), ", expected an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : entry.items()) {
    FUT_CHECK(value.is_string(), path, ": __metadata__ \"", printable(key), "\" is ", shown(value),
              ", expected a string");
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

}  // namespace

int64_t safetensors_element_bytes(const std::string& type) {
  static const std::map<std::string, int64_t> kBytes = {
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2},
      {"F16", 2},  {"BF16", 2}, {"U32", 4}, {"I32", 4},     {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
  const auto found = kBytes.find(type);
  return found == kBytes.end() ? 0 : found->second;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const std::string_view text = header_text(file_);
  const json header = parse_json(text, path + ": header");
  FUT_CHECK(header.is_object(), path, ": header is ", shown(header), ", expected an object");
  const uint8_t* const data = file_.data() + kPrefixBytes + text.size();
  std::vector<StoredTensor> tensors;
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      metadata_ = metadata_of(entry, path);
      continue;
    }
    tensors.push_back(stored_tensor(name, entry, file_, data));
    const auto begin = entry["data_offsets"][0].get<int64_t>();
    ranges.push_back({begin, begin + tensors.back().size_bytes, ranges.size()});
  }
  check_ranges(ranges, tensors, text.size(), file_);
  for (const Range& range : ranges) {
    tensors_.push_back(std::move(tensors[range.tensor]));
    tensors_.back().data += range.begin;
  }
}

namespace {

std::vector<float> read_f64(const uint8_t* data, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
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

}  // namespace

std::vector<float> read_floats(const StoredTensor& tensor, int64_t first_row, int64_t rows) {
  // Only a type whose size the header check knows has a size to be relied on.
  const int64_t element_bytes = safetensors_element_bytes(tensor.info.type);
  const BlockFormat* const format = element_bytes ? find_block_format(tensor.info.type) : nullptr;
  FUT_CHECK(format || tensor.info.type == "F64", tensor.info.file, ": tensor ", printable(tensor.info.name),
            ": unsupported dtype ", printable(tensor.info.type), ", expected F64, F32, F16 or BF16");
  Checkpoint::check_rows(tensor.info, first_row, rows);
  const int64_t all_rows = Checkpoint::rows_of(tensor.info);
  const int64_t width = all_rows ? tensor.size_bytes / element_bytes / all_rows : 0, count = rows * width;
  const uint8_t* const data = tensor.data + first_row * width * element_bytes;
  if (!format) return read_f64(data, count);
  std::vector<float> values(static_cast<size_t>(count));
  constexpr int64_t kGrainElements = 1 << 16;
  parallel_for(count, kGrainElements, [&](int64_t begin, int64_t end) {
    format->to_floats(data + begin * element_bytes, end - begin, values.data() + begin);
  });
  return values;
}

SafetensorsWriter::SafetensorsWriter(std::string path) : path_(std::move(path)), partial_path_(path_ + ".partial") {}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(partial_path_.c_str());
}

void SafetensorsWriter::declare(const std::string& name, const std::string& type, const std::vector<int64_t>& shape) {
  FUT_CHECK(fd_ < 0, path_, ": tensor ", printable(name), " declared after the first was written");
  const int64_t element_bytes = safetensors_element_bytes(type);
  FUT_CHECK(element_bytes > 0, path_, ": tensor ", printable(name), ": unknown type ", printable(type));
  for (const int64_t extent : shape) FUT_CHECK(extent >= 0, path_, ": tensor ", printable(name), ": extent ", extent);
  const auto bytes = bytes_of(element_bytes, shape);
  FUT_CHECK(bytes, path_, ": tensor ", printable(name), ": shape overflows");
  FUT_CHECK(name != "__metadata__" && slot_of_.emplace(name, slots_.size()).second, path_, ": tensor ", printable(name),
            " declared twice");
  slots_.push_back({name, type, shape, *bytes});
}

/// Wide types first, so that every tensor is aligned to its element: readers that map the file may rely on it.
void SafetensorsWriter::lay_out() {
  std::vector<Slot*> order;
  for (Slot& slot : slots_) order.push_back(&slot);
  std::stable_sort(order.begin(), order.end(), [](const Slot* a, const Slot* b) {
    return safetensors_element_bytes(a->type) > safetensors_element_bytes(b->type);
  });
  int64_t offset = 0;
  for (Slot* slot : order) {
    slot->offset = offset;
    FUT_CHECK(!__builtin_add_overflow(offset, slot->size_bytes, &offset), path_, ": total size overflows");
  }
}

std::string SafetensorsWriter::header() const {
  json entries = {{"__metadata__", {{"format", "pt"}}}};  // transformers refuses files that do not say so
  for (const Slot& slot : slots_) {
    entries[slot.name] = {
        {"dtype", slot.type}, {"shape", slot.shape}, {"data_offsets", {slot.offset, slot.offset + slot.size_bytes}}};
  }
  std::string text;
  try {
    text = entries.dump();
  } catch (const json::exception&) {
    fail(path_, ": a tensor's name is not valid UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  FUT_CHECK(text.size() <= kMaxJsonBytes, path_, ": header of ", text.size(), " bytes, at most ", kMaxJsonBytes);
  std::string prefix(kPrefixBytes, '\0');
  for (size_t i = 0; i < kPrefixBytes; ++i) prefix[i] = static_cast<char>(text.size() >> 8 * i & 0xff);
  return prefix + text;
}

void SafetensorsWriter::begin() {
  lay_out();
  const std::string text = header();
  fd_ = open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  FUT_CHECK(fd_ >= 0, partial_path_, ": cannot create: ", strerror(errno));
  data_start_ = static_cast<int64_t>(text.size());
  write_at(text.data(), data_start_, 0);
}

void SafetensorsWriter::write_at(const void* data, int64_t size_bytes, int64_t offset) {
  const auto* bytes = static_cast<const char*>(data);
  while (size_bytes > 0) {
    const ssize_t written = pwrite(fd_, bytes, static_cast<size_t>(size_bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    FUT_CHECK(written > 0, partial_path_, ": cannot write ", size_bytes, " bytes at ", offset, ": ",
              written < 0 ? strerror(errno) : "nothing was written");
    bytes += written;
    size_bytes -= written;
    offset += written;
  }
}

void SafetensorsWriter::write(const std::string& name, const void* data, int64_t size_bytes) {
  const auto found = slot_of_.find(name);
  FUT_CHECK(found != slot_of_.end(), path_, ": tensor ", printable(name), " was not declared");
  Slot& slot = slots_[found->second];
  FUT_CHECK(!slot.written, path_, ": tensor ", printable(name), " written twice");
  FUT_CHECK(size_bytes == slot.size_bytes, path_, ": tensor ", printable(name), ": ", size_bytes,
            " bytes given, declared ", slot.size_bytes);
  if (fd_ < 0) begin();
  write_at(data, size_bytes, data_start_ + slot.offset);
  slot.written = true;
}

void SafetensorsWriter::finish() {
  for (const Slot& slot : slots_) {
    FUT_CHECK(slot.written, path_, ": tensor ", printable(slot.name), " was declared but never written");
  }
  if (fd_ < 0) begin();  // a file without tensors is legal
  // Some file systems report a full disk only when the data reaches it: sync and close before the name is given.
  FUT_CHECK(fsync(fd_) == 0, partial_path_, ": cannot write to the disk: ", strerror(errno));
  FUT_CHECK(rename(partial_path_.c_str(), path_.c_str()) == 0, path_, ": cannot rename ", partial_path_,
            " to it: ", strerror(errno));
  const int closed = close(fd_);
  fd_ = -1;
  FUT_CHECK(closed == 0, path_, ": cannot close: ", strerror(errno));
}

}  // namespace fut
