// fut inspect: what a model is made of and what running it will take, from headers alone.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "base/error.h"
#include "common.h"
#include "io/json.h"
#include "layout/int4_fragment.h"
#include "layout/kv_page.h"
#include "model/source.h"
#include "model/weights.h"

namespace fut::app {
namespace {

using nlohmann::ordered_json;

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

/// The tensors of one kind, over all layers.
struct Group {
  std::string name;
  std::vector<const char*> parts;  ///< what a tensor's name contains to be one of them
  int64_t rows, cols, count;
  bool table = false;  ///< embedding or head: one copy serves both phases
  std::set<std::string> stored_types = {};
  int64_t stored_bytes = 0, prefill_bytes = 0, decode_bytes = 0;
};

struct Inspection {
  LlamaConfig config;
  std::vector<Group> groups;
  std::map<std::string, int64_t> files = {};
  bool shared = false;  ///< one copy serves both phases
  int64_t parameters = 0, prefill_bytes = 0, decode_bytes = 0, table_bytes = 0;
  int64_t kv_token_bytes = 0, kv_sequence_bytes = 0, free_bytes = 0;
  std::unique_ptr<Tokenizer> tokenizer = nullptr;
  std::string tokenizer_error = {};

  int64_t total_bytes() const { return prefill_bytes + decode_bytes + table_bytes; }
  /// Tokens of cache that fit beside the weights.
  int64_t cache_tokens() const {
    return std::max<int64_t>(0, free_bytes - total_bytes() - kv_sequence_bytes) / std::max<int64_t>(1, kv_token_bytes);
  }
};

std::vector<Group> groups_of(const LlamaConfig& c) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  std::vector<Group> groups = {{"embedding", {"embed_tokens"}, c.vocabulary, c.width, 1, true},
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
    for (Group& group : out.groups) {
      const bool member = std::any_of(group.parts.begin(), group.parts.end(),
                                      [&](const char* part) { return tensor.name.find(part) != std::string::npos; });
      if (!member) continue;
      int64_t bytes = 0;
      if (tensor.type != "pack-quantized") checkpoint.raw(tensor.name, &bytes);  // that one is a view of its parts
      group.stored_bytes += bytes;
      const bool part =
          tensor.name.ends_with("_packed") || tensor.name.ends_with("_scale") || tensor.name.ends_with("_shape");
      if (!part) group.stored_types.insert(tensor.type);
    }
  }
}

int64_t available_memory() {
  std::ifstream memory("/proc/meminfo");
  for (std::string line; std::getline(memory, line);) {
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  }
  return 0;
}

void add_sizes(Inspection& out, const EngineOptions& options, int group_size) {
  const Dtype prefill = dtype_of(options.prefill), decode = dtype_of(options.decode), kv = dtype_of(options.kv);
  const Dtype table = prefill == Dtype::f32 || decode == Dtype::f32 ? Dtype::f32 : Dtype::bf16;
  for (Group& group : out.groups) {
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
  out.parameters += (2 * c.layers + 1) * c.width;
  const KvPageLayout page{kv, static_cast<int>(c.head_dim)};
  out.kv_token_bytes = c.layers * c.kv_heads * page.page_bytes() / kKvPageTokens;
  // Two tails of a page and the sinks, K and V, in BF16.
  if (kv == Dtype::int4)
    out.kv_sequence_bytes = c.layers * c.kv_heads * 2 * (2 * kKvPageTokens + kKvSinkTokens) * c.head_dim * 2;
  out.free_bytes = available_memory();
}

/// INT4 codes that the checkpoint holds are used as they are, in their own groups; otherwise the flag decides.
int group_size_of(const Checkpoint& checkpoint, const ModelFlags& flags) {
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  const TensorInfo *codes = checkpoint.find(name), *scale = checkpoint.find(name + "_scale");
  const bool stored = codes && codes->type == "pack-quantized" && scale && scale->shape.size() == 2;
  return stored ? static_cast<int>(codes->shape[1] / scale->shape[1]) : std::stoi(flags.group_size);
}

Inspection inspect(const ModelFlags& flags) {
  const ModelSource source = ModelSource::open(flags.model);
  Inspection out{.config = source.config, .groups = groups_of(source.config)};
  check_tensors(*source.decode, source.config);
  add_stored(out, *source.decode);
  if (source.quantised()) {
    check_tensors(*source.prefill, source.config);
    add_stored(out, *source.prefill);
  }
  out.shared = flags.options.prefill == flags.options.decode && !source.quantised();
  add_sizes(out, flags.options, group_size_of(*source.decode, flags));
  try {
    out.tokenizer = source.tokenizer();
  } catch (const Error& error) {  // the rest is worth showing all the same
    out.tokenizer_error = error.what();
  }
  return out;
}

std::string rope_text(const LlamaConfig& c) {
  switch (c.rope_scaling.kind) {
    case RopeScaling::Kind::none: return "default";
    case RopeScaling::Kind::linear: return fmt::format("linear, factor {}", c.rope_scaling.factor);
    case RopeScaling::Kind::llama3: return fmt::format("llama3, factor {}", c.rope_scaling.factor);
  }
  return "?";
}

ordered_json as_json(const ModelFlags& flags, const Inspection& found) {
  const LlamaConfig& c = found.config;
  ordered_json out = {{"model", flags.model},
                      {"architecture", c.architecture},
                      {"parameters", found.parameters},
                      {"layers", c.layers},
                      {"width", c.width},
                      {"feed_forward", c.feed_forward},
                      {"heads", c.heads},
                      {"kv_heads", c.kv_heads},
                      {"head_dim", c.head_dim},
                      {"vocabulary", c.vocabulary},
                      {"context", c.positions},
                      {"rope_theta", c.rope_theta},
                      {"rope", rope_text(c)},
                      {"tied", c.tied}};
  for (const Group& group : found.groups) {
    out["weights"].push_back({{"name", group.name},
                              {"rows", group.rows},
                              {"cols", group.cols},
                              {"count", group.count},
                              {"stored", group.stored_types},
                              {"stored_bytes", group.stored_bytes},
                              {"prefill_bytes", group.prefill_bytes},
                              {"decode_bytes", group.decode_bytes}});
  }
  out["prefill"] = flags.options.prefill;
  out["decode"] = flags.options.decode;
  out["kv"] = flags.options.kv;
  out["one_copy_for_both"] = found.shared;
  out["prefill_weight_bytes"] = found.prefill_bytes;
  out["decode_weight_bytes"] = found.decode_bytes;
  out["embedding_and_head_bytes"] = found.table_bytes;
  out["kv_bytes_per_token"] = found.kv_token_bytes;
  out["kv_bytes_per_sequence"] = found.kv_sequence_bytes;
  out["free_bytes"] = found.free_bytes;
  out["cache_tokens_that_fit"] = found.cache_tokens();
  out["context_that_fits"] = std::min(found.cache_tokens(), c.positions);
  if (found.tokenizer) {
    const Tokenizer& t = *found.tokenizer;
    out["tokenizer"] = {{"size", t.size()}, {"bos", t.bos()}, {"adds_bos", t.adds_bos()}, {"eos", t.eos()}};
  } else {
    out["tokenizer"] = {{"error", found.tokenizer_error}};
  }
  for (const auto& [file, bytes] : found.files) out["files"].push_back({{"file", file}, {"bytes", bytes}});
  return out;
}

std::string weights_table(const ModelFlags& flags, const Inspection& found) {
  constexpr const char* kLine = "| {:<12} | {:<17} | {:<26} | {:>13} | {:>13} |\n";
  std::string text = fmt::format(fmt::runtime(kLine), "weights", "rows x columns", "stored as",
                                 flags.options.prefill + " prefill", flags.options.decode + " decode");
  text += fmt::format("|{:-<14}|{:-<19}|{:-<28}|{:->15}|{:->15}|\n", "", "", "", ":", ":");
  for (const Group& group : found.groups) {
    const std::string stored = group.stored_bytes == 0
                                   ? "the embedding"
                                   : fmt::format("{}, {}", fmt::join(group.stored_types, "+"), mib(group.stored_bytes));
    const char* none = group.table ? "the same" : "the same copy";
    text +=
        fmt::format(fmt::runtime(kLine), group.count > 1 ? fmt::format("{} x {}", group.name, group.count) : group.name,
                    fmt::format("{} x {}", group.rows, group.cols), stored, mib(group.prefill_bytes),
                    group.decode_bytes ? mib(group.decode_bytes) : none);
  }
  return text + fmt::format(fmt::runtime(kLine), "total", "", "", mib(found.prefill_bytes + found.table_bytes),
                            mib(found.decode_bytes));
}

std::string tokenizer_text(const Inspection& found) {
  if (!found.tokenizer) return "unusable: " + one_line(found.tokenizer_error);
  const Tokenizer& t = *found.tokenizer;
  const std::string bos =
      t.bos() < 0 ? "none" : fmt::format("{}{}", t.bos(), t.adds_bos() ? " (added)" : " (not added)");
  return fmt::format("{} tokens, BOS {}, end {}", t.size(), bos, fmt::join(t.eos(), " "));
}

std::string as_text(const ModelFlags& flags, const Inspection& found) {
  const LlamaConfig& c = found.config;
  std::string text;
  text += fmt::format("model      {}: {}, {:.1f} M parameters\n", flags.model, c.architecture,
                      static_cast<double>(found.parameters) / 1e6);
  text += fmt::format(
      "shape      {} layers, width {}, feed-forward {}, {} heads and {} KV heads of {}, vocabulary {}{}\n", c.layers,
      c.width, c.feed_forward, c.heads, c.kv_heads, c.head_dim, c.vocabulary, c.tied ? ", tied head" : "");
  text += fmt::format("context    {} tokens; RoPE theta {}, scaling {}\n", c.positions, c.rope_theta, rope_text(c));
  text += fmt::format("tokenizer  {}\n\n", tokenizer_text(found));
  text += weights_table(flags, found);
  text += fmt::format("\nKV cache   {}: {} bytes a token over all layers", flags.options.kv, found.kv_token_bytes);
  if (found.kv_sequence_bytes) {
    text += fmt::format(", and {:.1f} KiB a sequence for BF16 sinks and tails",
                        static_cast<double>(found.kv_sequence_bytes) / 1024);
  }
  text += fmt::format("\nmemory     weights {}; {} of main memory available: room for {} tokens of cache, ",
                      mib(found.total_bytes()), mib(found.free_bytes), found.cache_tokens());
  text += found.cache_tokens() >= c.positions ? fmt::format("the whole context of {}\n", c.positions)
                                              : fmt::format("less than the context of {}\n", c.positions);
  for (const auto& [file, bytes] : found.files) text += fmt::format("file       {}, {}\n", file, mib(bytes));
  return text;
}

}  // namespace

int run_inspect(int argc, const char* const* argv) {
  const auto app =
      make_app("Shows what a model is made of and what running it takes. Loads no weights.", "fut inspect");
  ModelFlags flags;
  add_model_flags(*app, flags);
  set_footer(*app,
             "Examples:\n  fut inspect model.gguf\n"
             "  fut inspect models/bard --prefill bf16 --decode bf16 --kv bf16 --json");
  if (const auto code = parse(*app, argc, argv)) return *code;
  now("inspecting " + flags.model);
  const Inspection found = inspect(flags);
  put(flags.json ? as_json(flags, found).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"
                 : as_text(flags, found));
  return 0;
}

}  // namespace fut::app
