#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace fut {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

void require_regular(const std::string& path, const struct stat& status) {
  FUT_CHECK(S_ISREG(status.st_mode), path, ": is ", kind_of(status.st_mode), ", expected a regular file");
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  FUT_CHECK(path.find('\0') == std::string::npos, printable(path), ": a file name cannot hold a NUL byte");
  struct stat status;
  FUT_CHECK(stat(path.c_str(), &status) == 0, path, ": cannot open: ", strerror(errno));
  require_regular(path, status);
  // O_NONBLOCK: should a FIFO take the file's place between the two looks, open() must not wait for its writer.
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  FUT_CHECK(file.fd >= 0, path, ": cannot open: ", strerror(errno));
  FUT_CHECK(fstat(file.fd, &status) == 0, path, ": cannot stat: ", strerror(errno));
  require_regular(path, status);
  if (status.st_size == 0) return;  // mmap refuses empty ranges
  void* const mapping = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file.fd, 0);
  FUT_CHECK(mapping != MAP_FAILED, path, ": cannot map ", status.st_size, " bytes: ", strerror(errno));
  data_ = static_cast<const uint8_t*>(mapping);
  size_ = static_cast<uint64_t>(status.st_size);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::drop_pages() const {
  if (data_) madvise(const_cast<uint8_t*>(data_), size_, MADV_DONTNEED);  // refused, they merely stay
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

std::string printable(std::string_view text) {
  constexpr size_t kLongest = 200;
  constexpr char kHex[] = "0123456789abcdef";
  std::string shown;
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      shown += c;
    } else {
      shown += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (text.size() > kLongest) shown += cat("... (", text.size(), " bytes)");
  return shown;
}

}  // namespace fut
