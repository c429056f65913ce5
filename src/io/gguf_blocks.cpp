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
};

}  // namespace

const BlockFormat* find_block_format(const std::string& name) {
  for (const BlockFormat& known : kFormats) {
    if (name == known.name) return &known;
  }
  return nullptr;
}

}  // namespace fut
