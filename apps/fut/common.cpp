#include "common.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/error.h"

namespace fut::app {
namespace {

std::string g_doing = "starting";
std::atomic<int> g_interrupted{0};  // the signal that did it

void watch(int signal) {
  struct sigaction action = {};
  action.sa_handler = [](int which) { g_interrupted = which; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(signal, &action, nullptr);
}

/// The whole of `text` as a number, or nothing.
template <class T>
std::optional<T> number(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

/// "--top-k" of "-k,--top-k".
std::string long_name(const std::string& flag) { return flag.substr(flag.find(',') + 1); }

/// Adds an option whose one value `take` accepts, or refuses with what was expected.
void add_checked(CLI::App& app, const std::string& flag, const std::string& type, const std::string& standard,
                 const std::string& help, const std::function<bool(const std::string&)>& take,
                 const std::string& expected) {
  const auto check = [=](const CLI::results_t& results) {
    if (take(results.front())) return true;
    throw CLI::ValidationError(fmt::format("{} {}: expected {}", long_name(flag), results.front(), expected));
  };
  app.add_option(flag, check, help)->type_name(type)->type_size(1)->expected(1)->default_str(standard);
}

/// Tensors that nothing reads may mean that the model is another one than its configuration says.
void note_unused(const std::vector<std::string>& tensors) {
  if (tensors.empty()) return;
  constexpr size_t kShown = 5;
  const std::vector<std::string> shown(tensors.begin(),
                                       tensors.begin() + static_cast<long>(std::min(kShown, tensors.size())));
  note(one_line(fmt::format("fut: {} tensors of the model are not used: {}{}", tensors.size(), fmt::join(shown, ", "),
                            tensors.size() > kShown ? ", ..." : "")));
}

/// CLI11 reads the value of "--flag=" from the argument behind it. Here the value is what stands there: nothing.
/// The result is in the order that its parser wants, the last one first.
std::vector<std::string> with_empty_values(CLI::App& app, int argc, const char* const* argv) {
  const auto takes_value = [&](const std::string& name) {
    const CLI::Option* option = app.get_option_no_throw(name);
    return option && name.starts_with('-') && option->get_items_expected_max() > 0;
  };
  std::vector<std::string> arguments;
  bool is_value = false;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    if (!is_value && argument == "--") {
      arguments.insert(arguments.end(), argv + i, argv + argc);
      break;
    }
    const bool empty = !is_value && argument.ends_with('=') && takes_value(argument.substr(0, argument.size() - 1));
    if (empty) argument.pop_back();
    is_value = !is_value && !empty && takes_value(argument);
    arguments.push_back(std::move(argument));
    if (empty) arguments.emplace_back();
  }
  std::reverse(arguments.begin(), arguments.end());
  return arguments;
}

std::string name_of_limit(double value) { return fmt::format("{:g}", value); }

}  // namespace

std::shared_ptr<CLI::App> make_app(const std::string& description, const std::string& name) {
  auto app = std::make_shared<CLI::App>(description, name);
  app->get_formatter()->column_width(34);
  return app;
}

std::optional<int> parse(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(with_empty_values(app, argc, argv));
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    put(app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error.what());
  }
}

int usage_error(const CLI::App& app, const std::string& message) {
  note(fmt::format("fut: {} (see {} --help)", one_line(message), app.get_name()));
  return kUsage;
}

void add_integer_flag(CLI::App& app, const std::string& flag, int64_t standard, IntegerRange range,
                      const std::string& help, const std::function<void(int64_t)>& store) {
  const auto take = [range, store](const std::string& text) {
    const auto value = number<int64_t>(text);
    if (!value || !contains(range, *value)) return false;
    store(*value);
    return true;
  };
  add_checked(app, flag, "INT", std::to_string(standard), help, take, describe(range));
}

void add_number(CLI::App& app, const std::string& flag, float& value, NumberRange range, const std::string& help) {
  const auto take = [range, &value](const std::string& text) {
    const auto given = number<double>(text);
    if (!given || !contains(range, *given)) return false;
    value = static_cast<float>(*given);
    return true;
  };
  add_checked(app, flag, "NUMBER", name_of_limit(value), help, take, describe(range));
}

void add_choice(CLI::App& app, const std::string& flag, std::string& value, const std::vector<std::string>& choices,
                const std::string& help) {
  const auto take = [choices, &value](const std::string& text) {
    value = text;
    return std::find(choices.begin(), choices.end(), text) != choices.end();
  };
  add_checked(app, flag, fmt::format("{}", fmt::join(choices, "|")), value, help, take,
              fmt::format("one of {}", fmt::join(choices, ", ")));
}

void add_text(CLI::App& app, const std::string& flag, std::string& value, const std::string& type,
              const std::string& help) {
  app.add_option(flag, value, help)->type_name(type);
}

void add_texts(CLI::App& app, const std::string& flag, std::vector<std::string>& values, const std::string& type,
               const std::string& help) {
  app.add_option(flag, values, help)->type_name(type)->allow_extra_args(false);
}

void add_argument(CLI::App& app, const std::string& name, std::string& value, bool required, const std::string& help) {
  app.add_option(name, value, help)->type_name("")->required(required);
}

void add_switch(CLI::App& app, const std::string& flag, bool& value, const std::string& help) {
  app.add_flag(flag, value, help);
}

void set_footer(CLI::App& app, const std::string& text) { app.footer(text); }

bool given(const CLI::App& app, const std::string& flag) { return app.count(flag) > 0; }

void add_model_flags(CLI::App& app, ModelFlags& flags) {
  add_argument(app, "MODEL", flags.model, true, "a Hugging Face folder, a .gguf file, or what `fut quantize` wrote");
  add_switch(app, "--json", flags.json, "results as JSON");
  auto& options = flags.options;
  add_choice(app, "--prefill", options.prefill, {"fp8", "bf16", "f32"}, "weights that read the prompt");
  add_choice(app, "--decode", options.decode, {"int4", "fp8", "bf16", "f32"}, "weights that write the answer");
  add_choice(app, "--kv", options.kv, {"int4", "fp8", "bf16", "f32"}, "the KV cache");
  add_choice(app, "--group-size", flags.group_size, {"32", "64", "128"},
             "of INT4 weights quantised at load; 64 by itself");
}

void add_sampling_flags(CLI::App& app, Sampling& sampling, bool& greedy) {
  add_number(app, "--temperature", sampling.temperature, kTemperatureRange, "0: always the most likely token");
  add_integer(app, "--top-k", sampling.top_k, kTopKRange, "only the k best; 0 or -1: off");
  add_number(app, "--top-p", sampling.top_p, kFractionRange, "only the best that make up p; 1: off");
  add_number(app, "--min-p", sampling.min_p, kFractionRange, "only those at least p times as likely as the best");
  add_integer(app, "--seed", sampling.seed, kSeedRange, "the same seed, prompt and flags give the same text");
  add_switch(app, "--greedy", greedy, "short for --temperature 0");
}

bool settle_sampling(const CLI::App& app, Sampling& sampling, bool greedy) {
  if (greedy && given(app, "--temperature")) {
    usage_error(app, "give --greedy or --temperature, not both");
    return false;
  }
  if (greedy) sampling.temperature = 0;
  return true;
}

void add_run_flags(CLI::App& app, ModelFlags& flags) {
  auto& options = flags.options;
  add_choice(app, "--prefill-scaling", options.prefill_scaling, {"auto", "exact", "frozen", "delayed"},
             "FP8 activation scales");
  add_choice(app, "--backend", options.backend, {"auto", "cpu", "cuda"}, "where it runs");
  add_integer(app, "--threads", options.threads, {0, 1024}, "CPU threads; 0: one a core");
  add_integer(app, "--max-context", options.max_context, {0, kNoLimit},
              "tokens a sequence may reach; 0: the model's limit");
  add_integer(app, "--max-batch", options.max_batch, {1, 4096}, "sequences that decode together");
  add_integer(app, "--kv-tokens", options.kv_tokens, {0, int64_t{1} << 40},
              "tokens the cache holds; 0: from free memory");
}

EngineOptions engine_options(const ModelFlags& flags) {
  EngineOptions options = flags.options;
  if (!flags.group_size.empty()) options.group_size = std::stoi(flags.group_size);
  return options;
}

std::unique_ptr<Engine> load_engine(const ModelFlags& flags, const std::function<void(const Engine&)>& on_open) {
  watch_interrupts();
  now("loading " + flags.model);
  Bar bar;
  EngineOptions options = engine_options(flags);
  options.on_open = on_open;
  options.on_load = [&](const std::string& stage, int64_t done, int64_t total) {
    throw_if_interrupted();
    now("loading " + flags.model + " (" + stage + ")");
    bar.show(stage, done, total);
  };
  std::unique_ptr<Engine> engine = Engine::load(flags.model, options);
  bar.clear();
  for (const std::string& warning : engine->info().warnings) note("fut: " + one_line(warning));
  note_unused(engine->info().unused_tensors);
  return engine;
}

bool put(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EPIPE) {
      return false;
    } else if (errno != EINTR) {
      fail("cannot write to stdout: ", std::strerror(errno));
    }
  }
  return true;
}

void note(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = ' ';
  }
  return text;
}

std::string mib(int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

double per_second(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

double rounded(double value, int digits) {
  const double unit = std::pow(10.0, digits);
  return std::round(value * unit) / unit;
}

std::string saturation_text(const Timing& timing) {
  return fmt::format("fut: {} activations were clamped to what their format can hold", timing.saturated);
}

std::string weights_line(const ModelInfo& info) {
  return fmt::format("weights: {} prefill {}, {} decode {}, embedding {}, head {}", info.prefill,
                     mib(info.prefill_weight_bytes), info.decode, mib(info.decode_weight_bytes),
                     mib(info.embedding_bytes), mib(info.head_bytes));
}

void Bar::show(const std::string& what, int64_t done, int64_t total) {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  if (!terminal || total <= 0) return;
  const int64_t ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count();
  if (drawn_ && ms - last_ms_ < 100) return;
  last_ms_ = ms;
  drawn_ = true;
  constexpr int64_t kWidth = 30;
  const int64_t filled = std::clamp<int64_t>(done * kWidth / total, 0, kWidth);
  std::fprintf(stderr, "\r\033[K%s [%s%s] %d %%", what.c_str(), std::string(static_cast<size_t>(filled), '#').c_str(),
               std::string(static_cast<size_t>(kWidth - filled), ' ').c_str(), static_cast<int>(done * 100 / total));
  std::fflush(stderr);
}

void Bar::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

std::string read_file(const std::string& path) {
  FUT_CHECK(!path.empty(), "the name of the file to read is empty");
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(nullptr, std::fclose);
  std::FILE* file = stdin;
  if (path != "-") {
    opened.reset(std::fopen(path.c_str(), "rb"));
    file = opened.get();
    FUT_CHECK(file != nullptr, path, ": cannot be opened: ", std::strerror(errno));
  }
  now("reading " + path);
  std::string bytes;
  std::vector<char> block(size_t{1} << 20);
  while (const size_t count = std::fread(block.data(), 1, block.size(), file)) {
    bytes.append(block.data(), count);
    if (std::ferror(file)) break;
  }
  throw_if_interrupted();  // while a pipe or a terminal was waited for
  FUT_CHECK(!std::ferror(file), path, ": cannot be read: ", std::strerror(errno));
  return bytes;
}

void watch_interrupts() {
  g_interrupted = 0;
  watch(SIGINT);
}

void watch_terminations() {
  for (const int signal : {SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) watch(signal);  // nohup means what it says
  }
}

bool interrupted() { return g_interrupted != 0; }
int interrupted_exit() { return 128 + g_interrupted; }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

void now(const std::string& doing) { g_doing = doing; }
const std::string& busy_with() { return g_doing; }

}  // namespace fut::app
