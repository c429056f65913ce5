// The algorithms that turn a weight matrix into INT4, by the name that `fut quantize --method` takes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layout/weight_quantiser.h"

namespace fut {

struct QuantiserOptions {
  double damping = 0.01;  ///< gptq: added to the Hessian's diagonal, as a share of its mean
  int sweeps = 4;         ///< gptq: passes of coordinate descent over codes and scales behind the first one
  /// gptq: counts as this many inputs without drift, when weights make up for the drift of their inputs (gptq.cpp).
  double drift_prior = 12000;
};

struct Quantiser {
  const char* name;
  const char* summary;  ///< for the help text
  std::unique_ptr<WeightQuantiser> (*make)(const QuantiserOptions& options);
};

const std::vector<Quantiser>& quantisers();

/// Throws, naming the known ones.
const Quantiser& find_quantiser(const std::string& name);

/// Round to nearest: every group by itself, the scale searched over sign and clipping (host_weight.h). Needs no data.
std::unique_ptr<WeightQuantiser> make_rtn(const QuantiserOptions& options);

/// Least output error on the inputs of the product (gptq.cpp).
std::unique_ptr<WeightQuantiser> make_gptq(const QuantiserOptions& options);

}  // namespace fut
