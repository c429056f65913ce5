// fut tokenize: the ids of a text. Loads no weights.
#include "base/error.h"
#include "common.h"
#include "io/checkpoint.h"
#include "io/json.h"

namespace fut::app {

int run_tokenize(int argc, const char* const* argv) {
  CLI::App app("Prints the token ids of a text.", "fut tokenize");
  std::string model, text, file;
  bool no_bos = false, parse_control = false, as_json = false;
  add_text(app, "MODEL", model, "", "a Hugging Face folder, a .gguf file, or what `fut quantize` wrote")->required();
  add_text(app, "TEXT", text, "", "the text; put -- before one that begins with -");
  add_text(app, "-f,--file", file, "FILE", "the text is the bytes of FILE; - is stdin");
  app.add_flag("--no-bos", no_bos, "no beginning-of-sequence token where the tokenizer adds one");
  app.add_flag("--parse-control", parse_control, "<|eot_id|> and the like in the text are control tokens");
  app.add_flag("--json", as_json, "{\"ids\": [...]}");
  app.footer(
      "Examples:\n  fut tokenize models/bard 'To be, or not'\n"
      "  fut tokenize model.gguf -f text.txt --no-bos --json");
  if (const auto code = parse(app, argc, argv)) return *code;
  if (app.count("TEXT") + app.count("--file") != 1) return usage_error(app, "give TEXT or --file, one of them");

  if (app.count("--file")) text = read_file(file);
  now("reading the tokenizer of " + model);
  const auto tokenizer = Checkpoint::open(model)->tokenizer();
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
