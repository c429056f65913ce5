// Every tensor of a Llama model, with its shape; how it is read, folded and brought into the formats of both phases.
//
//   model.embed_tokens.weight                        (V, D)
//   model.layers.N.input_layernorm.weight            (D)         folded into q, k, v
//   model.layers.N.self_attn.{q,k,v}_proj.weight     (H E, D), (J E, D), (J E, D)
//   model.layers.N.self_attn.{q,k}_norm.weight       (E) each, where the architecture has them
//   model.layers.N.self_attn.o_proj.weight           (D, H E)
//   model.layers.N.post_attention_layernorm.weight   (D)         folded into gate, up
//   model.layers.N.mlp.{gate,up}_proj.weight         (F, D) each
//   model.layers.N.mlp.down_proj.weight              (D, F)
//   model.norm.weight                                (D)         folded into the head
//   lm_head.weight                                   (V, D), or the embedding where heads are tied
// A projection's .bias (outputs) where the configuration says so.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/source.h"
#include "ops/backend.h"

namespace fut {

/// The four GEMM weights of one layer in one phase.
struct LayerWeights {
  PlacedWeight qkv;      // (H E + 2 J E, D)
  PlacedWeight o;        // (D, H E)
  PlacedWeight gate_up;  // (2 F, D)
  PlacedWeight down;     // (D, F)

  int64_t bytes() const { return qkv.weight.bytes + o.weight.bytes + gate_up.weight.bytes + down.weight.bytes; }
};

/// Numbers of one layer that belong to no matrix.
struct LayerConstants {
  float attention_guard = 1.0f;     ///< power of two: attention output / guard fits FP16, whatever the input
  float swiglu_guard = 1.0f;        ///< the same for the SwiGLU output
  std::vector<float> key_factor;    ///< (J) powers of two under the E4M3 scales of INT4 keys
  std::vector<float> value_factor;  ///< (J)
};

/// Gains (E) of the norms over each head's queries and keys; empty where the architecture has none.
struct HeadNorm {
  std::vector<float> q, k;
};

/// What follows from the values' and keys' rows of W_qkv, and the keys' gains: all but the SwiGLU guard.
LayerConstants attention_constants(const HostWeight& qkv, const HeadNorm& norm, const LlamaConfig& config);
float swiglu_guard(const HostWeight& gate_up, const LlamaConfig& config);

struct WeightOptions {
  Dtype prefill = Dtype::e4m3;  ///< e4m3, bf16 or f32
  Dtype decode = Dtype::int4;   ///< int4, e4m3, bf16 or f32
  bool rotate_values = true;    ///< offline, where the weights are not quantised yet: for INT4 caches
  int group = 64;
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_progress;
};

struct ModelWeights {
  PlacedWeight embedding;  // (V, D) bf16, or f32 if a phase is f32
  PlacedWeight head;       // (V, D) bf16 or f32, the final norm's gain folded in
  std::vector<LayerWeights> prefill;
  std::vector<LayerWeights> decode;  ///< empty if both phases use the same format and order: see for_decode()
  std::vector<LayerConstants> constants;
  std::vector<HeadNorm> head_norms;  // (L)
  std::string warning;               ///< one line: why stored INT4 codes could not be used as they are, or empty

  const LayerWeights& for_decode(int64_t layer) const { return decode.empty() ? prefill[layer] : decode[layer]; }
};

/// Checks that every tensor is there with its shape, before anything large is read; then reads layer by layer and the
/// tables piece by piece, so that no more than one layer is held in FP32 and little of the files' pages.
ModelWeights load_weights(Backend& backend, const ModelSource& source, const WeightOptions& options);

/// Biases of a layer's four products; empty where the configuration has none.
struct LayerBiases {
  std::vector<float> qkv, o, gate_up, down;
};

/// One layer in FP32 with the norms' gains folded: rows of qkv, o, gate_up, down.
struct LayerTensors {
  std::vector<float> qkv, o, gate_up, down;
  std::vector<float> qkv_gain,
      gate_up_gain;  ///< (D) what was folded into each column; ones where a rotation mixed them
  LayerBiases bias;
  HeadNorm head_norm;
};

/// An input scale (HostWeight) near `wanted` (K): the nearest BF16, as norm.weight stores it, 1 where there is no
/// dividing by it, and no larger than FP16 operands of rms 1 can take. Empty: all ones.
std::vector<float> usable_input_scale(std::vector<float> wanted);

/// w (N, K) -> w diag(1 / input_scale): what is left to the weight. An empty scale changes nothing.
std::vector<float> divide_columns(std::vector<float> w, const std::vector<float>& input_scale);

HeadNorm read_head_norm(const Checkpoint& checkpoint, const LlamaConfig& config, int64_t layer);

/// How a checkpoint's weights are turned offline; both leave the function of the model as it is.
struct OfflineRotation {
  bool value = false;     ///< rows of W_v and columns of W_o, head by head
  bool residual = false;  ///< embedding, head, columns of W_qkv and W_gate_up, rows of W_o and W_down
};

LayerTensors read_layer(const Checkpoint& checkpoint, const LlamaConfig& config, int64_t layer,
                        OfflineRotation rotation);

LayerBiases read_biases(const Checkpoint& checkpoint, const LlamaConfig& config, int64_t layer,
                        OfflineRotation rotation);

/// Which rows of (V, D).
struct TableRows {
  int64_t first, count;
};

/// (count, D) the head with the final norm's gain folded in.
std::vector<float> read_head(const Checkpoint& checkpoint, const LlamaConfig& config, OfflineRotation rotation,
                             TableRows rows);
std::vector<float> read_embedding(const Checkpoint& checkpoint, const LlamaConfig& config, OfflineRotation rotation,
                                  TableRows rows);

/// Throws unless every tensor that the configuration implies is there in the right shape, and no other bias or norm is.
void check_tensors(const Checkpoint& checkpoint, const LlamaConfig& config);

/// Names of the tensors that nothing reads. Stored rotary frequencies are not among them: they are recomputed.
std::vector<std::string> unused_tensors(const Checkpoint& checkpoint, const LlamaConfig& config);

}  // namespace fut
