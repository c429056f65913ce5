#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"

namespace fut {
namespace {

struct Candidate {
  int32_t id;
  double logit;  // over temperature, relative to the best
};

bool better(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

/// splitmix64's finaliser: every bit of the result depends on every bit of x.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

double gumbel_noise(uint64_t seed, int64_t step, int32_t id) {
  const uint64_t bits = mix(mix(mix(seed) + static_cast<uint64_t>(step)) + static_cast<uint32_t>(id));
  const double uniform = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;  // in (0, 1)
  return -std::log(-std::log(uniform));
}

int32_t best_token(const float* logits, int64_t vocabulary) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocabulary; ++i) {
    FUT_CHECK(!std::isnan(logits[i]), "the model's logits are NaN (token ", i, ")");
    if (logits[i] > logits[best]) best = i;
  }
  FUT_CHECK(std::isfinite(logits[best]), "no logit is finite");
  return static_cast<int32_t>(best);
}

/// Drops what top-p and min-p exclude; `kept` is sorted, best first.
void filter_by_probability(std::vector<Candidate>& kept, const Sampling& sampling) {
  double total = 0;
  for (const Candidate& c : kept) total += std::exp(c.logit);
  size_t count = kept.size();
  if (sampling.top_p < 1.0f) {
    double sum = 0;
    count = 0;
    while (count < kept.size() && (count == 0 || sum < sampling.top_p)) sum += std::exp(kept[count++].logit) / total;
  }
  // kept[0].logit is 0: a probability relative to the best token's is exp(logit).
  while (count > 1 && std::exp(kept[count - 1].logit) < sampling.min_p) --count;
  kept.resize(count);
}

}  // namespace

void check_sampling(const Sampling& s) {
  FUT_CHECK(std::isfinite(s.temperature) && s.temperature >= 0, "temperature ", s.temperature,
            " is not a number from 0 up");
  FUT_CHECK(s.top_k >= -1, "top-k ", s.top_k, " is below -1 (0 and -1 turn it off)");
  FUT_CHECK(s.top_p >= 0 && s.top_p <= 1, "top-p ", s.top_p, " is outside 0..1");
  FUT_CHECK(s.min_p >= 0 && s.min_p <= 1, "min-p ", s.min_p, " is outside 0..1");
}

int32_t sample_token(const float* logits, int64_t vocabulary, const Sampling& sampling, int64_t step) {
  const int32_t best = best_token(logits, vocabulary);
  if (sampling.temperature <= kGreedyTemperature) return best;
  std::vector<Candidate> kept;
  kept.reserve(vocabulary);
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (logits[i] == -std::numeric_limits<float>::infinity()) continue;
    kept.push_back({static_cast<int32_t>(i), (double{logits[i]} - logits[best]) / sampling.temperature});
  }
  if (sampling.top_k > 0 && sampling.top_k < static_cast<int64_t>(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + (sampling.top_k - 1), kept.end(), better);
    kept.resize(sampling.top_k);
  }
  if (sampling.top_p < 1.0f || sampling.min_p > 0.0f) {
    std::sort(kept.begin(), kept.end(), better);
    filter_by_probability(kept, sampling);
  }
  int32_t drawn = -1;
  double drawn_value = 0;
  for (const Candidate& c : kept) {
    const double value = c.logit + gumbel_noise(sampling.seed, step, c.id);
    if (drawn < 0 || value > drawn_value || (value == drawn_value && c.id < drawn)) {
      drawn = c.id;
      drawn_value = value;
    }
  }
  return drawn;
}

}  // namespace fut
