#include "cpu/operand.h"

#include <array>
#include <atomic>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"

namespace fut::cpu {
namespace {

/// All 256 codes as floats.
const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t;
    for (int i = 0; i < 256; ++i) t[i] = to_f32(E4m3{static_cast<uint8_t>(i)});
    return t;
  }();
  return table;
}

float inverse_rms(const Residual& r, int64_t t, int64_t width) {
  return static_cast<float>(1.0 / std::sqrt(double{r.sum_squares[t]} / static_cast<double>(width) + r.eps));
}

void raise_to(float* amax, float value) {
  std::atomic_ref<float> shared(*amax);
  float seen = shared.load();
  while (value > seen && !shared.compare_exchange_weak(seen, value)) {
  }
}

void add_to(int64_t* counter, int64_t count) {
  if (counter && count) std::atomic_ref<int64_t>(*counter).fetch_add(count);
}

/// Codes of one row; returns how many values were clamped.
int64_t quantise_row(E4m3* to, const float* values, int64_t cols, float scale) {
  int64_t clamped = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const float scaled = values[i] / scale;
    clamped += std::fabs(scaled) > kE4m3Max;
    to[i] = to_e4m3(scaled);
  }
  return clamped;
}

}  // namespace

GemmInput gemm_input(const Operand& operand, int64_t rows, int64_t cols) {
  GemmInput input{std::vector<float>(rows * cols), std::vector<float>(rows, operand.scale)};
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (operand.row_scale) input.row_factor[t] *= operand.row_scale[t];
      for (int64_t i = t * cols; i < (t + 1) * cols; ++i) {
        switch (operand.dtype) {
          case Dtype::f16: input.values[i] = to_f32(static_cast<const Half*>(operand.data)[i]); break;
          case Dtype::e4m3: input.values[i] = e4m3_table()[static_cast<const uint8_t*>(operand.data)[i]]; break;
          default: input.values[i] = load_element(operand.data, operand.dtype, i);
        }
      }
    }
  });
  return input;
}

GemmInput gemm_input(const Residual& residual, const Weight& w, const int64_t* row, int64_t rows) {
  const int64_t width = w.cols;
  const Dtype weight = w.dtype;
  GemmInput input{std::vector<float>(rows * width), std::vector<float>(rows, 1.0f)};
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = row ? row[i] : i;
      const float rstd = inverse_rms(residual, t, width);
      float* values = input.values.data() + i * width;
      if (weight == Dtype::e4m3 && residual.x8) {
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(residual.x8) + t * width;
        for (int64_t k = 0; k < width; ++k) values[k] = e4m3_table()[codes[k]];
        input.row_factor[i] = residual.x8_scale[t] * rstd;
        continue;
      }
      load_residual_row(residual, t, values, width);
      if (weight == Dtype::bf16 && residual.dtype == Dtype::bf16) {
        input.row_factor[i] = rstd;
        continue;
      }
      for (int64_t k = 0; k < width; ++k) {
        const float normalised = w.input_scale ? values[k] * rstd * w.input_scale[k] : values[k] * rstd;
        values[k] = weight == Dtype::f32    ? normalised
                    : weight == Dtype::bf16 ? to_f32(to_bf16(normalised))
                                            : to_f32(to_half_saturated(normalised));
      }
    }
  });
  return input;
}

void store_operand_row(const Operand& operand, int64_t t, const float* values, int64_t cols) {
  const float largest = operand.amax || operand.row_scale ? largest_magnitude(values, cols) : 0.0f;
  if (operand.amax) raise_to(operand.amax, largest);
  const int64_t start = t * cols;
  switch (operand.dtype) {
    case Dtype::f32:
    case Dtype::bf16:
      for (int64_t i = 0; i < cols; ++i) store_element(operand.data, operand.dtype, start + i, values[i]);
      return;
    case Dtype::f16: {
      int64_t clamped = 0;
      for (int64_t i = 0; i < cols; ++i) {
        const float scaled = values[i] / operand.scale;
        clamped += std::fabs(scaled) > kHalfMax;
        static_cast<Half*>(operand.data)[start + i] = to_half_saturated(scaled);
      }
      return add_to(operand.saturated, clamped);
    }
    case Dtype::e4m3: {
      float scale = operand.scale;
      if (operand.row_scale) {
        operand.row_scale[t] = e4m3_scale(largest);
        scale *= operand.row_scale[t];
      }
      return add_to(operand.saturated, quantise_row(static_cast<E4m3*>(operand.data) + start, values, cols, scale));
    }
    case Dtype::int4: fail("an operand cannot be int4");
  }
}

void load_residual_row(const Residual& residual, int64_t t, float* values, int64_t width) {
  for (int64_t i = 0; i < width; ++i) values[i] = load_element(residual.x, residual.dtype, t * width + i);
}

void store_residual_row(const Residual& residual, int64_t t, float* values, int64_t width, bool embedding) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) {
    store_element(residual.x, residual.dtype, t * width + i, values[i]);
    values[i] = load_element(residual.x, residual.dtype, t * width + i);
    sum += double{values[i]} * values[i];
  }
  const float before = embedding ? 0.0f : inverse_rms(residual, t, width);
  residual.sum_squares[t] = static_cast<float>(sum);
  if (!residual.x8) return;
  const float largest = largest_magnitude(values, width);
  float scale = e4m3_scale(largest);
  if (!embedding && residual.x8_scaling != Fp8Scaling::exact) {
    const float from_norm = 1.0f / (before * kResidualHeadroom);
    if (largest <= from_norm * kE4m3Max) {
      scale = from_norm;
    } else {
      add_to(residual.requantised, 1);
    }
  }
  residual.x8_scale[t] = scale;
  quantise_row(residual.x8 + t * width, values, width, scale);
}

}  // namespace fut::cpu
