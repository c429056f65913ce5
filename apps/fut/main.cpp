// fut: the command line of FuTransformer. One file a verb; this one picks the verb and reports what went wrong.
#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <exception>
#include <new>

#include "base/error.h"
#include "base/memory.h"
#include "common.h"

namespace fut::app {
namespace {

struct Verb {
  const char* name;
  const char* summary;
  int (*run)(int argc, const char* const* argv);
};

constexpr Verb kVerbs[] = {
    {"chat", "talk with a model through its chat template", run_chat},
    {"generate", "write text from a prompt, or answer many prompts from a file", run_generate},
    {"tokenize", "token ids of a text", run_tokenize},
    {"inspect", "layers, formats, bytes of each copy, context that fits; loads no weights", run_inspect},
    {"quantize", "write a model as INT4 for decode and FP8 for prefill", run_quantize},
    {"perplexity", "how well a model predicts a text, and how far it is from a base run", run_perplexity},
    {"bench", "speed of a model, or of single operations: fut bench model|op|block|step", run_bench},
};

std::string help() {
  std::string text =
      "FuTransformer runs Llama models with FP8 prefill, INT4 decode and an INT4 KV cache.\n"
      "Usage: fut VERB [OPTIONS] ...      fut VERB --help      fut --version\n\nVerbs:\n";
  for (const Verb& verb : kVerbs) text += fmt::format("  {:<12}{}\n", verb.name, verb.summary);
  return text +
         "\nExamples:\n"
         "  fut chat model.gguf --system 'Answer in one sentence.'\n"
         "  fut generate models/bard -p 'To be, or not' -n 64\n"
         "  fut quantize model.gguf model-int4\n"
         "  fut perplexity model.gguf text.txt --mode decode\n"
         "  fut bench model model.gguf --pp 512 --tg 128\n\n"
         "Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failure, 2 wrong usage, 130 "
         "interrupted.\n";
}

int run(int argc, const char* const* argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (first == "--help" || first == "-h") {
    put(help());
    return 0;
  }
  if (first == "--version") {
    put(fmt::format("fut {}\n", kVersion));
    return 0;
  }
  // A verb sees only what follows it. Were all verbs known to one parser, a TEXT that reads "bench" would be one.
  for (const Verb& verb : kVerbs) {
    if (first == verb.name) return verb.run(argc - 1, argv + 1);
  }
  note(first.empty() ? "fut: a verb is missing (see fut --help)"
                     : fmt::format("fut: unknown verb {} (see fut --help)", one_line(std::string(first))));
  return kUsage;
}

int out_of_memory() {
  std::fprintf(stderr, "fut: out of memory while %s%s\n", busy_with().c_str(), memory_limit_note().c_str());
  return kFailure;
}

int guarded_run(int argc, const char* const* argv) {
  try {
    return run(argc, argv);
  } catch (const Interrupted&) {
    return interrupted_exit();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::length_error&) {  // what a container says to a size that no memory could hold
    return out_of_memory();
  } catch (const OptionError& error) {
    std::fprintf(stderr, "fut: %s\n", one_line(error.what()).c_str());
    return kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fut: %s\n", one_line(error.what()).c_str());
    return kFailure;
  }
}

}  // namespace
}  // namespace fut::app

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);  // a closed pipe is then an error that put() reports
  return fut::app::guarded_run(argc, argv);
}
