// fut tokenize: the ids of a text. Loads no weights.
#include <filesystem>

#include "base/error.h"
#include "common.h"
#include "io/checkpoint.h"
#include "io/json.h"

namespace fut::app {
namespace {

/// A folder's own files are enough: neither its weights nor its configuration have to be there.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& model) {
  std::error_code ignored;
  return std::filesystem::is_directory(model, ignored) ? Tokenizer::from_hf_folder(model)
                                                       : Checkpoint::open(model)->tokenizer();
}

}  // namespace

int run_tokenize(int argc, const char* const* argv) {
  const auto app = make_app("Prints the token ids of a text.", "fut tokenize");
  std::string model, text, file;
  bool no_bos = false, parse_control = false, as_json = false;
  add_argument(*app, "MODEL", model, true, "a Hugging Face folder, a .gguf file, or what `fut quantize` wrote");
  add_argument(*app, "TEXT", text, false, "the text; put -- before one that begins with -");
  add_text(*app, "-f,--file", file, "FILE", "the text is the bytes of FILE; - is stdin");
  add_switch(*app, "--no-bos", no_bos, "no beginning-of-sequence token where the tokenizer adds one");
  add_switch(*app, "--parse-control", parse_control, "<|eot_id|> and the like in the text are control tokens");
  add_switch(*app, "--json", as_json, "{\"ids\": [...]}");
  set_footer(*app,
             "Examples:\n  fut tokenize models/bard 'To be, or not'\n"
             "  fut tokenize model.gguf -f text.txt --no-bos --json");
  if (const auto code = parse(*app, argc, argv)) return *code;
  if (given(*app, "TEXT") + given(*app, "--file") != 1) return usage_error(*app, "give TEXT or --file, one of them");

  if (given(*app, "--file")) text = read_file(file);
  now("reading the tokenizer of " + model);
  const auto tokenizer = open_tokenizer(model);
  now("tokenizing");
  const auto ids = tokenizer->encode(text, !no_bos, parse_control ? ControlTokens::parsed : ControlTokens::as_text);
  if (as_json) {
    put(nlohmann::json{{"ids", ids}}.dump() + "\n");
    return 0;
  }
  std::string line;
  for (const int32_t id : ids) line += std::to_string(id) + ' ';
  if (!line.empty()) line.pop_back();
  put(line + "\n");
  return 0;
}

}  // namespace fut::app
