#include "quant/quantisers.h"

#include "base/error.h"

namespace fut {

const std::vector<Quantiser>& quantisers() {
  static const std::vector<Quantiser> table = {{"rtn", "round to nearest, no data", make_rtn},
                                               {"gptq", "least error on the products' inputs", make_gptq}};
  return table;
}

const Quantiser& find_quantiser(const std::string& name) {
  std::string known;
  for (const Quantiser& q : quantisers()) {
    if (q.name == name) return q;
    known += cat(known.empty() ? "" : ", ", q.name);
  }
  fail("quantiser \"", name, "\" is unknown (known: ", known, ")");
}

}  // namespace fut
