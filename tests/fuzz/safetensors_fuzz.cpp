// Safetensors: the header as JSON, the length before it, and byte ranges that do or do not tile the data.
#include <cstring>

#include "io/safetensors.h"
#include "mutate.h"

namespace fut::fuzz {
namespace {

constexpr size_t kPrefix = 8, kMostData = 4096;
constexpr char kFile[] = "model.safetensors";

const std::vector<std::string> kWords = {"__metadata__", "dtype", "shape", "data_offsets", "format",  "pt",
                                         "F64",          "F32",   "F16",   "BF16",         "F8_E4M3", "I64",
                                         "U8",           "BOOL",  "a",     "b.c"};

struct SafetensorsParts {
  std::string header, data;
};

uint64_t length_of(const std::string& file) {
  uint64_t length = 0;
  memcpy(&length, file.data(), kPrefix);
  return length;
}

SafetensorsParts cut(const std::string& file) {
  const uint64_t length = length_of(file);
  return {file.substr(kPrefix, length), file.substr(kPrefix + length)};
}

/// Byte ranges that follow from dtype and shape, one after the other: what hides a wrong shape behind right offsets.
void tile(JsonTree& header, std::string& data, Random& random) {
  uint64_t at = 0;
  for (auto& [name, entry] : header.parts) {
    JsonTree *type = entry.find("dtype"), *shape = entry.find("shape"), *offsets = entry.find("data_offsets");
    if (!type || !shape || !offsets) continue;
    auto bytes = static_cast<uint64_t>(
        safetensors_element_bytes(type->text.size() < 2 ? "" : type->text.substr(1, type->text.size() - 2)));
    for (const auto& [none, extent] : shape->parts) bytes *= strtoull(extent.text.c_str(), nullptr, 10);
    const uint64_t begin = at;
    at += bytes;
    offsets->kind = JsonTree::Kind::array;
    offsets->parts = {{"", json_scalar(std::to_string(begin))}, {"", json_scalar(std::to_string(at))}};
  }
  data.resize(at <= kMostData ? at : random.below(kMostData), '\x5a');
}

/// Extents whose product is small, or wraps around, or is hidden behind a 0.
void change_shape(JsonTree& header, Random& random) {
  if (header.parts.empty()) return;
  JsonTree* const shape = header.parts[random.below(header.parts.size())].second.find("shape");
  if (!shape) return;
  shape->kind = JsonTree::Kind::array;
  shape->parts.clear();
  for (size_t i = random.below(5); i > 0; --i) {
    const uint64_t extent = random.chance(50) ? random.below(4) : odd_number(random);
    shape->parts.emplace_back("", json_scalar(std::to_string(extent)));
  }
}

class SafetensorsTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kFile}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string& file = input.at(kFile);
    if (random.chance(10)) return mutate_bytes(file, random, random.pick(seeds).at(kFile));
    input[kFile] = mutated_safetensors(file, random);
  }

  void run(const Input& input, const std::string& folder) const override {
    const std::string& bytes = input.at(kFile);
    const SafetensorsFile file(folder + "/" + kFile);
    size_t at = kPrefix + length_of(bytes);
    for (const StoredTensor& tensor : file.tensors()) {
      const auto size = static_cast<size_t>(tensor.size_bytes);
      require(tensor.size_bytes >= 0 && size <= bytes.size() - at, "a tensor passes the end of the file");
      require(size == 0 || memcmp(tensor.data, bytes.data() + at, size) == 0, "a tensor's bytes are not its own");
      auto elements = static_cast<uint64_t>(safetensors_element_bytes(tensor.info.type));
      const bool known = elements > 0;
      for (const int64_t extent : tensor.info.shape) elements *= static_cast<uint64_t>(extent);
      require(!known || elements == size, "a tensor's size is not that of its shape");
      at += size;
    }
    require(at == bytes.size(), "bytes of no tensor");
  }
};

}  // namespace

std::string mutated_safetensors(const std::string& file, Random& random) {
  SafetensorsParts parts = cut(file);
  JsonTree header = parse_json_tree(parts.header);
  if (random.chance(30)) change_shape(header, random);
  if (random.chance(80)) mutate_json(header, random, kWords);
  if (random.chance(50)) tile(header, parts.data, random);
  parts.header = to_text(header);
  if (random.chance(5)) mutate_bytes(parts.header, random);
  if (random.chance(10)) parts.header.append(random.below(20), ' ');
  if (random.chance(5)) parts.data.resize(random.below(2 * parts.data.size() + 2));
  uint64_t length = parts.header.size();
  if (random.chance(5)) length = random.chance(50) ? odd_number(random) : length + random.below(20) - 10;
  std::string result(kPrefix, '\0');
  memcpy(result.data(), &length, kPrefix);
  return result + parts.header + parts.data;
}

std::unique_ptr<Target> safetensors_target() { return std::make_unique<SafetensorsTarget>(); }

}  // namespace fut::fuzz
