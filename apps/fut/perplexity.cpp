// fut perplexity: how well a model predicts a text, and how far it is from a base run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "common.h"
#include "io/json.h"
#include "kl_base.h"
#include "sha256.h"

namespace fut::app {
namespace {

using nlohmann::ordered_json;

struct PerplexityFlags {
  ModelFlags model;
  std::string file, mode = "prefill", kl_base;
  int64_t tokens = 0;
  bool no_bos = false, ctx_size_given = false;
  ScoreOptions score;
};

void add_flags(CLI::App& app, PerplexityFlags& flags) {
  add_model_flags(app, flags.model);
  add_argument(app, "FILE", flags.file, true, "the text, taken byte for byte; control tokens in it are plain text");
  add_integer(app, "--ctx-size", flags.score.context, {2, kNoLimit},
              "tokens a window; not given: 512, or the model's limit if that is less");
  add_integer(app, "--stride", flags.score.stride, {0, kNoLimit}, "tokens that a window adds; 0: as many as fit");
  add_choice(app, "--mode", flags.mode, {"prefill", "decode"}, "decode: one step a token, which judges INT4");
  add_integer(app, "--tokens", flags.tokens, {0, kNoLimit}, "only the first so many tokens of the text; 0: all");
  add_switch(app, "--no-bos", flags.no_bos, "no beginning-of-sequence token where the tokenizer adds one");
  add_text(app, "--kl-base", flags.kl_base, "FILE",
           "if FILE is there, compare with it; if not, write it (2 bytes a token and vocabulary entry)");
  add_run_flags(app, flags.model);
  set_footer(
      app,
      "Every token is scored once. Windows begin with BOS if the tokenizer adds one; BOS itself is never scored.\n\n"
      "Examples:\n"
      "  fut perplexity model.gguf wiki.test.raw --tokens 20000 --prefill f32 --decode f32 --kv f32 --kl-base "
      "f32.base\n"
      "  fut perplexity model.gguf wiki.test.raw --tokens 20000 --mode decode --kl-base f32.base");
}

/// Writes a base, or compares with one, as the file is there or not.
class KlRun {
 public:
  KlRun(const std::string& path, const KlSubject& subject) : path_(path) {
    if (path.empty()) return;
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored)) {
      reader_.emplace(path, subject);
    } else {
      writer_.emplace(path, subject);
    }
  }

  void add(int64_t index, double nll, const float* logits) {
    if (reader_) reader_->add(index, nll, logits);
    if (writer_) writer_->add(index, nll, logits);
  }

  /// The comparison, if it was one.
  std::optional<KlResult> finish() {
    if (writer_) writer_->finish();
    if (!reader_) return std::nullopt;
    return reader_->finish();
  }

  bool wrote() const { return writer_.has_value(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::optional<KlReader> reader_;
  std::optional<KlWriter> writer_;
};

struct Report {
  std::string file, sha256, mode;
  int64_t bytes = 0, text_tokens = 0, taken_tokens = 0;
  ScoreOptions options;
  ModelInfo info = {};
  Score score = {};
  double seconds = 0;
  std::optional<KlResult> kl = std::nullopt;

  double per_token() const { return score.nll / static_cast<double>(score.tokens); }
};

ordered_json as_json(const Report& report) {
  ordered_json line = {{"ppl", std::exp(report.per_token())},
                       {"nll", report.score.nll},
                       {"tokens", report.score.tokens},
                       {"ctx_size", report.options.context},
                       {"stride", report.options.stride},
                       {"windows", report.score.windows},
                       {"bos", report.score.bos},
                       {"mode", report.mode},
                       {"text_sha256", report.sha256},
                       {"text_tokens", report.text_tokens},
                       {"prefill", report.info.prefill},
                       {"prefill_scaling", report.info.prefill_scaling},
                       {"decode", report.info.decode},
                       {"kv", report.info.kv},
                       {"backend", report.info.backend},
                       {"tok_s", rounded(per_second(report.score.tokens, report.seconds), 2)}};
  if (report.kl) {
    line["kl"] = {{"mean", report.kl->mean},
                  {"p99", report.kl->p99},
                  {"max", report.kl->max},
                  {"top1_agreement", report.kl->top1_agreement},
                  {"nll_difference", report.kl->nll_difference},
                  {"nll_difference_se", report.kl->nll_difference_se}};
  }
  return line;
}

std::string as_text(const Report& report) {
  const ModelInfo& info = report.info;
  const std::string stride = report.options.stride ? std::to_string(report.options.stride) : "as many as fit";
  std::string text;
  text += fmt::format("text       {}, {} bytes, sha256 {}\n", one_line(report.file), report.bytes, report.sha256);
  text += fmt::format("tokens     {} of {}, {} scored\n", report.taken_tokens, report.text_tokens, report.score.tokens);
  text += fmt::format("windows    {} of {} tokens, stride {}, {}\n", report.score.windows, report.options.context,
                      stride, report.score.bos ? "BOS at the start of each, never scored" : "no BOS");
  text += fmt::format("precision  prefill {} (scaling {}), decode {}, KV {}; scored by {}\n", info.prefill,
                      info.prefill_scaling, info.decode, info.kv, report.mode);
  text += fmt::format("speed      {:.1f} tok/s, {}\n", per_second(report.score.tokens, report.seconds), info.backend);
  text += fmt::format("nll        {:.6f}, {:.6f} a token\n", report.score.nll, report.per_token());
  text += fmt::format("ppl        {:.6f}\n", std::exp(report.per_token()));
  if (report.kl) {
    text += fmt::format("KL         mean {:.6f}, 99 % {:.6f}, max {:.6f} nats a token\n", report.kl->mean,
                        report.kl->p99, report.kl->max);
    text += fmt::format("top-1      the same best token as the base for {:.3f} %\n", 100 * report.kl->top1_agreement);
    text += fmt::format("nll diff   {:+.6f} +- {:.6f} a token, this run minus the base\n", report.kl->nll_difference,
                        report.kl->nll_difference_se);
  }
  return text;
}

/// What is scored, and how; everything that can be refused before the weights are read is refused here.
std::vector<int32_t> prepare(const Engine& engine, const PerplexityFlags& flags, const std::string& text,
                             Report& report) {
  now("tokenizing " + flags.file);
  std::vector<int32_t> tokens = engine.tokenize(text, /*add_bos=*/false);
  report.text_tokens = static_cast<int64_t>(tokens.size());
  if (flags.tokens && flags.tokens < report.text_tokens) tokens.resize(static_cast<size_t>(flags.tokens));
  report.taken_tokens = static_cast<int64_t>(tokens.size());
  const int64_t limit = engine.info().context;
  if (!flags.ctx_size_given) report.options.context = std::min(report.options.context, limit);
  require_option(report.options.context <= limit, "--ctx-size ", report.options.context,
                 " is beyond the context limit of ", limit);
  report.options.add_bos = !flags.no_bos && !engine.tokenize("", /*add_bos=*/true).empty();
  report.options.decode = flags.mode == "decode";
  FUT_CHECK(tokens.size() + report.options.add_bos > 1, flags.file, ": nothing to score in ", tokens.size(),
            " tokens: the first one without a BOS before it has no prediction");
  return tokens;
}

Report score_text(const PerplexityFlags& flags, const std::string& text) {
  Report report{.file = flags.file, .sha256 = Sha256::hex(text), .mode = flags.mode, .options = flags.score};
  report.bytes = static_cast<int64_t>(text.size());
  std::vector<int32_t> tokens;
  const auto engine =
      load_engine(flags.model, [&](const Engine& opened) { tokens = prepare(opened, flags, text, report); });
  report.info = engine->info();

  watch_terminations();
  KlRun kl(flags.kl_base, {.text_sha256 = report.sha256,
                           .tokens = report.taken_tokens,
                           .context = report.options.context,
                           .stride = report.options.stride,
                           .bos = report.options.add_bos,
                           .vocabulary = report.info.vocabulary});
  now("scoring " + flags.file);
  Bar bar;
  int64_t done = 0;
  report.score = engine->score(tokens, report.options, [&](int64_t index, double nll, const float* logits) {
    throw_if_interrupted();
    kl.add(index, nll, logits);
    bar.show("scoring", ++done, report.taken_tokens);
  });
  bar.clear();
  FUT_CHECK(report.score.tokens > 0, flags.file, ": nothing to score in ", tokens.size(), " tokens");
  FUT_CHECK(std::isfinite(report.score.nll), flags.model.model, ": the model's logits are not finite");
  report.kl = kl.finish();
  if (kl.wrote()) note(fmt::format("base of {} tokens written to {}", report.score.tokens, one_line(kl.path())));
  const Timing timing = engine->last_timing();
  report.seconds = timing.prefill_seconds + timing.decode_seconds;
  if (timing.saturated) note(saturation_text(timing));
  return report;
}

}  // namespace

int run_perplexity(int argc, const char* const* argv) {
  const auto app =
      make_app("Scores a text: the exponential of the mean negative log-likelihood a token.", "fut perplexity");
  PerplexityFlags flags;
  add_flags(*app, flags);
  if (const auto code = parse(*app, argc, argv)) return *code;
  flags.ctx_size_given = given(*app, "--ctx-size");
  if (flags.score.stride > flags.score.context) return usage_error(*app, "--stride is larger than --ctx-size");

  const std::string text = read_file(flags.file);
  FUT_CHECK(!text.empty(), flags.file, ": is empty, there is nothing to score");
  const Report report = score_text(flags, text);
  put(flags.model.json ? as_json(report).dump() + "\n" : as_text(report));
  return 0;
}

}  // namespace fut::app
