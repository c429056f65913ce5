#include "layout/host_weight.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/parallel.h"
#include "layout/fp8.h"
#include "layout/int4_fragment.h"

namespace fut {
namespace {

constexpr int kMaxGroup = 128;

float group_error(const float* w, const float* importance, int count, float scale) {
  const float inverse = 1.0f / scale;
  float lanes[8] = {};  // eight partial sums let the compiler use vector registers without reordering anything
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const float d = w[i + j] - scale * int4_level(w[i + j], inverse);
      lanes[j] += importance[i + j] * (d * d);
    }
  }
  for (; i < count; ++i) {
    const float d = w[i] - scale * int4_level(w[i], inverse);
    lanes[i & 7] += importance[i] * (d * d);
  }
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

constexpr std::array<float, kMaxGroup> kAllEqual = [] {
  std::array<float, kMaxGroup> ones{};
  ones.fill(1.0f);
  return ones;
}();

/// FP16 scales worth judging; 0, infinite and subnormal-to-zero ones are not.
struct ScaleSearch {
  const float* w;
  const float* importance;
  int count;
  float best_scale = 0.0f, best_error = 0.0f;

  void consider(float wanted) {
    const float scale = to_f32(to_half(wanted));
    // A scale below 1e-38 would overflow 1 / scale; the smallest FP16 is 6e-8, so only zero is excluded here.
    if (scale == 0.0f || !std::isfinite(scale)) return;
    const float error = group_error(w, importance, count, scale);
    if (best_scale == 0.0f || error < best_error) {
      best_scale = scale;
      best_error = error;
    }
  }
};

}  // namespace

Half encode_int4_group(const float* w, int count, uint8_t* codes, const float* importance) {
  const bool all_equal =
      !importance || std::all_of(importance, importance + count, [&](float x) { return x == importance[0]; });
  if (all_equal) importance = kAllEqual.data();
  float peak = 0.0f;  // the value of largest magnitude, with its sign
  for (int i = 0; i < count; ++i) {
    if (std::fabs(w[i]) > std::fabs(peak)) peak = w[i];
  }
  std::fill(codes, codes + count, uint8_t{kInt4Zero});
  if (peak == 0.0f) return Half{0};
  ScaleSearch search{w, importance, count};
  // The peak at level -8, or at +7 with the other sign; then both with the peak clipped step by step: further where the
  // peak may be a weight that hardly matters.
  constexpr float kClips[] = {1.0f,  0.96f, 0.92f, 0.88f, 0.84f, 0.80f, 0.76f, 0.72f, 0.68f, 0.64f,
                              0.60f, 0.56f, 0.52f, 0.48f, 0.44f, 0.40f, 0.36f, 0.32f, 0.28f, 0.24f};
  const int clips = all_equal ? 8 : 20;
  for (int i = 0; i < clips; ++i) {
    search.consider(peak * kClips[i] / -8.0f);
    search.consider(peak * kClips[i] / 7.0f);
  }
  if (search.best_scale == 0.0f) return Half{0};  // too small for FP16
  float numerator = 0.0f, denominator = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float level = int4_level(w[i], 1.0f / search.best_scale);
    numerator += importance[i] * (w[i] * level);
    denominator += importance[i] * (level * level);
  }
  if (denominator > 0.0f) search.consider(numerator / denominator);
  for (int i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(static_cast<int>(int4_level(w[i], 1.0f / search.best_scale)) + kInt4Zero);
  }
  return to_half(search.best_scale);
}

namespace {

void encode_int4_row(HostWeight& out, const float* w, int64_t n, const std::string& name) {
  uint8_t codes[kMaxGroup];
  uint8_t* row = out.data.data() + n * out.row_bytes();
  for (int64_t g = 0; g < out.groups(); ++g) {
    const int64_t start = g * out.group;
    const int count = static_cast<int>(std::min<int64_t>(out.group, out.cols - start));
    const float largest = largest_magnitude(w + start, count);
    FUT_CHECK(largest <= 8.0f * kHalfMax, "tensor ", name, ": row ", n, " holds ", largest,
              ", beyond what an FP16 scale times -8 can reach (", 8.0f * kHalfMax, ")");
    out.group_scale[n * out.groups() + g] = encode_int4_group(w + start, count, codes);
    for (int i = 0; i < count; ++i) row[(start + i) / 2] |= static_cast<uint8_t>(codes[i] << ((start + i) % 2 * 4));
  }
}

void encode_e4m3_row(HostWeight& out, const float* w, int64_t n) {
  const float scale = e4m3_scale(largest_magnitude(w, out.cols));
  out.scale[n] = scale;
  uint8_t* row = out.data.data() + n * out.cols;
  for (int64_t k = 0; k < out.cols; ++k) row[k] = to_e4m3(w[k] / scale).bits;
}

}  // namespace

HostWeight empty_weight(Dtype dtype, int group, int64_t rows, int64_t cols) {
  HostWeight out;
  out.dtype = dtype;
  out.rows = rows;
  out.cols = cols;
  if (dtype == Dtype::int4) {
    FUT_CHECK(int4_group_size_ok(group), "INT4 group size ", group, " is not 32, 64 or 128");
    out.group = group;
    out.group_scale.resize(rows * out.groups());
  }
  if (dtype == Dtype::e4m3) out.scale.resize(rows);
  out.data.resize(rows * out.row_bytes());
  return out;
}

void encode_rows(HostWeight& out, int64_t first, int64_t count, const float* w, const std::string& name) {
  const int64_t cols = out.cols;
  parallel_for(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = first + i;
      const float* row = w + i * cols;
      for (int64_t k = 0; k < cols; ++k) {
        FUT_CHECK(std::isfinite(row[k]), "tensor ", name, ": element (", n, ", ", k, ") is ", row[k]);
      }
      switch (out.dtype) {
        case Dtype::f32: memcpy(out.data.data() + n * out.row_bytes(), row, out.row_bytes()); break;
        case Dtype::bf16:
          for (int64_t k = 0; k < cols; ++k) reinterpret_cast<Bf16*>(out.data.data())[n * cols + k] = to_bf16(row[k]);
          break;
        case Dtype::e4m3: encode_e4m3_row(out, row, n); break;
        case Dtype::int4: encode_int4_row(out, row, n, name); break;
        case Dtype::f16: fail("tensor ", name, ": weights are not kept in f16");
      }
    }
  });
}

HostWeight encode_weight(Dtype dtype, int group, const float* w, int64_t rows, int64_t cols, const std::string& name) {
  HostWeight out = empty_weight(dtype, group, rows, cols);
  encode_rows(out, 0, rows, w, name);
  return out;
}

void decode_weight_row(const HostWeight& weight, int64_t n, float* row) {
  const uint8_t* data = weight.data.data() + n * weight.row_bytes();
  for (int64_t k = 0; k < weight.cols; ++k) {
    switch (weight.dtype) {
      case Dtype::f32: memcpy(&row[k], data + k * sizeof(float), sizeof(float)); break;
      case Dtype::bf16: row[k] = to_f32(reinterpret_cast<const Bf16*>(data)[k]); break;
      case Dtype::e4m3: row[k] = to_f32(E4m3{data[k]}) * weight.scale[n]; break;
      case Dtype::int4:
        row[k] = to_f32(weight.group_scale[n * weight.groups() + k / weight.group]) *
                 static_cast<float>((data[k / 2] >> (k % 2 * 4) & 15) - kInt4Zero);
        break;
      case Dtype::f16: fail("weights are not kept in f16");
    }
  }
}

}  // namespace fut
