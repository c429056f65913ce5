// Stored number formats that have a plain meaning as floats: GGUF's block types, and the scalar types that GGUF and
// safetensors spell alike (F32, F16, BF16).
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace fut {

/// Values of one block of the types below. All are little endian; the nibble with the lower bits of byte i is element i
/// of the block, the one with the higher bits is element i + 16.
inline constexpr int64_t kBlockElements = 32;

/// Q8_0, 34 bytes: x[i] = scale * codes[i], codes from -127 to 127.
struct BlockQ8_0 {
  Half scale;
  int8_t codes[kBlockElements];
};

/// Q4_0, 18 bytes: x[i] = scale * (q[i] - 8), q a nibble.
struct BlockQ4_0 {
  Half scale;
  uint8_t nibbles[kBlockElements / 2];
};

/// Q4_1, 20 bytes: x[i] = scale * q[i] + minimum, q a nibble.
struct BlockQ4_1 {
  Half scale, minimum;
  uint8_t nibbles[kBlockElements / 2];
};

static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);

/// A type's storage: `elements` consecutive values of a row take `bytes`.
struct BlockFormat {
  const char* name;
  int64_t elements, bytes;
  void (*to_floats)(const uint8_t* blocks, int64_t block_count, float* values);  ///< `blocks` need not be aligned
};

/// nullptr for a type that is not read as floats.
const BlockFormat* find_block_format(const std::string& name);

}  // namespace fut
