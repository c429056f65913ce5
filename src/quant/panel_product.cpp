#include "quant/panel_product.h"

#include <cstring>

namespace fut {
namespace {

/// kRows x (kVectors * kBytes / 4) elements of c stay in registers for the whole depth. Inlined into functions that are
/// compiled for an instruction set each; nothing else is called, so none of its instructions can leak out of them.
template <int kBytes, int kRows, int kVectors>
[[gnu::always_inline]] inline void multiply(float* c, const float* a, const float* b, int64_t depth) {
  using Vector [[gnu::vector_size(kBytes)]] = float;
  constexpr int kWidth = kBytes / 4;
  for (int row = 0; row < kPanel; row += kRows) {
    for (int col = 0; col < kPanel; col += kWidth * kVectors) {
      Vector sum[kRows][kVectors] = {};
      for (int64_t k = 0; k < depth; ++k) {
        Vector right[kVectors];
        for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&right[v], b + k * kPanel + col + v * kWidth, kBytes);
        for (int r = 0; r < kRows; ++r) {
          for (int v = 0; v < kVectors; ++v) sum[r][v] += a[k * kPanel + row + r] * right[v];
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          Vector old;
          float* to = c + (row + r) * kPanel + col + v * kWidth;
          __builtin_memcpy(&old, to, kBytes);
          old += sum[r][v];
          __builtin_memcpy(to, &old, kBytes);
        }
      }
    }
  }
}

using Product = void (*)(float* c, const float* a, const float* b, int64_t depth);

}  // namespace

// Named as Highway names its targets: tests/portable.sh lets AVX instructions occur nowhere else.
#if defined(__x86_64__)
namespace N_AVX3 {
[[gnu::target("avx512f")]] void panel_product(float* c, const float* a, const float* b, int64_t depth) {
  multiply<64, 8, 2>(c, a, b, depth);
}
}  // namespace N_AVX3
namespace N_AVX2 {
[[gnu::target("avx2")]] void panel_product(float* c, const float* a, const float* b, int64_t depth) {
  multiply<32, 4, 2>(c, a, b, depth);
}
}  // namespace N_AVX2
#endif

namespace {

void panel_product_baseline(float* c, const float* a, const float* b, int64_t depth) {
  multiply<16, 2, 4>(c, a, b, depth);
}

Product best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return N_AVX3::panel_product;
  if (__builtin_cpu_supports("avx2")) return N_AVX2::panel_product;
#endif
  return panel_product_baseline;
}

}  // namespace

void panel_product(float* c, const float* a, const float* b, int64_t depth) {
  static const Product chosen = best();
  chosen(c, a, b, depth);
}

}  // namespace fut
