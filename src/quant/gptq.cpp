// GPTQ: codes that make the outputs right instead of the weights.
//
// MATH. For a row w of W and the Hessian H of the product's inputs, the output error of codes q is e = d H d^T with
// d = w - q. With H (damped) = L L^T it is the sum over columns k of (L_kk d_k + sum_{j > k} L_jk d_j)^2. So columns
// are rounded from the last to the first, each to the nearest level of
//     w_k + sum_{j > k} d_j L_jk / L_kk,
// which takes over what the columns before it got wrong: GPTQ's update (Frantar et al. 2022), in the form of Babai's
// nearest plane, which needs the Cholesky factor of H itself and no inverse.
//
// TARGET. Inputs x of a layer behind quantised ones are not the original model's x'. What its product made of x', and
// what the residual stream r' had more than r where the outputs are added to one, is wanted of ours: the least mean
// square of W x' + (r' - r) - W* x is at
//     W* = W + (W D + R) H^-1,  D = mean of (x' - x) x^T,  R = mean of (r' - r) x^T,
// and W* is what is quantised (idea of the first term: GPTAQ, Li et al. 2025). In directions in which inputs are small,
// most of D and R is chance: a prior, so many inputs of mean size, on H's diagonal holds W* to W there.
//
// ORDER. Columns are permuted by their diagonal before factorising, so that those with the largest inputs come first,
// while others can still make up for them. Groups and their scales stay where they are: nothing is permuted at run
// time.
//
// SCALES are chosen before the codes, by squared error weighted with the diagonal, over both signs and clips, as FP16
// (encode_int4_group).
//
// INPUT SCALES where a norm in front can multiply them (balance.h), weighted with the pivots L_kk^2: that is what a
// column's rounding costs here. H becomes C H C.
//
// SWEEPS. Behind the first pass come passes of coordinate descent on the same error (idea: QuantEase, Behdin et al.
// 2023): every code in turn to the level nearest to its optimum given all others, then every scale to its least-squares
// value given its codes, rounded to FP16 and kept if that helps. The error falls with each step.
//
// SCHEDULE. 32 rows at a time, independent of all others, lie side by side (column, row), so that every step is a loop
// over 32 floats and everything else is panel_product(). A row that round-to-nearest does better keeps its codes.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "layout/int4_fragment.h"
#include "quant/balance.h"
#include "quant/hessian.h"
#include "quant/panel_product.h"
#include "quant/quantisers.h"

namespace fut {
namespace {

constexpr int64_t kRows = kPanel;  // of W, that are worked on together

/// What all rows of a product share.
struct Inputs {
  int64_t cols = 0, n = 0;      ///< K, and K rounded up to whole panels
  bool usable = false;          ///< whether H could be factorised
  double damping = 0;           ///< as it was needed
  float added = 0;              ///< to the diagonal
  std::vector<float> diagonal;  // (n) of H, damped
  std::vector<float> pivot;     // (n) L_kk^2 of a column: what its rounding costs when those behind it make up for it
  std::vector<float> hessian;   // panels (n, 32) of H, damped, columns in their own order
  std::vector<int64_t> column;  // (n) which one is at a position; the last position is rounded first
  std::vector<float> factor;    // panels of L_jk / L_kk by position, each from its first row on: see panel_start

  const float* hessian_panel(int64_t p) const { return hessian.data() + p * n * kPanel; }
  /// Panel p holds the rows j = 32 p .. n - 1.
  int64_t panel_start(int64_t p) const { return (p * n - kPanel * (p * (p - 1) / 2)) * kPanel; }
};

/// `h` (n, n): mean of the outer products of inputs of `cols` elements, zeros behind.
Inputs prepare(const std::vector<double>& h, int64_t n, int64_t cols, double damping) {
  Inputs in;
  in.cols = cols;
  in.n = n;
  in.column.resize(n);
  std::iota(in.column.begin(), in.column.end(), 0);
  std::stable_sort(in.column.begin(), in.column.end(),
                   [&](int64_t a, int64_t b) { return h[a * n + a] < h[b * n + b]; });
  std::vector<double> permuted(n * n);
  parallel_for(n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; ++j) permuted[i * n + j] = h[in.column[i] * n + in.column[j]];
    }
  });
  const Factor factor = factorise(permuted, n, damping);
  if (factor.lower.empty()) return in;
  in.usable = true;
  in.damping = factor.damping;
  in.added = static_cast<float>(factor.added);
  in.hessian.resize(n * n);
  in.factor.resize(in.panel_start(n / kPanel));
  in.diagonal.resize(n);
  in.pivot.resize(n);
  for (int64_t i = 0; i < n; ++i)
    in.pivot[in.column[i]] = static_cast<float>(factor.lower[i * n + i] * factor.lower[i * n + i]);
  parallel_for(n / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < kPanel; ++i) {
          const int64_t k = p * kPanel + i;
          in.hessian[(p * n + j) * kPanel + i] = static_cast<float>(h[j * n + k] + (j == k ? factor.added : 0));
          if (j == k) in.diagonal[k] = in.hessian[(p * n + j) * kPanel + i];
          if (j < p * kPanel) continue;
          in.factor[in.panel_start(p) + (j - p * kPanel) * kPanel + i] =
              j > k ? static_cast<float>(factor.lower[j * n + k] / factor.lower[k * n + k]) : 0.0f;
        }
      }
    }
  });
  return in;
}

using Lane = float[kRows];

/// Up to 32 rows of W and what has become of them. Arrays are (column, row).
class RowBlock {
 public:
  RowBlock(const Inputs& in, int group)
      : in_(in),
        group_(group),
        groups_((in.cols + group - 1) / group),
        w_(in.n * kRows),
        d_(in.n * kRows),
        level_(in.n * kRows),
        permuted_(in.n * kRows),
        scale_(groups_ * kRows),
        gradient_(kMaxGroup * kRows),
        curvature_(kMaxGroup * kRows) {}

  void load(const float* w, int64_t rows) {
    rows_ = rows;
    std::fill(w_.begin(), w_.end(), 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < in_.cols; ++k) w_[k * kRows + r] = w[r * in_.cols + k];
    }
  }

  /// Scales of every group by themselves.
  void choose_scales() {
    const float largest = *std::max_element(in_.diagonal.begin(), in_.diagonal.end());
    std::vector<float> importance(in_.cols), row(in_.cols);
    for (int64_t k = 0; k < in_.cols; ++k) importance[k] = in_.diagonal[k] / largest;
    uint8_t codes[kMaxGroup];
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t k = 0; k < in_.cols; ++k) row[k] = w_[k * kRows + r];
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t start = g * group_;
        scale_[g * kRows + r] =
            to_f32(encode_int4_group(row.data() + start, static_cast<int>(count(g)), codes, importance.data() + start));
      }
    }
  }

  /// Codes, by the first pass.
  void round_columns() {
    Lane target[kPanel];
    for (int64_t p = in_.n / kPanel; p-- > 0;) {
      const float* factor = in_.factor.data() + in_.panel_start(p);
      const int64_t next = (p + 1) * kPanel;
      std::fill(&target[0][0], &target[0][0] + kPanel * kRows, 0.0f);
      panel_product(&target[0][0], factor + kPanel * kPanel, permuted_.data() + next * kRows, in_.n - next);
      for (int64_t i = kPanel; i-- > 0;) {
        const int64_t position = p * kPanel + i, k = in_.column[position];
        float* d = permuted_.data() + position * kRows;
        if (k >= in_.cols) {
          std::fill(d, d + kRows, 0.0f);
          continue;
        }
        const float *w = w_.data() + k * kRows, *scale = scale_.data() + k / group_ * kRows;
        float* level = level_.data() + k * kRows;
        for (int64_t r = 0; r < kRows; ++r) {
          level[r] = int4_level(w[r] + target[i][r], inverse(scale[r]));
          d[r] = w[r] - scale[r] * level[r];
        }
        for (int64_t before = 0; before < i; ++before) {
          const float share = factor[i * kPanel + before];
          for (int64_t r = 0; r < kRows; ++r) target[before][r] += share * d[r];
        }
        std::copy(d, d + kRows, d_.data() + k * kRows);
      }
    }
  }

  void sweep() {
    for (int64_t g = 0; g < groups_; ++g) {
      gradients(g * group_, count(g));
      descend(g);
      refit(g);
    }
  }

  /// d H d^T of every row, without the damping.
  void error(double* of_row) {
    std::fill(of_row, of_row + kRows, 0.0);
    for (int64_t start = 0; start < in_.cols; start += kPanel) {
      const int64_t width = std::min(kPanel, in_.cols - start);
      gradients(start, width);
      for (int64_t i = 0; i < width; ++i) {
        const float *d = d_.data() + (start + i) * kRows, *g = gradient_.data() + i * kRows;
        for (int64_t r = 0; r < kRows; ++r) of_row[r] += double{d[r]} * (g[r] - in_.added * d[r]);
      }
    }
  }

  /// The error of having nothing: w H w^T.
  void energy(double* of_row) {
    d_ = w_;
    error(of_row);
  }

  /// Codes and scales from elsewhere.
  void take(const HostWeight& weight, int64_t first_row) {
    for (int64_t r = 0; r < rows_; ++r) {
      const uint8_t* codes = weight.data.data() + (first_row + r) * weight.row_bytes();
      for (int64_t g = 0; g < groups_; ++g)
        scale_[g * kRows + r] = to_f32(weight.group_scale[(first_row + r) * groups_ + g]);
      for (int64_t k = 0; k < in_.cols; ++k) {
        level_[k * kRows + r] = static_cast<float>((codes[k / 2] >> (k % 2 * 4) & 15) - kInt4Zero);
      }
    }
    update_differences();
  }

  void put(HostWeight& weight, int64_t first_row, int64_t r) const {
    uint8_t* codes = weight.data.data() + (first_row + r) * weight.row_bytes();
    std::fill(codes, codes + weight.row_bytes(), uint8_t{0});
    for (int64_t g = 0; g < groups_; ++g)
      weight.group_scale[(first_row + r) * groups_ + g] = to_half(scale_[g * kRows + r]);
    for (int64_t k = 0; k < in_.cols; ++k) {
      const int code = static_cast<int>(level_[k * kRows + r]) + kInt4Zero;
      codes[k / 2] = static_cast<uint8_t>(codes[k / 2] | code << (k % 2 * 4));
    }
  }

 private:
  static constexpr int64_t kMaxGroup = 128;

  static float inverse(float scale) { return scale != 0.0f ? 1.0f / scale : 0.0f; }
  int64_t count(int64_t g) const { return std::min<int64_t>(group_, in_.cols - g * group_); }

  void update_differences() {
    for (int64_t k = 0; k < in_.cols; ++k) {
      const float* scale = scale_.data() + k / group_ * kRows;
      for (int64_t i = k * kRows; i < (k + 1) * kRows; ++i) d_[i] = w_[i] - scale[i - k * kRows] * level_[i];
    }
  }

  /// (d H) of the columns from `start` on, which is a panel's first.
  void gradients(int64_t start, int64_t columns) {
    std::fill(gradient_.begin(), gradient_.end(), 0.0f);
    for (int64_t i = 0; i < columns; i += kPanel) {
      panel_product(gradient_.data() + i * kRows, in_.hessian_panel((start + i) / kPanel), d_.data(), in_.n);
    }
  }

  /// One code after the other to its optimum; the group's gradients follow.
  void descend(int64_t g) {
    const int64_t start = g * group_, columns = count(g);
    const float* scale = scale_.data() + g * kRows;
    Lane change, inverses;
    for (int64_t r = 0; r < kRows; ++r) inverses[r] = inverse(scale[r]);
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t k = start + i;
      float *level = level_.data() + k * kRows, *d = d_.data() + k * kRows, largest = 0.0f;
      const float *gradient = gradient_.data() + i * kRows, step = 1.0f / in_.diagonal[k];
      for (int64_t r = 0; r < kRows; ++r) {
        const float better = int4_level(scale[r] * level[r] + gradient[r] * step, inverses[r]);
        change[r] = scale[r] * (better - level[r]);
        level[r] = better;
        d[r] -= change[r];
        largest = std::max(largest, std::fabs(change[r]));
      }
      if (largest == 0.0f) continue;
      for (int64_t p = 0; p < columns; p += kPanel) {
        const float* h = in_.hessian_panel((start + p) / kPanel) + k * kPanel;
        for (int64_t j = 0; j < std::min(kPanel, columns - p); ++j) {
          float* to = gradient_.data() + (p + j) * kRows;
          for (int64_t r = 0; r < kRows; ++r) to[r] -= h[j] * change[r];
        }
      }
    }
  }

  /// The scale that suits the group's codes best: with c the codes, moving s by t changes the error by
  /// -2 t (c . dH) + t^2 (c H c).
  void refit(int64_t g) {
    const int64_t start = g * group_, columns = count(g);
    std::fill(curvature_.begin(), curvature_.end(), 0.0f);
    const float* codes = level_.data() + start * kRows;
    for (int64_t i = 0; i < columns; i += kPanel) {
      panel_product(curvature_.data() + i * kRows, in_.hessian_panel((start + i) / kPanel) + start * kPanel, codes,
                    columns);
    }
    Lane slope = {}, bend = {};
    for (int64_t i = 0; i < columns * kRows; ++i) {
      slope[i % kRows] += codes[i] * gradient_[i];
      bend[i % kRows] += codes[i] * curvature_[i];
    }
    float* scale = scale_.data() + g * kRows;
    for (int64_t r = 0; r < kRows; ++r) {
      if (!(bend[r] > 0.0f)) continue;
      const float wanted = to_f32(to_half(scale[r] + slope[r] / bend[r])), move = wanted - scale[r];
      if (wanted == 0.0f || !std::isfinite(wanted) || 2 * move * slope[r] <= move * move * bend[r]) continue;
      scale[r] = wanted;
      for (int64_t k = start; k < start + columns; ++k)
        d_[k * kRows + r] = w_[k * kRows + r] - wanted * level_[k * kRows + r];
    }
  }

  const Inputs& in_;
  int64_t group_, groups_, rows_ = 0;
  std::vector<float> w_, d_, level_, permuted_;
  std::vector<float> scale_;  // (groups, row)
  std::vector<float> gradient_, curvature_;
};

class Gptq final : public WeightQuantiser {
 public:
  explicit Gptq(const QuantiserOptions& options) : options_(options) {}

  bool wants_inputs() const override { return true; }
  void start_product(int64_t cols) override {
    prepared_ = false;
    hessian_.clear();
    scale_.clear();
    sums_.emplace(cols);
    drift_.reset();
    lack_.reset();
    held_.clear();
    lacking_.clear();
  }
  void add_inputs(const float* x, int64_t rows) override { sums_->add(x, rows); }
  void add_drift(const float* x, int64_t rows, const float* drift, const float* lack, int64_t width) override {
    if (!drift_) drift_.emplace(sums_->cols(), sums_->cols());
    drift_->add(drift, x, rows);
    if (!lack) return;
    if (!lack_) lack_.emplace(width, sums_->cols());
    lack_->add(lack, x, rows);
  }

  std::vector<float> input_scale(const float* w, int64_t rows, int64_t cols, int group,
                                 const std::vector<float>& folded) override {
    const Inputs in = prepare(hessian(), sums_->padded(), cols, options_.damping);
    return in.usable ? balance_columns(w, rows, cols, group, in.pivot) : folded;
  }
  void scale_inputs(const std::vector<float>& scale) override { scale_ = scale; }

  QuantisedMatrix quantise(const float* w, int64_t rows, int64_t cols, int group, const std::string& name) override {
    FUT_CHECK(sums_ && sums_->cols() == cols, name, ": has ", cols, " columns, the inputs seen have ",
              sums_ ? sums_->cols() : 0);
    if (!prepared_) prepare_inputs();
    const std::vector<float> wanted = target(w, rows, cols);
    w = wanted.data();
    QuantisedMatrix out;
    out.weight = encode_weight(Dtype::int4, group, w, rows, cols, name);
    if (!inputs_.usable) {
      out.warning = cat(name, ": its inputs give no positive definite Hessian; rounded to nearest instead");
      return out;
    }
    if (inputs_.damping > options_.damping)
      out.warning = cat(name, ": needed damping ", inputs_.damping, " instead of ", options_.damping);
    std::vector<double> loss(rows), rtn_loss(rows), energy(rows);
    parallel_for(rows, kRows, [&](int64_t begin, int64_t end) {
      RowBlock block(inputs_, group);
      for (int64_t n = begin; n < end; n += kRows) {
        const int64_t count = std::min(kRows, end - n);
        double of_row[3][kRows];
        block.load(w + n * cols, count);
        block.energy(of_row[0]);
        block.take(out.weight, n);
        block.error(of_row[1]);
        block.choose_scales();
        block.round_columns();
        for (int i = 0; i < options_.sweeps; ++i) block.sweep();
        block.error(of_row[2]);
        for (int64_t r = 0; r < count; ++r) {
          energy[n + r] = of_row[0][r];
          rtn_loss[n + r] = of_row[1][r];
          loss[n + r] = std::min(of_row[1][r], of_row[2][r]);
          if (of_row[2][r] < of_row[1][r]) block.put(out.weight, n, r);
        }
      }
    });
    const double all = std::accumulate(energy.begin(), energy.end(), 0.0);
    if (all > 0) {
      out.loss = std::accumulate(loss.begin(), loss.end(), 0.0) / all;
      out.rtn_loss = std::accumulate(rtn_loss.begin(), rtn_loss.end(), 0.0) / all;
    }
    return out;
  }

 private:
  const std::vector<double>& hessian() {
    if (hessian_.empty()) hessian_ = sums_->take();
    return hessian_;
  }

  void prepare_inputs() {
    std::vector<double> h = hessian();
    const int64_t n = sums_->padded();
    for (size_t i = 0; i < scale_.size(); ++i) {
      for (size_t j = 0; j < scale_.size(); ++j) h[i * n + j] *= double{scale_[i]} * scale_[j];
    }
    inputs_ = prepare(h, n, sums_->cols(), options_.damping);
    if (drift_) take_drift(std::move(h));
    prepared_ = true;
  }

  float scale(int64_t k) const { return k < static_cast<int64_t>(scale_.size()) ? scale_[k] : 1.0f; }

  /// D and R of the scaled inputs, whose Hessian is `h`, and the factor of what divides them.
  void take_drift(std::vector<double> h) {
    const int64_t n = sums_->padded();
    double trace = 0;
    for (int64_t i = 0; i < n; ++i) trace += h[i * n + i];
    for (int64_t i = 0; i < n; ++i)
      h[i * n + i] += options_.drift_prior / static_cast<double>(sums_->rows()) * trace / static_cast<double>(n);
    held_ = factorise(h, n, options_.damping).lower;
    const std::vector<double> d = drift_->take();
    drift_panels_.resize(n * n);
    for (int64_t k = 0; k < n; ++k) {
      for (int64_t j = 0; j < n; ++j)
        drift_panels_[(j / kPanel * n + k) * kPanel + j % kPanel] =
            static_cast<float>(d[k * n + j] * scale(k) * scale(j));
    }
    if (!lack_) return;
    lacking_ = lack_->take();
    for (size_t i = 0; i < lacking_.size(); ++i) lacking_[i] *= scale(static_cast<int64_t>(i) % n);
  }

  /// W* of rows w, which are all rows where outputs are added to the stream.
  std::vector<float> target(const float* w, int64_t rows, int64_t cols) const {
    std::vector<float> wanted(w, w + rows * cols);
    if (held_.empty() || !inputs_.usable) return wanted;
    const int64_t n = inputs_.n;
    FUT_CHECK(lacking_.empty() || static_cast<int64_t>(lacking_.size()) >= rows * n, "drift of a stream of ",
              lacking_.size() / n, " channels for ", rows, " outputs");
    parallel_for(rows, kRows, [&](int64_t begin, int64_t end) {
      std::vector<float> columns(n * kRows), product(n * kRows);
      std::vector<double> change(kRows * n);
      for (int64_t first = begin; first < end; first += kRows) {
        const int64_t count = std::min(kRows, end - first);
        for (int64_t i = 0; i < count * cols; ++i) columns[i % cols * kRows + i / cols] = w[first * cols + i];
        std::fill(product.begin(), product.end(), 0.0f);
        for (int64_t j = 0; j < n; j += kPanel)
          panel_product(product.data() + j * kRows, drift_panels_.data() + j * n, columns.data(), n);
        for (int64_t i = 0; i < count * n; ++i) {
          const int64_t r = i / n, k = i % n;
          change[i] = product[k * kRows + r] + (lacking_.empty() ? 0.0 : lacking_[(first + r) * n + k]);
        }
        solve(held_, n, change.data(), count);
        for (int64_t i = 0; i < count * n; ++i) {
          const int64_t r = first + i / n, k = i % n;
          if (k < cols) wanted[r * cols + k] += static_cast<float>(change[i]);
        }
      }
    });
    return wanted;
  }

  QuantiserOptions options_;
  std::optional<Hessian> sums_;
  std::optional<MeanProduct> drift_, lack_;
  std::vector<float> drift_panels_;  // D, panels (n, 32)
  std::vector<double> lacking_;      // (N', n) R
  std::vector<double> held_;         // (n, n) factor of H with the prior on its diagonal
  std::vector<double> hessian_;
  std::vector<float> scale_;  // of the inputs, empty: ones
  bool prepared_ = false;
  Inputs inputs_;
};

}  // namespace

std::unique_ptr<WeightQuantiser> make_gptq(const QuantiserOptions& options) { return std::make_unique<Gptq>(options); }

}  // namespace fut
