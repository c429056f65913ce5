// A file's bytes, mapped read-only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fut {

/// Only regular files are opened (symlinks to them too): a FIFO or device is refused before it could block. The size is
/// the one at opening; whoever truncates a file while it is mapped gets SIGBUS, as with any mapping.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

  /// Takes the pages that were read out of this process's memory; whoever reads them again gets them again.
  void drop_pages() const;

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
};

/// `text` from a file, fit for a one-line message: control and non-ASCII bytes as \xNN, cut after 200 bytes.
std::string printable(std::string_view text);

}  // namespace fut
