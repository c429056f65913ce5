#include "base/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "base/error.h"

namespace fut {
namespace {

/// Of addresses, which is what ulimit -v counts; nothing if there is no limit.
std::optional<uint64_t> address_limit() {
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

uint64_t addresses_in_use() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

/// With the page cache, which gives way; 0 if the system does not tell.
uint64_t system_memory() {
  std::ifstream memory("/proc/meminfo");
  for (std::string name; memory >> name;) {
    uint64_t kib = 0;
    if (name == "MemAvailable:" && memory >> kib) return kib * 1024;
    memory.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

}  // namespace

uint64_t available_memory() {
  const uint64_t available = system_memory();
  const auto limit = address_limit();
  if (!limit) return available;
  const uint64_t used = addresses_in_use();
  return std::min(available, *limit > used ? *limit - used : 0);
}

std::string memory_limit_note() {
  const auto limit = address_limit();
  return limit ? cat(", of the ", *limit >> 20, " MiB that ulimit -v allows") : std::string();
}

}  // namespace fut
