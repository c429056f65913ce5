// The public C++ API of FuTransformer: load a model, write text, score text. Needs nothing but the standard library.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fut {

class Engine;

/// How a model is run. Defaults are the two-precision path: FP8 prefill, INT4 weights and INT4 KV cache in decode.
struct EngineOptions {
  std::string prefill = "fp8";           ///< fp8 | bf16 | f32: weights of whole-prompt passes
  std::string decode = "int4";           ///< int4 | fp8 | bf16 | f32: weights of one-token steps
  std::string kv = "int4";               ///< int4 | fp8 | bf16 | f32: the KV cache
  std::string backend = "auto";          ///< auto | cpu | cuda
  std::string prefill_scaling = "auto";  ///< auto | exact | frozen | delayed: FP8 activation scales. auto: frozen if
                                         ///< the checkpoint brings calibrated scales, otherwise exact
  int threads = 0;                       ///< CPU threads; 0: one a core
  int group_size = 0;                    ///< of INT4 weights quantised at load: 32, 64 or 128; 0: 64
  int64_t max_context = 0;               ///< tokens a sequence may reach; 0: the model's own limit
  int64_t kv_tokens = 0;                 ///< tokens the cache pool holds over all sequences; 0: chosen from free memory
  int max_batch = 16;                    ///< sequences that decode together
  int64_t prefill_chunk = 512;           ///< rows of one prefill pass; never changes a result
  std::string chat_template;             ///< takes the place of the model's own, if not empty
  std::string chat_template_name;        ///< what messages call it; empty: "the given chat template"
  bool chat = false;  ///< refuse, before any long work, a model that chat_prompt() would not work with
  std::function<void(const std::string& stage, int64_t done, int64_t total)> on_load;  ///< progress, may be empty
  /// Called before the weights are read, when the tokenizer and the limits are known: tokenize(), chat_prompt(),
  /// check() and the sizes in info() work, nothing else does. What it throws ends the loading. May be empty.
  std::function<void(const Engine& engine)> on_open;
};

/// Which token comes next. Filters apply in this order: temperature, top-k, top-p, min-p.
struct Sampling {
  float temperature = 0.8f;  ///< 0 (or below 1e-3): greedy, the lowest id wins ties
  int64_t top_k = 40;        ///< 0 or -1: off
  float top_p = 0.95f;       ///< 1: off; 0: only the best token
  float min_p = 0.05f;       ///< 0: off; relative to the best token's probability
  uint64_t seed = 0;
};

struct Request {
  std::string prompt;
  std::vector<int32_t> ids;  ///< used as given, instead of `prompt`, if not empty
  int64_t max_tokens = 128;  ///< -1: up to the context limit
  Sampling sampling;
  std::vector<std::string> stop;      ///< the text ends before the first of these
  bool parse_control_tokens = false;  ///< <|eot_id|> and the like in `prompt` become control tokens
  bool ignore_end_tokens = false;     ///< go on after an end token: for benchmarks
  bool prefill_only = false;          ///< no answer, so that the prompt may fill the context: for benchmarks
};

/// One turn of a conversation.
struct ChatMessage {
  std::string role;  ///< "system", "user", "assistant", or what else the model's template knows
  std::string content;
};

struct Completion {
  std::string text;          ///< valid UTF-8
  std::vector<int32_t> ids;  ///< generated tokens, without the end token
  int64_t prompt_tokens = 0;
  std::string finish_reason;  ///< "stop" (end token or stop string), "length", "cancelled" or "error"
  std::string error;          ///< why, if finish_reason is "error"
};

/// Times of one generate() or score() call.
struct Timing {
  int64_t prefill_tokens = 0, decode_tokens = 0;  ///< decode: tokens produced by decode steps, over all sequences
  double prefill_seconds = 0, decode_seconds = 0;
  int64_t saturated = 0;  ///< activations that a format had to clamp: 0 in a healthy run
  int64_t outgrown = 0;   ///< residual rows that outgrew their previous norm and got an exact FP8 scale instead
};

/// Sizes that a user asks about first.
struct ModelInfo {
  std::string architecture, backend, prefill, decode, kv, prefill_scaling;
  int64_t parameters = 0, layers = 0, width = 0, feed_forward = 0, heads = 0, kv_heads = 0, head_dim = 0,
          vocabulary = 0;
  int64_t context = 0;  ///< limit in force
  int64_t prefill_weight_bytes = 0, decode_weight_bytes = 0, embedding_bytes = 0, head_bytes = 0;
  int64_t kv_bytes_per_token = 0;  ///< over all layers
  int64_t kv_pool_tokens = 0;
  int group_size = 0;                       ///< of the INT4 weights in use; 0: none are
  std::vector<std::string> unused_tensors;  ///< of the model's files: read by nothing
  std::vector<std::string> warnings;        ///< one line each: what of the files or options is passed over
};

/// How a text is scored: every token once, windows of `context` tokens.
struct ScoreOptions {
  int64_t context = 512;
  int64_t stride = 0;   ///< new tokens a window scores; 0: as many as fit
  bool decode = false;  ///< through decode steps, one token each, instead of prefill
  bool add_bos = true;  ///< if the tokenizer does: at the start of every window, never scored
};

/// Called with every new piece of a request's text; `index` is its place in the list. An empty piece only asks whether
/// to go on (between the passes of a long prompt). Return false to cancel all.
using TextCallback = std::function<bool(size_t index, std::string_view piece)>;

/// Called once for each scored token: its index in the text's tokens, its negative log-likelihood (nats) and all logits
/// (vocabulary) before the softmax. In order in prefill mode; decode mode runs several windows side by side.
using ScoreCallback = std::function<void(int64_t index, double nll, const float* logits)>;

struct Score {
  double nll = 0;      ///< sum over the scored tokens
  int64_t tokens = 0;  ///< how many were scored
  int64_t windows = 0;
  bool bos = false;  ///< whether windows began with a beginning-of-sequence token
};

/// A loaded model. One call at a time; throws fut::Error (derived from std::runtime_error) on bad input.
class Engine {
 public:
  /// `model`: a Hugging Face folder, a .gguf file, or a folder that `fut quantize` wrote.
  static std::unique_ptr<Engine> load(const std::string& model, const EngineOptions& options = {});
  virtual ~Engine() = default;

  virtual const ModelInfo& info() const = 0;

  /// Throws what generate() would say to this request instead of answering it.
  virtual void check(const Request& request) const = 0;

  /// Answers in the order of the requests, each as if it had been asked alone.
  virtual std::vector<Completion> generate(const std::vector<Request>& requests, const TextCallback& on_text = {}) = 0;

  virtual Score score(const std::vector<int32_t>& tokens, const ScoreOptions& options,
                      const ScoreCallback& on_token = {}) = 0;

  virtual Timing last_timing() const = 0;

  virtual std::vector<int32_t> tokenize(std::string_view text, bool add_bos = true,
                                        bool parse_control_tokens = false) const = 0;
  /// A conversation as the model's chat template writes it, for Request::ids. What looks like a control token in a
  /// content stays text. Begins with exactly one beginning-of-sequence token if the tokenizer adds one, whether or not
  /// the template writes it. `for_answer`: ends where the answer begins. Error if there is no template, or it refuses.
  virtual std::vector<int32_t> chat_prompt(const std::vector<ChatMessage>& messages, bool for_answer = true) const = 0;

  virtual std::string detokenize(const std::vector<int32_t>& ids) const = 0;
};

}  // namespace fut
