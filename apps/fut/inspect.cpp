// fut inspect: what a model is made of and what running it will take, from headers alone.
#include "engine/inspect.h"

#include <fmt/format.h>

#include <algorithm>

#include "common.h"
#include "io/json.h"

namespace fut::app {
namespace {

using nlohmann::ordered_json;

std::string rope_text(const LlamaConfig& c) {
  using Kind = RopeScaling::Kind;
  const RopeScaling& scaling = c.rope_scaling;
  const char* const name = scaling.kind == Kind::linear ? "linear" : scaling.kind == Kind::llama3 ? "llama3" : "yarn";
  if (scaling.kind == Kind::none) return "default";
  if (scaling.kind == Kind::dynamic) return "dynamic (as default up to the context)";
  return fmt::format("{}, factor {}", name, scaling.factor);
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
  for (const WeightGroup& group : found.groups) {
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
  for (const WeightGroup& group : found.groups) {
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
  text += fmt::format("model      {}: {}, {:.1f} M parameters\n", one_line(flags.model), c.architecture,
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
  for (const auto& [file, bytes] : found.files) text += fmt::format("file       {}, {}\n", one_line(file), mib(bytes));
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
  const Inspection found = inspect_model(flags.model, engine_options(flags));
  for (const std::string& warning : found.config.warnings) note("fut: " + one_line(warning));
  put(flags.json ? as_json(flags, found).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"
                 : as_text(flags, found));
  return 0;
}

}  // namespace fut::app
