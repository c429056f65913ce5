// GEMMs of the CPU backend against plain double loops over the exact weights, and the vector loops against one another.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/error.h"
#include "base/parallel.h"
#include "cpu/cpu_backend.h"
#include "cpu/gemm.h"
#include "support/temp_folder.h"

namespace fut {
namespace {

constexpr int64_t kWidths[] = {576, 1536, 192, 64, 96, 100, 52, 259};
constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65, 129};
constexpr int64_t kMostRows = 129;
constexpr float kGuard = -12345.0f;

std::vector<float> normal_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

struct Format {
  Dtype dtype;
  int group;
};
constexpr Format kFormats[] = {{Dtype::f32, 0},   {Dtype::bf16, 0},  {Dtype::e4m3, 0},
                               {Dtype::int4, 32}, {Dtype::int4, 64}, {Dtype::int4, 128}};

/// One weight on the backend, and its exact values from the host form.
struct Matrix {
  PlacedWeight placed;
  std::vector<float> values;  // (N, K)

  Matrix(Backend& backend, const Format& format, int64_t rows, int64_t cols, uint32_t seed)
      : values(normal_values(rows * cols, seed)) {
    const HostWeight host = encode_weight(format.dtype, format.group, values.data(), rows, cols, "w");
    placed = backend.place(host);
    for (int64_t n = 0; n < rows; ++n) decode_weight_row(host, n, values.data() + n * cols);
  }
};

std::vector<float> guarded_gemm(const std::vector<float>& a, int64_t rows, const Weight& weight) {
  std::vector<float> y(rows * weight.rows + 32, kGuard);
  cpu::gemm(y.data(), a.data(), rows, weight);
  for (size_t i = rows * weight.rows; i < y.size(); ++i) EXPECT_EQ(y[i], kGuard) << "written past the end";
  y.resize(rows * weight.rows);
  return y;
}

class CpuGemmTest : public testing::Test {
 protected:
  ~CpuGemmTest() override { set_thread_count(0); }

  std::unique_ptr<Backend> backend_ = make_cpu_backend();
};

/// |error| of 16 partial sums of K / 16 terms each, a tree of four levels and a scale, in units of 2^-24 of sum |a w|.
double tolerance(int64_t cols, double absolute_sum) {
  return (static_cast<double>(cols) / 16 + 8) * 0x1p-24 * absolute_sum;
}

TEST_F(CpuGemmTest, EveryFormatAndShapeIsRightAndRowsDoNotDependOnTheirNumber_D02) {
  for (const Format& format : kFormats) {
    for (int64_t N : kWidths) {
      for (int64_t K : kWidths) {
        if (format.group != 0 && format.group != 64 && N * K > 100000)
          continue;  // the default group stands for the rest
        const Matrix w(*backend_, format, N, K, static_cast<uint32_t>(N * 4096 + K));
        const std::vector<float> a = normal_values(kMostRows * K, static_cast<uint32_t>(K));
        const std::vector<float> y = guarded_gemm(a, kMostRows, w.placed.weight);
        for (int64_t t : {0, 63, 128}) {
          for (int64_t n = 0; n < N; ++n) {
            double sum = 0, absolute = 0;
            for (int64_t k = 0; k < K; ++k) {
              const double product = double{a[t * K + k]} * w.values[n * K + k];
              sum += product;
              absolute += std::fabs(product);
            }
            ASSERT_NEAR(y[t * N + n], sum, tolerance(K, absolute))
                << name_of(format.dtype) << " G " << format.group << " (" << N << ", " << K << ") at " << t << ", "
                << n;
          }
        }
        for (int64_t rows : kRowCounts) {
          const std::vector<float> part = guarded_gemm(a, rows, w.placed.weight);
          ASSERT_EQ(memcmp(part.data(), y.data(), part.size() * sizeof(float)), 0)
              << name_of(format.dtype) << " (" << N << ", " << K << "), " << rows << " rows";
        }
      }
    }
  }
}

TEST_F(CpuGemmTest, ReferenceReadsTheSameWeights) {
  for (const Format& format : kFormats) {
    const Matrix w(*backend_, format, 52, 259, 1);
    const std::vector<float> a = normal_values(3 * 259, 2);
    std::vector<double> y(3 * 52);
    cpu::gemm_reference(y.data(), a.data(), 3, w.placed.weight);
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t n = 0; n < 52; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < 259; ++k) sum += double{a[t * 259 + k]} * w.values[n * 259 + k];
        ASSERT_NEAR(y[t * 52 + n], sum, 1e-5) << name_of(format.dtype);
      }
    }
  }
}

TEST_F(CpuGemmTest, ThreadsDoNotChangeABit) {
  for (const Format& format : kFormats) {
    const Matrix w(*backend_, format, 259, 192, 3);
    const std::vector<float> a = normal_values(17 * 192, 4);
    set_thread_count(1);
    const std::vector<float> alone = guarded_gemm(a, 17, w.placed.weight);
    for (int threads : {2, 3}) {
      set_thread_count(threads);
      const std::vector<float> y = guarded_gemm(a, 17, w.placed.weight);
      EXPECT_EQ(memcmp(y.data(), alone.data(), y.size() * sizeof(float)), 0) << threads << " threads";
    }
  }
}

TEST_F(CpuGemmTest, NoRowsTouchNothing) {
  const Matrix w(*backend_, kFormats[0], 64, 64, 5);
  EXPECT_TRUE(guarded_gemm({}, 0, w.placed.weight).empty());
}

TEST_F(CpuGemmTest, RefusesAWeightInF16) {
  Weight w{Dtype::f16, 16, 16, 0, Phase::decode, &kGuard, nullptr, 512};
  std::vector<float> a(16), y(16);
  std::vector<double> exact(16);
  test::expect_refused([&] { cpu::gemm(y.data(), a.data(), 1, w); }, {"f16"});
  test::expect_refused([&] { cpu::gemm_reference(exact.data(), a.data(), 1, w); }, {"f16"});
}

// ---- instruction sets

std::vector<const cpu::Simd*> available_sets() {
  std::vector<const cpu::Simd*> sets;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (const cpu::Simd* set = cpu::simd_named(name)) sets.push_back(set);
  }
  return sets;
}

TEST(SimdTest, TheBaselineIsAlwaysThere) {
  ASSERT_TRUE(cpu::simd_named("baseline"));
  EXPECT_FALSE(cpu::simd_named("avx1024"));
  EXPECT_TRUE(cpu::simd_named(cpu::simd().name));
}

TEST(SimdTest, DotProductsAgree_J03) {
  for (int64_t length : {16, 48, 64, 576, 1536}) {
    for (int64_t w_rows : {1, 2, 3, 4, 5, 16}) {
      for (int64_t a_rows : {1, 2, 3, 4, 7}) {
        const int64_t w_stride = length + 5, a_stride = length + 3, y_stride = w_rows + 2;
        const std::vector<float> w = normal_values(w_rows * w_stride, 6), a = normal_values(a_rows * a_stride, 7);
        std::vector<std::vector<float>> results;
        for (const cpu::Simd* set : available_sets()) {
          std::vector<float> y(a_rows * y_stride, kGuard);
          set->dot(w.data(), w_stride, w_rows, a.data(), a_stride, a_rows, length, y.data(), y_stride);
          for (int64_t c = 0; c < a_rows; ++c) {
            for (int64_t r = 0; r < y_stride; ++r) {
              if (r >= w_rows) {
                ASSERT_EQ(y[c * y_stride + r], kGuard) << set->name;
                continue;
              }
              double sum = 0, absolute = 0;
              for (int64_t i = 0; i < length; ++i) {
                sum += double{w[r * w_stride + i]} * a[c * a_stride + i];
                absolute += std::fabs(double{w[r * w_stride + i]} * a[c * a_stride + i]);
              }
              ASSERT_NEAR(y[c * y_stride + r], sum, tolerance(length, absolute)) << set->name;
              ASSERT_NEAR(y[c * y_stride + r], sum, 1e-5 * absolute) << set->name;
            }
          }
          // Both sets with fused multiply-add give the same bits.
          if (std::string_view(set->name) != "baseline") results.push_back(y);
        }
        for (const std::vector<float>& y : results) ASSERT_EQ(y, results[0]);
      }
    }
  }
}

TEST(SimdTest, ConversionsAreExactForEveryCodeAndLength_J03) {
  std::vector<uint16_t> bf16(65536);
  std::vector<uint8_t> e4m3;
  for (int i = 0; i < 65536; ++i) bf16[i] = static_cast<uint16_t>(i);
  for (int i = 0; i < 256; ++i) {
    if ((i & 0x7f) != 0x7f) e4m3.push_back(static_cast<uint8_t>(i));
  }
  for (const cpu::Simd* set : available_sets()) {
    std::vector<float> out(bf16.size());
    set->bf16_to_f32(bf16.data(), out.data(), 65536);
    for (int i = 0; i < 65536; ++i) ASSERT_EQ(bits_of(out[i]), static_cast<uint32_t>(i) << 16) << set->name;
    for (int64_t count = 0; count <= static_cast<int64_t>(e4m3.size()); ++count) {
      std::vector<float> some(count + 1, kGuard), others(count + 1, kGuard);
      set->e4m3_to_f32(e4m3.data(), some.data(), count);
      set->bf16_to_f32(bf16.data() + 0x3f80, others.data(), count);
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(bits_of(some[i]), bits_of(to_f32(E4m3{e4m3[i]}))) << set->name << " code " << int{e4m3[i]};
        ASSERT_EQ(bits_of(others[i]), static_cast<uint32_t>(0x3f80 + i) << 16) << set->name;
      }
      ASSERT_EQ(some[count], kGuard) << set->name;
      ASSERT_EQ(others[count], kGuard) << set->name;
    }
  }
}

}  // namespace
}  // namespace fut
