// Safetensors: 8 bytes little-endian header length n, n bytes of JSON that name each tensor's type, shape and byte
// range, then the ranges themselves, without holes and without overlap.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/mapped_file.h"

namespace fut {

/// A tensor's description together with its bytes in a mapped file. `data` may be aligned to nothing: use memcpy.
struct StoredTensor {
  TensorInfo info;
  const uint8_t* data;
  int64_t size_bytes;
};

/// Bytes of one element of a safetensors type, 0 for a type this reader does not know.
int64_t safetensors_element_bytes(const std::string& type);

/// The header is checked as a whole against the file's size before the constructor returns. A tensor of a type that is
/// not known is kept under that type's name, its size taken on trust.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  ///< in the order of their bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  void drop_pages() const { file_.drop_pages(); }

 private:
  MappedFile file_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// `rows` rows of a tensor of floats, all of it where it is no matrix; other types are refused by name.
std::vector<float> read_floats(const StoredTensor& tensor, int64_t first_row, int64_t rows);

/// Writes a file without ever holding more than the caller's one tensor: declare every tensor, then write each, in any
/// order. The file appears under its name at finish(), whole; until then it is NAME.partial, and a writer that is
/// destroyed early removes it.
class SafetensorsWriter {
 public:
  explicit SafetensorsWriter(std::string path);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void declare(const std::string& name, const std::string& type, const std::vector<int64_t>& shape);
  void write(const std::string& name, const void* data, int64_t size_bytes);
  void finish();

 private:
  struct Slot {
    std::string name, type;
    std::vector<int64_t> shape;
    int64_t size_bytes;
    int64_t offset = 0;
    bool written = false;
  };

  void begin();
  void lay_out();
  std::string header() const;
  void write_at(const void* data, int64_t size_bytes, int64_t offset);

  std::string path_, partial_path_;
  int fd_ = -1;             // open from the first write to finish()
  int64_t data_start_ = 0;  // where the header ends
  std::vector<Slot> slots_;
  std::map<std::string, size_t> slot_of_;
};

}  // namespace fut
