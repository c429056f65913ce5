// Number formats against arithmetic done in double: every bit pattern decodes, and encoding is nearest-even.
#include "base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace fut {
namespace {

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

double e4m3_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits & 0x80 ? -magnitude : magnitude;
}

TEST(Dtype, HalfDecodesEveryPattern) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    if ((bits & 0x7c00) == 0x7c00) {
      EXPECT_FALSE(std::isfinite(to_f32(half)));
    } else {
      EXPECT_EQ(to_f32(half), half_value(half.bits));
      EXPECT_EQ(to_half(to_f32(half)).bits, bits);
    }
  }
}

TEST(Dtype, E4m3DecodesEveryPattern) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const E4m3 value{static_cast<uint8_t>(bits)};
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(to_f32(value)));
    } else {
      EXPECT_EQ(to_f32(value), e4m3_value(value.bits));
      EXPECT_EQ(to_e4m3(to_f32(value)).bits, bits);
    }
  }
}

TEST(Dtype, EncodingIsNearestEven) {
  // Between neighbours: below the midpoint down, above it up, at the midpoint to the even pattern.
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const double low = half_value(bits), high = half_value(bits + 1), middle = (low + high) / 2;
    EXPECT_EQ(to_half(static_cast<float>(middle)).bits, bits + (bits & 1));
    EXPECT_EQ(to_half(std::nextafter(static_cast<float>(middle), 0.0f)).bits, bits);
    EXPECT_EQ(to_half(std::nextafter(static_cast<float>(middle), 1e9f)).bits, bits + 1);
  }
  for (uint32_t bits = 0; bits < 0x7e; ++bits) {
    const double low = e4m3_value(bits), high = e4m3_value(bits + 1), middle = (low + high) / 2;
    EXPECT_EQ(to_e4m3(static_cast<float>(middle)).bits, bits + (bits & 1));
    EXPECT_EQ(to_e4m3(std::nextafter(static_cast<float>(middle), 0.0f)).bits, bits);
    EXPECT_EQ(to_e4m3(std::nextafter(static_cast<float>(-middle), -1e9f)).bits, (bits + 1) | 0x80);
  }
}

TEST(Dtype, Bf16IsNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(float_of(0x3f808000)).bits, 0x3f80);  // tie to even
  EXPECT_EQ(to_bf16(float_of(0x3f818000)).bits, 0x3f82);
  EXPECT_EQ(to_bf16(float_of(0x3f808001)).bits, 0x3f81);
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::nanf("")))));
  EXPECT_TRUE(std::isinf(to_f32(to_bf16(3.4e38f))));
}

TEST(Dtype, Saturation) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (float x : {449.0f, 465.0f, 1e30f, infinity}) {
    EXPECT_EQ(to_f32(to_e4m3(x)), 448.0f);
    EXPECT_EQ(to_f32(to_e4m3(-x)), -448.0f);
  }
  EXPECT_TRUE(std::isnan(to_f32(to_e4m3(std::nanf("")))));
  EXPECT_EQ(to_f32(to_half_saturated(66975.28f)), 65504.0f);
  EXPECT_EQ(to_f32(to_half_saturated(-infinity)), -65504.0f);
  EXPECT_TRUE(std::isinf(to_f32(to_half(65520.0f))));
  EXPECT_EQ(to_f32(to_half(65519.0f)), 65504.0f);
}

}  // namespace
}  // namespace fut
