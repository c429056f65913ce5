// fut generate: one answer, streamed, or many from a file of prompts.
#include <fmt/format.h>

#include "base/error.h"
#include "common.h"
#include "io/json.h"
#include "prompts.h"

namespace fut::app {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

struct GenerateFlags {
  ModelFlags model;
  Request request;  ///< what every prompt starts from
  std::string prompt, file, prompts_file;
  bool greedy = false, echo = false;
};

void add_flags(CLI::App& app, GenerateFlags& flags) {
  add_model_flags(app, flags.model);
  add_text(app, "-p,--prompt", flags.prompt, "TEXT", "the prompt");
  add_text(app, "-f,--file", flags.file, "FILE", "the prompt is the bytes of FILE; - is stdin");
  add_text(app, "--prompts", flags.prompts_file, "FILE",
           "JSON lines: {\"prompt\": ...} or a string; one JSON line an answer");
  Request& request = flags.request;
  add_integer(app, "-n,--max-tokens", request.max_tokens, kMaxTokensRange,
              "at most so many; -1: up to the context limit");
  add_sampling_flags(app, request.sampling, flags.greedy);
  add_texts(app, "--stop", request.stop, "STR", "the text ends before STR; may be given several times");
  add_switch(app, "--parse-control", request.parse_control_tokens,
             "<|eot_id|> and the like in a prompt are control tokens");
  add_switch(app, "--echo", flags.echo, "print the prompt first");
  add_run_flags(app, flags.model);
  set_footer(app,
             "A line of --prompts may bring max_tokens, temperature, top_k, top_p, min_p, seed and stop of its own.\n\n"
             "Examples:\n"
             "  fut generate models/bard -p 'To be, or not' -n 64 --seed 7\n"
             "  fut generate model.gguf -f prompt.txt --greedy --stop $'\\n\\n'\n"
             "  echo '{\"prompt\": \"Once\", \"max_tokens\": 20}' | fut generate model.gguf --prompts -");
}

ordered_json answer(const Completion& completion, const Timing& timing, const ModelInfo& info) {
  ordered_json line = {{"text", completion.text},
                       {"ids", completion.ids},
                       {"prompt_tokens", completion.prompt_tokens},
                       {"finish_reason", completion.finish_reason},
                       {"prefill_tok_s", rounded(per_second(timing.prefill_tokens, timing.prefill_seconds), 2)},
                       {"decode_tok_s", rounded(per_second(timing.decode_tokens, timing.decode_seconds), 2)},
                       {"backend", info.backend}};
  if (!completion.error.empty()) line["error"] = completion.error;
  return line;
}

/// False if nobody reads stdout any more. A prompt or path in a message may hold bytes that are no UTF-8.
bool put_json(const ordered_json& value) {
  return put(value.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
}

void note_speed(const Engine& engine) {
  const Timing timing = engine.last_timing();
  const ModelInfo& info = engine.info();
  note(fmt::format("{}: prefill {:.1f} tok/s ({} tokens), decode {:.1f} tok/s ({} tokens); {}", info.backend,
                   per_second(timing.prefill_tokens, timing.prefill_seconds), timing.prefill_tokens,
                   per_second(timing.decode_tokens, timing.decode_seconds), timing.decode_tokens, weights_line(info)));
  if (timing.saturated) note(saturation_text(timing));
}

int generate_many(Engine& engine, const GenerateFlags& flags, const std::vector<Request>& requests) {
  now(cat("answering ", requests.size(), " prompts"));
  int64_t done = 0, most = 0;
  for (const Request& request : requests) most += request.max_tokens < 0 ? engine.info().context : request.max_tokens;
  Bar bar;
  const auto completions = engine.generate(requests, [&](size_t, std::string_view) {
    bar.show(cat("answering ", requests.size(), " prompts"), ++done, most);
    return !interrupted();
  });
  bar.clear();
  int code = 0;
  for (size_t i = 0; i < completions.size(); ++i) {
    ordered_json line = {{"index", i}};
    line.update(answer(completions[i], engine.last_timing(), engine.info()));
    if (flags.echo) line["prompt"] = requests[i].prompt;
    if (completions[i].finish_reason == "error") code = kFailure;
    if (!put_json(line)) return 0;
  }
  note_speed(engine);
  return interrupted() ? interrupted_exit() : code;
}

int generate_one(Engine& engine, const GenerateFlags& flags) {
  const bool stream = !flags.model.json;
  bool open = true, written = false;
  const auto write = [&](std::string_view text) {
    written = written || !text.empty();
    open = open && put(text);
  };
  now("generating");
  if (stream && flags.echo) write(flags.request.prompt);
  const auto on_text = [&](size_t, std::string_view piece) {
    if (stream) write(piece);
    return open && !interrupted();
  };
  const Completion completion = engine.generate({flags.request}, on_text).at(0);
  if (stream && written) write("\n");
  FUT_CHECK(completion.finish_reason != "error", completion.error);
  if (!stream) {
    ordered_json line = answer(completion, engine.last_timing(), engine.info());
    if (flags.echo) line["prompt"] = flags.request.prompt;
    put_json(line);
  } else if (open) {
    note_speed(engine);
  }
  return interrupted() ? interrupted_exit() : 0;
}

}  // namespace

int run_generate(int argc, const char* const* argv) {
  const auto app = make_app("Writes text from a prompt.", "fut generate");
  GenerateFlags flags;
  add_flags(*app, flags);
  if (const auto code = parse(*app, argc, argv)) return *code;
  if (given(*app, "--prompt") + given(*app, "--file") + given(*app, "--prompts") != 1) {
    return usage_error(*app, "give exactly one of --prompt, --file and --prompts");
  }
  for (const std::string& stop : flags.request.stop) {
    if (stop.empty()) return usage_error(*app, "--stop: expected a text that is not empty");
  }
  if (!settle_sampling(*app, flags.request.sampling, flags.greedy)) return kUsage;

  if (given(*app, "--prompts")) {
    const auto requests = parse_prompts(read_file(flags.prompts_file), flags.prompts_file, flags.request);
    return generate_many(*load_engine(flags.model), flags, requests);
  }
  flags.request.prompt = given(*app, "--file") ? read_file(flags.file) : flags.prompt;
  const auto engine = load_engine(flags.model, [&](const Engine& opened) { opened.check(flags.request); });
  return generate_one(*engine, flags);
}

}  // namespace fut::app
