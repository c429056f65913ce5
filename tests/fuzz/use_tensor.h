// What every driver does with a tensor that a checkpoint lists.
#pragma once

#include <cstring>

#include "fuzz.h"
#include "io/checkpoint.h"

namespace fut::fuzz {

/// Reads it whole, then one of its rows, which must be what stands there in the whole.
inline void use_tensor(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  uint64_t elements = 1;
  for (const int64_t extent : tensor.shape) elements *= static_cast<uint64_t>(extent);
  const std::vector<float> all = checkpoint.read_f32(tensor.name);
  require(all.size() == elements, "read_f32 gives another count than the shape");
  if (tensor.shape.size() != 2 || all.empty()) return;
  const int64_t first = tensor.shape[0] / 2;
  const std::vector<float> row = checkpoint.read_rows(tensor.name, first, 1);  // refused where rows are reordered
  require(row.size() == static_cast<uint64_t>(tensor.shape[1]), "a row of another length than the shape");
  require(memcmp(row.data(), all.data() + first * tensor.shape[1], row.size() * sizeof(float)) == 0,
          "a row is not what the whole has there");
}

}  // namespace fut::fuzz
