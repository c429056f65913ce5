#include "layout/hadamard.h"

#include <vector>

#include "base/parallel.h"

namespace fut {

void hadamard_rotate_columns(float* w, int64_t rows, int64_t cols, int64_t width) {
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t start = 0; start < cols; start += width)
        hadamard_rotate(w + n * cols + start, static_cast<int>(width));
    }
  });
}

void hadamard_rotate_rows(float* w, int64_t rows, int64_t cols, int64_t width) {
  parallel_for(cols, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> column(rows);
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t n = 0; n < rows; ++n) column[n] = w[n * cols + k];
      for (int64_t start = 0; start < rows; start += width)
        hadamard_rotate(column.data() + start, static_cast<int>(width));
      for (int64_t n = 0; n < rows; ++n) w[n * cols + k] = column[n];
    }
  });
}

}  // namespace fut
