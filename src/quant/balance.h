// Input scales for INT4: which share of a column's magnitude its input takes over, so that the columns of a group,
// which have one step in common, lose about equally much by it. The idea of AWQ (Lin et al. 2023), without its search
// over one exponent: the scale of every column follows from the weights and the inputs.
#pragma once

#include <cstdint>
#include <vector>

namespace fut {

/// c (K), all positive, for w (N, K) whose rounding errors count `importance` (K) in their column. The loss of rounding
/// w / c, whose inputs are multiplied by c, is about the sum over rows and groups of step^2 times the sum over the
/// group's columns of importance c^2; a step is proportional to the largest |w / c| of its group, for which a smooth
/// maximum stands here. Every group's c make that least; their common factor brings the mean of importance c^2 to 1. A
/// group without importance or without weights gets ones.
std::vector<float> balance_columns(const float* w, int64_t rows, int64_t cols, int group,
                                   const std::vector<float>& importance);

}  // namespace fut
