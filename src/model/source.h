// Where a model's tensors come from: one checkpoint, or the two that `fut quantize` wrote side by side.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"

namespace fut {

/// What was measured once on calibration text and is stored in futransformer.json. Empty vectors: not calibrated.
struct Calibration {
  std::vector<float> attention_amax;         ///< (L) largest magnitude of the attention output
  std::vector<float> swiglu_amax;            ///< (L) largest magnitude of the SwiGLU output
  std::vector<std::vector<float>> key_mean;  ///< (L)(J * E) mean of keys after RoPE
};

/// An opened model: nothing is read yet but headers.
struct ModelSource {
  std::string path;
  LlamaConfig config;
  std::unique_ptr<Checkpoint> prefill;  ///< the folder's prefill/ (FP8), or null: `decode` serves both phases
  std::unique_ptr<Checkpoint> decode;   ///< the folder's decode/ (INT4), or the plain checkpoint
  Calibration calibration;
  bool value_rotation = false;   ///< values are rotated in the stored weights already
  std::string tokenizer_folder;  ///< quantised folders: the root, where tokenizer.json is

  bool quantised() const { return prefill != nullptr; }
  const Checkpoint& for_prefill() const { return prefill ? *prefill : *decode; }
  std::unique_ptr<Tokenizer> tokenizer() const;
  std::string chat_template() const { return decode->chat_template(); }  ///< "" if there is none

  /// A Hugging Face folder, a .gguf file, or a folder with futransformer.json.
  static ModelSource open(const std::string& path);
};

/// Name of the file that makes a folder one of ours, and its text.
inline constexpr const char* kMetadataFile = "futransformer.json";
/// Into the source's calibration and rotation; its configuration says how many numbers there must be.
void read_metadata(const std::string& path, ModelSource& source);
std::string metadata_json(const ModelSource& source, int group, bool residual_rotation, const Calibration& calibration);

}  // namespace fut
