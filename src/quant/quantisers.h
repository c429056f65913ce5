// The algorithms that turn a weight matrix into INT4, by the name that `fut quantize --method` takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/host_weight.h"

namespace fut {

/// w (N, K) f32 -> codes and scales with groups of `group` along K. `name` is for messages.
using Quantise = HostWeight (*)(const float* w, int64_t rows, int64_t cols, int group, const std::string& name);

struct Quantiser {
  const char* name;
  Quantise quantise;
};

const std::vector<Quantiser>& quantisers();

/// Throws, naming the known ones.
const Quantiser& find_quantiser(const std::string& name);

/// Round to nearest: every group by itself, the scale searched over sign and clipping (host_weight.h). Needs no data.
HostWeight quantise_rtn(const float* w, int64_t rows, int64_t cols, int group, const std::string& name);

}  // namespace fut
