// Parts of a model at a given shape, with random weights: no model is needed. Shares nothing with `fut bench model` but
// the verb.
#include "bench_op.h"

#include <fmt/format.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

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
  std::string lengths, scaling = "exact";
  std::string backend = "auto", csv, commit;
  int threads = 0;
  float ceiling = 0;  ///< TB/s; 0: read_ceiling()
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
  if (flags.what == "op")
    add_argument(app, "NAME", flags.op, false,
                 "an operation, several joined by + (A+B), layer for each of a "
                 "layer's, or all (the default)");
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
  add_text(app, "--lengths", flags.lengths, "LIST",
           "prefill: new tokens of every sequence, as 17,300,64, or a file of them; instead of --tokens and --batch");
  add_choice(app, "--prefill-scaling", flags.scaling, {"exact", "frozen", "delayed"}, "FP8 activation scales");
  add_integer(app, "--layers", o.layers, {0, 10000},
              flags.what == "step"
                  ? "layers of the step; 0: the shape's"
                  : "sets of weights and cache that take turns; 0: enough to leave the last-level cache");
  if (flags.what == "step")
    add_switch(app, "--trace", o.trace, "on a card, decode as one kernel: also where its time goes, stage by stage");
  add_integer(app, "--repeat", o.repeat, {0, 100000},
              "samples, after a warm-up that is not counted; 0: 40 on a card, else 10");
  add_number(app, "--ceiling", flags.ceiling, {0, 1e6}, "TB/s that memory can be read at; 0: as measured, for an H200");
  add_switch(app, "--json", flags.json, "results as JSON");
  add_text(app, "--csv", flags.csv, "FILE",
           "append a line for every row, in the columns that the file's first line names");
  add_text(app, "--commit", flags.commit, "ID", "what CSV and JSON call this version; by itself what git says");
  add_choice(app, "--backend", flags.backend, {"auto", "cpu", "cuda"}, "where it runs");
  add_integer(app, "--threads", flags.threads, {0, 1024}, "CPU threads; 0: one a core");
}

std::string footer(const std::string& what) {
  std::string text =
      "Times are of one run: median, lowest and highest over the samples. Runs shorter than 2 ms are repeated within\n"
      "a sample. On a card, work is recorded once and replayed, one run on each set a sample, by the card's clock.\n"
      "Weights, activations and cached tokens are random, always the same.\nBytes moved: ";
  text += kBenchBytes;
  if (what == "op") {
    text += fmt::format("\n\nDecode: {}\nPrefill: {}", fmt::join(bench_op_names(false), ", "),
                        fmt::join(bench_op_names(true), ", "));
  } else if (what == "block") {
    text += "\n\nA block is the operations of one layer, one after another.";
  } else {
    text +=
        "\n\nA step is embed, all layers and lm_head; logits stay where they are and no token is chosen. A card makes\n"
        "a decode step as one kernel where that is faster; FUT_STEP_ROWS says up to how many sequences (0: never; 32\n"
        "at most). Row \"layer\": the step less one with half the layers, by the number of layers between them.";
  }
  text +=
      "\n\nPFLOP/s: of products, and of causal attention counted as half of its square. In prefill FP8 activations "
      "have\n"
      "exact scales by itself; frozen and delayed ones are such as fit the random numbers. In CSV such a row is "
      "called\n"
      "prefill_NAME, with /frozen, /delayed and /ragged (--lengths) behind it; a file without a column tokens gets "
      "the\n"
      "cached and new tokens of the longest sequence as its context.";
  const std::string example = what == "op" ? "op attention_decode" : what;
  return text + fmt::format(
                    "\n\nExamples:\n  fut bench {0} --shape llama-3.1-8b --batch 8 --context 2048\n"
                    "  fut bench {0} --shape smollm2-135m --weights bf16 --kv bf16 --csv results.csv",
                    example);
}

/// "17,300,64", or the name of a file with such numbers, apart by commas, spaces or lines. Error where it is neither.
std::vector<int64_t> parse_lengths(const std::string& list) {
  std::string text = list;
  if (list.find_first_not_of("0123456789,") != list.npos) {
    std::ifstream file(list);
    FUT_CHECK(file, "--lengths ", list, ": is no list of lengths such as 17,300 and no file that can be read");
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  std::replace(text.begin(), text.end(), ',', ' ');
  std::vector<int64_t> lengths;
  std::istringstream words(text);
  for (std::string word; words >> word; lengths.push_back(std::stoll(word))) {
    const bool digits = word.size() <= 8 && word.find_first_not_of("0123456789") == word.npos;
    FUT_CHECK(digits && std::stoll(word) > 0 && std::stoll(word) <= 1 << 24, "--lengths ", list, ": \"", word,
              "\" is no whole number from 1 to ", 1 << 24);
  }
  FUT_CHECK(!lengths.empty() && lengths.size() <= 4096, "--lengths ", list, ": names ", lengths.size(),
            " lengths, from 1 to 4096 can be");
  return lengths;
}

/// What the flags mean together; throws nothing that is not about a file.
void resolve(const CLI::App& app, PartFlags& flags) {
  if (flags.prefill() && !given(app, "--weights")) flags.weights = "fp8";
  if (flags.prefill() && !given(app, "--context")) flags.options.context = 0;
  BenchOptions& o = flags.options;
  o.prefill = flags.prefill();
  o.weights = dtype_of(flags.weights);
  o.kv = dtype_of(flags.kv);
  if (!flags.head.empty()) o.head = dtype_of(flags.head);
  o.scaling = flags.scaling == "frozen"    ? Fp8Scaling::frozen
              : flags.scaling == "delayed" ? Fp8Scaling::delayed
                                           : Fp8Scaling::exact;
  if (!flags.lengths.empty()) {
    o.lengths = parse_lengths(flags.lengths);
    o.batch = static_cast<int64_t>(o.lengths.size());
    o.tokens = *std::max_element(o.lengths.begin(), o.lengths.end());
  }
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

using Columns = std::vector<std::string>;

/// "share_of_4.57TB/s" -> 4.57e12; nothing where the column is another.
std::optional<double> ceiling_of(const std::string& column) {
  double ceiling = 0;
  int end = 0;
  const bool fits = sscanf(column.c_str(), "share_of_%lfTB/s%n", &ceiling, &end) == 1 && end == int(column.size());
  return fits && ceiling > 0 ? std::optional(ceiling * 1e12) : std::nullopt;
}

/// The columns of a file that results are appended to: its own, or those of a new one.
Columns columns_of(const PartFlags& flags, std::optional<double> ceiling) {
  std::ifstream file(flags.csv);
  std::string line;
  Columns columns;
  if (!std::getline(file, line)) {
    columns = {"commit",  "card", "date",   "clock_mhz", "op",     "phase",  "shape", "batch", "context", "tokens",
               "weights", "kv",   "layers", "us",        "us_min", "us_max", "bytes", "gb_s",  "one_call"};
    if (ceiling) columns.push_back(fmt::format("share_of_{:.6g}TB/s", *ceiling / 1e12));
    return columns;
  }
  std::istringstream names(line);
  for (std::string name; std::getline(names, name, ',');) columns.push_back(name);
  const auto has = [&](const char* name) { return std::find(columns.begin(), columns.end(), name) != columns.end(); };
  FUT_CHECK(!flags.prefill() || has("op"), flags.csv, ": line 1 has no column op, which tells prefill from decode");
  return columns;
}

/// A row's op in a file: prefill, its scales and ragged prompts show in the name, for not every file has a column for
/// them. "prefill_block/frozen/ragged"
std::string csv_op(const PartFlags& flags, const std::string& what) {
  if (!flags.prefill()) return what;
  return "prefill_" + what + (flags.scaling == "exact" ? "" : "/" + flags.scaling) +
         (flags.lengths.empty() ? "" : "/ragged");
}

/// "cuda (NVIDIA H200)" -> "NVIDIA H200"; other backends keep their whole name.
std::string card_name(const std::string& backend) {
  return backend.starts_with("cuda (") ? backend.substr(6, backend.size() - 7) : backend;
}

std::map<std::string, std::string> csv_values(const PartFlags& flags, Backend& backend, const BenchResult& r,
                                              const Columns& columns) {
  const BenchOptions& o = flags.options;
  const bool has_tokens = std::find(columns.begin(), columns.end(), "tokens") != columns.end();
  const auto clock = card_clock(backend);
  const time_t now = ::time(nullptr);
  char date[16];
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
  const auto us = [](double value) { return fmt::format("{:.3f}", value); };
  return {{"commit", flags.commit},
          {"card", card_name(backend.name())},
          {"date", date},
          {"clock_mhz", clock ? fmt::to_string(clock->mhz) : ""},
          {"op", csv_op(flags, r.what)},
          {"phase", flags.phase},
          {"shape", flags.shape_name()},
          {"batch", fmt::to_string(o.batch)},
          {"context", fmt::to_string(o.context + (o.prefill && !has_tokens ? o.tokens : 0))},
          {"tokens", fmt::to_string(o.prefill ? o.tokens : 1)},
          {"weights", name_of(o.weights)},
          {"kv", name_of(o.kv)},
          {"layers", fmt::to_string(r.layers)},
          {"us", us(r.median_us())},
          {"us_min", us(r.us.front())},
          {"us_max", us(r.us.back())},
          {"bytes", fmt::to_string(r.bytes)},
          {"gb_s", us(r.gb_per_second())},
          {"one_call", flags.what != "step" ? ""
                       : r.one_call         ? "yes"
                                            : "no"}};
}

/// Throws, before anything is measured, unless a value is known for every column.
void check_columns(const PartFlags& flags, Backend& backend, const Columns& columns) {
  BenchResult any;
  any.us = {1.0};
  const std::map<std::string, std::string> known = csv_values(flags, backend, any, columns);
  for (const std::string& column : columns) {
    FUT_CHECK(known.count(column) || ceiling_of(column), flags.csv, ": line 1 names a column ", column,
              ", which is none of a benchmark's");
  }
}

/// Fields by the names of the file's columns.
void append_csv(const PartFlags& flags, Backend& backend, const Columns& columns,
                const std::vector<BenchResult>& results) {
  std::error_code absent;
  const auto size = std::filesystem::file_size(flags.csv, absent);
  std::ofstream file(flags.csv, std::ios::app);
  if (absent || size == 0) file << fmt::format("{}\n", fmt::join(columns, ","));
  for (const BenchResult& r : results) {
    const std::map<std::string, std::string> values = csv_values(flags, backend, r, columns);
    Columns fields;
    for (const std::string& column : columns) {
      if (const auto ceiling = ceiling_of(column)) {
        fields.push_back(fmt::format("{:.6g}", r.gb_per_second() * 1e9 / *ceiling));
      } else {
        fields.push_back(csv_field(values.at(column)));
      }
    }
    file << fmt::format("{}\n", fmt::join(fields, ","));
  }
  FUT_CHECK(file.flush(), flags.csv, ": cannot be written: ", std::strerror(errno));
}

/// Where a step's time goes: each kind of stage with its share of the whole.
template <class Use>
void for_stages(const std::vector<StepStage>& stages, int mhz, Use use) {
  double all = 0;
  for (const StepStage& s : stages) all += s.cycles * static_cast<double>(s.count);
  for (const StepStage& s : stages)
    use(s, s.cycles / mhz, 100 * s.cycles * static_cast<double>(s.count) / all, s.input_cycles / mhz,
        s.memory_cycles / mhz, s.longest / mhz);
}

ordered_json stages_as_json(const std::vector<StepStage>& stages, int mhz) {
  ordered_json rows = ordered_json::array();
  for_stages(stages, mhz, [&](const StepStage& s, double us, double share, double input, double memory, double most) {
    rows.push_back({{"op", s.op},
                    {"count", s.count},
                    {"cycles", s.cycles},
                    {"us", us},
                    {"share", share / 100},
                    {"input_us", input},
                    {"memory_us", memory},
                    {"longest_us", most}});
  });
  return rows;
}

std::string stages_as_text(const std::vector<StepStage>& stages, int mhz) {
  std::string text = fmt::format(
      "\nStages of a traced step: means over multiprocessors and layers, microseconds at {} MHz. inputs: of these,\n"
      "until what others make was there; memory: waiting for weights or cached tokens.\n\n"
      "| {:<17} | {:>5} | {:>9} | {:>7} | {:>7} | {:>7} | {:>7} | {:>7} |\n"
      "|{:-<19}|{:->7}|{:->11}|{:->9}|{:->9}|{:->9}|{:->9}|{:->9}|\n",
      mhz, "stage", "count", "cycles", "us", "share", "inputs", "memory", "longest", "", ":", ":", ":", ":", ":", ":",
      ":");
  for_stages(stages, mhz, [&](const StepStage& s, double us, double share, double input, double memory, double most) {
    text += fmt::format("| {:<17} | {:>5} | {:>9.0f} | {:>7.2f} | {:>5.1f} % | {:>7.2f} | {:>7.2f} | {:>7.2f} |\n",
                        s.op, s.count, s.cycles, us, share, input, memory, most);
  });
  return text;
}

std::string as_json(const PartFlags& flags, const std::string& backend, int mhz, std::optional<double> ceiling,
                    const std::vector<BenchResult>& results) {
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
    if (ceiling) rows.back()["share_of_ceiling"] = r.gb_per_second() * 1e9 / *ceiling;
    if (flags.what == "step") rows.back()["one_call"] = r.one_call;
    if (o.prefill) rows.back()["pflop_s"] = r.pflop_per_second();
    if (!r.stages.empty()) rows.back()["stages"] = stages_as_json(r.stages, mhz);
  }
  ordered_json out = {{"backend", backend},
                      {"commit", flags.commit},
                      {"phase", flags.phase},
                      {"shape", flags.shape_name()},
                      {"weights", flags.weights},
                      {"kv", flags.kv},
                      {"batch", o.batch},
                      {"context", o.context},
                      {"repeat", results[0].us.size()},
                      {"rows", rows}};
  if (o.prefill) out.update({{"tokens", o.tokens}, {"prefill_scaling", flags.scaling}});
  if (!o.lengths.empty()) out["lengths"] = o.lengths;
  if (ceiling) out["ceiling_gb_s"] = *ceiling / 1e9;
  return out.dump() + "\n";
}

std::string as_text(const PartFlags& flags, const std::string& backend, int mhz, std::optional<double> ceiling,
                    const std::vector<BenchResult>& results) {
  const BenchOptions& o = flags.options;
  std::string text = fmt::format("{}: {}, weights {}, KV {}, batch {}, context {}{}, {}\n\n", flags.shape_name(),
                                 flags.phase, flags.weights, flags.kv, o.batch, o.context,
                                 o.prefill ? fmt::format(" + {}", o.tokens) : "", backend);
  size_t width = 17;
  for (const BenchResult& r : results) width = std::max(width, r.what.size());
  text += fmt::format("| {:<{}} | {:>12} | {:>25} | {:>10} | {:>8} | {:>7} | {:>6} |\n", flags.what, width, "us",
                      "lowest .. highest", "MiB moved", "GB/s", o.prefill ? "PFLOP/s" : "ceiling",
                      flags.what == "step" ? "layers" : "sets");
  text += fmt::format("|{:-<{}}|{:->14}|{:->27}|{:->12}|{:->10}|{:->9}|{:->8}|\n", "", width + 2, ":", ":", ":", ":",
                      ":", ":");
  for (const BenchResult& r : results) {
    const std::string share = o.prefill ? fmt::format("{:.3f}", r.pflop_per_second())
                              : ceiling ? fmt::format("{:.1f} %", r.gb_per_second() * 1e11 / *ceiling)
                                        : std::string("unknown");
    text += fmt::format("| {:<{}} | {:>12.1f} | {:>25} | {:>10.2f} | {:>8.2f} | {:>7} | {:>6} |\n", r.what, width,
                        r.median_us(), fmt::format("{:.1f} .. {:.1f}", r.us.front(), r.us.back()),
                        static_cast<double>(r.bytes) / (1 << 20), r.gb_per_second(), share, r.layers);
  }
  if (flags.what == "step") {
    const bool head = o.head.value_or(Dtype::bf16) == o.weights;
    text += !results[0].one_call ? "\nThe step ran operation by operation.\n"
            : head               ? "\nThe step ran as one kernel.\n"
                                 : "\nThe step ran as one kernel, and lm_head, whose format is another, behind it.\n";
  }
  if (!results[0].stages.empty()) text += stages_as_text(results[0].stages, mhz);
  return text;
}

/// A step's row for one of its layers, where it could be told.
std::optional<BenchResult> layer_of(const BenchResult& step) {
  if (!step.layer_us) return std::nullopt;
  BenchResult layer;
  layer.what = "layer";
  layer.layers = 1;
  layer.bytes = step.layer_bytes;
  layer.us = {*step.layer_us};
  layer.one_call = step.one_call;
  return layer;
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
  if (!flags.prefill() && (given(*app, "--lengths") || given(*app, "--prefill-scaling"))) {
    return usage_error(*app, "--lengths and --prefill-scaling are for --phase prefill");
  }
  if (given(*app, "--lengths") && (given(*app, "--tokens") || given(*app, "--batch"))) {
    return usage_error(*app, "--lengths says what --tokens and --batch say");
  }
  if (flags.prefill() && flags.head == "int4") return usage_error(*app, "--head int4: INT4 weights are for decode");
  std::vector<std::string> todo = flags.what == "op" ? bench_op_names(flags.prefill()) : std::vector{flags.what};
  if (flags.op == "layer") {  // all but embed and lm_head
    todo.erase(todo.begin());
    todo.pop_back();
  } else if (flags.what == "op" && flags.op != "all") {
    std::istringstream names(flags.op);
    for (std::string name; std::getline(names, name, '+');) {
      if (std::find(todo.begin(), todo.end(), name) != todo.end()) continue;
      return usage_error(*app, fmt::format("{}: no operation of {} (known: all, layer, {})", name, flags.phase,
                                           fmt::join(todo, ", ")));
    }
    todo = {flags.op};
  }
  resolve(*app, flags);
  if (flags.commit.empty()) flags.commit = commit();

  watch_interrupts();
  set_thread_count(flags.threads);
  const BenchOptions& o = flags.options;
  std::vector<std::string> warnings;
  const auto backend = make_backend(flags.backend, o.config, {o.weights, o.kv, o.head.value_or(o.weights)}, &warnings);
  for (const std::string& warning : warnings) note("fut: " + one_line(warning));
  const std::optional<double> ceiling = flags.ceiling > 0 ? flags.ceiling * 1e12 : read_ceiling(*backend);
  const Columns columns = flags.csv.empty() ? Columns{} : columns_of(flags, ceiling);
  check_columns(flags, *backend, columns);
  Bar bar;
  flags.options.on_progress = [&](const std::string& stage, int64_t done, int64_t total) {
    throw_if_interrupted();
    now("measuring " + stage);
    bar.show(stage, done, total);
  };
  std::vector<BenchResult> results;
  for (const std::string& what : todo) {
    results.push_back(run_benchmark(*backend, what, flags.options));
    if (auto layer = layer_of(results.back())) results.push_back(std::move(*layer));
  }
  bar.clear();
  if (!flags.csv.empty()) append_csv(flags, *backend, columns, results);
  const auto clock = card_clock(*backend);
  const int mhz = clock ? clock->mhz : 0;
  put(flags.json ? as_json(flags, backend->name(), mhz, ceiling, results)
                 : as_text(flags, backend->name(), mhz, ceiling, results));
  return 0;
}

}  // namespace fut::app
