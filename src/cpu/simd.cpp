// Compiled once for each instruction set: foreach_target.h includes this file again and again (Highway). The choice is
// made here instead of by Highway's library, so that nothing has to be linked but headers.
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/simd.cpp"
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fut::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, kLanes>;
constexpr int kWidth = hn::MaxLanes(F());
constexpr int kVectors = kLanes / kWidth;

/// Sum of 16 partial sums, always in this order: halves onto halves, 16 to 8 to 4 to 2 to 1.
HWY_INLINE float tree_sum(const float (&x)[kLanes]) {
  const hn::FixedTag<float, 4> quad;
  const auto low = hn::Add(hn::Load(quad, x), hn::Load(quad, x + 8));
  const auto high = hn::Add(hn::Load(quad, x + 4), hn::Load(quad, x + 12));
  const auto four = hn::Add(low, high);
  const auto two = hn::Add(four, hn::Shuffle1032(four));
  return hn::GetLane(hn::Add(two, hn::Shuffle2301(two)));
}

template <int kRows, int kCols>
HWY_INLINE void dot_tile(const float* HWY_RESTRICT w, int64_t w_stride, const float* HWY_RESTRICT a, int64_t a_stride,
                         int64_t length, float* HWY_RESTRICT y, int64_t y_stride) {
  const F d;
  hn::Vec<F> sum[kRows][kCols][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      for (int v = 0; v < kVectors; ++v) sum[r][c][v] = hn::Zero(d);
    }
  }
  for (int64_t i = 0; i < length; i += kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      hn::Vec<F> weight[kRows];
      for (int r = 0; r < kRows; ++r) weight[r] = hn::LoadU(d, w + r * w_stride + i + v * kWidth);
      for (int c = 0; c < kCols; ++c) {
        const hn::Vec<F> operand = hn::LoadU(d, a + c * a_stride + i + v * kWidth);
        for (int r = 0; r < kRows; ++r) sum[r][c][v] = hn::MulAdd(weight[r], operand, sum[r][c][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      HWY_ALIGN float lanes[kLanes];
      for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][c][v], d, lanes + v * kWidth);
      y[c * y_stride + r] = tree_sum(lanes);
    }
  }
}

/// How rows are grouped only decides what stays in registers; every sum is its own.
template <int kCols>
HWY_INLINE void dot_rows(const float* w, int64_t w_stride, int64_t w_rows, const float* a, int64_t a_stride,
                         int64_t length, float* y, int64_t y_stride) {
  constexpr int kRows = kCols == 1 ? 4 : 2;
  int64_t r = 0;
  for (; r + kRows <= w_rows; r += kRows) {
    dot_tile<kRows, kCols>(w + r * w_stride, w_stride, a, a_stride, length, y + r, y_stride);
  }
  for (; r < w_rows; ++r) dot_tile<1, kCols>(w + r * w_stride, w_stride, a, a_stride, length, y + r, y_stride);
}

void dot(const float* w, int64_t w_stride, int64_t w_rows, const float* a, int64_t a_stride, int64_t a_rows,
         int64_t length, float* y, int64_t y_stride) {
  int64_t c = 0;
  for (; c + 3 <= a_rows; c += 3) {
    dot_rows<3>(w, w_stride, w_rows, a + c * a_stride, a_stride, length, y + c * y_stride, y_stride);
  }
  for (; c < a_rows; ++c)
    dot_rows<1>(w, w_stride, w_rows, a + c * a_stride, a_stride, length, y + c * y_stride, y_stride);
}

void bf16_to_f32(const uint16_t* from, float* to, int64_t count) {
  const F d;
  const hn::RebindToUnsigned<F> du;
  const hn::Rebind<uint16_t, F> d16;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, from + i)));
    hn::StoreU(hn::BitCast(d, bits), d, to + i);
  }
  for (; i < count; ++i) {
    const uint32_t bits = uint32_t{from[i]} << 16;
    __builtin_memcpy(to + i, &bits, sizeof bits);
  }
}

/// Subnormal codes (below 8) go through a subtraction, so that no float is subnormal on the way: those are slow.
HWY_INLINE hn::Vec<F> e4m3_vector(hn::Vec<hn::RebindToUnsigned<F>> code) {
  const F d;
  const hn::RebindToUnsigned<F> du;
  const auto magnitude = hn::And(code, hn::Set(du, 0x7fu));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(du, 0x80u)));
  const auto shifted = hn::ShiftLeft<20>(magnitude);
  const auto normal = hn::BitCast(d, hn::Add(shifted, hn::Set(du, 0x3c000000u)));
  const auto subnormal = hn::Sub(hn::BitCast(d, hn::Add(shifted, hn::Set(du, 0x3c800000u))), hn::Set(d, 0.015625f));
  const auto is_subnormal =
      hn::RebindMask(d, hn::Lt(hn::BitCast(hn::RebindToSigned<F>(), magnitude), hn::Set(hn::RebindToSigned<F>(), 8)));
  return hn::Or(hn::IfThenElse(is_subnormal, subnormal, normal), hn::BitCast(d, sign));
}

void e4m3_to_f32(const uint8_t* from, float* to, int64_t count) {
  const F d;
  const hn::RebindToUnsigned<F> du;
  const hn::Rebind<uint8_t, F> d8;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    hn::StoreU(e4m3_vector(hn::PromoteTo(du, hn::LoadU(d8, from + i))), d, to + i);
  }
  if (i < count) {
    uint8_t code[kWidth] = {};
    HWY_ALIGN float value[kWidth];
    for (int64_t j = i; j < count; ++j) code[j - i] = from[j];
    hn::Store(e4m3_vector(hn::PromoteTo(du, hn::LoadU(d8, code))), d, value);
    for (int64_t j = i; j < count; ++j) to[j] = value[j - i];
  }
}

void int4_tile(const uint8_t* codes, float zero, const float (*scale)[2], float* out, int64_t out_stride) {
  const F d;
  const hn::RebindToSigned<F> di;
  const hn::Rebind<uint8_t, F> d8;
  const hn::FixedTag<uint8_t, 16> bytes;
  const hn::FixedTag<uint32_t, 4> words;
  const hn::FixedTag<uint64_t, 2> pairs;
  const auto low_nibbles = hn::Set(bytes, 0x0f);
  const auto offset = hn::Set(d, zero);
  for (int g = 0; g < 8; ++g) {
    // Four lanes of 16 bytes, four words each: transpose, so that vector s holds word s of the lanes t = 0..3.
    const uint8_t* lane = codes + g * 64;
    const auto l0 = hn::BitCast(words, hn::LoadU(bytes, lane)), l1 = hn::BitCast(words, hn::LoadU(bytes, lane + 16));
    const auto l2 = hn::BitCast(words, hn::LoadU(bytes, lane + 32)),
               l3 = hn::BitCast(words, hn::LoadU(bytes, lane + 48));
    const auto a = hn::BitCast(pairs, hn::InterleaveLower(words, l0, l1));
    const auto b = hn::BitCast(pairs, hn::InterleaveLower(words, l2, l3));
    const auto c = hn::BitCast(pairs, hn::InterleaveUpper(words, l0, l1));
    const auto e = hn::BitCast(pairs, hn::InterleaveUpper(words, l2, l3));
    const hn::Vec<decltype(bytes)> word[4] = {
        hn::BitCast(bytes, hn::InterleaveLower(pairs, a, b)), hn::BitCast(bytes, hn::InterleaveUpper(pairs, a, b)),
        hn::BitCast(bytes, hn::InterleaveLower(pairs, c, e)), hn::BitCast(bytes, hn::InterleaveUpper(pairs, c, e))};
    for (int s = 0; s < 4; ++s) {
      HWY_ALIGN uint8_t nibbles[2][16];
      const hn::FixedTag<uint16_t, 8> halves;
      const auto high = hn::BitCast(bytes, hn::ShiftRight<4>(hn::BitCast(halves, word[s])));
      hn::Store(hn::And(word[s], low_nibbles), bytes, nibbles[0]);
      hn::Store(hn::And(high, low_nibbles), bytes, nibbles[1]);
      for (int half = 0; half < 2; ++half) {
        float* to = out + (g + 8 * half) * out_stride + 16 * s;
        const auto factor = hn::Set(d, scale[g + 8 * half][s / 2]);
        for (int i = 0; i < 16; i += kWidth) {
          const auto code = hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, nibbles[half] + i)));
          hn::StoreU(hn::Mul(hn::Sub(code, offset), factor), d, to + i);
        }
      }
    }
  }
}

const Simd kTable = {
#if HWY_TARGET == HWY_AVX3
    "avx512",
#elif HWY_TARGET == HWY_AVX2
    "avx2",
#else
    "baseline",
#endif
    dot, bf16_to_f32, e4m3_to_f32, int4_tile};

const Simd& table() { return kTable; }

}  // namespace HWY_NAMESPACE
}  // namespace fut::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace fut::cpu {
namespace {

const Simd* best_up_to(const char* limit) {
  bool allowed = limit == nullptr;
  (void)allowed;
#if HWY_TARGETS & HWY_AVX3
  allowed = allowed || !strcmp(limit, "avx512");
  if (allowed && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &N_AVX3::table();
  }
#endif
#if HWY_TARGETS & HWY_AVX2
  allowed = allowed || !strcmp(limit, "avx2");
  if (allowed && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("f16c")) {
    return &N_AVX2::table();
  }
#endif
  return &HWY_STATIC_DISPATCH(table)();
}

}  // namespace

const Simd& simd() {
  static const Simd& chosen = []() -> const Simd& {
    const char* wanted = std::getenv("FUT_SIMD");
    const Simd* found = wanted ? simd_named(wanted) : best_up_to(nullptr);
    FUT_CHECK(found, "FUT_SIMD=", wanted, ": not on this machine, whose best of baseline, avx2 and avx512 is ",
              best_up_to(nullptr)->name);
    return *found;
  }();
  return chosen;
}

const Simd* simd_named(const char* name) {
  const Simd* found = best_up_to(name);
  return strcmp(found->name, name) == 0 ? found : nullptr;
}

}  // namespace fut::cpu
#endif  // HWY_ONCE
