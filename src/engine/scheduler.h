// Many requests through one model: admitted in order as slots and pages allow, prompts packed into prefill passes, then
// all answers decoded together. Operations treat rows independently, so that no answer depends on its company.
#pragma once

#include <deque>
#include <memory>

#include "engine/engine_impl.h"
#include "engine/text_stream.h"

namespace fut {

class Scheduler {
 public:
  Scheduler(EngineImpl& engine, const std::vector<Request>& requests, const TextCallback& on_text);

  std::vector<Completion> run();

 private:
  /// One request on its way.
  struct Active {
    size_t index;
    std::vector<int32_t> prompt;
    int64_t fed = 0;     // prompt tokens already in the cache
    int64_t budget = 0;  // tokens still to generate
    int64_t step = 0;    // tokens generated
    int32_t last = -1;   // the token that the next decode step feeds
    bool done = false;
    CachedSequence sequence;
    std::unique_ptr<TextStream> text;  // null where the model has no tokenizer
  };

  void prepare(size_t index);
  void admit();
  void prefill_all();
  void decode_once();
  void take_token(Active& active, const float* logits);
  void end(Active& active, const std::string& reason);
  void emit(Active& active, const std::string& piece);
  void refuse(size_t index, const std::string& why);
  void retire();

  EngineImpl& engine_;
  const std::vector<Request>& requests_;
  const TextCallback& on_text_;
  std::vector<Completion> answers_;
  std::deque<std::unique_ptr<Active>> waiting_;
  std::vector<std::unique_ptr<Active>> running_;
  std::vector<float> logits_;
  bool cancelled_ = false;
};

}  // namespace fut
