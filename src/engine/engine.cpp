#include <algorithm>

#include "base/error.h"
#include "base/parallel.h"
#include "engine/backends.h"
#include "engine/engine_impl.h"
#include "engine/sampler.h"

namespace fut {

Dtype parse_weight_type(const std::string& option, const std::string& flag, bool int4_allowed) {
  if (option == "f32") return Dtype::f32;
  if (option == "bf16") return Dtype::bf16;
  if (option == "fp8") return Dtype::e4m3;
  if (option == "int4" && int4_allowed) return Dtype::int4;
  fail(flag, " ", option, " is unknown (", int4_allowed ? "int4, " : "", "fp8, bf16 and f32 are known)");
}

namespace {

Fp8Scaling parse_scaling(const std::string& option, bool calibrated) {
  if (option == "auto") return calibrated ? Fp8Scaling::frozen : Fp8Scaling::exact;
  if (option == "exact") return Fp8Scaling::exact;
  if (option == "frozen") return Fp8Scaling::frozen;
  if (option == "delayed") return Fp8Scaling::delayed;
  fail("prefill scaling ", option, " is unknown (auto, exact, frozen and delayed are known)");
}

const char* name_of_scaling(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::exact ? "exact" : scaling == Fp8Scaling::frozen ? "frozen" : "delayed";
}

}  // namespace

EngineImpl::EngineImpl(const std::string& path, const EngineOptions& options) : path_(path), options_(options) {
  LlamaOptions llama;
  llama.weights.prefill = parse_weight_type(options.prefill, "prefill", false);
  llama.weights.decode = parse_weight_type(options.decode, "decode", true);
  kv_dtype_ = parse_weight_type(options.kv, "kv", true);
  llama.weights.rotate_values = kv_dtype_ == Dtype::int4;
  llama.weights.group = options.group_size ? options.group_size : kInt4Group;
  llama.weights.on_progress = options.on_load;
  require_option(int4_group_size_ok(llama.weights.group), "group size ", options.group_size, " is not 32, 64 or 128");
  require_option(options.max_batch >= 1 && options.max_batch <= 4096, "max batch ", options.max_batch,
                 " is not in 1..4096");
  require_option(options.prefill_chunk >= 1, "prefill chunk ", options.prefill_chunk, " is below 1");
  require_option(options.max_context >= 0 && options.kv_tokens >= 0, "max context and KV tokens must not be negative");
  require_option(options.kv_tokens == 0 || options.kv_tokens >= kKvPageTokens,
                 "the KV cache holds whole pages: --kv-tokens ", options.kv_tokens, " is less than one of ",
                 kKvPageTokens);
  set_thread_count(options.threads);
  const ModelSource source = ModelSource::open(path);
  const LlamaConfig& c = source.config;
  info_.warnings = c.warnings;
  backend_ =
      make_backend(options.backend, c, {llama.weights.prefill, llama.weights.decode, kv_dtype_}, &info_.warnings);
  const bool dynamic = c.rope_scaling.kind == RopeScaling::Kind::dynamic;
  require_option(options.max_context <= c.positions, "max context ", options.max_context,
                 " is beyond the model's own limit of ", c.positions,
                 dynamic ? "; beyond it the rope type \"dynamic\" would turn keys that are already cached" : "");
  info_.context = options.max_context ? options.max_context : c.positions;
  llama.max_positions = info_.context;
  llama.scaling = parse_scaling(options.prefill_scaling, !source.calibration.swiglu_amax.empty());
  try {
    tokenizer_ = source.tokenizer();
  } catch (const Error& error) {
    tokenizer_error_ = error.what();
  }
  open_chat(source);
  take_end_tokens(c);
  info_.prefill_scaling = llama.weights.prefill == Dtype::e4m3 ? name_of_scaling(llama.scaling) : "none";
  describe_sizes(c);
  if (options.on_open) options.on_open(*this);
  pool_tokens(c);  // what can never fit is refused before the weights are read
  model_ = std::make_unique<LlamaModel>(*backend_, source, llama);
  pool_ = std::make_unique<KvPool>(*backend_, c, kv_dtype_, pool_tokens(c), options_.max_batch);
  describe_weights(source);
}

/// Those of the configuration and those of the tokenizer. What is beyond the vocabulary can never be drawn.
void EngineImpl::take_end_tokens(const LlamaConfig& c) {
  end_tokens_ = c.eos;
  for (int32_t id : tokenizer_ ? tokenizer_->eos() : std::vector<int32_t>{}) {
    if (id >= c.vocabulary) {
      info_.warnings.push_back(cat(path_, ": the tokenizer's end token ", id, " is beyond the model's vocabulary of ",
                                   c.vocabulary, " and is passed over"));
    } else if (!is_end(id)) {
      end_tokens_.push_back(id);
    }
  }
}

void EngineImpl::open_chat(const ModelSource& source) {
  try {
    const bool given = !options_.chat_template.empty();
    const std::string text = given ? options_.chat_template : source.chat_template();
    FUT_CHECK(!text.empty(), source.path, ": the model has no chat template (--template FILE gives it one)");
    const std::string name =
        options_.chat_template_name.empty() ? "the given chat template" : options_.chat_template_name;
    chat_ = std::make_unique<ChatFormat>(text, given ? name : source.path + ": chat template", tokenizer());
  } catch (const Error& error) {
    if (options_.chat) throw;
    chat_error_ = error.what();
  }
}

/// As many tokens as a full batch can need, but no more than half of what is free.
int64_t EngineImpl::pool_tokens(const LlamaConfig& c) const {
  const int64_t free = static_cast<int64_t>(backend_->free_bytes());
  const int64_t per_token = KvPool::bytes_per_token(c, kv_dtype_);
  const int64_t slots_bytes = KvPool::bytes_per_slot(c, kv_dtype_) * options_.max_batch;
  int64_t tokens = options_.kv_tokens;
  if (tokens == 0)
    tokens = std::min(options_.max_batch * (info_.context + kKvPageTokens), (free / 2 - slots_bytes) / per_token);
  const int64_t least = std::max<int64_t>(tokens, kKvPageTokens);
  const double needed = static_cast<double>(least) * static_cast<double>(per_token) + static_cast<double>(slots_bytes);
  FUT_CHECK(tokens >= kKvPageTokens && needed <= static_cast<double>(free), "the KV cache needs ",
            static_cast<int64_t>(needed / 1048576), " MiB for ", least, " tokens and ", options_.max_batch,
            " sequences, ", free >> 20, " MiB are free on ", backend_->name(),
            options_.kv_tokens == 0 ? " and half of them are the cache's at most" : "",
            ": lower --kv-tokens, --max-batch or --max-context, or choose a smaller --kv format");
  return tokens;
}

void EngineImpl::describe_sizes(const LlamaConfig& c) {
  ModelInfo& i = info_;
  i.architecture = c.architecture;
  i.backend = backend_->name();
  i.prefill = options_.prefill;
  i.decode = options_.decode;
  i.kv = options_.kv;
  i.layers = c.layers;
  i.width = c.width;
  i.feed_forward = c.feed_forward;
  i.heads = c.heads;
  i.kv_heads = c.kv_heads;
  i.head_dim = c.head_dim;
  i.vocabulary = c.vocabulary;
  i.kv_bytes_per_token = KvPool::bytes_per_token(c, kv_dtype_);
}

void EngineImpl::describe_weights(const ModelSource& source) {
  const LlamaConfig& c = source.config;
  const ModelWeights& w = model_->weights();
  ModelInfo& i = info_;
  i.parameters = c.vocabulary * c.width * (c.tied ? 1 : 2) + c.width;
  for (int64_t l = 0; l < c.layers; ++l) {
    const LayerWeights& d = w.for_decode(l);
    for (const Weight* m : {&d.qkv.weight, &d.o.weight, &d.gate_up.weight, &d.down.weight})
      i.parameters += m->rows * m->cols;
    i.parameters += 2 * c.width;
    i.prefill_weight_bytes += w.prefill[l].bytes();
    i.decode_weight_bytes += d.bytes();
  }
  i.embedding_bytes = w.embedding.weight.bytes;
  i.head_bytes = w.head.weight.bytes;
  i.kv_pool_tokens = pool_->token_capacity();
  const Weight& first = w.for_decode(0).qkv.weight;
  i.group_size = first.dtype == Dtype::int4 ? first.group : 0;
  if (i.group_size && options_.group_size && i.group_size != options_.group_size) {
    i.warnings.push_back(cat(path_, ": group size ", options_.group_size,
                             " has no effect: the model brings its own INT4 codes, in groups of ", i.group_size));
  }
  if (!w.warning.empty()) i.warnings.push_back(w.warning);
  i.unused_tensors = unused_tensors(*source.decode, c);
  if (source.quantised()) {
    for (std::string& name : unused_tensors(*source.prefill, c)) i.unused_tensors.push_back("prefill/" + name);
  }
}

std::vector<int32_t> EngineImpl::prompt_of(const Request& request) const {
  check_sampling(request.sampling);
  FUT_CHECK(request.max_tokens >= -1, "max tokens ", request.max_tokens, " is below -1 (-1: up to the context limit)");
  return request.ids.empty() ? tokenize(request.prompt, true, request.parse_control_tokens) : request.ids;
}

int64_t EngineImpl::budget_of(const Request& request, const std::vector<int32_t>& prompt) const {
  const auto length = static_cast<int64_t>(prompt.size());
  FUT_CHECK(length > 0, "the prompt has no tokens and this tokenizer adds none");
  for (int32_t id : prompt) {
    FUT_CHECK(id >= 0 && id < info_.vocabulary, "token id ", id, " is outside the model's vocabulary of ",
              info_.vocabulary);
  }
  FUT_CHECK(length < info_.context + request.prefill_only, "the prompt has ", length,
            " tokens; with a context limit of ", info_.context, " that leaves no room for an answer");
  int64_t budget = info_.context - length;
  if (request.max_tokens >= 0) budget = std::min(budget, request.max_tokens);
  if (request.prefill_only) budget = 0;
  // Before there is a pool, all that is known of it is what was asked for, if it was.
  const int64_t pages = (options_.kv_tokens + kKvPageTokens - 1) / kKvPageTokens;
  const int64_t capacity = pool_ ? pool_->token_capacity() : pages * kKvPageTokens;
  FUT_CHECK(capacity == 0 || length + budget <= capacity, "prompt and answer may reach ", length + budget,
            " tokens, the KV cache holds ", capacity, ": raise --kv-tokens or ask for less");
  if (request.ids.empty() || !request.stop.empty()) tokenizer();  // says why there is none
  return budget;
}

void EngineImpl::check(const Request& request) const { budget_of(request, prompt_of(request)); }

void EngineImpl::start_timing() {
  timing_ = Timing{};
  saturation_before_ = model_->saturation();
}

Timing EngineImpl::last_timing() const {
  Timing timing = timing_;
  timing.saturated = model_->saturation().values - saturation_before_.values;
  timing.outgrown = model_->saturation().rows - saturation_before_.rows;
  return timing;
}

const Tokenizer& EngineImpl::tokenizer() const {
  FUT_CHECK(tokenizer_, tokenizer_error_);
  return *tokenizer_;
}

bool EngineImpl::is_end(int32_t id) const {
  return std::find(end_tokens_.begin(), end_tokens_.end(), id) != end_tokens_.end();
}

std::vector<int32_t> EngineImpl::tokenize(std::string_view text, bool add_bos, bool parse_control_tokens) const {
  return tokenizer().encode(text, add_bos, parse_control_tokens ? ControlTokens::parsed : ControlTokens::as_text);
}

std::vector<int32_t> EngineImpl::chat_prompt(const std::vector<ChatMessage>& messages, bool for_answer) const {
  FUT_CHECK(chat_, chat_error_);
  return chat_->prompt(messages, for_answer);
}

std::string EngineImpl::detokenize(const std::vector<int32_t>& ids) const { return tokenizer().decode(ids); }

std::unique_ptr<Engine> Engine::load(const std::string& model, const EngineOptions& options) {
  return std::make_unique<EngineImpl>(model, options);
}

}  // namespace fut
