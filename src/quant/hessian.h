// What a product's inputs tell about its weights: H = mean of x x^T. The output error of a row w read as q is
// (w - q) H (w - q)^T on average over those inputs.
#pragma once

#include <cstdint>
#include <vector>

namespace fut {

/// Mean of a b^T over rows a (A), b (B). Streamed: sums of 512 rows in FP32, sums of those in FP64. How the rows are
/// split over calls and threads changes nothing.
class MeanProduct {
 public:
  MeanProduct(int64_t a_cols, int64_t b_cols) : MeanProduct(a_cols, b_cols, false) {}

  /// a (rows, A), b (rows, B).
  void add(const float* a, const float* b, int64_t rows);

  int64_t rows() const { return rows_; }

  /// The mean so far, (A', B') row-major, both rounded up to whole panels, zeros behind A and B; nothing can be added
  /// afterwards.
  std::vector<double> take();

 protected:
  MeanProduct(int64_t a_cols, int64_t b_cols, bool symmetric);

 private:
  /// Panels of (rows of a chunk, 32).
  struct Side {
    int64_t cols, panels;
    std::vector<float> chunk;
    void put(const float* x, int64_t at, int64_t rows);
    const float* panel(int64_t p) const;
  };

  void flush();

  Side a_, b_;
  bool symmetric_;  // b is a: only tiles on and right of the diagonal are summed
  int64_t rows_ = 0, waiting_ = 0;
  std::vector<double> sum_;  // (A', B')
};

/// H.
class Hessian : public MeanProduct {
 public:
  explicit Hessian(int64_t cols) : MeanProduct(cols, cols, true), cols_(cols) {}

  /// x (rows, K).
  void add(const float* x, int64_t rows) { MeanProduct::add(x, x, rows); }

  int64_t cols() const { return cols_; }
  int64_t padded() const;  ///< K'

 private:
  int64_t cols_;
};

/// H + damping * mean(diagonal) * I = L L^T.
struct Factor {
  std::vector<double> lower;  // (K', K') row-major; empty: no damping up to 1 made it positive definite
  double damping = 0;         ///< that was needed, at least what was asked for
  double added = 0;           ///< to the diagonal: damping times its mean
};

/// `h` (n, n) row-major, symmetric. Where the factorisation fails, damping rises tenfold until it does not.
Factor factorise(const std::vector<double>& h, int64_t n, double damping);

/// Every row b of `rows` (count, n) becomes b (L L^T)^-1.
void solve(const std::vector<double>& lower, int64_t n, double* rows, int64_t count);

}  // namespace fut
