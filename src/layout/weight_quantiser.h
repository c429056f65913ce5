// What the engine asks of an algorithm that turns weights into INT4. quant/ implements it, engine/quantize.cpp calls
// it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/host_weight.h"

namespace fut {

struct QuantisedMatrix {
  HostWeight weight;
  double loss = 0;      ///< share of the wanted outputs' energy that is lost on the inputs seen; 0 where none were
  double rtn_loss = 0;  ///< what round-to-nearest loses on them
  std::string warning;  ///< one line that the user should read, or empty
};

class WeightQuantiser {
 public:
  virtual ~WeightQuantiser() = default;

  /// Whether start_product() and add_inputs() must come before quantise().
  virtual bool wants_inputs() const { return false; }
  /// The matrices from here on multiply inputs of `cols` elements, which are still to come.
  virtual void start_product(int64_t cols) { (void)cols; }
  /// x (rows, K): inputs of the product, in any number of calls, all before the first quantise().
  virtual void add_inputs(const float* x, int64_t rows) { (void)x, (void)rows; }
  /// After add_inputs(), for the same rows: how far the original model is from them. drift (rows, K): its inputs minus
  /// x. lack (rows, N), where the outputs are added to the residual stream: its stream minus ours; elsewhere null. What
  /// the outputs can make up for, they may.
  virtual void add_drift(const float* x, int64_t rows, const float* drift, const float* lack, int64_t width) {
    (void)x, (void)rows, (void)drift, (void)lack, (void)width;
  }

  /// The input scale (HostWeight) that suits w (N, K) best, before quantise() is given what it leaves of the rows of w.
  /// `folded` (K): what of each column came from the norm's gain.
  virtual std::vector<float> input_scale(const float* w, int64_t rows, int64_t cols, int group,
                                         const std::vector<float>& folded) {
    (void)w, (void)rows, (void)cols, (void)group;
    return folded;
  }
  /// The scale that was taken in the end: the inputs seen are to be thought multiplied by it.
  virtual void scale_inputs(const std::vector<float>& scale) { (void)scale; }

  /// w (N, K) f32 -> codes and scales with groups of `group` along K. `name` is for messages.
  virtual QuantisedMatrix quantise(const float* w, int64_t rows, int64_t cols, int group, const std::string& name) = 0;
};

}  // namespace fut
