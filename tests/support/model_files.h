// Small safetensors and GGUF files made byte by byte, right ones and wrong ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fut::test {

template <class T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes;
  for (const T value : values) bytes += bytes_of(value);
  return bytes;
}

/// `count` bytes 0, 1, 2, ...
inline std::string counting_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i);
  return bytes;
}

inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  return bytes_of(uint64_t{header.size()}) + std::string(header) + std::string(data);
}

/// Puts together a safetensors file of tensors that are right.
class SafetensorsBuilder {
 public:
  SafetensorsBuilder& add(std::string_view name, std::string_view type, std::string_view shape, std::string_view data) {
    header_ += cat(header_.empty() ? "{" : ",", '"', name, R"(":{"dtype":")", type, R"(","shape":)", shape,
                   R"(,"data_offsets":[)", data_.size(), ",", data_.size() + data.size(), "]}");
    data_ += data;
    return *this;
  }
  std::string bytes() const { return safetensors_bytes(header_.empty() ? "{}" : header_ + "}", data_); }

 private:
  std::string header_, data_;
};

/// GGUF's numbers for value types and tensor types.
enum GgufValueType : uint32_t {
  kGgufU32 = 4,
  kGgufI32 = 5,
  kGgufF32 = 6,
  kGgufBool = 7,
  kGgufText = 8,
  kGgufArray = 9,
  kGgufU64 = 10
};
enum GgufTensorType : uint32_t {
  kGgmlF32 = 0,
  kGgmlF16 = 1,
  kGgmlQ4_0 = 2,
  kGgmlQ4_1 = 3,
  kGgmlQ8_0 = 8,
  kGgmlQ2_K = 10,
  kGgmlQ4_K = 12,
  kGgmlBf16 = 30
};

inline std::string gguf_text(std::string_view text) { return bytes_of(uint64_t{text.size()}) + std::string(text); }

/// Puts together a GGUF file. Public members let a test make one number wrong.
class GgufBuilder {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;  ///< of the data; a test that changes it states general.alignment itself
  uint64_t extra_values = 0, extra_tensors = 0;

  GgufBuilder& value(std::string_view key, uint32_t type, std::string_view bytes) {
    values_ += gguf_text(key) + bytes_of(type) + std::string(bytes);
    ++value_count_;
    return *this;
  }
  GgufBuilder& text(std::string_view key, std::string_view text) { return value(key, kGgufText, gguf_text(text)); }
  GgufBuilder& u32(std::string_view key, uint32_t number) { return value(key, kGgufU32, bytes_of(number)); }
  GgufBuilder& f32(std::string_view key, float number) { return value(key, kGgufF32, bytes_of(number)); }
  GgufBuilder& texts(std::string_view key, const std::vector<std::string>& texts) {
    std::string bytes = bytes_of(uint32_t{kGgufText}) + bytes_of(uint64_t{texts.size()});
    for (const std::string& text : texts) bytes += gguf_text(text);
    return value(key, kGgufArray, bytes);
  }
  GgufBuilder& i32s(std::string_view key, const std::vector<int32_t>& numbers) {
    return value(key, kGgufArray,
                 bytes_of(uint32_t{kGgufI32}) + bytes_of(uint64_t{numbers.size()}) + bytes_of(numbers));
  }

  /// `extents` as the file has them: the fastest first.
  GgufBuilder& tensor(std::string_view name, uint32_t type, const std::vector<uint64_t>& extents,
                      std::string_view data) {
    return entry(name, type, extents, data_.size()).data(data);
  }
  GgufBuilder& entry(std::string_view name, uint32_t type, const std::vector<uint64_t>& extents, uint64_t offset) {
    entries_ += gguf_text(name) + bytes_of(static_cast<uint32_t>(extents.size())) + bytes_of(extents) + bytes_of(type) +
                bytes_of(offset);
    ++tensor_count_;
    return *this;
  }
  GgufBuilder& data(std::string_view bytes) {
    data_ += bytes;
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    return *this;
  }

  std::string bytes() const {
    std::string all = cat("GGUF", bytes_of(version), bytes_of(tensor_count_ + extra_tensors),
                          bytes_of(value_count_ + extra_values), values_, entries_);
    all.resize((all.size() + alignment - 1) / alignment * alignment);
    return all + data_;
  }

 private:
  uint64_t value_count_ = 0, tensor_count_ = 0;
  std::string values_, entries_, data_;
};

}  // namespace fut::test
