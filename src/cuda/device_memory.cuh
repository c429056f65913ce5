// Device memory that belongs to the backend itself: growing scratch, mirrors of host arrays, and counters.
#pragma once

#include <cstring>
#include <vector>

#include "cuda/launch.cuh"

namespace fut::cuda {

/// Scratch of at least the size last asked for; contents are lost when it grows. Freed and reused in stream order.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (data_) cudaFree(data_);
  }

  template <class T>
  T* reserve(size_t count, cudaStream_t stream, bool zeroed = false) {
    const size_t bytes = count * sizeof(T);
    if (bytes > bytes_) {
      if (data_) FUT_CUDA(cudaFreeAsync(data_, stream));
      data_ = nullptr;
      bytes_ = 0;
      FUT_CUDA(cudaMallocAsync(&data_, bytes, stream));
      bytes_ = bytes;
      if (zeroed) FUT_CUDA(cudaMemsetAsync(data_, 0, bytes, stream));
    }
    return static_cast<T*>(data_);
  }
  void zero(cudaStream_t stream) {
    if (data_) FUT_CUDA(cudaMemsetAsync(data_, 0, bytes_, stream));
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Several small host arrays as one piece of device memory, sent again only when their contents have changed.
class Mirror {
 public:
  void begin() { image_.clear(); }

  /// Returns the array's place; at() gives its device address after send().
  template <class T>
  size_t add(const T* data, size_t count) {
    image_.resize((image_.size() + 15) / 16 * 16);
    const size_t place = image_.size();
    image_.resize(place + count * sizeof(T));
    if (count) memcpy(image_.data() + place, data, count * sizeof(T));
    return place;
  }

  void send(cudaStream_t stream) {
    if (image_ == sent_ && device_) return;
    device_ = memory_.reserve<uint8_t>(image_.size() + 16, stream);
    sent_ = image_;
    FUT_CUDA(cudaMemcpyAsync(device_, sent_.data(), sent_.size(), cudaMemcpyHostToDevice, stream));
  }

  template <class T>
  const T* at(size_t place) const {
    return reinterpret_cast<const T*>(device_ + place);
  }

 private:
  std::vector<uint8_t> image_, sent_;
  Scratch memory_;
  uint8_t* device_ = nullptr;
};

/// Device counters standing for host ones: added to them, and zeroed, by flush().
class Counters {
 public:
  unsigned long long* of(int64_t* host, cudaStream_t stream) {
    if (!host) return nullptr;
    unsigned long long* device = memory_.reserve<unsigned long long>(kCount, stream, true);
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (hosts_[i] == host) return device + i;
    }
    FUT_CHECK(hosts_.size() < kCount, "backend cuda: more than ", kCount, " saturation counters");
    hosts_.push_back(host);
    return device + hosts_.size() - 1;
  }

  /// The stream must be idle afterwards anyway: it is waited for.
  void flush(cudaStream_t stream) {
    if (hosts_.empty()) return;
    unsigned long long values[kCount];
    unsigned long long* device = memory_.reserve<unsigned long long>(kCount, stream, true);
    FUT_CUDA(cudaMemcpyAsync(values, device, sizeof values, cudaMemcpyDeviceToHost, stream));
    FUT_CUDA(cudaMemsetAsync(device, 0, sizeof values, stream));
    FUT_CUDA(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < hosts_.size(); ++i) *hosts_[i] += static_cast<int64_t>(values[i]);
    hosts_.clear();
  }

 private:
  static constexpr size_t kCount = 16;
  std::vector<int64_t*> hosts_;
  Scratch memory_;
};

}  // namespace fut::cuda
