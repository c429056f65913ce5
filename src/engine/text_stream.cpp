#include "engine/text_stream.h"

#include <algorithm>

namespace fut {
namespace {

bool inside_character(const std::string& text, size_t at) { return at < text.size() && (text[at] & 0xc0) == 0x80; }

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, const std::vector<std::string>& stop) : decoder_(tokenizer) {
  for (const std::string& s : stop) {
    if (!s.empty()) stop_.push_back(s);
  }
}

std::string TextStream::take(const std::string& piece, bool last) {
  if (stopped_) return "";
  pending_ += piece;
  size_t end = std::string::npos;
  for (const std::string& s : stop_) end = std::min(end, pending_.find(s));
  if (end != std::string::npos) {
    stopped_ = true;
    while (end > 0 && inside_character(pending_, end)) --end;  // a stop string that is no text of whole characters
    return pending_.substr(0, end);
  }
  const size_t ready = pending_.size() - (last ? 0 : held_back());
  const std::string text = pending_.substr(0, ready);
  pending_.erase(0, ready);
  return text;
}

/// Length of the longest end of the pending text that begins a stop string, grown to a whole character.
size_t TextStream::held_back() const {
  size_t longest = 0;
  for (const std::string& s : stop_) {
    for (size_t length = std::min(s.size() - 1, pending_.size()); length > longest; --length) {
      if (pending_.compare(pending_.size() - length, length, s, 0, length) == 0) longest = length;
    }
  }
  while (longest < pending_.size() && inside_character(pending_, pending_.size() - longest)) ++longest;
  return longest;
}

}  // namespace fut
