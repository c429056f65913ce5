#include "io/gguf_blocks.h"

#include <cstring>

namespace fut {
namespace {

void decode(float stored, float* values) { *values = stored; }
void decode(Half stored, float* values) { *values = to_f32(stored); }
void decode(Bf16 stored, float* values) { *values = to_f32(stored); }

void decode(const BlockQ8_0& block, float* values) {
  const float scale = to_f32(block.scale);
  for (int64_t i = 0; i < kBlockElements; ++i) values[i] = scale * static_cast<float>(block.codes[i]);
}

void decode(const BlockQ4_0& block, float* values) {
  const float scale = to_f32(block.scale);
  for (int64_t i = 0; i < kBlockElements / 2; ++i) {
    values[i] = scale * static_cast<float>((block.nibbles[i] & 15) - 8);
    values[i + kBlockElements / 2] = scale * static_cast<float>((block.nibbles[i] >> 4) - 8);
  }
}

void decode(const BlockQ4_1& block, float* values) {
  const float scale = to_f32(block.scale), minimum = to_f32(block.minimum);
  for (int64_t i = 0; i < kBlockElements / 2; ++i) {
    values[i] = scale * static_cast<float>(block.nibbles[i] & 15) + minimum;
    values[i + kBlockElements / 2] = scale * static_cast<float>(block.nibbles[i] >> 4) + minimum;
  }
}

/// Element i of a block of five-bit codes.
int five_bits(const uint8_t* nibbles, const uint8_t* high_bits, int64_t i) {
  const int nibble = i < kBlockElements / 2 ? nibbles[i] & 15 : nibbles[i - kBlockElements / 2] >> 4;
  return nibble | (high_bits[i / 8] >> i % 8 & 1) << 4;
}

void decode(const BlockQ5_0& block, float* values) {
  const float scale = to_f32(block.scale);
  for (int64_t i = 0; i < kBlockElements; ++i) {
    values[i] = scale * static_cast<float>(five_bits(block.nibbles, block.high_bits, i) - 16);
  }
}

void decode(const BlockQ5_1& block, float* values) {
  const float scale = to_f32(block.scale), minimum = to_f32(block.minimum);
  for (int64_t i = 0; i < kBlockElements; ++i) {
    values[i] = scale * static_cast<float>(five_bits(block.nibbles, block.high_bits, i)) + minimum;
  }
}

int group_scale(const GroupScales& groups, int64_t g) {
  return g < 4 ? groups[g] & 63 : (groups[g + 4] & 15) | groups[g - 4] >> 6 << 4;
}

int group_minimum(const GroupScales& groups, int64_t g) {
  return g < 4 ? groups[g + 4] & 63 : groups[g + 4] >> 4 | groups[g] >> 6 << 4;
}

/// Q4_K and Q5_K; `fifth_bits` is nullptr for Q4_K.
template <class Block>
void decode_groups(const Block& block, const uint8_t* fifth_bits, float* values) {
  constexpr int64_t kGroup = 32;
  const float scale = to_f32(block.scale), minimum = to_f32(block.minimum);
  for (int64_t i = 0; i < kSuperBlockElements; ++i) {
    const int64_t g = i / kGroup, k = i % kGroup;
    int code = block.nibbles[g / 2 * kGroup + k] >> g % 2 * 4 & 15;
    if (fifth_bits) code |= (fifth_bits[k] >> g & 1) << 4;
    const float step = scale * static_cast<float>(group_scale(block.groups, g));
    values[i] = step * static_cast<float>(code) - minimum * static_cast<float>(group_minimum(block.groups, g));
  }
}

void decode(const BlockQ4_K& block, float* values) { decode_groups(block, nullptr, values); }
void decode(const BlockQ5_K& block, float* values) { decode_groups(block, block.high_bits, values); }

void decode(const BlockQ6_K& block, float* values) {
  const float scale = to_f32(block.scale);
  for (int64_t i = 0; i < kSuperBlockElements; ++i) {
    const int64_t half = i / 128, k = i % 128;
    const int nibble = block.nibbles[half * 64 + k % 64] >> k / 64 * 4 & 15;
    const int code = nibble | (block.high_bits[half * 32 + k % 32] >> k / 32 * 2 & 3) << 4;
    values[i] = scale * static_cast<float>(block.groups[i / 16]) * static_cast<float>(code - 32);
  }
}

template <class Block, int64_t elements>
void decode_all(const uint8_t* blocks, int64_t block_count, float* values) {
  for (int64_t i = 0; i < block_count; ++i) {
    Block block;
    memcpy(&block, blocks + i * static_cast<int64_t>(sizeof(Block)), sizeof(Block));
    decode(block, values + i * elements);
  }
}

template <class Block, int64_t elements>
constexpr BlockFormat format(const char* name) {
  return {name, elements, sizeof(Block), decode_all<Block, elements>};
}

constexpr BlockFormat kFormats[] = {
    format<float, 1>("F32"),
    format<Half, 1>("F16"),
    format<Bf16, 1>("BF16"),
    format<BlockQ8_0, kBlockElements>("Q8_0"),
    format<BlockQ4_0, kBlockElements>("Q4_0"),
    format<BlockQ4_1, kBlockElements>("Q4_1"),
    format<BlockQ5_0, kBlockElements>("Q5_0"),
    format<BlockQ5_1, kBlockElements>("Q5_1"),
    format<BlockQ4_K, kSuperBlockElements>("Q4_K"),
    format<BlockQ5_K, kSuperBlockElements>("Q5_K"),
    format<BlockQ6_K, kSuperBlockElements>("Q6_K"),
};

}  // namespace

const BlockFormat* find_block_format(const std::string& name) {
  for (const BlockFormat& known : kFormats) {
    if (name == known.name) return &known;
  }
  return nullptr;
}

}  // namespace fut
