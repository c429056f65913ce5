#include "quant/quantisers.h"

#include "base/error.h"

namespace fut {

const std::vector<Quantiser>& quantisers() {
  static const std::vector<Quantiser> table = {{"rtn", quantise_rtn}};
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
