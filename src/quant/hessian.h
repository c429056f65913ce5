// What a product's inputs tell about its weights: H = mean of x x^T. The output error of a row w read as q is
// (w - q) H (w - q)^T on average over those inputs.
#pragma once

#include <cstdint>
#include <vector>

namespace fut {

/// Streamed: sums of 512 rows in FP32, sums of those in FP64. How the rows are split over calls and threads changes
/// nothing.
class Hessian {
 public:
  explicit Hessian(int64_t cols);

  /// x (rows, K).
  void add(const float* x, int64_t rows);

  int64_t cols() const { return cols_; }
  int64_t padded() const { return panels_ * panel_; }
  int64_t rows() const { return rows_; }

  /// The mean so far, (K', K') row-major with K' = padded(), zeros behind K; nothing can be added afterwards.
  std::vector<double> take();

 private:
  void flush();

  int64_t cols_, panel_, panels_, rows_ = 0, waiting_ = 0;
  std::vector<float> chunk_;  // panels of (rows of a chunk, 32)
  std::vector<double> sum_;   // (K', K'), tiles on and right of the diagonal
};

/// H + damping * mean(diagonal) * I = L L^T.
struct Factor {
  std::vector<double> lower;  // (K', K') row-major; empty: no damping up to 1 made it positive definite
  double damping = 0;         ///< that was needed, at least what was asked for
  double added = 0;           ///< to the diagonal: damping times its mean
};

/// `h` (n, n) row-major, symmetric. Where the factorisation fails, damping rises tenfold until it does not.
Factor factorise(const std::vector<double>& h, int64_t n, double damping);

}  // namespace fut
