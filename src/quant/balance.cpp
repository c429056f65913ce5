#include "quant/balance.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"

namespace fut {
namespace {

constexpr int kRounds = 40;
constexpr int kPower = 4;                  // of the mean that stands for a group's maximum
constexpr double kLeastImportance = 1e-3;  // of the group's mean: what calibration did not see may come all the same

/// The columns of one group as b = 1 / c, from a first guess. The loss is (sum over rows of step^2) times (sum over
/// columns of importance / b^2); where it is least, a column has the same share of both sums. So every b moves by the
/// ratio of its shares, to a power that makes the iteration exact where all rows are alike.
class Group {
 public:
  Group(const float* w, int64_t rows, int64_t stride, int64_t count, const float* importance)
      : w_(w), rows_(rows), stride_(stride), importance_(importance, importance + count), b_(count, 1.0) {
    double mean = 0;
    for (double m : importance_) mean += m / static_cast<double>(count);
    if (!(mean > 0) || !std::isfinite(mean)) return;
    for (int64_t k = 0; k < count; ++k) {
      importance_[k] = std::max(importance_[k], kLeastImportance * mean);
      b_[k] = std::pow(importance_[k] / mean, 0.25);
    }
    for (int round = 0; round < kRounds; ++round) {
      if (!improve()) break;
    }
    normalise();
  }

  const std::vector<double>& b() const { return b_; }

 private:
  static_assert(kPower == 4, "the loops take squares of squares");

  /// (count) every column's share of the sum of squared steps; false: there are no weights.
  bool step_shares(std::vector<double>& share) const {
    std::vector<double> size(b_.size());
    double all = 0;
    for (int64_t n = 0; n < rows_; ++n) {
      double sum = 0;
      for (size_t k = 0; k < b_.size(); ++k) {
        const double value = w_[n * stride_ + static_cast<int64_t>(k)] * b_[k];
        size[k] = value * value * (value * value);
        sum += size[k];
      }
      if (!(sum > 0)) continue;
      const double squared_step = std::sqrt(sum);
      for (size_t k = 0; k < b_.size(); ++k) share[k] += size[k] / sum * squared_step;
      all += squared_step;
    }
    for (double& s : share) s /= all;
    return all > 0;
  }

  bool improve() {
    std::vector<double> step_share(b_.size());
    if (!step_shares(step_share)) return false;
    double all = 0;
    for (size_t k = 0; k < b_.size(); ++k) all += importance_[k] / (b_[k] * b_[k]);
    for (size_t k = 0; k < b_.size(); ++k) {
      const double share = importance_[k] / (b_[k] * b_[k]) / all;
      b_[k] *= std::clamp(std::pow(share / std::max(step_share[k], 1e-12), 1.0 / (kPower + 2)), 0.25, 4.0);
    }
    return true;
  }

  void normalise() {
    double mean = 0;
    for (size_t k = 0; k < b_.size(); ++k) mean += importance_[k] / (b_[k] * b_[k]) / static_cast<double>(b_.size());
    for (double& b : b_) b *= std::sqrt(mean);
  }

  const float* w_;
  int64_t rows_, stride_;
  std::vector<double> importance_, b_;
};

}  // namespace

std::vector<float> balance_columns(const float* w, int64_t rows, int64_t cols, int group,
                                   const std::vector<float>& importance) {
  std::vector<float> c(cols);
  parallel_for((cols + group - 1) / group, 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const int64_t start = g * group, count = std::min<int64_t>(group, cols - start);
      const Group balanced(w + start, rows, cols, count, importance.data() + start);
      for (int64_t k = 0; k < count; ++k) c[start + k] = static_cast<float>(1 / balanced.b()[k]);
    }
  });
  return c;
}

}  // namespace fut
