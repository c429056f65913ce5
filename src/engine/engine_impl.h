// A loaded model behind the public API: backend, model, tokenizer and cache pool.
#pragma once

#include <memory>
#include <vector>

#include "engine/chat_format.h"
#include "engine/kv_cache.h"
#include "futransformer/engine.h"
#include "io/tokenizer.h"
#include "model/llama.h"

namespace fut {

class EngineImpl final : public Engine {
 public:
  EngineImpl(const std::string& model, const EngineOptions& options);

  const ModelInfo& info() const override { return info_; }
  void check(const Request& request) const override;
  std::vector<Completion> generate(const std::vector<Request>& requests, const TextCallback& on_text) override;
  Score score(const std::vector<int32_t>& tokens, const ScoreOptions& options, const ScoreCallback& on_token) override;
  Timing last_timing() const override;
  std::vector<int32_t> tokenize(std::string_view text, bool add_bos, bool parse_control_tokens) const override;
  std::vector<int32_t> chat_prompt(const std::vector<ChatMessage>& messages, bool for_answer) const override;
  std::string detokenize(const std::vector<int32_t>& ids) const override;

  LlamaModel& model() { return *model_; }
  KvPool& pool() { return *pool_; }
  const Tokenizer& tokenizer() const;
  const EngineOptions& options() const { return options_; }
  int64_t context() const { return info_.context; }
  bool is_end(int32_t id) const;
  Timing& timing() { return timing_; }
  void start_timing();
  const std::string& path() const { return path_; }
  /// The ids of a request's prompt, and whether it can be answered: how many tokens its answer may have.
  std::vector<int32_t> prompt_of(const Request& request) const;
  int64_t budget_of(const Request& request, const std::vector<int32_t>& prompt) const;

 private:
  void open_chat(const ModelSource& source);
  void take_end_tokens(const LlamaConfig& c);
  void describe_sizes(const LlamaConfig& c);
  void describe_weights(const ModelSource& source);
  int64_t pool_tokens(const LlamaConfig& c) const;

  std::string path_;
  EngineOptions options_;
  Dtype kv_dtype_ = Dtype::int4;
  std::unique_ptr<Backend> backend_;      // first: everything below lives in its memory
  std::unique_ptr<Tokenizer> tokenizer_;  // null where the model has none: scoring ids still works
  std::string tokenizer_error_;
  std::unique_ptr<ChatFormat> chat_;  // null where the model has no template, or none that is understood
  std::string chat_error_;
  std::unique_ptr<LlamaModel> model_;
  std::unique_ptr<KvPool> pool_;
  std::vector<int32_t> end_tokens_;
  ModelInfo info_;
  Timing timing_;
  Saturation saturation_before_;
};

/// The three precisions of EngineOptions as types; throws on an unknown word.
Dtype parse_weight_type(const std::string& option, const std::string& flag, bool int4_allowed);

}  // namespace fut
