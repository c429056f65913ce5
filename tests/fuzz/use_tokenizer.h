// What every driver does with a tokenizer that its parser accepted.
#pragma once

#include <string>

#include "fuzz.h"
#include "io/tokenizer.h"

namespace fut::fuzz {

inline void use_tokenizer(const Tokenizer& tokenizer, const std::string& text) {
  const auto known = [&](const std::vector<int32_t>& ids) {
    for (const int32_t id : ids) require(id >= 0 && id < tokenizer.size(), "an id outside the vocabulary");
  };
  for (const ControlTokens control : {ControlTokens::as_text, ControlTokens::parsed}) {
    const std::vector<int32_t> ids = tokenizer.encode(text, true, control);
    known(ids);
    StreamDecoder decoder(tokenizer, true);
    for (const int32_t id : ids) decoder.add(id);
    decoder.finish();
    tokenizer.decode(ids);
  }
  // A word longer than those that are merged by searching: the text without its spaces, again and again.
  std::string word;
  for (size_t i = 0; i < 20 * text.size() && word.size() < 300; ++i) {
    const char c = text[i % text.size()];
    if (c != ' ' && c != '\n') word += c;
  }
  known(tokenizer.encode(word, false, ControlTokens::as_text));
  std::string marks(text.size(), '\0');
  for (size_t i = 0; i < marks.size(); ++i) marks[i] = i % 7 < 3 ? '\1' : '\0';
  known(tokenizer.encode_marked(text, marks));
  known(tokenizer.eos());
  require(tokenizer.bos() >= -1 && tokenizer.bos() < tokenizer.size(), "a BOS outside the vocabulary");
  require(!tokenizer.adds_bos() || tokenizer.bos() >= 0, "adds a BOS that it does not have");
  for (int32_t id = -1; id <= std::min<int64_t>(tokenizer.size(), 1000); ++id) tokenizer.bytes(id);
}

}  // namespace fut::fuzz
