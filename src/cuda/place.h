// Weights in the order of the kernels' tiles, made on the host.
#pragma once

#include <vector>

#include "layout/host_weight.h"

namespace fut::cuda {

/// Tiles [ceil(N / 16)][K / 64] of weight_tile.cuh; rows beyond N are zero. Throws where this backend has no kernel.
std::vector<uint8_t> make_tiles(const HostWeight& weight);

}  // namespace fut::cuda
