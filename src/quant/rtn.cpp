#include "quant/quantisers.h"

namespace fut {

HostWeight quantise_rtn(const float* w, int64_t rows, int64_t cols, int group, const std::string& name) {
  return encode_weight(Dtype::int4, group, w, rows, cols, name);
}

}  // namespace fut
