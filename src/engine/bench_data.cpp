#include "engine/bench_data.h"

#include <array>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/error.h"
#include "base/parallel.h"

namespace fut {
namespace {

/// 64 random bits for each place of a stream: splitmix64, a function of the place alone.
uint64_t random_bits(uint64_t seed, int64_t place) {
  uint64_t z = (seed << 40) + static_cast<uint64_t>(place + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/// Uniform in [-1, 1): its mean square is 1/3.
float random_unit(uint64_t seed, int64_t place) {
  return static_cast<float>(random_bits(seed, place) >> 40) * 0x1p-23f - 1.0f;
}

constexpr int64_t kGrain = 1 << 14;

HostBytes random_bytes(int64_t count, uint64_t seed) {
  HostBytes bytes(count);
  parallel_for((count + 7) / 8, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t bits = random_bits(seed, i);
      memcpy(bytes.data() + i * 8, &bits, std::min<int64_t>(8, count - i * 8));
    }
  });
  return bytes;
}

template <class T, class Encode>
HostBytes encoded(int64_t count, float rms, uint64_t seed, Encode encode) {
  HostBytes bytes(count * sizeof(T));
  T* out = reinterpret_cast<T*>(bytes.data());
  const float amplitude = rms * std::sqrt(3.0f);
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = encode(random_unit(seed, i) * amplitude);
  });
  return bytes;
}

/// x with Phi(x) = p: the normal distribution's inverse, by halving.
double normal_quantile(double p) {
  double low = -8, high = 8;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::numbers::sqrt2) / 2 < p ? low : high) = middle;
  }
  return low;
}

/// Codes of a normal distribution whose six standard deviations are the largest number, as those of weights and
/// activations nearly are: how hot a card runs, and so how fast, depends on how bits change.
struct NormalCodes {
  std::array<uint8_t, 4096> code;  ///< each as likely as another
  float rms;
  NormalCodes() {
    double squares = 0;
    for (size_t i = 0; i < code.size(); ++i) {
      const double x = normal_quantile((static_cast<double>(i) + 0.5) / static_cast<double>(code.size()));
      code[i] = to_e4m3(static_cast<float>(x) * (kE4m3Max / 6)).bits;
      squares += std::pow(to_f32(E4m3{code[i]}), 2);
    }
    rms = static_cast<float>(std::sqrt(squares / static_cast<double>(code.size())));
  }
};
const NormalCodes& normal_codes() {
  static const NormalCodes codes;
  return codes;
}

HostBytes random_e4m3_codes(int64_t count, uint64_t seed) {
  HostBytes bytes(count);
  const NormalCodes& codes = normal_codes();
  parallel_for((count + 4) / 5, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint64_t bits = random_bits(seed, i);
      for (int64_t j = 5 * i; j < std::min(5 * i + 5, count); ++j, bits >>= 12) bytes[j] = codes.code[bits % 4096];
    }
  });
  return bytes;
}

constexpr float kInt4CodeRms = 4.64f;  ///< of q - 8, q = 0 .. 15

void random_page(uint8_t* page, const KvPageLayout& layout, uint64_t seed) {
  const int64_t codes = layout.key_bytes() + layout.value_bytes(), scales = 2 * layout.scale_bytes();
  const int64_t elements = 2 * int64_t{kKvPageTokens} * layout.head_dim;
  const bool int4 = layout.dtype == Dtype::int4;
  memcpy(page, (int4 ? random_bytes(codes, seed) : random_elements(layout.dtype, elements, 1.0f, seed)).data(), codes);
  if (layout.dtype == Dtype::e4m3) {
    const std::vector<float> scale(scales / sizeof(float), e4m3_unit(1.0f));
    memcpy(page + codes, scale.data(), scales);
  }
  for (int64_t i = 0; int4 && i < scales; ++i) {
    page[codes + i] = to_e4m3((1.0f + 0.25f * random_unit(seed + 1, i)) / (kInt4CodeRms * kRandomKvFactor)).bits;
  }
}

}  // namespace

float e4m3_unit(float rms) { return rms / normal_codes().rms; }

HostBytes random_elements(Dtype dtype, int64_t count, float rms, uint64_t seed) {
  switch (dtype) {
    case Dtype::f32: return encoded<float>(count, rms, seed, [](float x) { return x; });
    case Dtype::f16: return encoded<Half>(count, rms, seed, [](float x) { return to_half_saturated(x); });
    case Dtype::bf16: return encoded<Bf16>(count, rms, seed, [](float x) { return to_bf16(x); });
    case Dtype::e4m3: return random_e4m3_codes(count, seed);
    case Dtype::int4: break;
  }
  fail("int4 elements have no meaning without their scales");
}

HostWeight random_weight(Dtype dtype, int group, int64_t rows, int64_t cols, uint64_t seed) {
  HostWeight w;
  w.dtype = dtype;
  w.rows = rows;
  w.cols = cols;
  const float rms = 1.0f / std::sqrt(static_cast<float>(cols));
  if (dtype == Dtype::int4) {
    w.group = group;
    w.data = random_bytes(rows * w.row_bytes(), seed);
    w.group_scale.resize(rows * w.groups());
    for (int64_t i = 0; i < rows * w.groups(); ++i) {
      const float unit = random_unit(seed + 1, i);
      w.group_scale[i] = to_half((unit < 0 ? -1.0f : 1.0f) * rms / kInt4CodeRms * (0.75f + 0.5f * std::fabs(unit)));
    }
  } else {
    w.data = random_elements(dtype, rows * cols, rms, seed);
    if (dtype == Dtype::e4m3) w.scale.assign(rows, e4m3_unit(rms));
  }
  return w;
}

std::vector<uint8_t> random_pages(const KvPageLayout& layout, int64_t count, uint64_t seed) {
  std::vector<uint8_t> pages(count * layout.page_bytes());
  for (int64_t i = 0; i < count; ++i) random_page(pages.data() + i * layout.page_bytes(), layout, seed + 2 * i);
  return pages;
}

}  // namespace fut
