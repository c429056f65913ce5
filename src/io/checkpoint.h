// A model's files, seen through one set of names and conventions: those of Hugging Face's Llama.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "io/tokenizer.h"
#include "layout/host_weight.h"

namespace fut {

/// One stored tensor. Shapes are Hugging Face's: a projection is (outputs, inputs).
struct TensorInfo {
  std::string name;
  std::string type;  ///< as the file spells it: "F32", "BF16", "Q4_1", "I32", "F8_E4M3", ...
  std::vector<int64_t> shape;
  std::string file;  ///< for messages
};

/// Whether the tensor is a matrix of 4-bit codes (io/packed_int4.h), which other tensors hold: it has no bytes of its
/// own.
inline bool is_packed_int4(const TensorInfo& tensor) {
  return tensor.type == "pack-quantized" || tensor.type == "gptq" || tensor.type == "awq";
}

/// A Hugging Face folder or a GGUF file. GGUF is translated on the way: names, configuration, order of q and k rows.
/// Opening checks every header against the file's size before anything is allocated; tensors are read on demand from
/// memory-mapped files.
class Checkpoint {
 public:
  virtual ~Checkpoint() = default;

  /// `path`: a folder with config.json, or a .gguf file. Throws Error naming the file and what is wrong with it.
  static std::unique_ptr<Checkpoint> open(const std::string& path);

  const std::string& path() const { return path_; }

  /// Text of config.json, or the same keys made from GGUF metadata.
  virtual std::string config_json() const = 0;

  /// The file that config_json() is from, for messages.
  virtual std::string config_place() const = 0;

  /// Text of generation_config.json, or "{}".
  virtual std::string generation_config_json() const = 0;

  virtual std::vector<TensorInfo> tensors() const = 0;

  /// nullptr if there is no tensor of that name.
  virtual const TensorInfo* find(const std::string& name) const = 0;

  /// The tensor as floats, row-major, in Hugging Face's row order. Accepts floats of any width, FP8 and INT4 codes with
  /// their scales and GGUF's block types; refuses by name what has no plain meaning as numbers (I32 ...).
  std::vector<float> read_f32(const std::string& name) const;

  /// `count` rows of a matrix from row `first` on; any other tensor counts as one row. Only whole where rows are
  /// reordered (q and k of GGUF).
  virtual std::vector<float> read_rows(const std::string& name, int64_t first, int64_t count) const = 0;

  /// Whether a matrix's stored 4-bit codes are this engine's own: their group size, for int4_codes(). 0: only numbers,
  /// and why. What was no code has no reason.
  virtual int int4_group(const std::string& name, std::string* why = nullptr) const;
  virtual HostWeight int4_codes(const std::string& name) const;

  /// Takes the files' pages that were read out of this process's memory: they are still there, and come when needed.
  virtual void drop_pages() const = 0;

  /// The tensor's bytes in the file, as stored. Valid while the checkpoint lives.
  virtual const uint8_t* raw(const std::string& name, int64_t* size_bytes) const = 0;

  virtual std::unique_ptr<Tokenizer> tokenizer() const = 0;

  /// The files that make a Hugging Face folder's tokenizer, name to text: as they lie there, or written anew from GGUF.
  virtual std::map<std::string, std::string> tokenizer_files() const = 0;

  /// The chat template's source, or "" if the files hold none.
  virtual std::string chat_template() const = 0;

  static int64_t rows_of(const TensorInfo& tensor) { return tensor.shape.size() == 2 ? tensor.shape[0] : 1; }

  /// Refuses rows that the tensor does not have. True if they are all that there are.
  static bool check_rows(const TensorInfo& tensor, int64_t first, int64_t count);

 protected:
  std::string path_;
};

}  // namespace fut
