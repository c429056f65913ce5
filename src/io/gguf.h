// GGUF, versions 2 and 3, little endian: a header, typed key-value metadata, a table of tensors, then their data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "io/mapped_file.h"

namespace fut {

/// A metadata value, left in the file and decoded when it is asked for.
struct GgufValue {
  uint32_t type;  ///< of the value, or of each element of an array
  bool is_array;
  uint64_t count;         ///< elements of an array, otherwise 1
  std::string_view data;  ///< the whole value, lengths of strings included
};

/// One entry of the tensor table. Extents are in the file's order: the fastest first, so a matrix is (inputs, outputs).
struct GgufTensor {
  std::string name;
  std::string type;  ///< "Q4_1", or "type 77" if nothing is known of it
  std::vector<int64_t> extents;
  int64_t elements;
  const uint8_t* data;
  int64_t size_bytes;  ///< 0 if the type is not one that is read: nothing vouches for such a tensor's size
};

/// The format alone, knowing nothing of models. Every count, length and offset is checked against the file's size
/// before anything is sized by it; repeated keys, repeated tensors and overlapping tensors are refused.
class GgufFile {
 public:
  explicit GgufFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  void drop_pages() const { file_.drop_pages(); }

  bool has(const std::string& key) const { return values_.contains(key); }
  // A key that is absent gives nothing; a value of another type is refused by the key's name.
  std::optional<int64_t> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;  ///< an integer will do
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  std::optional<std::vector<std::string>> texts(const std::string& key) const;
  std::optional<std::vector<int64_t>> integers(const std::string& key) const;
  std::optional<std::vector<float>> floats(const std::string& key) const;  ///< of 32 bits

 private:
  class Reader;
  const GgufValue* find(const std::string& key, bool array) const;
  GgufTensor read_tensor(Reader& reader) const;
  void place_tensors(std::vector<uint64_t> offsets, uint64_t data_start);

  MappedFile file_;
  std::map<std::string, GgufValue> values_;
  std::vector<GgufTensor> tensors_;
};

/// A Llama model from a GGUF file, under Hugging Face's names and in its row order; see gguf_llama.cpp.
std::unique_ptr<Checkpoint> open_gguf(const std::string& path);

}  // namespace fut
