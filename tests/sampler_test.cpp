// Filters, ties, edges and the draw itself.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "support/temp_folder.h"

namespace fut {
namespace {

using test::expect_refused;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

/// Everything off: the plain softmax.
Sampling plain(float temperature = 1.0f) { return {temperature, 0, 1.0f, 0.0f, 0}; }

int32_t sample(const std::vector<float>& logits, const Sampling& sampling, int64_t step = 0) {
  return sample_token(logits.data(), static_cast<int64_t>(logits.size()), sampling, step);
}

/// How often each id is drawn over many steps.
std::map<int32_t, double> frequencies(const std::vector<float>& logits, const Sampling& sampling, int draws = 20000) {
  std::map<int32_t, double> counts;
  for (int i = 0; i < draws; ++i) counts[sample(logits, sampling, i)] += 1.0 / draws;
  return counts;
}

std::set<int32_t> drawn(const std::vector<float>& logits, const Sampling& sampling) {
  std::set<int32_t> ids;
  for (const auto& [id, share] : frequencies(logits, sampling, 4000)) ids.insert(id);
  return ids;
}

const std::vector<float> kFour = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};

TEST(SamplerTest, TinyTemperaturesAreGreedy_G01) {
  for (float temperature : {0.0f, 1e-45f, 1e-12f, 1e-5f, 1e-4f, 1e-3f}) {
    for (int64_t step = 0; step < 50; ++step) {
      EXPECT_EQ(sample({1, 2, 3}, plain(temperature), step), 2);
      EXPECT_EQ(sample({1, 2, -kInfinity}, plain(temperature), step), 1);
    }
  }
}

TEST(SamplerTest, TheLowestIdWinsATie_G01) {
  EXPECT_EQ(sample({5, 5, 1}, plain(0)), 0);
  EXPECT_EQ(sample({1, 5, 5}, plain(0)), 1);
  Sampling one = plain();
  one.top_k = 1;
  for (int64_t step = 0; step < 100; ++step) EXPECT_EQ(sample({1, 5, 5}, one, step), 1);
}

TEST(SamplerTest, DrawsFollowTheSoftmax_G01) {
  // 20000 draws: a standard error below 0.0036; five of them.
  const auto got = frequencies({1, 2, 3}, plain());
  EXPECT_NEAR(got.at(0), 0.0900, 0.018);
  EXPECT_NEAR(got.at(1), 0.2447, 0.018);
  EXPECT_NEAR(got.at(2), 0.6652, 0.018);
  const auto hot = frequencies({1, 2, 3}, plain(1e30f));
  for (int id = 0; id < 3; ++id) EXPECT_NEAR(hot.at(id), 1.0 / 3, 0.018);
  const auto warm = frequencies({1, 2, 3}, plain(2.5f));
  EXPECT_NEAR(warm.at(2), 1 / (1 + std::exp(-0.4) + std::exp(-0.8)), 0.018);
}

TEST(SamplerTest, ImpossibleTokensAreNeverDrawn_G01) {
  for (float temperature : {1.0f, 100.0f, 1e30f})
    EXPECT_EQ(drawn({1, 2, -kInfinity}, plain(temperature)), (std::set<int32_t>{0, 1}));
}

TEST(SamplerTest, HugeLogitsDoNotOverflow_G01) {
  EXPECT_EQ(sample({3e38f, -3e38f, 0}, plain(0.5f)), 0);
  EXPECT_EQ(drawn({3e38f, 3e38f}, plain(0.002f)), (std::set<int32_t>{0, 1}));
}

TEST(SamplerTest, BrokenLogitsAreAnError_G01) {
  for (float temperature : {0.0f, 1.0f}) {
    expect_refused([&] { sample({1, kNan, 3}, plain(temperature)); }, {"NaN", "1"});
    expect_refused([&] { sample({kNan, 1}, plain(temperature)); }, {"NaN", "0"});
    expect_refused([&] { sample({-kInfinity, -kInfinity}, plain(temperature)); }, {"finite"});
    expect_refused([&] { sample({1, kInfinity}, plain(temperature)); }, {"finite"});
  }
}

TEST(SamplerTest, TopK_G02) {
  std::vector<float> flat(259, 0.0f);
  for (int i = 0; i < 259; ++i) flat[i] = 0.001f * static_cast<float>(i);
  Sampling s = plain();
  const std::set<int32_t> all = drawn(flat, s);
  for (int64_t off : {0, -1, 259, 260, 9999999}) {
    s.top_k = off;
    EXPECT_EQ(drawn(flat, s), all) << off;
  }
  s.top_k = 1;
  EXPECT_EQ(drawn(flat, s), std::set<int32_t>{258});
  s.top_k = 2;
  EXPECT_EQ(drawn(kFour, s), (std::set<int32_t>{0, 1}));
  EXPECT_EQ(drawn({1, 1, 1, 1}, s), (std::set<int32_t>{0, 1}));  // ties: the lowest ids stay
}

TEST(SamplerTest, TopP_G02) {
  const auto kept = [&](float top_p) {
    Sampling s = plain();
    s.top_p = top_p;
    const std::set<int32_t> ids = drawn(kFour, s);
    EXPECT_EQ(*ids.begin(), 0);  // the best ones stay, and they are tokens
    EXPECT_EQ(*ids.rbegin() + 1, static_cast<int32_t>(ids.size()));
    return ids.size();
  };
  EXPECT_EQ(kept(0.0f), 1u);
  EXPECT_EQ(kept(1e-9f), 1u);
  EXPECT_EQ(kept(0.45f), 1u);
  EXPECT_EQ(kept(0.75f), 2u);  // the token that crosses the limit stays
  EXPECT_EQ(kept(0.9f), 3u);
  EXPECT_EQ(kept(1.0f), 4u);
}

TEST(SamplerTest, MinP_G02) {
  const auto kept = [&](float min_p) {
    Sampling s = plain();
    s.min_p = min_p;
    const std::set<int32_t> ids = drawn(kFour, s);
    EXPECT_EQ(*ids.begin(), 0);  // the best ones stay, and they are tokens
    EXPECT_EQ(*ids.rbegin() + 1, static_cast<int32_t>(ids.size()));
    return ids.size();
  };
  EXPECT_EQ(kept(0.0f), 4u);
  EXPECT_EQ(kept(0.2f), 3u);  // threshold 0.1
  EXPECT_EQ(kept(0.5f), 2u);
  EXPECT_EQ(kept(1.0f), 1u);
}

/// Temperature comes first: at 0.5 the probabilities are 0.685, 0.247, 0.062, 0.007.
TEST(SamplerTest, FiltersSeeWhatTemperatureLeft_G02) {
  Sampling s = plain(0.5f);
  s.min_p = 0.2f;
  EXPECT_EQ(drawn(kFour, s).size(), 2u);
  s = plain(0.5f);
  s.top_p = 0.65f;
  EXPECT_EQ(drawn(kFour, s).size(), 1u);
  s = plain();
  s.top_k = 2;  // then 0.625, 0.375: top-p counts within what top-k left
  s.top_p = 0.6f;
  EXPECT_EQ(drawn(kFour, s).size(), 1u);
}

TEST(SamplerTest, ADrawDependsOnSeedStepAndLogitsAlone) {
  const std::vector<float> flat(100, 0.0f);
  Sampling a = plain(), b = plain();
  b.seed = 1;
  int same = 0;
  for (int64_t step = 0; step < 200; ++step) {
    EXPECT_EQ(sample(flat, a, step), sample(flat, a, step));
    same += sample(flat, a, step) == sample(flat, b, step);
  }
  EXPECT_LT(same, 20);  // two are expected by chance
}

TEST(SamplerTest, RefusesFieldsOutOfRange_G01_G02) {
  const auto refused = [](auto set, const char* word) {
    Sampling s;
    set(s);
    expect_refused([&] { check_sampling(s); }, {word});
  };
  for (float bad : {-1.0f, kNan, kInfinity, -1e-9f}) refused([&](Sampling& s) { s.temperature = bad; }, "temperature");
  for (int64_t bad : {-2, -5}) refused([&](Sampling& s) { s.top_k = bad; }, "top-k");
  for (float bad : {-0.1f, 1.0000001f, kNan}) refused([&](Sampling& s) { s.top_p = bad; }, "top-p");
  for (float bad : {-0.1f, 1.1f, kNan}) refused([&](Sampling& s) { s.min_p = bad; }, "min-p");
  check_sampling({});
  check_sampling({1e30f, 9999999, 0.0f, 1.0f, ~uint64_t{0}});
}

}  // namespace
}  // namespace fut
