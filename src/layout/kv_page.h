// THE KV page layout: 64 tokens of one KV head, keys and values and their parameters in one contiguous piece.
//
//   f32, bf16:  K (64, E), V (64, E), row-major.
//   e4m3:       K (64, E), V (64, E), then FP32 scales: K (64), V (64); one scale a token.
//   int4:       K tiles, V tiles, K scales, V scales. E = 128: 4096 + 4096 + 256 + 256 = 8704 bytes.
//     K tiles   [token / 16][channel / 64], int4_fragment.h tiles with rows = tokens, columns = channels: keys are the
//               A operand of S = K Q^T (16 tokens x 16 channels a step).
//     V tiles   [channel / 16], tiles with rows = channels, columns = the page's 64 tokens: the A operand of
//               O^T = V^T P^T.
//     scales    E4M3, [channel / 32][token], for K and then for V: one scale a token and group of 32 channels.
//
// INT4 values are mid-rise, v = (q - 7.5) * s * f with q in 0..15, s the E4M3 scale, f a power of two of the head.
// There is no code for zero: a group of zeros has scale 0.
//
// Keys are stored after RoPE, minus the head's static mean, rotated (hadamard.h); queries are rotated alike, and the
// softmax does not see the mean. Values carry a rotation that was folded into W_v and W_o offline.
//
// An INT4 page is written once, when its 64 tokens are there, from their BF16 values; until then they live in the
// sequence's BF16 tail. The first kKvSinkTokens stay readable in BF16 for ever (attention sinks). So what a query at
// position p sees of token j depends on positions alone, never on how a prompt was cut into chunks:
//     j < kKvSinkTokens or j in p's own page: BF16;  everything earlier: INT4.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/dtype.h"
#include "layout/int4_fragment.h"

namespace fut {

inline constexpr int kKvPageTokens = 64;
inline constexpr int kKvSinkTokens = 16;  ///< one row tile of keys, so that the INT4 kernel skips whole tiles
inline constexpr int kKvGroup = 32;       ///< channels that share a scale

static_assert(kKvPageTokens == kInt4TileCols, "a V tile holds one page's tokens");

/// Sizes and offsets of a page of one KV head. Pure arithmetic, for host and device.
struct KvPageLayout {
  Dtype dtype;   ///< f32, bf16, e4m3 or int4
  int head_dim;  ///< E

  FUT_HD constexpr int groups() const { return (head_dim + kKvGroup - 1) / kKvGroup; }
  FUT_HD constexpr int key_col_tiles() const { return (head_dim + kInt4TileCols - 1) / kInt4TileCols; }
  FUT_HD constexpr int value_row_tiles() const { return (head_dim + kInt4TileRows - 1) / kInt4TileRows; }

  FUT_HD constexpr int64_t key_bytes() const {
    if (dtype == Dtype::int4) return int64_t{kKvPageTokens / kInt4TileRows} * key_col_tiles() * kInt4TileCodeBytes;
    return int64_t{kKvPageTokens} * head_dim * bits_per_element(dtype) / 8;
  }
  FUT_HD constexpr int64_t value_bytes() const {
    if (dtype == Dtype::int4) return int64_t{value_row_tiles()} * kInt4TileCodeBytes;
    return key_bytes();
  }
  FUT_HD constexpr int64_t value_offset() const { return key_bytes(); }
  FUT_HD constexpr int64_t key_scale_offset() const { return key_bytes() + value_bytes(); }
  FUT_HD constexpr int64_t scale_bytes() const {
    if (dtype == Dtype::int4) return int64_t{kKvPageTokens} * groups();
    return dtype == Dtype::e4m3 ? int64_t{kKvPageTokens} * 4 : 0;
  }
  FUT_HD constexpr int64_t value_scale_offset() const { return key_scale_offset() + scale_bytes(); }
  FUT_HD constexpr int64_t page_bytes() const { return value_scale_offset() + scale_bytes(); }

  /// INT4 keys: the tile of (token, channel) within the page, and the coordinates in it.
  FUT_HD constexpr int64_t key_tile_offset(int token, int channel) const {
    return (int64_t{token / kInt4TileRows} * key_col_tiles() + channel / kInt4TileCols) * kInt4TileCodeBytes;
  }
  FUT_HD constexpr Int4Place key_place(int token, int channel) const {
    return int4_place(token % kInt4TileRows, channel % kInt4TileCols);
  }
  /// INT4 values: rows are channels.
  FUT_HD constexpr int64_t value_tile_offset(int channel) const {
    return value_offset() + int64_t{channel / kInt4TileRows} * kInt4TileCodeBytes;
  }
  FUT_HD constexpr Int4Place value_place(int token, int channel) const {
    return int4_place(channel % kInt4TileRows, token);
  }
  /// INT4: byte offset of a scale relative to key_scale_offset() or value_scale_offset().
  FUT_HD constexpr int64_t scale_index(int token, int channel) const {
    return int64_t{channel / kKvGroup} * kKvPageTokens + token;
  }
};

static_assert(KvPageLayout{Dtype::int4, 128}.page_bytes() == 8704);
static_assert(KvPageLayout{Dtype::int4, 64}.page_bytes() == 4352);
static_assert(KvPageLayout{Dtype::bf16, 128}.page_bytes() == 512 * 64);

/// The code of one value under scale `s` (s > 0, inverse = 1 / s): level floor(x / s) + 8, clamped to 0..15; NaN: 0.
FUT_HD int kv_code(float x, float inverse) {
  const float level = floorf(x * inverse) + 8.0f;
  return static_cast<int>(level > 0.0f ? (level < 15.0f ? level : 15.0f) : 0.0f);
}

FUT_HD float kv_value(int code, float scale) { return (static_cast<float>(code) - 7.5f) * scale; }

/// Squared error of a group under scale `s`. The sum runs as the four lanes of a quad would do it (lane t owns channels
/// 8 j + 2 t and + 1, j rising; then lanes 0+1, 2+3, and the two halves), so that CPU and GPU choose the same scale.
FUT_HD float kv_group_error(const float* x, int count, float scale) {
  const float inverse = 1.0f / scale;
  float partial[4] = {0, 0, 0, 0};
  for (int i = 0; i < count; ++i) {
    const float d = x[i] - kv_value(kv_code(x[i], inverse), scale);
    float& sum = partial[(i & 7) / 2];
    sum = fmaf(d, d, sum);
  }
  return (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

inline constexpr int kKvScaleCandidates = 6;

/// The E4M3 scale of a group: of the code nearest to (largest magnitude / 7.5), its upper neighbour and the four below
/// it, the one with the least squared error; the larger scale wins a tie. `factor` is the head's power of two.
FUT_HD E4m3 kv_choose_scale(const float* x, int count, float factor) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = fmaxf(largest, fabsf(x[i]));
  if (!(largest > 0.0f)) return E4m3{0};
  const int nearest = to_e4m3(largest * (1.0f / 7.5f) * (1.0f / factor)).bits;
  E4m3 best{0};
  float best_error = 0.0f;
  for (int step = 1; step > 1 - kKvScaleCandidates; --step) {
    const int bits = nearest + step;
    if (bits < 1 || bits > 0x7e) continue;
    const E4m3 candidate{static_cast<uint8_t>(bits)};
    const float error = kv_group_error(x, count, to_f32(candidate) * factor);
    if (best.bits == 0 || error < best_error) {
      best = candidate;
      best_error = error;
    }
  }
  return best;
}

/// Quantises one full page of one head. keys, values: (64, E) BF16 row-major.
void kv_quantise_page(uint8_t* page, const KvPageLayout& layout, const Bf16* keys, const Bf16* values, float key_factor,
                      float value_factor);

/// One key or value of an INT4 page, exactly: the plain reference's way of reading it.
float kv_int4_key(const uint8_t* page, const KvPageLayout& layout, int token, int channel, float factor);
float kv_int4_value(const uint8_t* page, const KvPageLayout& layout, int token, int channel, float factor);

/// Stores one token in a page of a token-wise format (f32, bf16, e4m3). key, value: (E).
void kv_store_token(uint8_t* page, const KvPageLayout& layout, int token, const float* key, const float* value);

/// Reads one token of a token-wise format. key, value: (E).
void kv_load_token(const uint8_t* page, const KvPageLayout& layout, int token, float* key, float* value);

}  // namespace fut
