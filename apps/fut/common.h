// What the verbs share: flags and their ranges, output, progress, interruption.
//
// Results go to stdout; everything else goes to stderr. Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted
// (128 + the signal).
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "futransformer/engine.h"
#include "ranges.h"

namespace CLI {
class App;  // only common.cpp sees its header, which costs every file seconds
}

namespace fut::app {

inline constexpr const char* kVersion = "0.1.0";
inline constexpr int kFailure = 1, kUsage = 2;

// ---- flags

/// `name` as the user types it: "fut generate".
std::shared_ptr<CLI::App> make_app(const std::string& description, const std::string& name);

void add_text(CLI::App& app, const std::string& flag, std::string& value, const std::string& type,
              const std::string& help);
void add_texts(CLI::App& app, const std::string& flag, std::vector<std::string>& values, const std::string& type,
               const std::string& help);  ///< may be given several times
void add_argument(CLI::App& app, const std::string& name, std::string& value, bool required, const std::string& help);
void add_switch(CLI::App& app, const std::string& flag, bool& value, const std::string& help);
void add_number(CLI::App& app, const std::string& flag, float& value, NumberRange range, const std::string& help);
void add_choice(CLI::App& app, const std::string& flag, std::string& value, const std::vector<std::string>& choices,
                const std::string& help);
void add_integer_flag(CLI::App& app, const std::string& flag, int64_t standard, IntegerRange range,
                      const std::string& help, const std::function<void(int64_t)>& store);
template <std::integral T>
void add_integer(CLI::App& app, const std::string& flag, T& value, IntegerRange range, const std::string& help) {
  add_integer_flag(app, flag, static_cast<int64_t>(value), range, help,
                   [&value](int64_t given) { value = static_cast<T>(given); });
}
void set_footer(CLI::App& app, const std::string& text);

/// --temperature, --top-k, --top-p, --min-p, --seed and --greedy.
void add_sampling_flags(CLI::App& app, Sampling& sampling, bool& greedy);
/// False, and wrong usage is reported, if they contradict each other; makes --greedy a temperature otherwise.
bool settle_sampling(const CLI::App& app, Sampling& sampling, bool greedy);

/// The program's exit code if parsing ends it: help was asked for, or the usage was wrong.
std::optional<int> parse(CLI::App& app, int argc, const char* const* argv);

bool given(const CLI::App& app, const std::string& flag);

/// Reports wrong usage of the verb in one line and returns kUsage.
int usage_error(const CLI::App& app, const std::string& message);

/// MODEL and how it is run, as every verb that loads one takes them.
struct ModelFlags {
  std::string model, group_size;
  EngineOptions options;
  bool json = false;
};

/// MODEL, --json and the precisions.
void add_model_flags(CLI::App& app, ModelFlags& flags);
/// --backend, --threads and sizes.
void add_run_flags(CLI::App& app, ModelFlags& flags);

/// The options that the flags ask for.
EngineOptions engine_options(const ModelFlags& flags);

/// Loads with a progress bar. Ctrl-C is watched from here on. `on_open`: see EngineOptions.
std::unique_ptr<Engine> load_engine(const ModelFlags& flags, const std::function<void(const Engine&)>& on_open = {});

// ---- output

/// Writes to stdout at once. False: nobody reads it any more, which is no failure. Error if writing fails otherwise.
bool put(std::string_view text);

/// One line on stderr.
void note(const std::string& line);

/// `text` without line breaks and other control characters.
std::string one_line(std::string text);

std::string mib(int64_t bytes);  ///< "129.4 MiB"
double per_second(int64_t count, double seconds);
double rounded(double value, int digits);

/// "weights: fp8 prefill 129.4 MiB, ..."
std::string weights_line(const ModelInfo& info);

/// What the formats had to clamp in the last run.
std::string saturation_text(const Timing& timing);

/// A progress bar on stderr, if that is a terminal; it leaves nothing behind.
class Bar {
 public:
  ~Bar() { clear(); }
  void show(const std::string& what, int64_t done, int64_t total);
  void clear();

 private:
  bool drawn_ = false;
  int64_t last_ms_ = 0;
};

// ---- input

/// All bytes of a file, pipe, or "-" (stdin).
std::string read_file(const std::string& path);

// ---- interruption and trouble

/// The first Ctrl-C from here on only raises interrupted(), which is down again; a second one kills the program at
/// once.
void watch_interrupts();

/// The same for SIGTERM and SIGHUP, where a file that is half written would be left behind.
void watch_terminations();

bool interrupted();
int interrupted_exit();  ///< 128 + the signal

/// Thrown out of a progress callback to give up what is under way.
struct Interrupted {};
void throw_if_interrupted();

/// What the program is busy with, for "out of memory while ...".
void now(const std::string& doing);
const std::string& busy_with();

// ---- verbs: argv[0] is the verb

int run_chat(int argc, const char* const* argv);
int run_generate(int argc, const char* const* argv);
int run_tokenize(int argc, const char* const* argv);
int run_quantize(int argc, const char* const* argv);
int run_inspect(int argc, const char* const* argv);
int run_perplexity(int argc, const char* const* argv);
int run_bench(int argc, const char* const* argv);

}  // namespace fut::app
