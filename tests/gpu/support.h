// What the GPU tests share: arrays that live on the card and on the host, random data, and comparisons that name the
// element that is off. Plain programs: exit 0 passed, 1 failed, 77 no Hopper card here.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"
#include "layout/host_weight.h"
#include "ops/backend.h"

namespace fut::test {

inline int failures = 0;

inline std::mt19937& random_bits() {
  static std::mt19937 bits(std::random_device{}());
  return bits;
}
inline float normal() {
  static std::normal_distribution<float> draw;
  return draw(random_bits());
}
inline std::vector<float> normals(int64_t count, float scale = 1.0f) {
  std::vector<float> x(count);
  for (float& v : x) v = normal() * scale;
  return x;
}
inline int64_t below(int64_t n) { return static_cast<int64_t>(random_bits()() % static_cast<uint64_t>(n)); }

/// The same array twice: `host` for the reference, and on the card between guard bands that nobody may touch.
template <class T>
class Twin {
 public:
  Twin(Backend& gpu, std::vector<T> values) : host(std::move(values)), gpu_(gpu), buffer_(gpu, bytes() + 2 * kGuard) {
    send();
  }
  Twin(Backend& gpu, int64_t count, int poison) : Twin(gpu, poisoned(count, poison)) {}

  static std::vector<T> poisoned(int64_t count, int byte) {
    std::vector<T> values(count);
    memset(values.data(), byte, count * sizeof(T));
    return values;
  }

  T* gpu() const { return reinterpret_cast<T*>(buffer_.template as<uint8_t>() + kGuard); }
  void send() {
    std::vector<uint8_t> image(bytes() + 2 * kGuard, 0xa5);
    memcpy(image.data() + kGuard, host.data(), bytes());
    gpu_.upload(buffer_.template as<void>(), image.data(), image.size());
  }
  std::vector<T> fetch(const char* name) const {
    std::vector<uint8_t> image(bytes() + 2 * kGuard);
    gpu_.download(image.data(), buffer_.template as<void>(), image.size());
    for (size_t i = 0; i < kGuard; ++i) {
      if (image[i] != 0xa5 || image[kGuard + bytes() + i] != 0xa5) {
        printf("FAILED %s: a guard band was written\n", name);
        ++failures;
        break;
      }
    }
    std::vector<T> values(host.size());
    memcpy(values.data(), image.data() + kGuard, bytes());
    return values;
  }
  size_t bytes() const { return host.size() * sizeof(T); }

  std::vector<T> host;

 private:
  static constexpr size_t kGuard = 256;
  Backend& gpu_;
  Buffer buffer_;
};

/// |got[i] - want[i]| <= tolerance(i) everywhere; prints the worst element's share of its tolerance.
template <class Get, class Want, class Tolerance>
void compare(const std::string& name, int64_t count, int64_t width, Get got, Want want, Tolerance tolerance) {
  double worst = -1;
  int64_t at = -1;
  for (int64_t i = 0; i < count; ++i) {
    const double share = std::fabs(double{got(i)} - double{want(i)}) / tolerance(i);
    if (!(share <= worst)) {  // NaN is worst of all
      worst = share;
      at = i;
      if (std::isnan(share)) break;
    }
  }
  const bool passed = count == 0 || worst <= 1.0;
  if (!passed) {
    printf("FAILED %s: row %lld, column %lld: got %.9g, expected %.9g, %.3g of the tolerance\n", name.c_str(),
           static_cast<long long>(at / width), static_cast<long long>(at % width), double{got(at)}, double{want(at)},
           worst);
    ++failures;
  } else {
    printf("ok     %-86s worst %.3f of the tolerance\n", name.c_str(), worst);
  }
}

inline void expect(bool condition, const std::string& name) {
  if (condition) return;
  printf("FAILED %s\n", name.c_str());
  ++failures;
}

/// Runs `tests(gpu)` on a card, or says why not.
template <class Tests>
int run_on_card(Tests tests) {
  const std::string obstacle = cuda_obstacle();
  if (!obstacle.empty()) {
    printf("skipped: %s\n", obstacle.c_str());
    return 77;
  }
  try {
    const std::unique_ptr<Backend> gpu = make_cuda_backend();
    tests(*gpu);
  } catch (const std::exception& error) {
    printf("FAILED: %s\n", error.what());
    ++failures;
  }
  printf(failures ? "%d checks failed\n" : "all passed\n", failures);
  return failures ? 1 : 0;
}

}  // namespace fut::test
