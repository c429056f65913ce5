#include "engine/quantize.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "engine/backends.h"
#include "engine/calibrate.h"
#include "engine/decode_walk.h"
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
  FUT_CHECK(file.good(), path.string(), ": cannot write ", text.size(), " bytes: ", strerror(errno));
}

/// A folder under a temporary name that disappears unless it is kept.
class NewFolder {
 public:
  explicit NewFolder(const std::string& path) : path_(path) {
    FUT_CHECK(!path.empty(), "the name of the folder to write is empty");
    if (!path_.has_filename()) path_ = path_.parent_path();  // "OUT/" means OUT
    partial_ = path_.string() + ".partial-" + std::to_string(getpid());
    std::error_code error;
    FUT_CHECK(!fs::exists(path_, error), path, ": exists already; quantize writes a new folder");
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
          {"kv_cache_scheme", nullptr},
          {"ignore", {"lm_head"}},
          {"config_groups", {{"group_0", scheme}}}};
}

/// One projection's rows of a stacked weight, and its name.
struct Projection {
  std::string name;
  int64_t first_row, rows, cols;
};

std::string layer_name(int64_t l, const char* name) { return cat("model.layers.", l, ".", name); }

/// What a layer's four products consist of: qkv, o, gate_up, down.
constexpr int kProducts = 4;
std::vector<Projection> projections(const LlamaConfig& c, int64_t l, int product) {
  const int64_t D = c.width, F = c.feed_forward, E = c.head_dim, H = c.heads, J = c.kv_heads;
  switch (product) {
    case 0:
      return {{layer_name(l, "self_attn.q_proj"), 0, H * E, D},
              {layer_name(l, "self_attn.k_proj"), H * E, J * E, D},
              {layer_name(l, "self_attn.v_proj"), (H + J) * E, J * E, D}};
    case 1: return {{layer_name(l, "self_attn.o_proj"), 0, D, H * E}};
    case 2: return {{layer_name(l, "mlp.gate_proj"), 0, F, D}, {layer_name(l, "mlp.up_proj"), F, F, D}};
    default: return {{layer_name(l, "mlp.down_proj"), 0, D, F}};
  }
}

const std::vector<float>& product_weight(const LayerTensors& tensors, int product) {
  const std::vector<float>* all[kProducts] = {&tensors.qkv, &tensors.o, &tensors.gate_up, &tensors.down};
  return *all[product];
}

const std::vector<float>& product_bias(const LayerTensors& tensors, int product) {
  const LayerBiases& bias = tensors.bias;
  const std::vector<float>* all[kProducts] = {&bias.qkv, &bias.o, &bias.gate_up, &bias.down};
  return *all[product];
}

/// `more`'s rows behind those of `weight`, which may be empty.
void append_rows(HostWeight& weight, HostWeight more) {
  if (weight.rows == 0) {
    weight = std::move(more);
    return;
  }
  weight.rows += more.rows;
  weight.data.insert(weight.data.end(), more.data.begin(), more.data.end());
  weight.scale.insert(weight.scale.end(), more.scale.begin(), more.scale.end());
  weight.group_scale.insert(weight.group_scale.end(), more.group_scale.begin(), more.group_scale.end());
}

/// Writes one of the two folders: declared whole, then filled layer by layer.
class FolderWriter {
 public:
  FolderWriter(const fs::path& folder, const ModelSource& source, Dtype dtype, const QuantizeOptions& options)
      : config_(source.config), dtype_(dtype), options_(options), writer_((folder / "model.safetensors").string()) {
    Json config = parse_json(source.decode->config_json(), source.decode->config_place());
    config["quantization_config"] = quantization_config(dtype, options.group);
    config.erase("dtype");  // a newer name of the next, which says what others compute in
    config["torch_dtype"] = "bfloat16";
    if (options.rotate_residual) config["tie_word_embeddings"] = false;
    write_text(folder / "config.json", config.dump(1) + "\n");
    const std::string generation = source.decode->generation_config_json();
    if (generation != "{}") write_text(folder / "generation_config.json", generation);
    for (const auto& [name, text] : source.decode->tokenizer_files()) write_text(folder / name, text);
    declare();
  }

  /// The codes of one of the layer's stacked products, under their projections' names, and the norm in front of it,
  /// which multiplies by the input scale.
  void write_product(int64_t l, int product, const HostWeight& codes) {
    if (product == 0 || product == 2) {
      const std::vector<float> ones(config_.width, 1.0f);
      const char* norm = product == 0 ? "input_layernorm.weight" : "post_attention_layernorm.weight";
      write_bf16(layer_name(l, norm), codes.input_scale.empty() ? ones : codes.input_scale);
    }
    for (const Projection& p : projections(config_, l, product)) {
      const auto write = [&](const char* suffix, const auto& values, int64_t per_row) {
        const auto bytes = static_cast<int64_t>(sizeof(values[0]));
        writer_.write(p.name + suffix, values.data() + p.first_row * per_row, p.rows * per_row * bytes);
      };
      if (dtype_ == Dtype::int4) {
        write(".weight_packed", codes.data, codes.row_bytes());
        write(".weight_scale", codes.group_scale, codes.groups());
        const int64_t shape[] = {p.rows, p.cols};
        writer_.write(p.name + ".weight_shape", shape, sizeof shape);
      } else {
        write(".weight", codes.data, codes.row_bytes());
        write(".weight_scale", codes.scale, 1);
      }
      if (!codes.bias.empty()) write(".bias", codes.bias, 1);
    }
  }

  void write_head_norm(int64_t l, const HeadNorm& norm) {
    if (!config_.head_norm) return;
    write_f32(layer_name(l, "self_attn.q_norm.weight"), norm.q);
    write_f32(layer_name(l, "self_attn.k_norm.weight"), norm.k);
  }

  void write_tables(const std::vector<float>& embedding, const std::vector<float>& norm,
                    const std::vector<float>* head) {
    write_bf16("model.embed_tokens.weight", embedding);
    write_f32("model.norm.weight", norm);
    if (head) write_bf16("lm_head.weight", *head);
    writer_.finish();
  }

 private:
  void declare() {
    const int64_t D = config_.width;
    writer_.declare("model.embed_tokens.weight", "BF16", {config_.vocabulary, D});
    for (int64_t l = 0; l < config_.layers; ++l) {
      writer_.declare(layer_name(l, "input_layernorm.weight"), "BF16", {D});
      writer_.declare(layer_name(l, "post_attention_layernorm.weight"), "BF16", {D});
      for (const char* norm : {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}) {
        if (config_.head_norm) writer_.declare(layer_name(l, norm), "F32", {config_.head_dim});
      }
      const bool biased[kProducts] = {config_.qkv_bias, config_.o_bias, config_.mlp_bias, config_.mlp_bias};
      for (int product = 0; product < kProducts; ++product) {
        for (const Projection& p : projections(config_, l, product)) {
          declare_projection(p);
          if (biased[product]) writer_.declare(p.name + ".bias", "F32", {p.rows});
        }
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

  void write_f32(const std::string& name, const std::vector<float>& values) {
    writer_.write(name, values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
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

/// The four products of a layer to INT4, one after the other, each told its inputs if the quantiser wants them: those
/// that the layers and products before it, quantised already, make of the calibration text, and how far they are from
/// what the original model, in BF16, makes of it.
class LayerQuantiser {
 public:
  LayerQuantiser(const QuantizeOptions& options, const LlamaConfig& config) : options_(options), config_(config) {}

  void walk_over(const std::vector<std::vector<int32_t>>& pieces, const std::vector<float>& embedding) {
    backend_ = make_backend("cpu", config_, {Dtype::int4, Dtype::bf16});
    walk_.emplace(*backend_, config_, Dtype::int4, pieces, embedding, [this] { tick(); });
    original_.emplace(*backend_, config_, Dtype::bf16, pieces, embedding, [this] { tick(); });
  }

  void layer(int64_t l, const LayerTensors& tensors, const std::function<void(int, const HostWeight&)>& write) {
    HostWeight codes, exact;  // of the product before
    for (int product = 0; product < kProducts; ++product) {
      done_ = l * kProducts + product;
      stage_ = cat("layer ", l + 1, " of ", config_.layers);
      if (walk_ && matrices_ > 0) stage_ += cat(", loss ", std::setprecision(3), loss_ / matrices_);
      tick();
      if (walk_) {
        options_.quantiser->start_product(projections(config_, l, product)[0].cols);
        step(product, codes, exact, tensors.head_norm);
      }
      const std::vector<float> scale = input_scale(product, tensors);
      codes = quantise(l, product, divide_columns(product_weight(tensors, product), scale));
      codes.input_scale = scale;
      codes.bias = product_bias(tensors, product);
      write(product, codes);
      if (original_) exact = exact_weight(l, product, tensors);
    }
    if (!walk_ || l + 1 == config_.layers) return;
    walk_->down(codes);
    original_->down(exact);
  }

  /// What the walk has seen beside the inputs.
  const Calibration& calibration() const { return walk_->calibration(); }

  QuantizeReport report() const {
    return {loss_ / std::max(1, matrices_), rtn_loss_ / std::max(1, matrices_), walk_ ? walk_->tokens() : 0};
  }

 private:
  HostWeight exact_weight(int64_t l, int product, const LayerTensors& tensors) const {
    const std::vector<float>& w = product_weight(tensors, product);
    const Projection p = projections(config_, l, product)[0];
    HostWeight exact = encode_weight(Dtype::bf16, 0, w.data(), static_cast<int64_t>(w.size()) / p.cols, p.cols, p.name);
    exact.bias = product_bias(tensors, product);
    return exact;
  }

  /// Through the product before, whose codes are known, to the inputs of this one: the original model first, then ours,
  /// compared with it.
  void step(int product, const HostWeight& codes, const HostWeight& exact, const HeadNorm& norm) {
    step(*original_, product, exact, norm, [](const float*, int64_t) {});
    const bool into_stream = product == 1 || product == 3;
    const int64_t D = config_.width, cols = projections(config_, 0, product)[0].cols;
    int64_t first = 0;
    std::vector<float> drift, lack;
    step(*walk_, product, codes, norm, [&](const float* x, int64_t rows) {
      drift.resize(rows * cols);
      original_->inputs(first, rows, drift.data());
      for (int64_t i = 0; i < rows * cols; ++i) drift[i] -= x[i];
      lack.assign(original_->stream(first), original_->stream(first) + rows * D);
      for (int64_t i = 0; i < rows * D; ++i) lack[i] -= walk_->stream(first)[i];
      options_.quantiser->add_inputs(x, rows);
      options_.quantiser->add_drift(x, rows, drift.data(), into_stream ? lack.data() : nullptr, D);
      first += rows;
    });
  }

  static void step(DecodeWalk& walk, int product, const HostWeight& before, const HeadNorm& norm,
                   const DecodeWalk::See& see) {
    switch (product) {
      case 0: return walk.start_layer(see);
      case 1: return walk.attention(before, norm, see);
      case 2: return walk.o_proj(before, see);
      default: return walk.gate_up(before, see);
    }
  }

  /// Only qkv and gate_up have inputs that something multiplies anyway: the norm.
  std::vector<float> input_scale(int product, const LayerTensors& tensors) {
    if (product != 0 && product != 2) return {};
    const std::vector<float>& w = product_weight(tensors, product);
    const std::vector<float> wanted =
        options_.quantiser->input_scale(w.data(), static_cast<int64_t>(w.size()) / config_.width, config_.width,
                                        options_.group, product == 0 ? tensors.qkv_gain : tensors.gate_up_gain);
    const std::vector<float> scale = usable_input_scale(wanted);
    options_.quantiser->scale_inputs(scale);
    return scale;
  }

  HostWeight quantise(int64_t l, int product, const std::vector<float>& w) {
    HostWeight codes;
    for (const Projection& p : projections(config_, l, product)) {
      QuantisedMatrix made =
          options_.quantiser->quantise(w.data() + p.first_row * p.cols, p.rows, p.cols, options_.group, p.name);
      if (!made.warning.empty() && options_.on_warning) options_.on_warning(made.warning);
      loss_ += made.loss;
      rtn_loss_ += made.rtn_loss;
      ++matrices_;
      append_rows(codes, std::move(made.weight));
    }
    return codes;
  }

  void tick() {
    if (options_.on_progress) options_.on_progress(stage_, done_, config_.layers * kProducts);
  }

  const QuantizeOptions& options_;
  const LlamaConfig& config_;
  std::unique_ptr<Backend> backend_;
  std::optional<DecodeWalk> walk_, original_;
  double loss_ = 0, rtn_loss_ = 0;  // summed over the matrices
  int matrices_ = 0;
  int64_t done_ = 0;
  std::string stage_ = "layers";
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

QuantizeReport quantize_model(const std::string& source_path, const std::string& out, const QuantizeOptions& options) {
  set_thread_count(options.threads);
  const ModelSource source = ModelSource::open(source_path);
  const LlamaConfig& c = source.config;
  FUT_CHECK(!source.quantised(), source_path, ": is quantised already; quantize its source");
  for (const TensorInfo& info : source.decode->tensors()) {
    FUT_CHECK(!is_packed_int4(info) && info.type != "F8_E4M3", info.file, ": tensor ", info.name, " is ", info.type,
              ": the checkpoint is quantised already; quantize its source");
  }
  check_tensors(*source.decode, c);
  check_group(c, options.group);
  FUT_CHECK(!options.quantiser->wants_inputs() || !options.calibration_text.empty(),
            "this method needs a calibration text");
  NewFolder folder(out);
  const OfflineRotation rotation{true, options.rotate_residual};
  Calibration calibration;
  const CalibrateOptions calibrate_options{options.calibration_text, options.calibration_samples,
                                           options.calibration_length, options.threads, options.on_progress};
  const bool walks = options.quantiser->wants_inputs();
  if (!walks && !options.calibration_text.empty()) calibration = calibrate(source, calibrate_options);
  fs::create_directory(folder.path() / "decode");
  fs::create_directory(folder.path() / "prefill");
  FolderWriter decode(folder.path() / "decode", source, Dtype::int4, options);
  FolderWriter prefill(folder.path() / "prefill", source, Dtype::e4m3, options);
  const std::vector<float> embedding = read_embedding(*source.decode, c, rotation, {0, c.vocabulary});
  LayerQuantiser quantiser(options, c);
  if (walks) quantiser.walk_over(calibration_pieces(source, calibrate_options), embedding);
  for (int64_t l = 0; l < c.layers; ++l) {
    const LayerTensors tensors = read_layer(*source.decode, c, l, rotation);
    decode.write_head_norm(l, tensors.head_norm);
    prefill.write_head_norm(l, tensors.head_norm);
    quantiser.layer(l, tensors, [&](int product, const HostWeight& codes) { decode.write_product(l, product, codes); });
    for (int product = 0; product < kProducts; ++product) {
      HostWeight codes;
      for (const Projection& p : projections(c, l, product)) {
        append_rows(codes, encode_weight(Dtype::e4m3, 0, product_weight(tensors, product).data() + p.first_row * p.cols,
                                         p.rows, p.cols, p.name));
      }
      codes.bias = product_bias(tensors, product);
      prefill.write_product(l, product, codes);
    }
  }
  if (options.on_progress) options.on_progress("layers", c.layers, c.layers);
  if (walks) calibration = quantiser.calibration();
  // A rotated stream cannot pass through the norm's gains: they move into the head, which is then no longer the
  // embedding.
  std::vector<float> norm(c.width, 1.0f), head;
  if (!options.rotate_residual) {
    norm = source.decode->read_f32("model.norm.weight");
    if (!c.tied) head = source.decode->read_f32("lm_head.weight");
  } else {
    head = read_head(*source.decode, c, rotation, {0, c.vocabulary});
  }
  decode.write_tables(embedding, norm, head.empty() ? nullptr : &head);
  prefill.write_tables(embedding, norm, head.empty() ? nullptr : &head);
  for (const auto& [name, text] : source.decode->tokenizer_files()) write_text(folder.path() / name, text);
  write_text(folder.path() / kMetadataFile, metadata_json(source, options.group, options.rotate_residual, calibration));
  folder.keep();
  return quantiser.report();
}

}  // namespace fut
