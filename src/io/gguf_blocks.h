// Stored number formats that have a plain meaning as floats: GGUF's block types, and the scalar types that GGUF and
// safetensors spell alike (F32, F16, BF16).
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace fut {

/// Values of one block of Q8_0, Q4_0 ... Q5_1. All types are little endian; the nibble with the lower bits of byte i is
/// element i of the block, the one with the higher bits is element i + 16.
inline constexpr int64_t kBlockElements = 32;
/// Values of one block of the K types.
inline constexpr int64_t kSuperBlockElements = 256;

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

/// Q5_0, 22 bytes: x[i] = scale * (q[i] - 16), q a nibble and, as its fifth bit, bit i of high_bits.
struct BlockQ5_0 {
  Half scale;
  uint8_t high_bits[kBlockElements / 8];
  uint8_t nibbles[kBlockElements / 2];
};

/// Q5_1, 24 bytes: x[i] = scale * q[i] + minimum, q as in Q5_0.
struct BlockQ5_1 {
  Half scale, minimum;
  uint8_t high_bits[kBlockElements / 8];
  uint8_t nibbles[kBlockElements / 2];
};

/// Six-bit scales and minima of the eight groups of 32 of a Q4_K or Q5_K block. Group g < 4 has the lower six bits of
/// bytes g and g + 4; the others have the nibbles of byte g + 4 and, above them, the upper two bits of g - 4 and g.
using GroupScales = uint8_t[12];

/// Q4_K, 144 bytes: x[i] = scale * s[g] * q[i] - minimum * m[g], g = i / 32. Bytes 32 j .. 32 j + 31 hold group 2 j in
/// their lower nibbles and group 2 j + 1 in their upper ones.
struct BlockQ4_K {
  Half scale, minimum;
  GroupScales groups;
  uint8_t nibbles[kSuperBlockElements / 2];
};

/// Q5_K, 176 bytes: as Q4_K; the fifth bit of element i is bit i / 32 of high_bits[i % 32].
struct BlockQ5_K {
  Half scale, minimum;
  GroupScales groups;
  uint8_t high_bits[kSuperBlockElements / 8];
  uint8_t nibbles[kSuperBlockElements / 2];
};

/// Q6_K, 210 bytes: x[i] = scale * s[i / 16] * (q[i] - 32). Each half of 128 elements has 64 bytes of nibbles, whose
/// lower ones are its first 64 elements, and 32 bytes with the upper two bits of element i at bits 2 (i / 32) of byte
/// i % 32.
struct BlockQ6_K {
  uint8_t nibbles[kSuperBlockElements / 2];
  uint8_t high_bits[kSuperBlockElements / 4];
  int8_t groups[kSuperBlockElements / 16];
  Half scale;
};

static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210);

/// What find_block_format() knows, for messages.
inline constexpr char kBlockFormatNames[] = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K";

/// A type's storage: `elements` consecutive values of a row take `bytes`.
struct BlockFormat {
  const char* name;
  int64_t elements, bytes;
  void (*to_floats)(const uint8_t* blocks, int64_t block_count, float* values);  ///< `blocks` need not be aligned
};

/// nullptr for a type that is not read as floats.
const BlockFormat* find_block_format(const std::string& name);

}  // namespace fut
