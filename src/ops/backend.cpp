#include "ops/backend.h"

#include <utility>

namespace fut {

Buffer::Buffer(Backend& backend, size_t bytes) : backend_(&backend), data_(backend.allocate(bytes)), bytes_(bytes) {}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Buffer::~Buffer() {
  if (data_) backend_->release(data_, bytes_);
}

}  // namespace fut
