// fut quantize: a model in both precisions, as a folder that runs by itself.
#include "engine/quantize.h"

#include <filesystem>

#include "common.h"
#include "io/json.h"
#include "quant/quantisers.h"

namespace fut::app {
namespace {

int64_t folder_bytes(const std::string& path) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) bytes += static_cast<int64_t>(entry.file_size());
  }
  return bytes;
}

std::vector<std::string> method_names() {
  std::vector<std::string> names;
  for (const Quantiser& q : quantisers()) names.emplace_back(q.name);
  return names;
}

}  // namespace

int run_quantize(int argc, const char* const* argv) {
  const auto app = make_app("Writes a model as INT4 for decode and FP8 for prefill.", "fut quantize");
  std::string source, out, method = "rtn", group = "64", calibration;
  bool as_json = false;
  QuantizeOptions options;
  add_argument(*app, "SRC", source, true, "a Hugging Face folder or a .gguf file");
  add_argument(*app, "OUT", out, true, "the folder to write; it must not exist");
  add_choice(*app, "--method", method, method_names(), "how INT4 codes are found");
  add_choice(*app, "--group-size", group, {"32", "64", "128"}, "weights that share an INT4 scale");
  add_switch(*app, "--rotate", options.rotate_residual, "rotate the residual stream too (values always are)");
  add_text(*app, "--calib", calibration, "FILE", "text that FP8 activation scales and key means are measured on");
  add_integer(*app, "--calib-samples", options.calibration_samples, {1, kNoLimit}, "pieces of that text");
  add_integer(*app, "--calib-seqlen", options.calibration_length, {2, kNoLimit}, "tokens of a piece");
  add_integer(*app, "--threads", options.threads, {0, 4096}, "CPU threads; 0: one a core");
  add_switch(*app, "--json", as_json, "one JSON object on stdout");
  set_footer(*app,
             "Examples:\n  fut quantize model.gguf model-int4\n"
             "  fut quantize models/bard bard-int4 --rotate --calib text.txt --calib-samples 16 --calib-seqlen 512");
  if (const auto code = parse(*app, argc, argv)) return *code;

  watch_interrupts();
  options.group = std::stoi(group);
  options.quantise = find_quantiser(method).quantise;
  if (!calibration.empty()) {
    options.calibration_text = read_file(calibration);
    if (options.calibration_text.empty()) return usage_error(*app, "--calib " + calibration + " is empty");
  }
  Bar bar;
  options.on_progress = [&](const std::string& stage, int64_t done, int64_t total) {
    throw_if_interrupted();
    bar.show(stage, done, total);
  };
  now("quantising " + source);
  quantize_model(source, out, options);
  bar.clear();
  const int64_t decode = folder_bytes(out + "/decode"), prefill = folder_bytes(out + "/prefill");
  if (as_json) {
    put(nlohmann::json{{"out", out},
                       {"method", method},
                       {"group_size", options.group},
                       {"rotate", options.rotate_residual},
                       {"calibrated", !calibration.empty()},
                       {"decode_bytes", decode},
                       {"prefill_bytes", prefill}}
            .dump() +
        "\n");
  } else {
    note(out + ": decode/ " + mib(decode) + ", prefill/ " + mib(prefill));
  }
  return 0;
}

}  // namespace fut::app
