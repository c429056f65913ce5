// From tokens to the text that a user may see: whole characters, and never a part of a stop string.
#pragma once

#include <string>
#include <vector>

#include "io/tokenizer.h"

namespace fut {

/// Text of one answer. A stop string may begin in one token and end in another, so that text which could still become
/// one is held back.
class TextStream {
 public:
  /// Empty stop strings are ignored.
  TextStream(const Tokenizer& tokenizer, const std::vector<std::string>& stop);

  /// Text that became final with this token.
  std::string add(int32_t id) { return take(decoder_.add(id), false); }

  /// The rest, once no token follows.
  std::string finish() { return take(decoder_.finish(), true); }

  /// A stop string was met: the text ended right before it, nothing follows.
  bool stopped() const { return stopped_; }

 private:
  std::string take(const std::string& piece, bool last);
  size_t held_back() const;

  StreamDecoder decoder_;
  std::vector<std::string> stop_;
  std::string pending_;  // decoded, not given out
  bool stopped_ = false;
};

}  // namespace fut
