#include "layout/kv_page.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "layout/fp8.h"

namespace fut {
namespace {

void put_code(uint8_t* tile, Int4Place place, int code) {
  uint8_t& byte = tile[place.byte()];
  byte = static_cast<uint8_t>((byte & ~(15 << place.shift())) | code << place.shift());
}

float read_value(const uint8_t* tile, Int4Place place, uint8_t scale, float factor) {
  return kv_value(tile[place.byte()] >> place.shift() & 15, to_f32(E4m3{scale}) * factor);
}

/// Codes and scale of one group of one token; put(channel, code) stores them.
template <class Put>
E4m3 quantise_group(const float* x, int count, float factor, Put put) {
  const E4m3 scale = kv_choose_scale(x, count, factor);
  const float inverse = scale.bits ? 1.0f / (to_f32(scale) * factor) : 0.0f;
  for (int i = 0; i < count; ++i) put(i, kv_code(x[i], inverse));
  return scale;
}

void store_e4m3_row(uint8_t* codes, float* scale, const float* x, int count) {
  const float row_scale = e4m3_scale(largest_magnitude(x, count));
  for (int i = 0; i < count; ++i) codes[i] = to_e4m3(x[i] / row_scale).bits;
  *scale = row_scale;
}

}  // namespace

void kv_quantise_page(uint8_t* page, const KvPageLayout& layout, const Bf16* keys, const Bf16* values, float key_factor,
                      float value_factor) {
  FUT_CHECK(layout.dtype == Dtype::int4, "kv_quantise_page: the cache format is ", name_of(layout.dtype), ", not int4");
  const int E = layout.head_dim;
  memset(page, 0, layout.page_bytes());
  float x[kKvGroup];
  for (int token = 0; token < kKvPageTokens; ++token) {
    for (int start = 0; start < E; start += kKvGroup) {
      const int count = std::min(kKvGroup, E - start);
      for (int i = 0; i < count; ++i) x[i] = to_f32(keys[int64_t{token} * E + start + i]);
      const E4m3 key_scale = quantise_group(x, count, key_factor, [&](int i, int code) {
        put_code(page + layout.key_tile_offset(token, start + i), layout.key_place(token, start + i), code);
      });
      page[layout.key_scale_offset() + layout.scale_index(token, start)] = key_scale.bits;
      for (int i = 0; i < count; ++i) x[i] = to_f32(values[int64_t{token} * E + start + i]);
      const E4m3 value_scale = quantise_group(x, count, value_factor, [&](int i, int code) {
        put_code(page + layout.value_tile_offset(start + i), layout.value_place(token, start + i), code);
      });
      page[layout.value_scale_offset() + layout.scale_index(token, start)] = value_scale.bits;
    }
  }
}

float kv_int4_key(const uint8_t* page, const KvPageLayout& layout, int token, int channel, float factor) {
  return read_value(page + layout.key_tile_offset(token, channel), layout.key_place(token, channel),
                    page[layout.key_scale_offset() + layout.scale_index(token, channel)], factor);
}

float kv_int4_value(const uint8_t* page, const KvPageLayout& layout, int token, int channel, float factor) {
  return read_value(page + layout.value_tile_offset(channel), layout.value_place(token, channel),
                    page[layout.value_scale_offset() + layout.scale_index(token, channel)], factor);
}

void kv_store_token(uint8_t* page, const KvPageLayout& layout, int token, const float* key, const float* value) {
  const int E = layout.head_dim;
  uint8_t* k = page + layout.key_bytes() / kKvPageTokens * token;
  uint8_t* v = page + layout.value_offset() + layout.value_bytes() / kKvPageTokens * token;
  switch (layout.dtype) {
    case Dtype::f32:
      memcpy(k, key, E * sizeof(float));
      memcpy(v, value, E * sizeof(float));
      return;
    case Dtype::bf16:
      for (int i = 0; i < E; ++i) {
        reinterpret_cast<Bf16*>(k)[i] = to_bf16(key[i]);
        reinterpret_cast<Bf16*>(v)[i] = to_bf16(value[i]);
      }
      return;
    case Dtype::e4m3:
      store_e4m3_row(k, reinterpret_cast<float*>(page + layout.key_scale_offset()) + token, key, E);
      store_e4m3_row(v, reinterpret_cast<float*>(page + layout.value_scale_offset()) + token, value, E);
      return;
    default: fail("kv_store_token: the cache format ", name_of(layout.dtype), " is written page by page");
  }
}

void kv_load_token(const uint8_t* page, const KvPageLayout& layout, int token, float* key, float* value) {
  const int E = layout.head_dim;
  const uint8_t* k = page + layout.key_bytes() / kKvPageTokens * token;
  const uint8_t* v = page + layout.value_offset() + layout.value_bytes() / kKvPageTokens * token;
  switch (layout.dtype) {
    case Dtype::f32:
      memcpy(key, k, E * sizeof(float));
      memcpy(value, v, E * sizeof(float));
      return;
    case Dtype::bf16:
      for (int i = 0; i < E; ++i) {
        key[i] = to_f32(reinterpret_cast<const Bf16*>(k)[i]);
        value[i] = to_f32(reinterpret_cast<const Bf16*>(v)[i]);
      }
      return;
    case Dtype::e4m3: {
      const float key_scale = reinterpret_cast<const float*>(page + layout.key_scale_offset())[token];
      const float value_scale = reinterpret_cast<const float*>(page + layout.value_scale_offset())[token];
      for (int i = 0; i < E; ++i) {
        key[i] = to_f32(E4m3{k[i]}) * key_scale;
        value[i] = to_f32(E4m3{v[i]}) * value_scale;
      }
      return;
    }
    default: fail("kv_load_token: the cache format ", name_of(layout.dtype), " is read page by page");
  }
}

}  // namespace fut
