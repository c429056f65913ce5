// fut_fuzz PARSER ...: feeds one parser with mutated inputs and watches for what it must not do.
//
// Inputs are parsed in child processes, so that a crash, a hang or a leak ends only one of them. Input i follows from
// the seeds, i and --seed alone: the parent makes it again and keeps it as a file.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <typeinfo>

#include "base/error.h"
#include "base/parallel.h"
#include "fuzz.h"
#include "scratch.h"

// Of the address sanitizer; GCC ships no header for these.
extern "C" {
int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t), void (*)(const volatile void*));
size_t __sanitizer_get_allocated_size(const volatile void*);
const char* __asan_default_options() { return "quarantine_size_mb=16:handle_abort=1:detect_stack_use_after_return=0"; }
const char* __ubsan_default_options() { return "print_stacktrace=1"; }
}

namespace fut::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kChunk = 20'000;  // inputs of one child
constexpr int kFindingExit = 70;
constexpr size_t kLongestMessage = 2000;

/// What a child tells its parent, in memory that both see.
struct Progress {
  uint64_t index;  // of the input under way
  uint64_t accepted, refused;
  uint64_t slowest_us, slowest_index;
  uint64_t most_bytes, most_bytes_index;
  std::bitset<65536> kinds;  // of refusals, by hash
};
Progress* g_progress = nullptr;

std::atomic<size_t> g_live_bytes{0}, g_most_bytes{0}, g_limit_bytes{0};

void say(const char* line) { static_cast<void>(!write(STDERR_FILENO, line, strlen(line))); }

void count_allocation(const volatile void*, size_t bytes) {
  const size_t live = g_live_bytes += bytes;
  if (live > g_most_bytes) g_most_bytes = live;
  if (g_limit_bytes && live > g_limit_bytes) {
    say("fuzz: more memory than the limit\n");
    abort();  // the sanitizer shows where
  }
}

void count_release(const volatile void* pointer) {
  if (pointer) g_live_bytes -= __sanitizer_get_allocated_size(pointer);
}

void end_slow(int) {
  say("fuzz: longer than the time limit\n");
  abort();
}

/// Counts the time and memory of one input against the target's limits.
class Watch {
 public:
  explicit Watch(const Target& target) {
    const double seconds = target.most_seconds();
    const itimerval limit{
        {0, 0},
        {static_cast<time_t>(seconds),
         static_cast<suseconds_t>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e6)}};
    setitimer(ITIMER_PROF, &limit, nullptr);  // the processor's time, so that a busy machine makes no findings
    before_ = g_live_bytes;
    g_most_bytes = before_;
    g_limit_bytes = before_ + target.most_bytes();
  }
  ~Watch() {
    const itimerval none{};
    g_limit_bytes = 0;
    setitimer(ITIMER_PROF, &none, nullptr);
    const uint64_t most = g_most_bytes - before_;
    if (most > g_progress->most_bytes) g_progress->most_bytes = most, g_progress->most_bytes_index = g_progress->index;
  }

 private:
  size_t before_;
};

uint64_t cpu_us() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

/// A message without its numbers and quotations, as a number: how many differ tells how far inputs get.
size_t kind_of(const std::string& message, const std::string& folder) {
  uint64_t hash = 14695981039346656037u;
  bool quoted = false;
  for (size_t at = 0; at < message.size(); ++at) {
    if (message.compare(at, folder.size(), folder) == 0) at += folder.size();
    const char c = at < message.size() ? message[at] : ' ';
    if (c == '"') quoted = !quoted;
    if (quoted || (c >= '0' && c <= '9')) continue;
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  return hash % 65536;
}

/// Runs one input. True if the parser accepts it, false with `message` if it refuses; anything else is Finding.
bool accepts(const Target& target, const Input& input, Scratch& scratch, std::string* message) {
  scratch.put(input);
  const Watch watch(target);
  try {
    target.run(input, scratch.path());
    return true;
  } catch (const Error& error) {
    *message = error.what();
    check_message(*message, target.place(scratch.path()));
    return false;
  } catch (const Finding&) {
    throw;
  } catch (const std::exception& error) {
    throw Finding(std::string("no fut::Error but ") + typeid(error).name() + ": " + error.what());
  }
}

// ---- seeds and inputs

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

Input read_input(const fs::path& path, const Target& target) {
  if (!fs::is_directory(path)) return {{target.files().at(0), read_file(path)}};
  Input input;
  for (const auto& entry : fs::directory_iterator(path)) input[entry.path().filename()] = read_file(entry.path());
  return input;
}

/// The inputs in a folder by name; none if there is no such folder.
std::map<std::string, Input> read_inputs(const fs::path& folder, const Target& target) {
  std::map<std::string, Input> inputs;
  if (!fs::exists(folder)) return inputs;
  for (const auto& entry : fs::directory_iterator(folder)) {
    inputs[entry.path().filename()] = read_input(entry.path(), target);
  }
  return inputs;
}

void write_input(const Input& input, const fs::path& path, const Target& target) {
  const bool single = target.files().size() == 1;
  fs::create_directories(single ? path.parent_path() : path);
  for (const auto& [name, bytes] : input) std::ofstream(single ? path : path / name, std::ios::binary) << bytes;
}

Input make_input(const Target& target, const std::vector<Input>& seeds, uint64_t seed, uint64_t index) {
  Random random(Random(seed).next() ^ index);
  Input input = random.pick(seeds);
  target.mutate(input, random, seeds);
  return input;
}

// ---- children

/// Runs `body` in a child. Empty if it ends well, otherwise what happened.
std::string in_child(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    set_thread_count(1);
    signal(SIGPROF, end_slow);
    __sanitizer_install_malloc_and_free_hooks(count_allocation, count_release);
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "fuzz: %s\n", error.what());
      _exit(kFindingExit);
    }
    std::exit(0);  // through the leak check
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  if (WIFSIGNALED(status)) return std::string("signal ") + strsignal(WTERMSIG(status));
  if (WEXITSTATUS(status) == kFindingExit) return "a broken promise";
  return "a sanitizer's report";
}

void run_one(const Target& target, const Input& input, Scratch& scratch, uint64_t index) {
  g_progress->index = index;
  const uint64_t begin = cpu_us();
  std::string message;
  if (accepts(target, input, scratch, &message)) {
    ++g_progress->accepted;
  } else {
    ++g_progress->refused;
    g_progress->kinds.set(kind_of(message, scratch.path()));
  }
  const uint64_t took = cpu_us() - begin;
  if (took > g_progress->slowest_us) g_progress->slowest_us = took, g_progress->slowest_index = index;
}

struct Options {
  std::string parser, findings = "fuzz-findings";
  uint64_t inputs = 1000, first = 0, seed = 1;
  std::optional<uint64_t> show;
  std::vector<std::string> replay;
};

class Run {
 public:
  Run(const Options& options, const Target& target) : options_(options), target_(target) {
    const fs::path root = FUT_FUZZ_FOLDER;
    for (const auto& [name, input] : read_inputs(root / "seeds" / options.parser, target)) {
      names_.push_back(name);
      seeds_.push_back(input);
    }
    for (const Input& input : target.more_seeds()) {
      names_.push_back("built in " + std::to_string(seeds_.size()));
      seeds_.push_back(input);
    }
    crashes_ = read_inputs(root / "crashes" / options.parser, target);
    folder_ = (fs::temp_directory_path() / "fut_fuzz_XXXXXX").string();
    if (!mkdtemp(folder_.data())) throw std::runtime_error("fuzz: cannot make a folder like " + folder_);
  }
  ~Run() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// How many findings there were.
  int all() {
    if (seeds_.empty()) return std::printf("%s: no seeds\n", options_.parser.c_str()), 1;
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < seeds_.size(); ++i) accept_seed(i);
    for (const auto& [name, input] : crashes_) replay("crashes/" + options_.parser + "/" + name, input, false);
    const uint64_t end = options_.first + options_.inputs;
    for (uint64_t begin = options_.first; begin < end;) begin = run_chunk(begin, std::min(begin + kChunk, end));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf(
        "%s: %zu seeds, %zu kept inputs, %llu new ones: %llu accepted, %llu refused with %zu kinds of message; slowest "
        "%.1f ms (input %llu), most memory %.1f MiB (input %llu); %d findings; %.0f s\n",
        options_.parser.c_str(), seeds_.size(), crashes_.size(), count(options_.inputs), count(g_progress->accepted),
        count(g_progress->refused), g_progress->kinds.count(), static_cast<double>(g_progress->slowest_us) / 1e3,
        count(g_progress->slowest_index), static_cast<double>(g_progress->most_bytes) / (1 << 20),
        count(g_progress->most_bytes_index), findings_, took.count());
    return findings_;
  }

  /// Keeps a new input as a finding would be kept, without parsing it.
  void show(uint64_t index) {
    const fs::path path = fs::path(options_.findings) / options_.parser / std::to_string(index);
    write_input(make_input(target_, seeds_, options_.seed, index), path, target_);
    std::printf("%s\n", path.c_str());
  }

  /// One input by name; says what the parser says.
  void replay(const std::string& name, const Input& input, bool aloud) {
    const std::string trouble = in_child([&] {
      Scratch scratch(folder_);
      std::string message;
      const bool accepted = accepts(target_, input, scratch, &message);
      if (aloud) std::printf("%s: %s\n", name.c_str(), accepted ? "accepted" : message.c_str());
    });
    if (!trouble.empty()) report(name, trouble);
  }

  int findings() const { return findings_; }

  /// Whether misdeeds are noticed, and good behaviour is not.
  int selftest() {
    int missed = 0;
    const auto noticed = [&](const std::string& what) {
      const std::string trouble = in_child([&] {
        static_cast<void>(!freopen("/dev/null", "w", stderr));
        Scratch scratch(folder_);
        std::string message;
        accepts(target_, {{"what", what}}, scratch, &message);
      });
      return !trouble.empty();
    };
    for (const std::string& what : misdeeds()) {
      if (!noticed(what)) ++missed, std::printf("not noticed: %s\n", what.c_str());
    }
    for (const char* what : {"nothing", "refuses"}) {
      if (noticed(what)) ++missed, std::printf("taken for a finding: %s\n", what);
    }
    return missed;
  }

 private:
  static unsigned long long count(uint64_t value) { return value; }

  void report(const std::string& where, const std::string& trouble) {
    ++findings_;
    std::printf("FINDING: %s: %s: %s\n", options_.parser.c_str(), where.c_str(), trouble.c_str());
  }

  /// A seed that is refused makes inputs that never get far.
  void accept_seed(size_t i) {
    const std::string trouble = in_child([&] {
      Scratch scratch(folder_);
      std::string message;
      const bool accepted = accepts(target_, seeds_[i], scratch, &message);
      require(accepted, "a seed must be accepted: " + message);
    });
    if (!trouble.empty()) report("seeds/" + options_.parser + "/" + names_[i], trouble);
  }

  /// Runs inputs up to `end` or to the first finding, and returns where to go on.
  uint64_t run_chunk(uint64_t begin, uint64_t end) {
    const std::string trouble = in_child([&] {
      Scratch scratch(folder_);
      for (uint64_t i = begin; i < end; ++i)
        run_one(target_, make_input(target_, seeds_, options_.seed, i), scratch, i);
      g_progress->index = end;
    });
    if (trouble.empty()) return end;
    const uint64_t at = g_progress->index;
    if (at == end) {
      report("a leak in one of the inputs " + std::to_string(begin) + " to " + std::to_string(end - 1), trouble);
      return end;
    }
    const fs::path path = fs::path(options_.findings) / options_.parser / std::to_string(at);
    write_input(make_input(target_, seeds_, options_.seed, at), path, target_);
    report("input " + std::to_string(at) + ", kept as " + path.string(), trouble);
    return at + 1;
  }

  const Options& options_;
  const Target& target_;
  std::string folder_;
  std::vector<std::string> names_;
  std::vector<Input> seeds_;
  std::map<std::string, Input> crashes_;
  int findings_ = 0;
};

int usage() {
  std::string names;
  for (const std::string& name : target_names()) names += " " + name;
  std::fprintf(stderr,
               "usage: fut_fuzz PARSER [--inputs N] [--first I] [--seed S] [--findings FOLDER] [--show I] [INPUT...]\n"
               "--show keeps new input I as a file without parsing it.\n"
               "With INPUTs (files, or folders of files) only these are parsed, and what the parser says is shown.\n"
               "Parsers:%s\n",
               names.c_str());
  return 2;
}

bool read_number(const std::string& text, uint64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_options(const std::vector<std::string>& arguments, Options* options) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!argument.starts_with("--")) {
      (options->parser.empty() ? options->parser : options->replay.emplace_back()) = argument;
      continue;
    }
    if (++i == arguments.size()) return false;
    uint64_t* const number = argument == "--inputs"  ? &options->inputs
                             : argument == "--first" ? &options->first
                             : argument == "--seed"  ? &options->seed
                             : argument == "--show"  ? &options->show.emplace()
                                                     : nullptr;
    if (number ? !read_number(arguments[i], number) : argument != "--findings") return false;
    if (!number) options->findings = arguments[i];
  }
  return !options->parser.empty();
}

int run(const std::vector<std::string>& arguments) {
  Options options;
  if (!read_options(arguments, &options)) return usage();
  const auto target = make_target(options.parser);
  if (!target) return usage();
  void* const shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("fuzz: no shared memory");
  g_progress = new (shared) Progress{};
  Run all(options, *target);
  if (options.parser == "selftest") return all.selftest();
  if (options.show) return all.show(*options.show), 0;
  if (options.replay.empty()) return all.all() ? 1 : 0;
  for (const std::string& path : options.replay) all.replay(path, read_input(path, *target), true);
  return all.findings() ? 1 : 0;
}

}  // namespace

void check_message(const std::string& message, const std::string& place) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  require(std::none_of(message.begin(), message.end(), is_control), "a message with control characters: " + message);
  require(message.size() <= kLongestMessage, "a message of " + std::to_string(message.size()) + " bytes");
  require(message.find(place) != std::string::npos, "a message that does not name " + place + ": " + message);
}

std::vector<std::string> target_names() {
  return {"safetensors",    "index",           "gguf",     "config", "metadata",
          "tokenizer_json", "tokenizer_model", "template", "prompts"};
}

std::unique_ptr<Target> make_target(const std::string& name) {
  using Make = std::unique_ptr<Target> (*)();
  static const std::map<std::string, Make> makers = {{"safetensors", safetensors_target},
                                                     {"index", index_target},
                                                     {"gguf", gguf_target},
                                                     {"config", config_target},
                                                     {"metadata", metadata_target},
                                                     {"tokenizer_json", tokenizer_json_target},
                                                     {"tokenizer_model", tokenizer_model_target},
                                                     {"template", template_target},
                                                     {"prompts", prompts_target},
                                                     {"selftest", selftest_target}};
  const auto found = makers.find(name);
  return found == makers.end() ? nullptr : found->second();
}

}  // namespace fut::fuzz

int main(int argc, char** argv) { return fut::fuzz::run({argv + 1, argv + argc}); }
