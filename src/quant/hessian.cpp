#include "quant/hessian.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "quant/panel_product.h"

namespace fut {
namespace {

constexpr int64_t kChunkRows = 512;
constexpr double kLeastRise = 1e-4;  // the second attempt where the first was without damping

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

}  // namespace

Hessian::Hessian(int64_t cols) : cols_(cols), panel_(kPanel), panels_((cols + kPanel - 1) / kPanel) {
  chunk_.resize(panels_ * kChunkRows * kPanel);
  sum_.resize(padded() * padded());
}

void Hessian::add(const float* x, int64_t rows) {
  for (int64_t done = 0; done < rows;) {
    const int64_t count = std::min(rows - done, kChunkRows - waiting_);
    parallel_for(panels_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t width = std::min(kPanel, cols_ - p * kPanel);
        for (int64_t r = 0; r < count; ++r) {
          std::copy_n(x + (done + r) * cols_ + p * kPanel, width,
                      chunk_.data() + (p * kChunkRows + waiting_ + r) * kPanel);
        }
      }
    });
    waiting_ += count;
    done += count;
    if (waiting_ == kChunkRows) flush();
  }
}

void Hessian::flush() {
  std::vector<std::pair<int64_t, int64_t>> tiles;
  for (int64_t i = 0; i < panels_; ++i) {
    for (int64_t j = i; j < panels_; ++j) tiles.emplace_back(i, j);
  }
  parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto [i, j] = tiles[t];
      float tile[kPanel * kPanel] = {};
      panel_product(tile, chunk_.data() + i * kChunkRows * kPanel, chunk_.data() + j * kChunkRows * kPanel, waiting_);
      for (int64_t r = 0; r < kPanel; ++r) {
        double* to = sum_.data() + (i * kPanel + r) * padded() + j * kPanel;
        for (int64_t c = 0; c < kPanel; ++c) to[c] += double{tile[r * kPanel + c]};
      }
    }
  });
  rows_ += waiting_;
  waiting_ = 0;
}

std::vector<double> Hessian::take() {
  if (waiting_ > 0) flush();
  chunk_.clear();
  const int64_t n = padded();
  const double share = rows_ > 0 ? 1.0 / static_cast<double>(rows_) : 0.0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) sum_[j * n + i] = sum_[i * n + j] = sum_[i * n + j] * share;
  }
  return std::move(sum_);
}

Factor factorise(const std::vector<double>& h, int64_t n, double damping) {
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += h[i * n + i] / static_cast<double>(n);
  if (!std::isfinite(mean) || mean <= 0) return {};
  while (damping <= 1.0) {
    Factor out{h, damping, damping * mean};
    for (int64_t i = 0; i < n; ++i) out.lower[i * n + i] += out.added;
    Eigen::Map<Matrix> matrix(out.lower.data(), n, n);
    const Eigen::LLT<Eigen::Ref<Matrix>> cholesky(matrix);
    // A pivot of a sum of squares is at least the damping; one that is far below shows that rounding has won.
    bool sound = cholesky.info() == Eigen::Success;
    for (int64_t i = 0; i < n && sound; ++i) {
      const double pivot = matrix(i, i) * matrix(i, i);
      sound = pivot > 0 && pivot >= 0.5 * out.added && std::isfinite(pivot);
    }
    if (sound) return out;
    damping = std::max(10 * damping, kLeastRise);
  }
  return {};
}

}  // namespace fut
