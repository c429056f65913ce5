// fut chat: a conversation through the model's chat template, a line a message.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "common.h"
#include "io/json.h"

namespace fut::app {
namespace {

using nlohmann::ordered_json;

constexpr const char* kCommands =
    "/reset forgets the conversation   /system TEXT sets the system message, without TEXT removes it\n"
    "/save FILE writes it as JSON      /quit ends                 //TEXT sends a message that begins with /\n"
    "A line that ends with \\ goes on in the next line.";

struct ChatFlags {
  ModelFlags model;
  Sampling sampling;
  bool greedy = false;
  int64_t max_tokens = -1;
  std::vector<std::string> stop;
  std::string system, template_file;
};

void add_flags(CLI::App& app, ChatFlags& flags) {
  add_model_flags(app, flags.model);
  add_text(app, "--system", flags.system, "TEXT", "the system message");
  add_text(app, "--template", flags.template_file, "FILE", "a chat template (Jinja) in place of the model's own");
  add_integer(app, "-n,--max-tokens", flags.max_tokens, kMaxTokensRange,
              "at most so many an answer; -1: up to the context limit");
  add_sampling_flags(app, flags.sampling, flags.greedy);
  add_texts(app, "--stop", flags.stop, "STR", "an answer ends before STR; may be given several times");
  flags.model.options.max_batch = 1;
  add_run_flags(app, flags.model);
  set_footer(app, std::string("Every line of stdin is a message; answers go to stdout. In a conversation:\n") +
                      kCommands +
                      "\n\nExamples:\n"
                      "  fut chat model.gguf --system 'Answer in one sentence.'\n"
                      "  printf 'What is an ode?\\nAnd a sonnet?\\n' | fut chat model.gguf --greedy");
}

/// Lines of stdin as they come. Ctrl-C while waiting for one is Interrupted.
class Lines {
 public:
  /// Without its end; nothing at the end of the input.
  std::optional<std::string> next() {
    for (size_t searched = 0;;) {
      if (const size_t end = buffer_.find('\n', searched); end != std::string::npos) {
        std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        if (line.ends_with('\r')) line.pop_back();
        return line;
      }
      searched = buffer_.size();  // a line of any length is looked through once
      if (!read_more()) return buffer_.empty() ? std::nullopt : std::optional(std::exchange(buffer_, ""));
    }
  }

 private:
  bool read_more() {
    char block[4096];
    for (;;) {
      const ssize_t count = ::read(STDIN_FILENO, block, sizeof block);
      if (count > 0) buffer_.append(block, static_cast<size_t>(count));
      if (count >= 0) return count > 0;
      throw_if_interrupted();
      FUT_CHECK(errno == EINTR, "cannot read stdin: ", std::strerror(errno));
    }
  }

  std::string buffer_;
};

/// What was said, and which part of it still goes into the prompt.
class Conversation {
 public:
  explicit Conversation(std::string system) : system_(std::move(system)) {}

  void set_system(std::string text) { system_ = std::move(text); }
  void add(const std::string& role, std::string content) { turns_.push_back({role, std::move(content)}); }
  size_t size() const { return turns_.size(); }
  void take_back_to(size_t size) { turns_.resize(size); }
  void clear() { turns_.clear(), dropped_ = 0; }

  /// The oldest question and its answer leave the prompt. False if there is only the last question.
  bool drop_oldest() {
    if (dropped_ + 2 >= turns_.size()) return false;
    dropped_ += 2;
    return true;
  }
  size_t dropped() const { return dropped_; }

  std::vector<ChatMessage> prompt() const { return with_system(dropped_); }
  std::vector<ChatMessage> all() const { return with_system(0); }

 private:
  std::vector<ChatMessage> with_system(size_t first) const {
    std::vector<ChatMessage> messages(turns_.begin() + static_cast<std::ptrdiff_t>(first), turns_.end());
    if (!system_.empty()) messages.insert(messages.begin(), {"system", system_});
    return messages;
  }

  std::string system_;
  std::vector<ChatMessage> turns_;
  size_t dropped_ = 0;
};

class Chat {
 public:
  Chat(Engine& engine, const ChatFlags& flags)
      : engine_(engine),
        flags_(flags),
        conversation_(flags.system),
        limit_(std::min(engine.info().context, engine.info().kv_pool_tokens)),
        terminal_(isatty(STDIN_FILENO) == 1) {}

  int run() {
    if (terminal_) note(fmt::format("fut: context of {} tokens; /help lists the commands", limit_));
    while (auto message = next_message()) {
      if (message->starts_with("/") && !message->starts_with("//")) {
        if (*message == "/quit") break;
        command(*message);
      } else if (message->find_first_not_of(" \t") != std::string::npos) {
        if (!answer(message->starts_with("//") ? message->substr(1) : *message)) break;
      }
    }
    return code_;
  }

 private:
  std::optional<std::string> next_message() {
    watch_interrupts();
    now("waiting for a message");
    if (terminal_) std::fputs("> ", stderr);
    auto message = lines_.next();
    while (message && message->ends_with('\\')) {
      const auto more = lines_.next();
      message->back() = '\n';
      *message += more.value_or("");
    }
    return message;
  }

  /// What goes wrong in a conversation is said in one line, and the conversation goes on. Nobody reads along with a
  /// pipe, so that there the exit code says it too.
  void trouble(const std::string& line) {
    note("fut: " + one_line(line));
    if (!terminal_) code_ = kFailure;
  }

  void command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const size_t begin = space == std::string::npos ? space : line.find_first_not_of(' ', space);
    const std::string argument = begin == std::string::npos ? "" : line.substr(begin);
    if (name == "/reset" && argument.empty()) {
      conversation_.clear();
      note("fut: the conversation is forgotten");
    } else if (name == "/system") {
      conversation_.set_system(argument);
      note(argument.empty() ? "fut: no system message from now on" : "fut: a new system message from now on");
    } else if (name == "/save" && !argument.empty()) {
      save(argument);
    } else if (name == "/help") {
      note(kCommands);
    } else {
      trouble("unknown command " + line + "; known: /reset, /system TEXT, /save FILE, /help, /quit");
    }
  }

  void save(const std::string& path) {
    ordered_json messages = ordered_json::array();
    for (const ChatMessage& message : conversation_.all()) {
      messages.push_back({{"role", message.role}, {"content", message.content}});
    }
    // What a full disk cuts short is not what stood in the file before. A pipe or a device has no before.
    std::error_code ignored;
    const auto before = std::filesystem::symlink_status(path, ignored);
    const bool replaces = before.type() == std::filesystem::file_type::regular;
    const bool whole = replaces || before.type() == std::filesystem::file_type::not_found;
    const std::string written = whole ? path + ".partial" : path;
    std::ofstream file(written, std::ios::binary);
    // Who may not read the old file may not read what was said either.
    if (file && replaces) std::filesystem::permissions(written, before.permissions(), ignored);
    file << ordered_json{{"messages", messages}}.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    file.close();
    if (!file || (whole && std::rename(written.c_str(), path.c_str()) != 0)) {
      trouble(path + ": cannot be written: " + std::strerror(errno));
      if (whole) unlink(written.c_str());
      return;
    }
    note(fmt::format("fut: {} messages saved to {}", messages.size(), one_line(path)));
  }

  /// The prompt of the conversation, which loses its oldest turns as long as a quarter of the context, or what an
  /// answer may have, is not left for the answer. A last message that leaves no room at all is an error.
  std::vector<int32_t> fitting_prompt() {
    const int64_t quarter = std::max<int64_t>(limit_ / 4, 1);
    const int64_t room = flags_.max_tokens > 0 ? std::min(flags_.max_tokens, quarter) : quarter;
    const size_t dropped = conversation_.dropped();
    std::vector<int32_t> ids = engine_.chat_prompt(conversation_.prompt());
    while (static_cast<int64_t>(ids.size()) + room > limit_ && conversation_.drop_oldest()) {
      ids = engine_.chat_prompt(conversation_.prompt());
    }
    FUT_CHECK(static_cast<int64_t>(ids.size()) < limit_, "the message makes a prompt of ", ids.size(),
              " tokens; with a context of ", limit_, " that leaves no room for an answer");
    if (conversation_.dropped() > dropped) {
      note(fmt::format(
          "fut: the conversation outgrows the context of {} tokens: its first {} messages are no longer part of "
          "the prompt (/save keeps them)",
          limit_, conversation_.dropped()));
    }
    return ids;
  }

  /// False if nobody reads the answers any more.
  bool answer(const std::string& message) {
    const size_t before = conversation_.size();
    conversation_.add("user", message);
    try {
      return generate();
    } catch (const Error& error) {
      conversation_.take_back_to(before);  // with the answer, if it was there and could not be written
      trouble(error.what());
      return true;
    }
  }

  bool generate() {
    Request request;
    request.ids = fitting_prompt();
    const int64_t room = limit_ - static_cast<int64_t>(request.ids.size());
    request.max_tokens = flags_.max_tokens < 0 ? room : std::min(flags_.max_tokens, room);
    request.sampling = flags_.sampling;
    request.sampling.seed += answers_++;
    request.stop = flags_.stop;
    now("answering");
    bool open = true;
    const bool stream = !flags_.model.json;
    const Completion completion = engine_.generate({request}, [&](size_t, std::string_view piece) {
      if (stream) open = open && put(piece);
      return open && !interrupted();
    })[0];
    FUT_CHECK(completion.finish_reason != "error", completion.error);
    conversation_.add("assistant", completion.text);
    open = open && put(stream ? "\n" : json_line(completion));
    if (completion.finish_reason == "cancelled" && open) note("fut: interrupted; the answer so far is kept");
    if (completion.finish_reason == "length") {
      note(request.max_tokens == room ? fmt::format("fut: the answer ends at the context limit of {} tokens", limit_)
                                      : fmt::format("fut: the answer ends after {} tokens (-n)", request.max_tokens));
    }
    return open;
  }

  std::string json_line(const Completion& completion) const {
    const ordered_json line = {{"text", completion.text},
                               {"ids", completion.ids},
                               {"prompt_tokens", completion.prompt_tokens},
                               {"finish_reason", completion.finish_reason},
                               {"dropped_messages", conversation_.dropped()}};
    return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }

  Engine& engine_;
  const ChatFlags& flags_;
  Conversation conversation_;
  const int64_t limit_;
  const bool terminal_;
  Lines lines_;
  uint64_t answers_ = 0;
  int code_ = 0;
};

/// Refuses a context that cannot hold the shortest message with what the template writes around it. A template that
/// refuses the message is heard when there is one.
void require_room(const Engine& engine, const std::string& system) {
  std::vector<ChatMessage> messages = {{"user", "a"}};
  if (!system.empty()) messages.insert(messages.begin(), {"system", system});
  int64_t length = 0;
  try {
    length = static_cast<int64_t>(engine.chat_prompt(messages).size());
  } catch (const Error&) {
    return;
  }
  FUT_CHECK(length < engine.info().context, "a message of one letter makes a prompt of ", length,
            " tokens; with a context limit of ", engine.info().context, " that leaves no room for an answer");
}

}  // namespace

int run_chat(int argc, const char* const* argv) {
  const auto app = make_app("Talks with a model through its chat template.", "fut chat");
  ChatFlags flags;
  add_flags(*app, flags);
  if (const auto code = parse(*app, argc, argv)) return *code;
  for (const std::string& stop : flags.stop) {
    if (stop.empty()) return usage_error(*app, "--stop: expected a text that is not empty");
  }
  if (!settle_sampling(*app, flags.sampling, flags.greedy)) return kUsage;
  EngineOptions& options = flags.model.options;
  options.chat = true;
  if (given(*app, "--template")) {
    options.chat_template = read_file(flags.template_file);
    options.chat_template_name = flags.template_file;
    FUT_CHECK(!options.chat_template.empty(), flags.template_file, ": is empty, expected a chat template");
  }
  const auto engine = load_engine(flags.model, [&](const Engine& opened) { require_room(opened, flags.system); });
  return Chat(*engine, flags).run();
}

}  // namespace fut::app
