#include "scratch.h"

#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>

namespace fut::fuzz {
namespace {

namespace fs = std::filesystem;

void check(bool done, const std::string& what) {
  if (!done) throw std::runtime_error("fuzz: cannot " + what);
}

void write_all(int fd, const std::string& bytes) {
  check(ftruncate(fd, static_cast<off_t>(bytes.size())) == 0, "resize a file in memory");
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t written = pwrite(fd, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
    check(written > 0, "write a file in memory");
    at += static_cast<size_t>(written);
  }
}

}  // namespace

Scratch::Scratch(const std::string& folder) : path_(folder) {
  for (const auto& entry : fs::directory_iterator(path_)) fs::remove_all(entry.path());
}

Scratch::~Scratch() {
  for (const auto& [name, fd] : open_) close(fd);
}

void Scratch::put(const Input& input) {
  for (const auto& [name, bytes] : input) {
    if (!open_.contains(name)) {
      open_[name] = memfd_create(name.c_str(), MFD_CLOEXEC);
      check(open_[name] >= 0, "make a file in memory");
    }
    write_all(open_[name], bytes);
  }
  for (const auto& [name, fd] : open_) {
    const bool wanted = input.contains(name);
    if (linked_[name] == wanted) continue;
    const fs::path link = fs::path(path_) / name;
    wanted ? fs::create_symlink("/proc/self/fd/" + std::to_string(fd), link) : static_cast<void>(fs::remove(link));
    linked_[name] = wanted;
  }
}

}  // namespace fut::fuzz
