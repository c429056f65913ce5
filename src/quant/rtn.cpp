#include "quant/quantisers.h"

namespace fut {
namespace {

class Rtn final : public WeightQuantiser {
 public:
  QuantisedMatrix quantise(const float* w, int64_t rows, int64_t cols, int group, const std::string& name) override {
    return {encode_weight(Dtype::int4, group, w, rows, cols, name), 0, 0, ""};
  }
};

}  // namespace

std::unique_ptr<WeightQuantiser> make_rtn(const QuantiserOptions&) { return std::make_unique<Rtn>(); }

}  // namespace fut
