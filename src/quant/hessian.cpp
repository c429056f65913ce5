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

int64_t panels(int64_t cols) { return (cols + kPanel - 1) / kPanel; }

}  // namespace

MeanProduct::MeanProduct(int64_t a_cols, int64_t b_cols, bool symmetric)
    : a_{a_cols, panels(a_cols), {}}, b_{b_cols, panels(b_cols), {}}, symmetric_(symmetric) {
  a_.chunk.resize(a_.panels * kChunkRows * kPanel);
  if (!symmetric) b_.chunk.resize(b_.panels * kChunkRows * kPanel);
  sum_.resize(a_.panels * b_.panels * kPanel * kPanel);
}

void MeanProduct::Side::put(const float* x, int64_t at, int64_t rows) {
  parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t width = std::min(kPanel, cols - p * kPanel);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(x + r * cols + p * kPanel, width, chunk.data() + (p * kChunkRows + at + r) * kPanel);
    }
  });
}

const float* MeanProduct::Side::panel(int64_t p) const { return chunk.data() + p * kChunkRows * kPanel; }

void MeanProduct::add(const float* a, const float* b, int64_t rows) {
  for (int64_t done = 0; done < rows;) {
    const int64_t count = std::min(rows - done, kChunkRows - waiting_);
    a_.put(a + done * a_.cols, waiting_, count);
    if (!symmetric_) b_.put(b + done * b_.cols, waiting_, count);
    waiting_ += count;
    done += count;
    if (waiting_ == kChunkRows) flush();
  }
}

void MeanProduct::flush() {
  std::vector<std::pair<int64_t, int64_t>> tiles;
  for (int64_t i = 0; i < a_.panels; ++i) {
    for (int64_t j = symmetric_ ? i : 0; j < b_.panels; ++j) tiles.emplace_back(i, j);
  }
  const Side& right = symmetric_ ? a_ : b_;
  const int64_t width = b_.panels * kPanel;
  parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto [i, j] = tiles[t];
      float tile[kPanel * kPanel] = {};
      panel_product(tile, a_.panel(i), right.panel(j), waiting_);
      for (int64_t r = 0; r < kPanel; ++r) {
        double* to = sum_.data() + (i * kPanel + r) * width + j * kPanel;
        for (int64_t c = 0; c < kPanel; ++c) to[c] += double{tile[r * kPanel + c]};
      }
    }
  });
  rows_ += waiting_;
  waiting_ = 0;
}

std::vector<double> MeanProduct::take() {
  if (waiting_ > 0) flush();
  a_.chunk.clear();
  b_.chunk.clear();
  const double share = rows_ > 0 ? 1.0 / static_cast<double>(rows_) : 0.0;
  for (double& sum : sum_) sum *= share;
  const int64_t n = b_.panels * kPanel;
  for (int64_t i = 0; i < n && symmetric_; ++i) {
    for (int64_t j = i; j < n; ++j) sum_[j * n + i] = sum_[i * n + j];
  }
  return std::move(sum_);
}

int64_t Hessian::padded() const { return panels(cols_) * kPanel; }

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

void solve(const std::vector<double>& lower, int64_t n, double* rows, int64_t count) {
  const Eigen::Map<const Matrix> l(lower.data(), n, n);
  Eigen::Map<Eigen::MatrixXd> columns(rows, n, count);
  l.triangularView<Eigen::Lower>().solveInPlace(columns);
  l.transpose().triangularView<Eigen::Upper>().solveInPlace(columns);
}

}  // namespace fut
