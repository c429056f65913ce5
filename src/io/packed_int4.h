// Matrices of 4-bit codes as other programs store them, eight codes to a 32-bit word, the lowest bits first:
//
//                   codes of (N, K)                  zero points of (N, groups)         scales       order of columns
//   pack-quantized  X.weight_packed (N, ceil(K/8))   X.weight_zero_point (N/8, groups)  (N, groups)  X.weight_g_idx
//   gptq            X.qweight (K/8, N)               X.qzeros (groups, N/8)             (groups, N)  X.g_idx
//   awq             X.qweight (K, N/8)               X.qzeros (groups, N/8)             (groups, N)  as it is
//
// A word holds codes that follow one another along K in the first two, along N in AWQ, whose order is 0 2 4 6 1 3 5 7;
// zero points always follow along N, in the order of the codes. GPTQ's first version stores them less one. Column k
// belongs to group g_idx[k], or to k / (K / groups) where there is no g_idx, and X = scale * (q - zero point).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "layout/host_weight.h"

namespace fut {

using StoredTensors = std::map<std::string, const StoredTensor*>;

/// Where the nibble of row n and column k is.
struct Nibbles {
  const uint8_t* words = nullptr;
  int64_t n_stride = 0, k_stride = 0;  ///< in words
  bool along_n = false;                ///< a word holds rows, not columns
  bool interleaved = false;            ///< in AWQ's order

  int at(int64_t n, int64_t k) const;
};

/// What a GPTQ or AWQ checkpoint says of all its qweight tensors.
struct QweightConfig {
  std::string file;
  bool gptq = false, awq = false;  ///< neither: the shapes tell
  bool second_version = false;     ///< GPTQ's: zero points are stored as they are
  bool symmetric = false;          ///< said to be: then every zero point is 8, however it is stored
  int64_t group = 0;               ///< columns that share a scale; -1: all; 0: not said, or not for all tensors alike
};

/// From quantization_config of `config` (the text of `config_file`), or else from quantize_config.json or
/// quant_config.json in `folder`. What is not read (3 bits, Marlin's layout, ...) is refused by its key.
QweightConfig read_qweight_config(const std::string& folder, const std::string& config, const std::string& config_file);

class PackedInt4 {
 public:
  /// The parts are checked against each other, so that reading needs no check. `name` is X.weight.
  static PackedInt4 pack_quantized(const std::string& name, const StoredTensors& stored);
  static PackedInt4 qweight(const std::string& name, const StoredTensors& stored, const QweightConfig& config);

  const TensorInfo& info() const { return info_; }

  std::vector<float> read(int64_t first_row, int64_t count) const;

  /// 32, 64 or 128 if the codes mean in groups of that size what they mean in HostWeight; 0, and why, if they do not.
  int own_group(std::string* why) const;
  /// The codes in its order; own_group() must not be 0.
  HostWeight codes() const;

 private:
  void take_order(const StoredTensor& g_idx);
  int zero_at(int64_t n, int64_t group) const { return zeros_.words ? (zeros_.at(n, group) + zero_shift_) & 15 : 8; }

  TensorInfo info_;
  Nibbles codes_, zeros_;  // without words: every zero point is 8
  int zero_shift_ = 0;
  const StoredTensor* scales_ = nullptr;
  bool scales_by_group_ = false;  // (groups, N)
  int64_t groups_ = 0;
  std::vector<int32_t> group_of_;  // (K) if columns are in an order of their own, else empty
};

}  // namespace fut
