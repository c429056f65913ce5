// fut bench: speed. `fut bench model` measures whole models, through the same calls that `fut generate` makes.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "base/error.h"
#include "bench_op.h"
#include "common.h"
#include "engine/inspect.h"
#include "io/json.h"

namespace fut::app {
namespace {

using nlohmann::ordered_json;

struct BenchFlags {
  ModelFlags model;
  int64_t pp = 512, tg = 128, depth = 0, repeat = 3, batch = 1;
};

/// One row of the table: what is asked, and the speed of each repetition.
struct Row {
  std::string test;
  int64_t prompt = 0, generate = 0;  ///< tokens a sequence; generate = 0: the prefill is what counts
  int64_t depth = 0;
  std::vector<double> tok_s = {};
  int64_t short_by = 0;  ///< tokens that were asked for and did not come, over all repetitions

  double median() const {
    std::vector<double> sorted = tok_s;
    std::sort(sorted.begin(), sorted.end());
    const size_t middle = sorted.size() / 2;
    return sorted.size() % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  double low() const { return *std::min_element(tok_s.begin(), tok_s.end()); }
  double high() const { return *std::max_element(tok_s.begin(), tok_s.end()); }
};

void add_flags(CLI::App& app, BenchFlags& flags) {
  add_model_flags(app, flags.model);
  add_integer(app, "--pp", flags.pp, {0, kNoLimit}, "tokens of the prompt in the pp row; 0: no such row");
  add_integer(app, "--tg", flags.tg, {0, kNoLimit}, "tokens that the tg row generates; 0: no such row");
  add_integer(app, "--depth", flags.depth, {0, kNoLimit}, "tokens in the cache before the tg row begins");
  add_integer(app, "--repeat", flags.repeat, {1, 1000}, "measured runs of a row, after one that is not counted");
  add_integer(app, "--batch", flags.batch, {1, 4096}, "sequences at a time; tok/s is over all of them");
  add_run_flags(app, flags.model);
  set_footer(
      app,
      "pp: prompt tokens by the time of the prefill. tg: tokens made by decode steps by the time of those steps; the\n"
      "first token of an answer comes from the prefill and is not among them. Prompts are random ids and end tokens\n"
      "do not end an answer. Peak memory is the process's own, loading included.\n\n"
      "Examples:\n"
      "  fut bench model model.gguf\n"
      "  fut bench model model.gguf --pp 0 --tg 64 --depth 4096 --batch 8 --json");
}

std::vector<Request> random_requests(const Row& row, int64_t batch, int64_t vocabulary) {
  std::mt19937 random(1);
  std::vector<Request> requests(static_cast<size_t>(batch));
  for (Request& request : requests) {
    for (int64_t i = 0; i < row.prompt; ++i) {
      request.ids.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocabulary)));
    }
    request.max_tokens = row.generate + 1;
    request.prefill_only = row.generate == 0;
    request.sampling.temperature = 0;
    request.ignore_end_tokens = true;
  }
  return requests;
}

/// Runs a row once; returns tokens a second.
double run_once(Engine& engine, Row& row, int64_t batch) {
  const auto requests = random_requests(row, batch, engine.info().vocabulary);
  for (const Completion& completion :
       engine.generate(requests, [](size_t, std::string_view) { return !interrupted(); })) {
    throw_if_interrupted();
    FUT_CHECK(completion.finish_reason != "error", row.test, ": ", completion.error);
  }
  const Timing timing = engine.last_timing();
  if (row.generate == 0) return per_second(timing.prefill_tokens, timing.prefill_seconds);
  row.short_by += row.generate * batch - timing.decode_tokens;
  return per_second(timing.decode_tokens, timing.decode_seconds);
}

std::vector<Row> measure(Engine& engine, const BenchFlags& flags) {
  std::vector<Row> rows;
  if (flags.pp) rows.push_back({.test = cat("pp", flags.pp), .prompt = flags.pp});
  if (flags.tg) {
    const std::string at = flags.depth ? cat(" @ d", flags.depth) : "";
    rows.push_back({.test = cat("tg", flags.tg) + at,
                    .prompt = std::max<int64_t>(flags.depth, 1),
                    .generate = flags.tg,
                    .depth = flags.depth});
  }
  Bar bar;
  for (Row& row : rows) {
    now("measuring " + row.test);
    for (int64_t i = 0; i <= flags.repeat; ++i) {
      bar.show(row.test, i, flags.repeat + 1);
      const double tok_s = run_once(engine, row, flags.batch);
      if (i == 0) row.short_by = 0;  // the first run warms caches and clocks up
      if (i > 0) row.tok_s.push_back(tok_s);
    }
  }
  return rows;
}

/// The most memory this process ever held, in bytes; 0 if the system does not tell.
int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

ordered_json as_json(const BenchFlags& flags, const ModelInfo& info, const std::vector<Row>& rows, int64_t peak) {
  ordered_json list = ordered_json::array();
  for (const Row& row : rows) {
    ordered_json line = {{"test", row.test},       {"prompt", row.prompt},     {"generate", row.generate},
                         {"depth", row.depth},     {"batch", flags.batch},     {"tok_s", row.median()},
                         {"tok_s_low", row.low()}, {"tok_s_high", row.high()}, {"tok_s_all", row.tok_s}};
    if (row.short_by) line["tokens_missing"] = row.short_by;
    list.push_back(std::move(line));
  }
  return {{"model", flags.model.model},
          {"backend", info.backend},
          {"prefill", info.prefill},
          {"decode", info.decode},
          {"kv", info.kv},
          {"parameters", info.parameters},
          {"rows", list},
          {"peak_bytes", peak},
          {"prefill_weight_bytes", info.prefill_weight_bytes},
          {"decode_weight_bytes", info.decode_weight_bytes},
          {"embedding_bytes", info.embedding_bytes},
          {"head_bytes", info.head_bytes}};
}

std::string as_text(const BenchFlags& flags, const ModelInfo& info, const std::vector<Row>& rows, int64_t peak) {
  std::string text = fmt::format("{}: {:.1f} M parameters, prefill {}, decode {}, KV {}, batch {}, {}\n",
                                 flags.model.model, static_cast<double>(info.parameters) / 1e6, info.prefill,
                                 info.decode, info.kv, flags.batch, info.backend);
  text += fmt::format("\n| {:<16} | {:>10} | {:>21} |\n|{:-<18}|{:->12}|{:->23}|\n", "test", "tok/s",
                      "lowest .. highest", "", ":", ":");
  for (const Row& row : rows) {
    text += fmt::format("| {:<16} | {:>10.2f} | {:>21} |\n", row.test, row.median(),
                        fmt::format("{:.2f} .. {:.2f}", row.low(), row.high()));
  }
  text += fmt::format("\npeak memory {}; {}\n", mib(peak), weights_line(info));
  for (const Row& row : rows) {
    if (row.short_by)
      text += fmt::format("{}: {} tokens fewer than asked for were made and counted\n", row.test, row.short_by);
  }
  return text;
}

/// A prompt of at least one token, the answer's first token, which the prefill makes, and those of the steps.
int64_t tg_context(const BenchFlags& flags) { return flags.tg ? std::max<int64_t>(flags.depth, 1) + 1 + flags.tg : 0; }

void check_context(const BenchFlags& flags, const ModelInfo& info) {
  require_option(flags.pp <= info.context, "--pp ", flags.pp, " is beyond the context limit of ", info.context);
  require_option(tg_context(flags) <= info.context, "--tg ", flags.tg, " needs a context of ", tg_context(flags),
                 " tokens, the limit is ", info.context, ": before its tokens there are ",
                 std::max<int64_t>(flags.depth, 1), " of the prompt and the one that the prefill makes");
}

int bench_model(int argc, const char* const* argv) {
  const auto app = make_app("Measures prefill (pp) and decode (tg) speed of a model.", "fut bench model");
  BenchFlags flags;
  add_flags(*app, flags);
  if (const auto code = parse(*app, argc, argv)) return *code;
  if (flags.pp == 0 && flags.tg == 0) return usage_error(*app, "--pp 0 and --tg 0 leave nothing to measure");

  // No larger cache than the rows need, unless asked: peak memory is one of the results.
  EngineOptions& options = flags.model.options;
  if (!given(*app, "--max-context")) {
    const int64_t limit = inspect_model(flags.model.model, options).config.positions;
    options.max_context = std::min(limit, std::max(flags.pp, tg_context(flags)));
  }
  if (!given(*app, "--max-batch")) options.max_batch = static_cast<int>(flags.batch);
  const auto engine = load_engine(flags.model, [&](const Engine& opened) { check_context(flags, opened.info()); });
  const auto rows = measure(*engine, flags);
  const int64_t peak = peak_memory();
  put(flags.model.json
          ? as_json(flags, engine->info(), rows, peak).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
                "\n"
          : as_text(flags, engine->info(), rows, peak));
  return 0;
}

}  // namespace

int run_bench(int argc, const char* const* argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "model") return bench_model(argc - 1, argv + 1);
  if (what == "op" || what == "block" || what == "step") return bench_parts(argc - 1, argv + 1);
  if (what == "--help" || what == "-h") {
    put("Measures speed.\n"
        "Usage: fut bench model MODEL [OPTIONS]   a whole model, through the calls that `fut generate` makes\n"
        "       fut bench op [NAME] [OPTIONS]     one operation, or each of them\n"
        "       fut bench block [OPTIONS]         the operations of one layer\n"
        "       fut bench step [OPTIONS]          a whole step\n"
        "The last three need no model, only a shape. Each has its own --help.\n");
    return 0;
  }
  note(what.empty() ? "fut: bench what? (see fut bench --help)"
                    : fmt::format("fut: unknown benchmark {} (known: model, op, block, step; see fut bench --help)",
                                  one_line(std::string(what))));
  return kUsage;
}

}  // namespace fut::app
