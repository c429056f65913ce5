// Two runs over a text, and how far they are apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace fut::test {

struct Scores {
  std::vector<double> nll;    // (tokens)
  std::vector<float> logits;  // (tokens, V)

  int64_t vocabulary() const { return static_cast<int64_t>(logits.size() / nll.size()); }
  double perplexity() const {
    return std::exp(std::accumulate(nll.begin(), nll.end(), 0.0) / static_cast<double>(nll.size()));
  }
};

inline constexpr int64_t kWindow = 256;  ///< rows of a window of the scored text, four pages

/// Root mean square of the differences of two rows of logits.
inline double row_distance(const float* a, const float* b, int64_t width) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(sum / static_cast<double>(width));
}

/// How far two runs are apart.
struct Distance {
  double rms = 0, largest = 0;  ///< of the differences of logits
  int64_t at = 0;               ///< of the largest
  double perplexity = 0;        ///< difference
  double lean = 0;              ///< mean difference of a window's loss, in standard errors
};

inline Distance distance(const Scores& from, const Scores& to) {
  Distance d;
  const int64_t V = from.vocabulary();
  std::vector<double> window((from.nll.size() + kWindow - 2) / (kWindow - 1));
  for (size_t row = 0; row < from.nll.size(); ++row) {
    const float *a = from.logits.data() + row * V, *b = to.logits.data() + row * V;
    d.rms += std::pow(row_distance(a, b, V), 2) / static_cast<double>(from.nll.size());
    for (int64_t i = 0; i < V; ++i) {
      const double difference = std::fabs(double{a[i]} - b[i]);
      if (difference <= d.largest || std::isnan(d.largest)) continue;  // a NaN is the largest of all
      d.largest = difference;
      d.at = static_cast<int64_t>(row) * V + i;
    }
    // Tokens of a window share a cache and its rounding: windows are the independent pieces.
    window[row / (kWindow - 1)] += to.nll[row] - from.nll[row];
  }
  d.rms = std::sqrt(d.rms);
  d.perplexity = to.perplexity() - from.perplexity();
  const double count = static_cast<double>(window.size());
  const double mean = std::accumulate(window.begin(), window.end(), 0.0) / count;
  double spread = 0;
  for (double w : window) spread += (w - mean) * (w - mean);
  d.lean = spread > 0 ? mean / std::sqrt(spread / (count - 1) / count) : 0;
  return d;
}

}  // namespace fut::test
