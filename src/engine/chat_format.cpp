#include "engine/chat_format.h"

#include <algorithm>

namespace fut {
namespace {

using jinja::Text;
using jinja::Value;

/// Templates build control tokens from roles ('<|' + role + '|>'), so that a role is only data if it is no plain word.
bool is_plain_word(const std::string& role) {
  return std::all_of(role.begin(), role.end(), [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
}

}  // namespace

std::vector<int32_t> ChatFormat::prompt(const std::vector<ChatMessage>& messages, bool for_answer) const {
  jinja::Items turns;
  for (const ChatMessage& message : messages) {
    turns.push_back(Value::dict({{Text("role"), Value::text(Text(message.role, !is_plain_word(message.role)))},
                                 {Text("content"), Value::text(Text(message.content, true))}}));
  }
  // What transformers defines for every template; tools and documents are absent, but defined.
  std::vector<std::pair<Text, Value>> variables = {{Text("messages"), Value::list(std::move(turns))},
                                                   {Text("tools"), Value::none()},
                                                   {Text("documents"), Value::none()},
                                                   {Text("add_generation_prompt"), Value::boolean(for_answer)}};
  for (const auto& [role, text] : tokenizer_.special_tokens()) variables.emplace_back(Text(role), Value::text(text));
  const Text text = template_.render(Value::dict(std::move(variables)));
  std::vector<int32_t> ids = tokenizer_.encode_marked(text.bytes(), text.marks());
  const bool has_bos = !ids.empty() && ids.front() == tokenizer_.bos();
  if (tokenizer_.adds_bos() && !has_bos) ids.insert(ids.begin(), tokenizer_.bos());
  return ids;
}

}  // namespace fut
