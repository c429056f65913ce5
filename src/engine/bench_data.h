// Random numbers in every format, for benchmarks: the same on every machine, whatever the number of threads, and made
// without an FP32 copy of what is large.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/host_weight.h"
#include "layout/kv_page.h"

namespace fut {

/// `count` elements with mean square about `rms`^2; e4m3 codes stand for elements / e4m3_unit(rms).
HostBytes random_elements(Dtype dtype, int64_t count, float rms, uint64_t seed);

/// The scale under which random e4m3 codes have the given root mean square.
float e4m3_unit(float rms);

/// (N, K) such that a normalised row gives outputs of mean square about one.
HostWeight random_weight(Dtype dtype, int group, int64_t rows, int64_t cols, uint64_t seed);

/// The power of two under which random_pages() chose the scales of INT4 pages.
inline constexpr float kRandomKvFactor = 1.0f / 32;

/// `count` pages with codes and scales as a model leaves them: keys and values of mean square about one.
std::vector<uint8_t> random_pages(const KvPageLayout& layout, int64_t count, uint64_t seed);

}  // namespace fut
