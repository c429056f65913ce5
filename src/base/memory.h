// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <string>

namespace fut {

/// Bytes: what the system says is available, or less where a limit on the process (ulimit -v) ends it earlier.
uint64_t available_memory();

/// "" or ", of the 2000 MiB that ulimit -v allows": what a message about memory has to add.
std::string memory_limit_note();

}  // namespace fut
