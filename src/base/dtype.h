// Number formats, for host and device alike: each is a plain struct around its bits, with exact decoding and
// round-to-nearest-even encoding. E4M3 encoding saturates and never makes a NaN out of a number.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FUT_HD __host__ __device__ inline
#else
#define FUT_HD inline
#endif

namespace fut {

enum class Dtype { f32, f16, bf16, e4m3, int4 };

/// Brain floating point: 1 sign, 8 exponent, 7 mantissa bits.
struct Bf16 {
  uint16_t bits;
};

/// IEEE binary16: 1 sign, 5 exponent, 10 mantissa bits, largest 65504.
struct Half {
  uint16_t bits;
};

/// OCP FP8 E4M3 ("fn"): 1 sign, 4 exponent, 3 mantissa bits, no infinity, largest 448, NaN = 0x7f.
struct E4m3 {
  uint8_t bits;
};

inline constexpr float kHalfMax = 65504.0f;
inline constexpr float kE4m3Max = 448.0f;

FUT_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

FUT_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

FUT_HD float to_f32(float x) { return x; }

FUT_HD float to_f32(Bf16 x) { return float_of(uint32_t{x.bits} << 16); }

FUT_HD float to_f32(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Placing the bits at the float's exponent and multiplying by 2^112 is exact for subnormals too.
  const float scaled = float_of(magnitude << 13) * float_of(0x77800000u);
  return float_of(bits_of(scaled) | sign);
}

FUT_HD float to_f32(E4m3 x) {
  const uint32_t sign = uint32_t{x.bits & 0x80u} << 24;
  const uint32_t magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return float_of(sign | 0x7fc00000u);
  const float scaled = float_of(magnitude << 20) * float_of(0x7b800000u);  // 2^120 rebiases 127 to 7
  return float_of(bits_of(scaled) | sign);
}

FUT_HD Bf16 to_bf16(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return Bf16{static_cast<uint16_t>(u >> 16 | 0x40u)};
  return Bf16{static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}

/// Nearest half; beyond 65504 it becomes infinity, as IEEE says. See to_half_saturated.
FUT_HD Half to_half(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Half{static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return Half{static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lets the hardware round to multiples of 2^-24
    const uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    return Half{static_cast<uint16_t>(sign | rounded)};
  }
  return Half{static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13)};
}

FUT_HD Half to_half_saturated(float x) {
  if (x > kHalfMax) return Half{0x7bffu};
  if (x < -kHalfMax) return Half{0xfbffu};
  return to_half(x);
}

/// Nearest E4M3, saturated to +-448 (infinity too); NaN stays NaN.
FUT_HD E4m3 to_e4m3(float x) {
  const uint32_t u = bits_of(x), sign = u >> 24 & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return E4m3{static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return E4m3{static_cast<uint8_t>(sign | 0x7eu)};  // 448 and more
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 rounds to multiples of 2^-9
    const uint32_t rounded = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
    return E4m3{static_cast<uint8_t>(sign | rounded)};
  }
  return E4m3{static_cast<uint8_t>(sign | (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20)};
}

inline const char* name_of(Dtype type) {
  switch (type) {
    case Dtype::f32: return "f32";
    case Dtype::f16: return "f16";
    case Dtype::bf16: return "bf16";
    case Dtype::e4m3: return "e4m3";
    case Dtype::int4: return "int4";
  }
  return "?";
}

/// Bits of one stored element, scales not counted.
constexpr int bits_per_element(Dtype type) {
  return type == Dtype::f32 ? 32 : type == Dtype::e4m3 ? 8 : type == Dtype::int4 ? 4 : 16;
}

}  // namespace fut
