// The program under test with pipes to its three streams. Only for tests in the folder that `fut` is built into.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fut::test {

inline std::string program() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "fut").string();
}

struct Result {
  int code = -1;  ///< 128 + signal if one ended it
  std::string out, err;
};

/// A running program with pipes to its three streams.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments, rlim_t memory_limit = RLIM_INFINITY) {
    signal(SIGPIPE, SIG_IGN);  // it may end before it has read its input
    int in[2], out[2], err[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC)) throw std::runtime_error("no pipe");
    arguments.insert(arguments.begin(), program());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], 0), dup2(out[1], 1), dup2(err[1], 2);
      const rlimit limit{memory_limit, memory_limit};
      if (memory_limit != RLIM_INFINITY) setrlimit(RLIMIT_AS, &limit);
      signal(SIGPIPE, SIG_DFL);
      execv(argv[0], argv.data());
      _exit(99);
    }
    close(in[0]), close(out[1]), close(err[1]);
    in_ = in[1], out_ = out[0], err_ = err[0];
  }
  ~Process() {
    for (const int fd : {in_, out_, err_}) {
      if (fd >= 0) close(fd);
    }
  }

  void interrupt(int signal = SIGINT) { kill(pid_, signal); }
  void send(const std::string& input) {
    if (write(in_, input.data(), input.size()) < 0) close(std::exchange(in_, -1));
  }
  void close_out() { close(std::exchange(out_, -1)); }
  void wait_for_output() {
    char byte;
    if (read(out_, &byte, 1) == 1) first_ = byte;
  }

  /// Sends the input and its end, unless it is to stay open, and waits for the program.
  Result finish(const std::string& input = "", bool stays_open = false) {
    std::thread feeder([&] {
      for (size_t at = 0; at < input.size();) {
        const ssize_t written = write(in_, input.data() + at, input.size() - at);
        if (written <= 0) break;
        at += static_cast<size_t>(written);
      }
      if (!stays_open) close(std::exchange(in_, -1));
    });
    Result result;
    std::thread listener([&] { result.err = drain(err_); });
    result.out = first_ + (out_ < 0 ? "" : drain(out_));
    listener.join();
    feeder.join();
    int status = 0;
    waitpid(pid_, &status, 0);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
  }

 private:
  static std::string drain(int fd) {
    std::string bytes;
    char block[4096];
    for (ssize_t count; (count = read(fd, block, sizeof block)) > 0;) bytes.append(block, static_cast<size_t>(count));
    return bytes;
  }

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1, err_ = -1;
  std::string first_;
};

inline Result fut(const std::vector<std::string>& arguments, const std::string& input = "") {
  return Process(arguments).finish(input);
}

}  // namespace fut::test
