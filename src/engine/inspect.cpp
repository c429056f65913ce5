#include "engine/inspect.h"

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/memory.h"
#include "layout/int4_fragment.h"
#include "layout/kv_page.h"
#include "model/source.h"
#include "model/weights.h"

namespace fut {
namespace {

Dtype dtype_of(const std::string& precision) {
  if (precision == "fp8") return Dtype::e4m3;
  if (precision == "bf16") return Dtype::bf16;
  return precision == "f32" ? Dtype::f32 : Dtype::int4;
}

/// Bytes of a weight (N, K) in the form in which a backend holds it, scales included.
int64_t weight_bytes(Dtype dtype, int64_t rows, int64_t cols, int group) {
  if (dtype == Dtype::int4) return int4_matrix_bytes(rows, cols, group);
  return rows * cols * bits_per_element(dtype) / 8 + (dtype == Dtype::e4m3 ? 4 * rows : 0);
}

std::vector<WeightGroup> groups_of(const LlamaConfig& c) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  std::vector<WeightGroup> groups = {{"embedding", {"embed_tokens"}, c.vocabulary, c.width, 1, true},
                                     {"qkv", {"q_proj", "k_proj", "v_proj"}, q + 2 * kv, c.width, c.layers},
                                     {"o", {"o_proj"}, c.width, q, c.layers},
                                     {"gate_up", {"gate_proj", "up_proj"}, 2 * c.feed_forward, c.width, c.layers},
                                     {"down", {"down_proj"}, c.width, c.feed_forward, c.layers},
                                     {"head", {"lm_head"}, c.vocabulary, c.width, 1, true}};
  return groups;
}

/// Adds what the checkpoint's files hold of every group.
void add_stored(Inspection& out, const Checkpoint& checkpoint) {
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    std::error_code no_size;
    const auto size = std::filesystem::file_size(tensor.file, no_size);
    if (!no_size) out.files[tensor.file] = static_cast<int64_t>(size);
    for (WeightGroup& group : out.groups) {
      const bool member = std::any_of(group.parts.begin(), group.parts.end(),
                                      [&](const char* part) { return tensor.name.find(part) != std::string::npos; });
      if (!member) continue;
      int64_t bytes = 0;
      if (!is_packed_int4(tensor)) checkpoint.raw(tensor.name, &bytes);  // those are views of their parts
      group.stored_bytes += bytes;
      const bool part = !tensor.name.ends_with(".weight") && !tensor.name.ends_with(".bias");  // scales and the like
      if (!part) group.stored_types.insert(tensor.type);
    }
  }
}

void add_sizes(Inspection& out, const EngineOptions& options, int group_size) {
  const Dtype prefill = dtype_of(options.prefill), decode = dtype_of(options.decode), kv = dtype_of(options.kv);
  const Dtype table = prefill == Dtype::f32 || decode == Dtype::f32 ? Dtype::f32 : Dtype::bf16;
  for (WeightGroup& group : out.groups) {
    if (group.name != "head" || !out.config.tied) out.parameters += group.rows * group.cols * group.count;
    const auto bytes = [&](Dtype dtype) {
      return weight_bytes(dtype, group.rows, group.cols, group_size) * group.count;
    };
    group.prefill_bytes = bytes(group.table ? table : prefill);
    group.decode_bytes = group.table || out.shared ? 0 : bytes(decode);
    (group.table ? out.table_bytes : out.prefill_bytes) += group.prefill_bytes;
    out.decode_bytes += group.decode_bytes;
  }
  const LlamaConfig& c = out.config;
  int64_t layer_vectors = 2 * c.width;  // norms; then biases
  if (c.head_norm) layer_vectors += 2 * c.head_dim;
  if (c.qkv_bias) layer_vectors += (c.heads + 2 * c.kv_heads) * c.head_dim;
  if (c.o_bias) layer_vectors += c.width;
  if (c.mlp_bias) layer_vectors += 2 * c.feed_forward + c.width;
  out.parameters += c.layers * layer_vectors + c.width;
  const KvPageLayout page{kv, static_cast<int>(c.head_dim)};
  out.kv_token_bytes = c.layers * c.kv_heads * page.page_bytes() / kKvPageTokens;
  // Two tails of a page and the sinks, K and V, in BF16.
  if (kv == Dtype::int4)
    out.kv_sequence_bytes = c.layers * c.kv_heads * 2 * (2 * kKvPageTokens + kKvSinkTokens) * c.head_dim * 2;
  out.free_bytes = static_cast<int64_t>(available_memory());
}

/// INT4 codes that the checkpoint holds are used as they are, in their own groups; otherwise the option decides.
int group_size_of(const Checkpoint& checkpoint, int standard) {
  const int stored = checkpoint.int4_group("model.layers.0.self_attn.q_proj.weight");
  return stored ? stored : standard;
}

}  // namespace

Inspection inspect_model(const std::string& path, const EngineOptions& options) {
  const ModelSource source = ModelSource::open(path);
  Inspection out{.config = source.config, .groups = groups_of(source.config)};
  check_tensors(*source.decode, source.config);
  add_stored(out, *source.decode);
  if (source.quantised()) {
    check_tensors(*source.prefill, source.config);
    add_stored(out, *source.prefill);
  }
  out.shared = options.prefill == options.decode && !source.quantised();
  add_sizes(out, options, group_size_of(*source.decode, options.group_size ? options.group_size : kInt4Group));
  try {
    out.tokenizer = source.tokenizer();
  } catch (const Error& error) {  // the rest is worth showing all the same
    out.tokenizer_error = error.what();
  }
  return out;
}

}  // namespace fut
