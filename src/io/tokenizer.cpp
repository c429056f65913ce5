#include "io/tokenizer.h"

#include "io/utf8.h"

namespace fut {

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
  std::string text;
  for (const int32_t id : ids) text += bytes(id);
  if (leads_with_space() && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::string StreamDecoder::add(int32_t id) {
  pending_ += tokenizer_.bytes(id);
  if (drops_space_ && !pending_.empty()) {
    if (pending_[0] == ' ') pending_.erase(0, 1);
    drops_space_ = false;
  }
  std::string text;
  pending_.erase(0, append_valid_utf8(text, pending_));
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  if (!pending_.empty()) append_utf8(text, kReplacement);  // what is pending is the start of one character
  pending_.clear();
  return text;
}

}  // namespace fut
