// Parts of a model at a given shape, with random weights: no model is needed. Shares nothing with `fut bench model` but
// the verb.
#include "bench_op.h"

#include <fmt/format.h>
#include <stdio.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>

#include "base/error.h"
#include "base/parallel.h"
#include "common.h"
#include "engine/backends.h"
#include "engine/bench.h"
#include "io/json.h"

namespace fut::app {
namespace {

using nlohmann::ordered_json;

struct PartFlags {
  std::string what, op = "all";  ///< what: op, block or step
  std::string shape = "llama-3.1-8b", model, phase = "decode", weights = "int4", kv = "int4", head, group = "64";
  std::string backend = "auto", csv;
  int threads = 0;
  bool json = false;
  BenchOptions options;

  bool prefill() const { return phase == "prefill"; }
  std::string shape_name() const { return model.empty() ? shape : model; }
};

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const BenchShape& shape : bench_shapes()) names.push_back(shape.name);
  return names;
}

Dtype dtype_of(const std::string& precision) {
  if (precision == "fp8") return Dtype::e4m3;
  if (precision == "bf16") return Dtype::bf16;
  return precision == "f32" ? Dtype::f32 : Dtype::int4;
}

void add_flags(CLI::App& app, PartFlags& flags) {
  const std::vector<std::string> precisions = {"int4", "fp8", "bf16", "f32"};
  BenchOptions& o = flags.options;
  if (flags.what == "op") add_argument(app, "NAME", flags.op, false, "an operation, or all (the default)");
  add_choice(app, "--shape", flags.shape, shape_names(), "whose sizes");
  add_text(app, "--model", flags.model, "MODEL", "the sizes of this model instead; its weights are not read");
  add_choice(app, "--phase", flags.phase, {"decode", "prefill"}, "one token a sequence, or whole prompts");
  add_choice(app, "--weights", flags.weights, precisions, "int4 is for decode; prefill takes fp8 by itself");
  add_choice(app, "--kv", flags.kv, precisions, "the KV cache");
  add_choice(app, "--head", flags.head, precisions, "of lm_head; by itself bf16, or f32 beside f32 weights");
  add_choice(app, "--group-size", flags.group, {"32", "64", "128"}, "of INT4 weights");
  add_integer(app, "--batch", o.batch, {1, 4096}, "sequences");
  add_integer(app, "--context", o.context, {0, 1 << 24}, "tokens of each in the cache already; prefill: 0 by itself");
  add_integer(app, "--tokens", o.tokens, {1, 1 << 24}, "prefill: new tokens of each sequence");
  add_integer(app, "--layers", o.layers, {0, 10000},
              flags.what == "step"
                  ? "layers of the step; 0: the shape's"
                  : "sets of weights and cache that take turns; 0: enough to leave the last-level cache");
  add_integer(app, "--repeat", o.repeat, {1, 100000}, "samples, after a warm-up that is not counted");
  add_switch(app, "--json", flags.json, "results as JSON");
  add_text(app, "--csv", flags.csv, "FILE", "append a line for every row; a new file begins with a header");
  add_choice(app, "--backend", flags.backend, {"auto", "cpu", "cuda"}, "where it runs");
  add_integer(app, "--threads", flags.threads, {0, 1024}, "CPU threads; 0: one a core");
}

std::string footer(const std::string& what) {
  std::string text =
      "Times are of one run: median, lowest and highest over the samples. Runs shorter than 2 ms are repeated within\n"
      "a sample. Weights, activations and cached tokens are random, always the same.\nBytes moved: ";
  text += kBenchBytes;
  if (what == "op") {
    text += fmt::format("\n\nDecode: {}\nPrefill: {}", fmt::join(bench_op_names(false), ", "),
                        fmt::join(bench_op_names(true), ", "));
  } else if (what == "block") {
    text += "\n\nA block is the operations of one layer, one after another.";
  } else {
    text += "\n\nA step is embed, all layers and lm_head; logits stay where they are and no token is chosen.";
  }
  const std::string example = what == "op" ? "op attention_decode" : what;
  return text + fmt::format(
                    "\n\nExamples:\n  fut bench {0} --shape llama-3.1-8b --batch 8 --context 2048\n"
                    "  fut bench {0} --shape smollm2-135m --weights bf16 --kv bf16 --csv results.csv",
                    example);
}

/// What the flags mean together; throws nothing that is not about a model's file.
void resolve(const CLI::App& app, PartFlags& flags) {
  if (flags.prefill() && !given(app, "--weights")) flags.weights = "fp8";
  if (flags.prefill() && !given(app, "--context")) flags.options.context = 0;
  BenchOptions& o = flags.options;
  o.prefill = flags.prefill();
  o.weights = dtype_of(flags.weights);
  o.kv = dtype_of(flags.kv);
  if (!flags.head.empty()) o.head = dtype_of(flags.head);
  o.group = std::stoi(flags.group);
  if (!flags.model.empty()) {
    o.config = model_shape(flags.model);
    return;
  }
  for (const BenchShape& shape : bench_shapes()) {
    if (shape.name == flags.shape) o.config = shape.config;
  }
}

/// The commit that the program was built from, where it lies in a git work tree; else "unknown".
std::string commit() {
  std::error_code no_link;
  std::string folder = std::filesystem::read_symlink("/proc/self/exe", no_link).parent_path();
  if (no_link || folder.find('\'') != folder.npos) return "unknown";
  const std::string command = "git -C '" + folder + "' describe --always --dirty --abbrev=9 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  char line[128];
  if (!pipe || !fgets(line, sizeof line, pipe.get())) return "unknown";
  return std::string(line, std::string_view(line).find_first_of("\r\n"));
}

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n") == text.npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

void append_csv(const PartFlags& flags, const std::string& backend, const std::vector<BenchResult>& results) {
  std::error_code absent;
  const auto size = std::filesystem::file_size(flags.csv, absent);
  std::ofstream file(flags.csv, std::ios::app);
  if (absent || size == 0) {
    file << "commit,backend,op,phase,shape,weights,kv,batch,context,tokens,layers,us_median,us_min,us_max,bytes,gb_s\n";
  }
  const BenchOptions& o = flags.options;
  const std::string at = commit();
  for (const BenchResult& r : results) {
    file << fmt::format("{},{},{},{},{},{},{},{},{},{},{},{:.3f},{:.3f},{:.3f},{},{:.3f}\n", at, csv_field(backend),
                        r.what, flags.phase, csv_field(flags.shape_name()), flags.weights, flags.kv, o.batch, o.context,
                        o.prefill ? o.tokens : 1, r.layers, r.median_us(), r.us.front(), r.us.back(), r.bytes,
                        r.gb_per_second());
  }
  FUT_CHECK(file.flush(), flags.csv, ": cannot be written");
}

std::string as_json(const PartFlags& flags, const std::string& backend, const std::vector<BenchResult>& results) {
  const BenchOptions& o = flags.options;
  ordered_json rows = ordered_json::array();
  for (const BenchResult& r : results) {
    rows.push_back({{"op", r.what},
                    {"us", r.median_us()},
                    {"us_min", r.us.front()},
                    {"us_max", r.us.back()},
                    {"bytes", r.bytes},
                    {"gb_s", r.gb_per_second()},
                    {"layers", r.layers}});
  }
  ordered_json out = {
      {"backend", backend},       {"commit", commit()}, {"phase", flags.phase}, {"shape", flags.shape_name()},
      {"weights", flags.weights}, {"kv", flags.kv},     {"batch", o.batch},     {"context", o.context},
      {"repeat", o.repeat},       {"rows", rows}};
  if (o.prefill) out["tokens"] = o.tokens;
  return out.dump() + "\n";
}

std::string as_text(const PartFlags& flags, const std::string& backend, const std::vector<BenchResult>& results) {
  const BenchOptions& o = flags.options;
  std::string text = fmt::format("{}: {}, weights {}, KV {}, batch {}, context {}{}, {}\n\n", flags.shape_name(),
                                 flags.phase, flags.weights, flags.kv, o.batch, o.context,
                                 o.prefill ? fmt::format(" + {}", o.tokens) : "", backend);
  text += fmt::format("| {:<17} | {:>12} | {:>25} | {:>10} | {:>8} | {:>6} |\n", flags.what, "us", "lowest .. highest",
                      "MiB moved", "GB/s", flags.what == "step" ? "layers" : "sets");
  text += fmt::format("|{:-<19}|{:->14}|{:->27}|{:->12}|{:->10}|{:->8}|\n", "", ":", ":", ":", ":", ":");
  for (const BenchResult& r : results) {
    text += fmt::format("| {:<17} | {:>12.1f} | {:>25} | {:>10.2f} | {:>8.2f} | {:>6} |\n", r.what, r.median_us(),
                        fmt::format("{:.1f} .. {:.1f}", r.us.front(), r.us.back()),
                        static_cast<double>(r.bytes) / (1 << 20), r.gb_per_second(), r.layers);
  }
  return text;
}

}  // namespace

int bench_parts(int argc, const char* const* argv) {
  PartFlags flags;
  flags.what = argv[0];
  const auto app = make_app("Measures operations at a model's sizes, with random weights.", "fut bench " + flags.what);
  add_flags(*app, flags);
  set_footer(*app, footer(flags.what));
  if (const auto code = parse(*app, argc, argv)) return *code;
  if (flags.prefill() && (flags.weights == "int4" && given(*app, "--weights"))) {
    return usage_error(*app, "--weights int4: INT4 weights are for decode");
  }
  if (flags.prefill() && flags.head == "int4") return usage_error(*app, "--head int4: INT4 weights are for decode");
  std::vector<std::string> todo = flags.what == "op" ? bench_op_names(flags.prefill()) : std::vector{flags.what};
  if (flags.what == "op" && flags.op != "all") {
    if (std::find(todo.begin(), todo.end(), flags.op) == todo.end()) {
      return usage_error(
          *app, fmt::format("{}: no operation of {} (known: all, {})", flags.op, flags.phase, fmt::join(todo, ", ")));
    }
    todo = {flags.op};
  }
  resolve(*app, flags);

  watch_interrupts();
  set_thread_count(flags.threads);
  const BenchOptions& o = flags.options;
  const auto backend = make_backend(flags.backend, o.config, {o.weights, o.kv, o.head.value_or(o.weights)});
  Bar bar;
  flags.options.on_progress = [&](const std::string& stage, int64_t done, int64_t total) {
    throw_if_interrupted();
    now("measuring " + stage);
    bar.show(stage, done, total);
  };
  std::vector<BenchResult> results;
  for (const std::string& what : todo) results.push_back(run_benchmark(*backend, what, flags.options));
  bar.clear();
  if (!flags.csv.empty()) append_csv(flags, backend->name(), results);
  put(flags.json ? as_json(flags, backend->name(), results) : as_text(flags, backend->name(), results));
  return 0;
}

}  // namespace fut::app
