// fut quantize: a model in both precisions, as a folder that runs by itself.
#include "engine/quantize.h"

#include <fmt/format.h>

#include <chrono>
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

std::string method_help() {
  std::string help = "how INT4 codes are found";
  for (const Quantiser& q : quantisers()) help += std::string("; ") + q.name + ": " + q.summary;
  return help;
}

/// "layer 3 of 30, loss 0.0123, 2:05 left": guessed from what the stage has taken so far.
class TimeLeft {
 public:
  std::string after(const std::string& stage, int64_t done, int64_t total) {
    const auto time = std::chrono::steady_clock::now();
    if (total != total_ || done < done_) {
      total_ = total;
      begin_ = done;
      start_ = time;
    }
    done_ = done;
    if (done == begin_) return stage;
    const double elapsed = std::chrono::duration<double>(time - start_).count();
    const auto left =
        static_cast<int64_t>(elapsed / static_cast<double>(done - begin_) * static_cast<double>(total - done));
    return fmt::format("{}, {}:{:02} left", stage, left / 60, left % 60);
  }

 private:
  int64_t total_ = -1, done_ = 0, begin_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

int run_quantize(int argc, const char* const* argv) {
  const auto app = make_app("Writes a model as INT4 for decode and FP8 for prefill.", "fut quantize");
  std::string source, out, method = "rtn", group = "64", calibration;
  bool as_json = false;
  QuantizeOptions options;
  float damping = 0.01f;
  add_argument(*app, "SRC", source, true, "a Hugging Face folder or a .gguf file");
  add_argument(*app, "OUT", out, true, "the folder to write; it must not exist");
  add_choice(*app, "--method", method, method_names(), method_help());
  add_choice(*app, "--group-size", group, {"32", "64", "128"}, "weights that share an INT4 scale");
  add_switch(*app, "--rotate", options.rotate_residual, "rotate the residual stream too (values always are)");
  add_text(*app, "--calib", calibration, "FILE",
           "text that FP8 activation scales, key means and (gptq) weights are fitted to");
  add_integer(*app, "--calib-samples", options.calibration_samples, {1, kNoLimit}, "pieces of that text");
  add_integer(*app, "--calib-seqlen", options.calibration_length, {2, kNoLimit}, "tokens of a piece");
  add_number(*app, "--damp", damping, kFractionRange, "gptq: share of the Hessian's mean diagonal that is added to it");
  add_integer(*app, "--threads", options.threads, {0, 1024}, "CPU threads; 0: one a core");
  add_switch(*app, "--json", as_json, "one JSON object on stdout");
  set_footer(
      *app,
      "Examples:\n  fut quantize model.gguf model-int4\n"
      "  fut quantize model.gguf model-gptq --method gptq --calib text.txt --calib-samples 128 --calib-seqlen 512\n"
      "  fut quantize models/bard bard-int4 --rotate --calib text.txt --calib-samples 16 --calib-seqlen 512");
  if (const auto code = parse(*app, argc, argv)) return *code;

  watch_interrupts();
  watch_terminations();
  options.group = std::stoi(group);
  QuantiserOptions quantiser_options;
  quantiser_options.damping = damping;
  const std::unique_ptr<WeightQuantiser> quantiser = find_quantiser(method).make(quantiser_options);
  options.quantiser = quantiser.get();
  if (quantiser->wants_inputs() && calibration.empty()) {
    return usage_error(*app,
                       "--method " + method + " needs --calib FILE: some 100 kB of text like what the model will meet");
  }
  if (!calibration.empty()) {
    options.calibration_text = read_file(calibration);
    if (options.calibration_text.empty()) return usage_error(*app, "--calib " + calibration + " is empty");
  }
  Bar bar;
  TimeLeft time_left;
  options.on_progress = [&](const std::string& stage, int64_t done, int64_t total) {
    throw_if_interrupted();
    bar.show(time_left.after(stage, done, total), done, total);
  };
  options.on_warning = [&](const std::string& line) {
    bar.clear();
    note("warning: " + line);
  };
  now("quantising " + source);
  const QuantizeReport report = quantize_model(source, out, options);
  bar.clear();
  const int64_t decode = folder_bytes(out + "/decode"), prefill = folder_bytes(out + "/prefill");
  if (as_json) {
    put(nlohmann::json{{"out", out},
                       {"method", method},
                       {"group_size", options.group},
                       {"rotate", options.rotate_residual},
                       {"calibrated", !calibration.empty()},
                       {"loss", report.loss},
                       {"rtn_loss", report.rtn_loss},
                       {"decode_bytes", decode},
                       {"prefill_bytes", prefill}}
            .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
        "\n");
  } else {
    if (quantiser->wants_inputs()) {
      note(fmt::format(
          "{} loses {:.2f} % of the products' output energy on the calibration text, rounding to nearest {:.2f} %",
          method, 100 * report.loss, 100 * report.rtn_loss));
    }
    note(one_line(out) + ": decode/ " + mib(decode) + ", prefill/ " + mib(prefill));
  }
  return 0;
}

}  // namespace fut::app
