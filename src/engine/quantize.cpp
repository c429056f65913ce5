#include "engine/quantize.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/error.h"
#include "base/parallel.h"
#include "engine/calibrate.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "model/weights.h"

namespace fut {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  FUT_CHECK(file.good(), path.string(), ": could not be written");
}

/// A folder under a temporary name that disappears unless it is kept.
class NewFolder {
 public:
  explicit NewFolder(const std::string& path) : path_(path), partial_(path + ".partial-" + std::to_string(getpid())) {
    FUT_CHECK(!fs::exists(path_), path, ": exists already; quantize writes a new folder");
    std::error_code error;
    fs::create_directories(partial_, error);
    FUT_CHECK(!error, partial_.string(), ": could not be created: ", error.message());
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder() {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  }
  const fs::path& path() const { return partial_; }
  void keep() {
    std::error_code error;
    fs::rename(partial_, path_, error);
    FUT_CHECK(!error, path_.string(), ": could not be created: ", error.message());
  }

 private:
  fs::path path_, partial_;
};

Json weight_scheme(int bits, const char* type, const char* strategy, Json group) {
  return {{"num_bits", bits},    {"type", type},     {"symmetric", true},   {"strategy", strategy},
          {"group_size", group}, {"dynamic", false}, {"actorder", nullptr}, {"observer", "minmax"}};
}

/// What compressed-tensors and its readers look for in config.json.
Json quantization_config(Dtype dtype, int group) {
  Json scheme = {{"targets", {"Linear"}}, {"input_activations", nullptr}, {"output_activations", nullptr}};
  if (dtype == Dtype::int4) {
    scheme["weights"] = weight_scheme(4, "int", "group", group);
  } else {
    scheme["weights"] = weight_scheme(8, "float", "channel", nullptr);
    scheme["input_activations"] = weight_scheme(8, "float", "token", nullptr);
    scheme["input_activations"]["dynamic"] = true;
    scheme["input_activations"]["observer"] = nullptr;
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", dtype == Dtype::int4 ? "pack-quantized" : "float-quantized"},
          {"quantization_status", "compressed"},
          {"ignore", {"lm_head"}},
          {"config_groups", {{"group_0", scheme}}}};
}

/// One projection's rows of a stacked weight, and its name.
struct Projection {
  std::string name;
  int64_t first_row, rows, cols;
};

/// Writes one of the two folders: declared whole, then filled layer by layer.
class FolderWriter {
 public:
  FolderWriter(const fs::path& folder, const ModelSource& source, Dtype dtype, const QuantizeOptions& options)
      : config_(source.config), dtype_(dtype), options_(options), writer_((folder / "model.safetensors").string()) {
    Json config = parse_json(source.decode->config_json(), source.path);
    config["quantization_config"] = quantization_config(dtype, options.group);
    config["torch_dtype"] = "bfloat16";
    if (options.rotate_residual) config["tie_word_embeddings"] = false;
    write_text(folder / "config.json", config.dump(1) + "\n");
    const std::string generation = source.decode->generation_config_json();
    if (generation != "{}") write_text(folder / "generation_config.json", generation);
    for (const auto& [name, text] : source.decode->tokenizer_files()) write_text(folder / name, text);
    declare();
  }

  void write_layer(int64_t l, const LayerTensors& tensors) {
    const std::vector<float> ones(config_.width, 1.0f);
    write_bf16(layer(l, "input_layernorm.weight"), ones);
    write_bf16(layer(l, "post_attention_layernorm.weight"), ones);
    const std::vector<float>* stacked[] = {&tensors.qkv, &tensors.o, &tensors.gate_up, &tensors.down};
    const std::vector<std::vector<Projection>> groups = projections(l);
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const Projection& p : groups[i]) write_projection(p, stacked[i]->data() + p.first_row * p.cols);
    }
  }

  void write_tables(const std::vector<float>& embedding, const std::vector<float>& norm,
                    const std::vector<float>* head) {
    write_bf16("model.embed_tokens.weight", embedding);
    writer_.write("model.norm.weight", norm.data(), static_cast<int64_t>(norm.size() * sizeof(float)));
    if (head) write_bf16("lm_head.weight", *head);
    writer_.finish();
  }

 private:
  static std::string layer(int64_t l, const char* name) { return cat("model.layers.", l, ".", name); }

  std::vector<std::vector<Projection>> projections(int64_t l) const {
    const int64_t D = config_.width, F = config_.feed_forward, E = config_.head_dim, H = config_.heads,
                  J = config_.kv_heads;
    return {{{layer(l, "self_attn.q_proj"), 0, H * E, D},
             {layer(l, "self_attn.k_proj"), H * E, J * E, D},
             {layer(l, "self_attn.v_proj"), (H + J) * E, J * E, D}},
            {{layer(l, "self_attn.o_proj"), 0, D, H * E}},
            {{layer(l, "mlp.gate_proj"), 0, F, D}, {layer(l, "mlp.up_proj"), F, F, D}},
            {{layer(l, "mlp.down_proj"), 0, D, F}}};
  }

  void declare() {
    const int64_t D = config_.width;
    writer_.declare("model.embed_tokens.weight", "BF16", {config_.vocabulary, D});
    for (int64_t l = 0; l < config_.layers; ++l) {
      writer_.declare(layer(l, "input_layernorm.weight"), "BF16", {D});
      writer_.declare(layer(l, "post_attention_layernorm.weight"), "BF16", {D});
      for (const auto& group : projections(l)) {
        for (const Projection& p : group) declare_projection(p);
      }
    }
    writer_.declare("model.norm.weight", "F32", {D});
    if (!config_.tied || options_.rotate_residual) writer_.declare("lm_head.weight", "BF16", {config_.vocabulary, D});
  }

  void declare_projection(const Projection& p) {
    if (dtype_ == Dtype::int4) {
      writer_.declare(p.name + ".weight_packed", "I32", {p.rows, (p.cols + 7) / 8});
      writer_.declare(p.name + ".weight_scale", "F16", {p.rows, (p.cols + options_.group - 1) / options_.group});
      writer_.declare(p.name + ".weight_shape", "I64", {2});
    } else {
      writer_.declare(p.name + ".weight", "F8_E4M3", {p.rows, p.cols});
      writer_.declare(p.name + ".weight_scale", "F32", {p.rows, 1});
    }
  }

  void write_projection(const Projection& p, const float* w) {
    const auto write = [&](const char* suffix, const auto& values) {
      writer_.write(p.name + suffix, values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
    };
    if (dtype_ == Dtype::int4) {
      const HostWeight codes = options_.quantise(w, p.rows, p.cols, options_.group, p.name);
      write(".weight_packed", codes.data);
      write(".weight_scale", codes.group_scale);
      write(".weight_shape", std::vector<int64_t>{p.rows, p.cols});
    } else {
      const HostWeight codes = encode_weight(Dtype::e4m3, 0, w, p.rows, p.cols, p.name);
      write(".weight", codes.data);
      write(".weight_scale", codes.scale);
    }
  }

  void write_bf16(const std::string& name, const std::vector<float>& values) {
    const HostWeight rounded =
        encode_weight(Dtype::bf16, 0, values.data(), 1, static_cast<int64_t>(values.size()), name);
    writer_.write(name, rounded.data.data(), static_cast<int64_t>(rounded.data.size()));
  }

  const LlamaConfig& config_;
  Dtype dtype_;
  const QuantizeOptions& options_;
  SafetensorsWriter writer_;
};

/// What a group size must divide, said before any work.
void check_group(const LlamaConfig& c, int group) {
  const std::pair<const char*, int64_t> inputs[] = {
      {"q_proj", c.width}, {"o_proj", c.heads * c.head_dim}, {"down_proj", c.feed_forward}};
  FUT_CHECK(int4_group_size_ok(group), "group size ", group, " is not 32, 64 or 128");
  for (const auto& [name, cols] : inputs) {
    FUT_CHECK(cols % group == 0, name, " has ", cols, " inputs, no multiple of the group size ", group,
              "; other readers of the pack-quantized format expect whole groups (choose 32, 64 or 128 to fit)");
  }
}

}  // namespace

void quantize_model(const std::string& source_path, const std::string& out, const QuantizeOptions& options) {
  set_thread_count(options.threads);
  const ModelSource source = ModelSource::open(source_path);
  const LlamaConfig& c = source.config;
  FUT_CHECK(!source.quantised(), source_path, ": is quantised already; quantize its source");
  for (const TensorInfo& info : source.decode->tensors()) {
    FUT_CHECK(info.type != "pack-quantized" && info.type != "F8_E4M3", info.file, ": tensor ", info.name, " is ",
              info.type, ": the checkpoint is quantised already; quantize its source");
  }
  check_tensors(*source.decode, c);
  check_group(c, options.group);
  NewFolder folder(out);
  const OfflineRotation rotation{true, options.rotate_residual};
  Calibration calibration;
  if (!options.calibration_text.empty()) {
    calibration = calibrate(source, {options.calibration_text, options.calibration_samples, options.calibration_length,
                                     options.threads, options.on_progress});
  }
  fs::create_directory(folder.path() / "decode");
  fs::create_directory(folder.path() / "prefill");
  FolderWriter decode(folder.path() / "decode", source, Dtype::int4, options);
  FolderWriter prefill(folder.path() / "prefill", source, Dtype::e4m3, options);
  for (int64_t l = 0; l < c.layers; ++l) {
    if (options.on_progress) options.on_progress("layers", l, c.layers);
    const LayerTensors tensors = read_layer(*source.decode, c, l, rotation);
    decode.write_layer(l, tensors);
    prefill.write_layer(l, tensors);
  }
  if (options.on_progress) options.on_progress("layers", c.layers, c.layers);
  const std::vector<float> embedding = read_embedding(*source.decode, c, rotation);
  // A rotated stream cannot pass through the norm's gains: they move into the head, which is then no longer the
  // embedding.
  std::vector<float> norm(c.width, 1.0f), head;
  if (!options.rotate_residual) {
    norm = source.decode->read_f32("model.norm.weight");
    if (!c.tied) head = source.decode->read_f32("lm_head.weight");
  } else {
    head = read_head(*source.decode, c, rotation);
  }
  decode.write_tables(embedding, norm, head.empty() ? nullptr : &head);
  prefill.write_tables(embedding, norm, head.empty() ? nullptr : &head);
  for (const auto& [name, text] : source.decode->tokenizer_files()) write_text(folder.path() / name, text);
  write_text(folder.path() / kMetadataFile, metadata_json(source, options.group, options.rotate_residual, calibration));
  folder.keep();
}

}  // namespace fut
