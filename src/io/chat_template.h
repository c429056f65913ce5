// Chat templates: the small program that comes with a model and writes a conversation the way the model was trained on.
//
// The language is the part of Jinja that published templates of Llama, SmolLM, Mistral and Qwen models use, rendered as
// Hugging Face's transformers sets Jinja up (trim_blocks, lstrip_blocks, its own tojson, raise_exception,
// strftime_now). What of Jinja is missing is refused by its name and line. Work, output and recursion are bounded.
#pragma once

#include <ctime>
#include <optional>
#include <string>

#include "io/jinja_value.h"

namespace fut {

namespace jinja {
struct Statement;
}

class ChatTemplate {
 public:
  /// `what` names the template in messages: "model/tokenizer_config.json: chat_template".
  ChatTemplate(const std::string& source, const std::string& what);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  /// `variables` is a dictionary: messages, add_generation_prompt, bos_token and so on. In the result the marks tell
  /// what came from values that are data. strftime_now() gives `now`, or the local time.
  jinja::Text render(const jinja::Value& variables, const std::optional<std::tm>& now = {}) const;

 private:
  std::string what_;
  std::vector<jinja::Statement> block_;
};

}  // namespace fut
