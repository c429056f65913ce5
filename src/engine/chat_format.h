// From a conversation to the ids that a model was trained to answer.
#pragma once

#include <string>
#include <vector>

#include "futransformer/engine.h"
#include "io/chat_template.h"
#include "io/tokenizer.h"

namespace fut {

class ChatFormat {
 public:
  /// `what` names the template in messages. The tokenizer must outlive this.
  ChatFormat(const std::string& source, const std::string& what, const Tokenizer& tokenizer)
      : template_(source, what), tokenizer_(tokenizer) {}

  /// See Engine::chat_prompt().
  std::vector<int32_t> prompt(const std::vector<ChatMessage>& messages, bool for_answer) const;

 private:
  ChatTemplate template_;
  const Tokenizer& tokenizer_;
};

}  // namespace fut
