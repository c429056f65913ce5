// GPTQ: the parts it is made of against plain loops, what it must win and where it must stay harmless; then the walk
// that collects its inputs against the model's own decode path, and whole models.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/parallel.h"
#include "engine/backends.h"
#include "engine/calibrate.h"
#include "engine/decode_walk.h"
#include "engine/kv_cache.h"
#include "engine/quantize.h"
#include "futransformer/engine.h"
#include "quant/hessian.h"
#include "quant/panel_product.h"
#include "quant/quantisers.h"
#include "support/fixture_model.h"

namespace fut {
namespace {

using test::expect_refused;
using test::TempFolder;

std::vector<float> normal_values(int64_t count, uint32_t seed, float sigma = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

/// x (rows, cols) of a few hidden causes, some channels much larger than others: what activations look like.
std::vector<float> correlated_inputs(int64_t rows, int64_t cols, uint32_t seed) {
  const int64_t causes = cols / 4;
  const std::vector<float> mixing = normal_values(causes * cols, seed), hidden = normal_values(rows * causes, seed + 1);
  std::vector<float> x = normal_values(rows * cols, seed + 2, 0.3f);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      for (int64_t i = 0; i < causes; ++i)
        x[r * cols + k] += hidden[r * causes + i] * mixing[i * cols + k] / std::sqrt(static_cast<float>(causes));
      if (k % 29 == 3) x[r * cols + k] *= 20.0f;
    }
  }
  return x;
}

std::vector<float> values_of(const HostWeight& weight) {
  std::vector<float> values(weight.rows * weight.cols);
  for (int64_t n = 0; n < weight.rows; ++n) decode_weight_row(weight, n, values.data() + n * weight.cols);
  return values;
}

/// Mean square of (W - Q) x over the inputs, by plain loops.
double output_error(const std::vector<float>& w, const HostWeight& q, const std::vector<float>& x) {
  const std::vector<float> read = values_of(q);
  const int64_t inputs = static_cast<int64_t>(x.size()) / q.cols;
  double sum = 0;
  for (int64_t t = 0; t < inputs; ++t) {
    for (int64_t n = 0; n < q.rows; ++n) {
      double y = 0;
      for (int64_t k = 0; k < q.cols; ++k) y += (double{w[n * q.cols + k]} - read[n * q.cols + k]) * x[t * q.cols + k];
      sum += y * y;
    }
  }
  return sum / static_cast<double>(inputs);
}

struct Shape {
  int64_t rows, cols;
  int group;
};

QuantisedMatrix gptq(const std::vector<float>& w, const Shape& shape, const std::vector<float>& x, int sweeps = 4,
                     double damping = 0.01) {
  const auto method = find_quantiser("gptq").make({damping, sweeps});
  method->start_product(shape.cols);
  method->add_inputs(x.data(), static_cast<int64_t>(x.size()) / shape.cols);
  return method->quantise(w.data(), shape.rows, shape.cols, shape.group, "w");
}

HostWeight rtn(const std::vector<float>& w, const Shape& shape) {
  return encode_weight(Dtype::int4, shape.group, w.data(), shape.rows, shape.cols, "w");
}

void expect_same(const HostWeight& a, const HostWeight& b) {
  EXPECT_EQ(a.data, b.data);
  ASSERT_EQ(a.group_scale.size(), b.group_scale.size());
  for (size_t i = 0; i < a.group_scale.size(); ++i) ASSERT_EQ(a.group_scale[i].bits, b.group_scale[i].bits) << i;
}

void expect_finite(const HostWeight& weight) {
  for (float value : values_of(weight)) ASSERT_TRUE(std::isfinite(value));
}

// ---- parts

TEST(PanelProductTest, EqualsThePlainLoop) {
  for (int64_t depth : {0, 1, 7, 200}) {
    const std::vector<float> a = normal_values(depth * kPanel, 1), b = normal_values(depth * kPanel, 2);
    std::vector<float> c = normal_values(kPanel * kPanel, 3), expected = c;
    panel_product(c.data(), a.data(), b.data(), depth);
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t j = 0; j < kPanel; ++j) {
        float sum = 0;
        for (int64_t k = 0; k < depth; ++k) sum += a[k * kPanel + i] * b[k * kPanel + j];
        expected[i * kPanel + j] += sum;
      }
    }
    EXPECT_EQ(c, expected) << depth;
  }
}

TEST(HessianTest, IsTheMeanOfOuterProducts) {
  constexpr int64_t kRows = 1300, kCols = 75;  // neither is a multiple of anything
  const std::vector<float> x = correlated_inputs(kRows, kCols, 5);
  Hessian whole(kCols);
  whole.add(x.data(), kRows);
  const std::vector<double> h = whole.take();
  const int64_t n = whole.padded();
  ASSERT_EQ(n, 96);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t t = 0; t < kRows && i < kCols && j < kCols; ++t) {
        const double product = double{x[t * kCols + i]} * x[t * kCols + j];
        sum += product;
        magnitude += std::fabs(product);
      }
      // 512 FP32 additions and one product each.
      ASSERT_NEAR(h[i * n + j], sum / kRows, 513 * 6e-8 * magnitude / kRows) << i << " " << j;
    }
  }
}

TEST(HessianTest, DoesNotDependOnHowRowsArrive) {
  constexpr int64_t kRows = 1100, kCols = 64;
  const std::vector<float> x = correlated_inputs(kRows, kCols, 6);
  Hessian whole(kCols), pieces(kCols);
  whole.add(x.data(), kRows);
  set_thread_count(3);
  for (int64_t at = 0; at < kRows; at += 37) pieces.add(x.data() + at * kCols, std::min<int64_t>(37, kRows - at));
  set_thread_count(0);
  EXPECT_EQ(pieces.rows() + 0, 1024);
  EXPECT_EQ(whole.take(), pieces.take());
}

TEST(FactorTest, MultipliesBack) {
  constexpr int64_t kCols = 96;
  Hessian sums(kCols);
  const std::vector<float> x = correlated_inputs(400, kCols, 7);
  sums.add(x.data(), 400);
  const std::vector<double> h = sums.take();
  const Factor factor = factorise(h, kCols, 0.01);
  ASSERT_FALSE(factor.lower.empty());
  EXPECT_EQ(factor.damping, 0.01);
  double mean = 0;
  for (int64_t i = 0; i < kCols; ++i) mean += h[i * kCols + i] / kCols;
  EXPECT_NEAR(factor.added, 0.01 * mean, 1e-12 * mean);
  for (int64_t i = 0; i < kCols; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t k = 0; k <= j; ++k) sum += factor.lower[i * kCols + k] * factor.lower[j * kCols + k];
      ASSERT_NEAR(sum, h[i * kCols + j] + (i == j ? factor.added : 0), 1e-12 * kCols * mean);
    }
  }
}

/// A matrix of ones but for its diagonal of `diagonal`: its least eigenvalue is diagonal - 1.
std::vector<double> mostly_ones(int64_t n, double diagonal) {
  std::vector<double> h(n * n, 1.0);
  for (int64_t i = 0; i < n; ++i) h[i * n + i] = diagonal;
  return h;
}

TEST(FactorTest, DampingRisesUntilTheMatrixIsPositiveDefinite) {
  EXPECT_EQ(factorise(mostly_ones(32, 1.5), 32, 0.01).damping, 0.01);
  EXPECT_NEAR(factorise(mostly_ones(32, 0.97), 32, 0.01).damping, 0.1, 1e-9);    // needs 0.031
  EXPECT_NEAR(factorise(mostly_ones(32, 0.7), 32, 0.01).damping, 1.0, 1e-9);     // needs 0.43
  EXPECT_NEAR(factorise(mostly_ones(32, 1.0), 32, 0.0).damping, 1e-4, 1e-9);     // singular
  EXPECT_TRUE(factorise(mostly_ones(32, 0.3), 32, 0.01).lower.empty());          // needs 2.3
  EXPECT_TRUE(factorise(std::vector<double>(32 * 32), 32, 0.01).lower.empty());  // nothing but zeros
  std::vector<double> broken = mostly_ones(32, 2);
  broken[33] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(factorise(broken, 32, 0.01).lower.empty());
}

// ---- what it wins

TEST(GptqTest, OutputsAreCloserThanRoundedToNearest) {
  for (const Shape& shape : {Shape{96, 256, 64}, {33, 192, 32}, {64, 256, 128}, {1, 64, 64}, {40, 96, 64}}) {
    const std::vector<float> x = correlated_inputs(600, shape.cols, 11);
    const std::vector<float> w = normal_values(shape.rows * shape.cols, 12, 0.05f);
    const double nearest = output_error(w, rtn(w, shape), x);
    const QuantisedMatrix first = gptq(w, shape, x, 0), refined = gptq(w, shape, x);
    const double one_pass = output_error(w, first.weight, x), swept = output_error(w, refined.weight, x);
    EXPECT_LT(one_pass, 0.6 * nearest) << shape.rows << " x " << shape.cols;
    EXPECT_LT(swept, 0.95 * one_pass) << shape.rows << " x " << shape.cols;
    EXPECT_EQ(refined.warning, "");
    // The losses that it reports are those of its outputs.
    const double energy = output_error(w, rtn(std::vector<float>(w.size()), shape), x);
    EXPECT_NEAR(refined.loss, swept / energy, 0.01 * swept / energy);
    EXPECT_NEAR(refined.rtn_loss, nearest / energy, 0.01 * nearest / energy);
  }
}

TEST(GptqTest, NoRowIsWorseThanRoundedToNearest) {
  constexpr Shape kShape{64, 128, 64};
  const std::vector<float> x = normal_values(300 * kShape.cols, 13), w = normal_values(kShape.rows * kShape.cols, 14);
  const HostWeight nearest = rtn(w, kShape), found = gptq(w, kShape, x, 1).weight;
  for (int64_t n = 0; n < kShape.rows; ++n) {
    const std::vector<float> row(w.begin() + n * kShape.cols, w.begin() + (n + 1) * kShape.cols);
    const auto one_row = [&](const HostWeight& weight) {
      HostWeight one = rtn(row, {1, kShape.cols, kShape.group});
      std::copy_n(weight.data.begin() + n * weight.row_bytes(), weight.row_bytes(), one.data.begin());
      std::copy_n(weight.group_scale.begin() + n * weight.groups(), weight.groups(), one.group_scale.begin());
      return output_error(row, one, x);
    };
    EXPECT_LE(one_row(found), one_row(nearest) * 1.0001) << n;
  }
}

TEST(GptqTest, WithoutCorrelationsItRoundsToNearest) {
  constexpr Shape kShape{48, 192, 64};
  std::vector<float> x(kShape.cols * kShape.cols);
  for (int64_t k = 0; k < kShape.cols; ++k) x[k * kShape.cols + k] = 3.0f;
  const std::vector<float> w = normal_values(kShape.rows * kShape.cols, 15);
  expect_same(gptq(w, kShape, x, 0).weight, rtn(w, kShape));
  EXPECT_LE(output_error(w, gptq(w, kShape, x).weight, x), output_error(w, rtn(w, kShape), x));
}

// ---- where it must stay harmless

TEST(GptqTest, ColumnsWithoutInputsKeepTheirWeights) {
  constexpr Shape kShape{32, 128, 32};
  std::vector<float> x = correlated_inputs(400, kShape.cols, 16);
  const auto dead = [](int64_t k) { return k % 5 == 0 || (k >= 64 && k < 96); };  // among others a whole group
  for (size_t i = 0; i < x.size(); ++i) {
    if (dead(static_cast<int64_t>(i) % kShape.cols)) x[i] = 0.0f;
  }
  const std::vector<float> w = normal_values(kShape.rows * kShape.cols, 17, 0.02f);
  for (double damping : {0.01, 0.0}) {
    const HostWeight q = gptq(w, kShape, x, 4, damping).weight;
    const std::vector<float> read = values_of(q);
    expect_finite(q);
    for (int64_t i = 0; i < kShape.rows * kShape.cols; ++i) {
      if (!dead(i % kShape.cols)) continue;
      const float scale =
          std::fabs(to_f32(q.group_scale[i / kShape.cols * q.groups() + i % kShape.cols / kShape.group]));
      const bool clipped = std::fabs(read[i]) >= 6.9f * scale;
      // Half a step, and what the last change of the scale has moved.
      ASSERT_TRUE(clipped || std::fabs(read[i] - w[i]) <= 0.7f * scale) << i << ": " << w[i] << " read " << read[i];
    }
    EXPECT_LT(output_error(w, q, x), 0.6 * output_error(w, rtn(w, kShape), x));
  }
}

TEST(GptqTest, AHessianOfNoUseMeansRoundingToNearestAndAWarning) {
  constexpr Shape kShape{16, 64, 64};
  const std::vector<float> w = normal_values(kShape.rows * kShape.cols, 18);
  std::vector<float> broken = normal_values(100 * kShape.cols, 19);
  broken[777] = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& x : {std::vector<float>(kShape.cols), broken, std::vector<float>{}}) {
    const QuantisedMatrix q = gptq(w, kShape, x);
    expect_same(q.weight, rtn(w, kShape));
    EXPECT_NE(q.warning.find("w: "), std::string::npos);
  }
}

TEST(GptqTest, EqualColumnsNeedDampingAndSayThatItRose) {
  constexpr Shape kShape{16, 64, 64};
  std::vector<float> x = normal_values(100 * kShape.cols, 20);
  for (size_t i = 0; i < x.size(); i += 64) std::fill_n(x.begin() + static_cast<int64_t>(i) + 32, 32, x[i]);
  const std::vector<float> w = normal_values(kShape.rows * kShape.cols, 21);
  const QuantisedMatrix damped = gptq(w, kShape, x), undamped = gptq(w, kShape, x, 4, 0.0);
  EXPECT_EQ(damped.warning, "");
  EXPECT_NE(undamped.warning.find("damping 0.0001 instead of 0"), std::string::npos) << undamped.warning;
  EXPECT_LT(output_error(w, damped.weight, x), output_error(w, rtn(w, kShape), x));
  EXPECT_LT(output_error(w, undamped.weight, x), output_error(w, rtn(w, kShape), x));
}

TEST(GptqTest, GroupsOfOddMagnitudes) {
  constexpr Shape kShape{8, 128, 64};
  std::vector<float> w = normal_values(kShape.rows * kShape.cols, 22);
  const float fills[] = {0.0f, 0.37f, -0.37f, 1e-8f, 2e-7f, -0.0f};
  for (int64_t n = 0; n < 6; ++n) std::fill_n(w.begin() + n * kShape.cols, 100, fills[n]);
  const std::vector<float> x = correlated_inputs(300, kShape.cols, 23);
  const QuantisedMatrix q = gptq(w, kShape, x);
  expect_finite(q.weight);
  EXPECT_LT(output_error(w, q.weight, x), output_error(w, rtn(w, kShape), x));
  const std::vector<float> nothing(w.size());
  for (float value : values_of(gptq(nothing, kShape, x).weight)) ASSERT_EQ(value, 0.0f);
}

TEST(GptqTest, RefusesWhatHasNoScaleByName) {
  constexpr Shape kShape{2, 64, 64};
  const std::vector<float> x = normal_values(100 * kShape.cols, 24);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 7e5f}) {
    std::vector<float> w(kShape.rows * kShape.cols, 1.0f);
    w[70] = bad;
    expect_refused([&] { gptq(w, kShape, x); }, {"w", "1"});
  }
  const auto method = find_quantiser("gptq").make({});
  const std::vector<float> w(128, 1.0f);
  expect_refused([&] { method->quantise(w.data(), 2, 64, 64, "w"); }, {"w", "64"});
}

TEST(GptqTest, IsTheSameWhateverTheThreadsAndTheCalls) {
  constexpr Shape kShape{80, 128, 64};
  const std::vector<float> x = correlated_inputs(700, kShape.cols, 25);
  const std::vector<float> w = normal_values(kShape.rows * kShape.cols, 26);
  const HostWeight expected = gptq(w, kShape, x).weight;
  expect_same(gptq(w, kShape, x).weight, expected);
  for (int threads : {1, 3}) {
    set_thread_count(threads);
    const auto method = find_quantiser("gptq").make({});
    method->start_product(kShape.cols);
    for (int64_t t = 0; t < 700; t += 70) method->add_inputs(x.data() + t * kShape.cols, 70);
    // One row at a time: rows have nothing to do with each other.
    for (int64_t n = 0; n < kShape.rows; n += 16) {
      const HostWeight some = method->quantise(w.data() + n * kShape.cols, 16, kShape.cols, kShape.group, "w").weight;
      EXPECT_TRUE(std::equal(some.data.begin(), some.data.end(), expected.data.begin() + n * expected.row_bytes()));
    }
  }
  set_thread_count(0);
}

TEST(EncodeInt4GroupTest, ImportanceMovesTheScale) {
  // One huge weight that does not matter: the scale fits the others.
  std::vector<float> w = normal_values(64, 27, 0.1f), importance(64, 1.0f);
  w[20] = 0.9f;
  uint8_t plain[64], weighted[64];
  const float before = to_f32(encode_int4_group(w.data(), 64, plain));
  importance[20] = 1e-6f;
  const float after = to_f32(encode_int4_group(w.data(), 64, weighted, importance.data()));
  const auto error = [&](float scale, const uint8_t* codes) {
    double sum = 0;
    for (int i = 0; i < 64; ++i) sum += importance[i] * std::pow(w[i] - scale * (codes[i] - 8), 2);
    return sum;
  };
  EXPECT_LT(error(after, weighted), 0.5 * error(before, plain));
  // Equal importance is none.
  std::fill(importance.begin(), importance.end(), 0.25f);
  EXPECT_EQ(to_f32(encode_int4_group(w.data(), 64, weighted, importance.data())), before);
  EXPECT_TRUE(std::equal(plain, plain + 64, weighted));
}

}  // namespace
}  // namespace fut
