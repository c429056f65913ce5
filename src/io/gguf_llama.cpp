// What GGUF files of the architectures whose block is Llama's (kFamilies) mean in Hugging Face's terms.
//
// NAMES   blk.N.attn_q.weight is model.layers.N.self_attn.q_proj.weight and so on: kModelNames, kLayerNames. A tensor
//         of another name keeps it.
// SHAPES  reversed: GGUF states the fastest extent first.
// ROWS    q and k of the architecture "llama" rotate neighbours where Hugging Face's rotate halves, so their rows are
//         stored in another order: row h*E + 2i + j of GGUF is row h*E + j*R/2 + i of Hugging Face (E head width, R of
//         it turned, i < R/2, j = 0 or 1), with each matrix's own number of heads. read_rows puts them right; raw()
//         gives bytes in the file's order.
// END     end tokens are eos_token_id and eot_token_id, and any of kEndSpellings that the vocabulary has as a control
//         token: files of chat models often name only one of the two tokens that end a turn and a text.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "io/gguf.h"
#include "io/gguf_blocks.h"
#include "io/json.h"
#include "io/spm.h"

namespace fut {
namespace {

using nlohmann::json;

constexpr int64_t kGrainElements = 1 << 16;
constexpr int64_t kControlToken = 3;
constexpr int64_t kMaxId = 2147483647;
constexpr char kBosKey[] = "tokenizer.ggml.bos_token_id";

/// An architecture of GGUF, which also begins its keys, and what it is called elsewhere. Mistral's files say "llama".
struct Family {
  const char *name, *hf_class;
  bool neighbours;  ///< RoPE turns 2i and 2i + 1, not i and i + R / 2
  bool optional_biases;
};
constexpr Family kFamilies[] = {{"llama", "LlamaForCausalLM", true, true},
                                {"qwen2", "Qwen2ForCausalLM", false, false},
                                {"qwen3", "Qwen3ForCausalLM", false, true}};

const Family& find_family(const std::string& name, const std::string& path) {
  for (const Family& family : kFamilies) {
    if (family.name == name) return family;
  }
  fail(path, ": architecture \"", printable(name), "\", expected \"llama\", \"qwen2\" or \"qwen3\"");
}

struct NamePair {
  std::string_view gguf, hf;
};

constexpr NamePair kModelNames[] = {
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kLayerNames[] = {
    {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},     {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"ffn_gate", "mlp.gate_proj"},      {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},       {"attn_norm", "input_layernorm"},   {"ffn_norm", "post_attention_layernorm"},
    {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"}};

constexpr std::string_view kEndSpellings[] = {"<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"};

/// What Llama-3.1 and later use where the file holds rope_freqs.weight; only the factor differs between models.
struct Llama3Rope {
  static constexpr double kLowFrequency = 1, kHighFrequency = 4;
  static constexpr int kOriginalLength = 8192;
};

template <size_t count>
std::string_view look_up(const NamePair (&names)[count], std::string_view gguf) {
  for (const NamePair& pair : names) {
    if (pair.gguf == gguf) return pair.hf;
  }
  return {};
}

/// "blk.7.attn_q.bias" is layer 7, part "attn_q", kind ".bias"; layer is -1 outside layers, kind empty if neither
/// weight nor bias.
struct GgufName {
  int64_t layer = -1;
  std::string_view part, kind;
};

GgufName parse_name(std::string_view name) {
  GgufName parsed;
  for (const std::string_view kind : {".weight", ".bias"}) {
    if (name.ends_with(kind)) parsed.kind = kind;
  }
  name.remove_suffix(parsed.kind.size());
  if (name.starts_with("blk.")) {
    const std::string_view rest = name.substr(4);
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), parsed.layer);
    const auto digits = static_cast<size_t>(end - rest.data());
    if (error == std::errc() && rest.substr(digits).starts_with('.')) name = rest.substr(digits + 1);
  }
  parsed.part = name;
  return parsed;
}

std::string hf_name(const std::string& name) {
  const GgufName parsed = parse_name(name);
  const bool in_layer = parsed.layer >= 0;
  const std::string_view part = in_layer ? look_up(kLayerNames, parsed.part) : look_up(kModelNames, parsed.part);
  if (part.empty() || parsed.kind.empty()) return name;
  return in_layer ? cat("model.layers.", parsed.layer, ".", part, parsed.kind) : cat(part, parsed.kind);
}

class GgufLlama final : public Checkpoint {
 public:
  explicit GgufLlama(const std::string& path);

  std::string config_json() const override { return config_; }
  std::string config_place() const override { return path_; }
  std::string generation_config_json() const override { return "{}"; }
  std::vector<TensorInfo> tensors() const override;
  const TensorInfo* find(const std::string& name) const override;
  std::vector<float> read_rows(const std::string& name, int64_t first, int64_t count) const override;
  void drop_pages() const override { file_.drop_pages(); }
  const uint8_t* raw(const std::string& name, int64_t* size_bytes) const override;
  std::unique_ptr<Tokenizer> tokenizer() const override {
    return is_spm() ? make_spm_tokenizer(spm_parts()) : Tokenizer::from_vocabulary(vocabulary(), path_);
  }
  std::map<std::string, std::string> tokenizer_files() const override;
  std::string chat_template() const override { return file_.text("tokenizer.chat_template").value_or(""); }

 private:
  struct Entry {
    TensorInfo info;
    const GgufTensor* tensor;
    int64_t heads;  // of q and k, if their rows are reordered; otherwise 0
  };

  /// The file's own name of a key of the architecture.
  std::string key(const char* name) const { return cat(family_->name, ".", name); }

  int64_t integer(const std::string& key, int64_t low, int64_t high, std::optional<int64_t> absent = {}) const;
  double number(const std::string& key, double high, std::optional<double> absent = {}) const;
  void read_head_width();
  void add_tensor(const GgufTensor& tensor);
  json rope_scaling(double theta) const;
  json llama3_scaling(double theta) const;
  std::string make_config() const;
  std::vector<int32_t> end_tokens() const;
  bool is_spm() const { return file_.text("tokenizer.ggml.model") == "llama"; }
  BpeVocabulary vocabulary() const;
  SpmParts spm_parts() const;
  std::vector<int> token_types() const;
  void check_ends(const std::vector<int32_t>& ends, int64_t last_id) const;
  const Entry& entry(const std::string& name) const;

  GgufFile file_;
  std::map<std::string, Entry> entries_;
  const Family* family_;
  int64_t hidden_, heads_, kv_heads_;
  int64_t head_width_ = 0, rotary_width_ = 0;  // E, R
  std::string config_;
};

GgufLlama::GgufLlama(const std::string& path) : file_(path) {
  path_ = path;
  family_ = &find_family(file_.text("general.architecture").value_or(""), path);
  const int64_t experts = file_.integer(key("expert_count")).value_or(0),
                files = file_.integer("split.count").value_or(1);
  FUT_CHECK(experts == 0, path, ": ", key("expert_count"), " is ", experts, "; mixtures of experts are not supported");
  FUT_CHECK(files <= 1, path, ": split.count is ", files, "; models split over several files are not supported");
  hidden_ = integer(key("embedding_length"), 1, 1 << 24);
  heads_ = integer(key("attention.head_count"), 1, 1 << 16);
  kv_heads_ = integer(key("attention.head_count_kv"), 1, heads_, heads_);
  read_head_width();
  for (const GgufTensor& tensor : file_.tensors()) add_tensor(tensor);
  config_ = make_config();
}

/// `key` must be from `low` to `high`; `absent` stands for a key that is not there, which otherwise is refused.
int64_t GgufLlama::integer(const std::string& key, int64_t low, int64_t high, std::optional<int64_t> absent) const {
  const auto value = file_.has(key) ? file_.integer(key) : absent;
  FUT_CHECK(value, path_, ": no key ", key);
  FUT_CHECK(*value >= low && *value <= high, path_, ": ", key, " is ", *value, ", expected ", low, " to ", high);
  return *value;
}

/// As integer(), for a number above 0.
double GgufLlama::number(const std::string& key, double high, std::optional<double> absent) const {
  const auto value = file_.has(key) ? file_.number(key) : absent;
  FUT_CHECK(value, path_, ": no key ", key);
  FUT_CHECK(*value > 0 && *value <= high, path_, ": ", key, " is ", *value, ", expected more than 0, at most ", high);
  return *value;
}

void GgufLlama::read_head_width() {
  const std::string stated_width = key("attention.key_length"), stated_rotary = key("rope.dimension_count");
  FUT_CHECK(file_.has(stated_width) || file_.has(stated_rotary) || hidden_ % heads_ == 0, path_, ": ", heads_,
            " heads do not divide the hidden size ", hidden_);
  const int64_t usual = integer(stated_rotary, 2, 1 << 16, hidden_ / heads_);
  head_width_ = integer(stated_width, 2, 1 << 16, usual);
  FUT_CHECK(head_width_ % 2 == 0, path_, ": the head width ", head_width_, " (",
            file_.has(stated_width)    ? stated_width
            : file_.has(stated_rotary) ? stated_rotary
                                       : "the width by the heads",
            ") is odd; rotary embedding needs pairs");
  rotary_width_ = file_.has(stated_rotary) ? usual : head_width_;
  FUT_CHECK(rotary_width_ <= head_width_ && rotary_width_ % 2 == 0, path_, ": ", stated_rotary, " is ", rotary_width_,
            ", expected an even number up to the head width ", head_width_);
  const int64_t values = integer(key("attention.value_length"), 1, 1 << 16, head_width_);
  FUT_CHECK(values == head_width_, path_, ": ", key("attention.value_length"), " is ", values,
            ", expected the head width ", head_width_);
}

/// llama3's factors stand in the file as numbers, without the parameters that made them. They are recovered by trial:
/// the largest number is the factor, and with it the usual parameters must give all the others.
json GgufLlama::llama3_scaling(double theta) const {
  const int64_t width = rotary_width_;
  const std::vector<float> stored = read_f32("rope_freqs.weight");
  FUT_CHECK(static_cast<int64_t>(stored.size()) == width / 2, path_, ": rope_freqs.weight has ", stored.size(),
            " values, expected ", width / 2);
  const double factor = *std::max_element(stored.begin(), stored.end());
  for (int64_t i = 0; i < width / 2; ++i) {
    const double wavelength = 2 * M_PI * std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(width));
    const double blend = (Llama3Rope::kOriginalLength / wavelength - Llama3Rope::kLowFrequency) /
                         (Llama3Rope::kHighFrequency - Llama3Rope::kLowFrequency);
    const double smooth = std::clamp(blend, 0.0, 1.0);
    const double expected = 1 / ((1 - smooth) / factor + smooth);
    FUT_CHECK(std::abs(stored[i] - expected) <= 1e-4 * expected, path_, ": rope_freqs.weight[", i, "] is ", stored[i],
              ", expected ", expected, " of llama3 scaling with factor ", factor, "; other factors are not supported");
  }
  return {{"rope_type", "llama3"},
          {"factor", factor},
          {"low_freq_factor", Llama3Rope::kLowFrequency},
          {"high_freq_factor", Llama3Rope::kHighFrequency},
          {"original_max_position_embeddings", Llama3Rope::kOriginalLength}};
}

json GgufLlama::rope_scaling(double theta) const {
  const std::string type = file_.text(key("rope.scaling.type")).value_or("linear");
  FUT_CHECK(type == "linear" || type == "none", path_, ": ", key("rope.scaling.type"), " \"", printable(type),
            "\" is not supported, expected \"none\" or \"linear\"");
  const double factor = number(key("rope.scaling.factor"), 1e6, number(key("rope.scale_linear"), 1e6, 1.0));
  const bool linear = type == "linear" && factor != 1;
  if (entries_.contains("rope_freqs.weight")) {
    FUT_CHECK(!linear, path_, ": linear rope scaling beside rope_freqs.weight is not supported");
    return llama3_scaling(theta);
  }
  return linear ? json{{"rope_type", "linear"}, {"factor", factor}} : json();
}

std::string GgufLlama::make_config() const {
  const double theta = number(key("rope.freq_base"), 1e15, 10000.0);
  const auto embedding = entries_.find("model.embed_tokens.weight");
  FUT_CHECK(embedding != entries_.end() && embedding->second.info.shape.size() == 2, path_,
            ": no matrix token_embd.weight");
  json config = {{"architectures", {family_->hf_class}},
                 {"model_type", family_->name},
                 {"hidden_size", hidden_},
                 {"intermediate_size", integer(key("feed_forward_length"), 1, 1 << 24)},
                 {"num_hidden_layers", integer(key("block_count"), 1, 1 << 14)},
                 {"num_attention_heads", heads_},
                 {"num_key_value_heads", kv_heads_},
                 {"head_dim", head_width_},
                 {"max_position_embeddings", integer(key("context_length"), 1, kMaxId)},
                 {"rms_norm_eps", number(key("attention.layer_norm_rms_epsilon"), 1)},
                 {"hidden_act", "silu"},
                 {"rope_theta", theta},
                 {"rope_scaling", rope_scaling(theta)},
                 {"vocab_size", embedding->second.info.shape[0]},
                 {"tie_word_embeddings", !entries_.contains("lm_head.weight")},
                 {"eos_token_id", end_tokens()}};
  if (family_->optional_biases) {
    config["attention_bias"] = entries_.contains("model.layers.0.self_attn.q_proj.bias");
    config["mlp_bias"] = entries_.contains("model.layers.0.mlp.down_proj.bias");
  }
  if (rotary_width_ < head_width_)
    config["partial_rotary_factor"] = static_cast<double>(rotary_width_) / static_cast<double>(head_width_);
  if (const int64_t window = integer(key("attention.sliding_window"), 0, kMaxId, 0)) {
    config["sliding_window"] = window;
    config["use_sliding_window"] = true;
    config["max_window_layers"] = 0;
  }
  if (file_.has(kBosKey)) config["bos_token_id"] = integer(kBosKey, 0, kMaxId);
  return config.dump(1);
}

void GgufLlama::add_tensor(const GgufTensor& tensor) {
  const GgufName parsed = parse_name(tensor.name);
  Entry entry{{hf_name(tensor.name), tensor.type, {tensor.extents.rbegin(), tensor.extents.rend()}, path_}, &tensor, 0};
  if (parsed.layer >= 0 && family_->neighbours && parsed.part == "attn_q") entry.heads = heads_;
  if (parsed.layer >= 0 && family_->neighbours && parsed.part == "attn_k") entry.heads = kv_heads_;
  if (entry.heads) {
    const int64_t rows = entry.info.shape.empty() ? 0 : entry.info.shape[0];
    FUT_CHECK(rows == entry.heads * head_width_, path_, ": tensor ", printable(tensor.name), " has ", rows,
              " rows, expected ", entry.heads, " heads of ", head_width_);
  }
  const std::string name = entry.info.name;
  FUT_CHECK(entries_.emplace(name, std::move(entry)).second, path_, ": two tensors mean ", printable(name));
}

std::vector<int32_t> GgufLlama::end_tokens() const {
  std::vector<int32_t> ids;
  const auto add = [&](int64_t id) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(static_cast<int32_t>(id));
  };
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (file_.has(key)) add(integer(key, 0, kMaxId));
  }
  const auto tokens = file_.texts("tokenizer.ggml.tokens").value_or(std::vector<std::string>{});
  const auto types = file_.integers("tokenizer.ggml.token_type").value_or(std::vector<int64_t>{});
  for (size_t id = 0; id < std::min(tokens.size(), types.size()); ++id) {
    const bool ends =
        std::find(std::begin(kEndSpellings), std::end(kEndSpellings), tokens[id]) != std::end(kEndSpellings);
    if (ends && types[id] == kControlToken) add(static_cast<int64_t>(id));
  }
  return ids;
}

std::vector<TensorInfo> GgufLlama::tensors() const {
  std::vector<TensorInfo> all;
  for (const auto& [name, entry] : entries_) all.push_back(entry.info);
  return all;
}

const TensorInfo* GgufLlama::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second.info;
}

/// Of a type that is read: the size of any other is not known, and so neither its bytes nor its numbers are.
const GgufLlama::Entry& GgufLlama::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  FUT_CHECK(found != entries_.end(), path_, ": tensor ", printable(name), " not found");
  FUT_CHECK(found->second.tensor->size_bytes > 0, path_, ": tensor ", printable(name), ": type ",
            found->second.info.type, " is not supported, expected ", kBlockFormatNames);
  return found->second;
}

const uint8_t* GgufLlama::raw(const std::string& name, int64_t* size_bytes) const {
  const GgufTensor& tensor = *entry(name).tensor;
  if (size_bytes) *size_bytes = tensor.size_bytes;
  return tensor.data;
}

std::vector<float> GgufLlama::read_rows(const std::string& name, int64_t first, int64_t count) const {
  const auto& [info, tensor, heads] = entry(name);
  const BlockFormat& format = *find_block_format(info.type);
  // A bias of q or k is reordered by elements, so its rows are single values.
  int64_t rows = heads ? info.shape[0] : tensor->elements / (info.shape.empty() ? 1 : info.shape.back());
  const int64_t row_elements = tensor->elements / rows;
  FUT_CHECK(row_elements % format.elements == 0, path_, ": tensor ", printable(name), ": type ", info.type,
            " cannot be reordered by elements");
  if (!check_rows(info, first, count)) {
    FUT_CHECK(!heads, path_, ": tensor ", printable(name), ": its rows are reordered: it can only be read whole");
    rows = count;
  }
  const int64_t row_blocks = row_elements / format.elements;
  const int64_t pairs = rotary_width_ / 2;
  const uint8_t* const blocks = tensor->data + first * row_blocks * format.bytes;
  std::vector<float> values(static_cast<size_t>(rows * row_elements));
  parallel_for(rows, kGrainElements / row_elements + 1, [&, heads = heads](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t in_head = row % head_width_;
      const bool moves = heads && in_head < 2 * pairs;
      const int64_t target = moves ? row - in_head + in_head % 2 * pairs + in_head / 2 : row;
      format.to_floats(blocks + row * row_blocks * format.bytes, row_blocks, values.data() + target * row_elements);
    }
  });
  return values;
}

BpeVocabulary GgufLlama::vocabulary() const {
  FUT_CHECK(file_.has("tokenizer.ggml.model"), path_, ": no key tokenizer.ggml.model; the file has no tokenizer");
  const std::string model = file_.text("tokenizer.ggml.model").value_or("");
  FUT_CHECK(model == "gpt2", path_, ": tokenizer.ggml.model \"", printable(model),
            "\" is not supported, expected \"gpt2\" (byte-level BPE) or \"llama\" (SentencePiece BPE)");
  auto tokens = file_.texts("tokenizer.ggml.tokens");
  auto merges = file_.texts("tokenizer.ggml.merges");
  FUT_CHECK(tokens && merges, path_, ": no tokenizer.ggml.tokens or no tokenizer.ggml.merges");
  BpeVocabulary vocabulary;
  vocabulary.tokens = std::move(*tokens);
  vocabulary.merges = std::move(*merges);
  vocabulary.token_types = token_types();
  const auto last_id = static_cast<int64_t>(vocabulary.tokens.size()) - 1;
  vocabulary.pre = file_.text("tokenizer.ggml.pre").value_or("default");
  vocabulary.bos = static_cast<int32_t>(integer(kBosKey, -1, last_id, -1));
  vocabulary.eos = end_tokens();
  check_ends(vocabulary.eos, last_id);
  vocabulary.add_bos = file_.boolean("tokenizer.ggml.add_bos_token");
  return vocabulary;
}

std::vector<int> GgufLlama::token_types() const {
  std::vector<int> types;
  for (const int64_t type : file_.integers("tokenizer.ggml.token_type").value_or(std::vector<int64_t>{})) {
    FUT_CHECK(type >= 1 && type <= 6, path_, ": tokenizer.ggml.token_type holds ", type, ", expected 1 to 6");
    types.push_back(static_cast<int>(type));
  }
  return types;
}

void GgufLlama::check_ends(const std::vector<int32_t>& ends, int64_t last_id) const {
  for (const int32_t id : ends) {
    FUT_CHECK(id <= last_id, path_, ": end token ", id, ", the vocabulary ends at ", last_id);
  }
}

SpmParts GgufLlama::spm_parts() const {
  using Kind = SpmPiece::Kind;
  const auto tokens = file_.texts("tokenizer.ggml.tokens");
  const auto scores = file_.floats("tokenizer.ggml.scores");
  const auto types = token_types();
  FUT_CHECK(tokens && scores && !tokens->empty(), path_, ": no tokenizer.ggml.tokens or no tokenizer.ggml.scores");
  FUT_CHECK(scores->size() == tokens->size() && (types.empty() || types.size() == tokens->size()), path_, ": ",
            tokens->size(), " tokens but ", scores->size(), " scores and ", types.size(), " token types");
  FUT_CHECK(!file_.boolean("tokenizer.ggml.remove_extra_whitespaces").value_or(false), path_,
            ": tokenizer.ggml.remove_extra_whitespaces is not supported");
  SpmParts parts;
  parts.source = path_;
  for (size_t id = 0; id < tokens->size(); ++id) {
    constexpr Kind kKinds[] = {Kind::normal,       Kind::unknown, Kind::control,
                               Kind::user_defined, Kind::absent,  Kind::byte};
    const Kind kind = kKinds[types.empty() ? 0 : types[id] - 1];
    FUT_CHECK(kind != Kind::byte || byte_of_piece((*tokens)[id]) >= 0, path_, ": token ", id, " is the byte \"",
              printable((*tokens)[id]), "\", expected <0x00> to <0xFF>");
    parts.pieces.push_back({(*tokens)[id], kind, (*scores)[id]});
  }
  const auto last_id = static_cast<int64_t>(tokens->size()) - 1;
  parts.bos = static_cast<int32_t>(integer(kBosKey, -1, last_id, -1));
  parts.unknown = static_cast<int32_t>(integer("tokenizer.ggml.unknown_token_id", -1, last_id, -1));
  parts.eos = end_tokens();
  check_ends(parts.eos, last_id);
  parts.add_bos = file_.boolean("tokenizer.ggml.add_bos_token").value_or(parts.bos >= 0);
  const bool prefix = file_.boolean("tokenizer.ggml.add_space_prefix").value_or(true);
  parts.prefix = prefix ? PrefixSpace::each : PrefixSpace::never;
  add_special_pieces(parts);
  return parts;
}

std::map<std::string, std::string> GgufLlama::tokenizer_files() const {
  const auto tokens = file_.texts("tokenizer.ggml.tokens").value_or(std::vector<std::string>{});
  const SpmParts spm = is_spm() ? spm_parts() : SpmParts();
  const BpeVocabulary bpe = is_spm() ? BpeVocabulary() : vocabulary();
  const std::vector<int32_t>& ends = is_spm() ? spm.eos : bpe.eos;
  const auto spelling = [&](int32_t id) { return id < 0 ? nlohmann::json() : nlohmann::json(tokens[id]); };
  nlohmann::json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  config["bos_token"] = spelling(is_spm() ? spm.bos : bpe.bos);
  config["eos_token"] = spelling(ends.empty() ? -1 : ends.front());
  if (!chat_template().empty()) config["chat_template"] = chat_template();
  return {{"tokenizer.json", is_spm() ? tokenizer_json(spm) : tokenizer_json(bpe, path_)},
          {"tokenizer_config.json", json_text(config, 1, path_ + ": tokenizer_config.json") + "\n"}};
}

}  // namespace

std::unique_ptr<Checkpoint> open_gguf(const std::string& path) { return std::make_unique<GgufLlama>(path); }

}  // namespace fut
