// What all tokenizers here share: tokens with a text each, added tokens that are found before anything is split, and a
// memory of pieces already encoded.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer.h"

namespace fut {

/// A token that is looked for in the text before it is split.
struct AddedToken {
  std::string text;
  int32_t id = -1;
  bool control = false;
  bool takes_space_before = false, takes_space_after = false;
  bool second_pass = false;  ///< looked for only in what the other added tokens leave (Hugging Face: "normalized")
};

/// Finds added tokens in text.
class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);  ///< none of them empty

  struct Match {
    const AddedToken* token = nullptr;
    size_t at = 0;
  };

  /// The first place from `at` on where a token begins, and the longest token there. A control token must lie within
  /// the first own(place) bytes.
  template <class Own>
  Match next(std::string_view text, size_t at, Own own) const {
    if (tokens_.empty()) return {};
    for (; at < text.size(); ++at) {
      if (!starts_[static_cast<unsigned char>(text[at])]) continue;
      if (const AddedToken* token = longest(text.substr(at), own(at))) return {token, at};
    }
    return {};
  }

 private:
  const AddedToken* longest(std::string_view text, size_t own_bytes) const;

  std::vector<AddedToken> tokens_;
  std::array<bool, 256> starts_{};
};

/// The parts that do not depend on how text becomes tokens.
struct VocabularyParts {
  std::string source;              ///< the file, for messages
  std::vector<std::string> texts;  ///< by id: what a token adds to the text; empty for control tokens
  std::vector<AddedToken> added;
  bool add_bos = false;
  int32_t bos = -1;
  std::vector<int32_t> eos;
  std::map<std::string, std::string> special_tokens;
};

class VocabularyTokenizer : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text, bool add_bos, ControlTokens control) const final;
  std::vector<int32_t> encode_marked(std::string_view text, std::string_view marks) const final;
  std::string bytes(int32_t id) const final {
    return id < 0 || id >= size() ? std::string() : std::string(text_of(static_cast<size_t>(id)));
  }
  bool adds_bos() const final { return add_bos_; }
  int32_t bos() const final { return bos_; }
  std::vector<int32_t> eos() const final { return eos_; }
  int64_t size() const final { return static_cast<int64_t>(ends_.size()); }
  const std::map<std::string, std::string>& special_tokens() const final { return special_tokens_; }

 protected:
  explicit VocabularyTokenizer(VocabularyParts parts);

  /// Where a stretch without added tokens begins.
  enum class Place {
    text_start,
    after_token,
    inside  ///< after a token of the second pass
  };

  /// One call of encode(). Pieces repeat a lot, so the ids of one already seen are copied from where they were put
  /// first; a slot of the memory belongs to the latest piece, which bounds its size and the harm that chosen collisions
  /// can do.
  class Encoding {
   public:
    /// Control tokens are found outside the marked bytes of `text`, or nowhere.
    Encoding(const VocabularyTokenizer& tokenizer, std::string_view text, std::string_view marks,
             ControlTokens control);

    void run() { cut_added(text_, 0, Place::text_start); }
    void take(std::string_view piece);
    /// A copy that lives as long as this does, for pieces that are no part of the text itself.
    std::string_view keep(std::string text) { return kept_.emplace_back(std::move(text)); }

    std::vector<int32_t> ids;

   private:
    struct Seen {
      std::string_view piece;
      size_t begin, count;  // in ids
    };

    void cut_added(std::string_view text, size_t pass, Place place);
    size_t own_bytes(size_t at) const;

    const VocabularyTokenizer& tokenizer_;
    std::string_view text_, marks_;
    ControlTokens control_;
    std::vector<Seen> seen_;
    std::deque<std::string> kept_;
  };

  /// A stretch as it is to be tokenised, where that is not as it stands. Tokens of the second pass are looked for in
  /// it.
  virtual std::optional<std::string> normalised(std::string_view) const { return std::nullopt; }
  /// Cuts a stretch (not empty) into pieces, each of which encoding.take() gets.
  virtual void cut(std::string_view text, Place place, Encoding& encoding) const = 0;
  /// The tokens of a piece, which depend on nothing else.
  virtual void append_piece(std::string_view piece, std::vector<int32_t>& ids) const = 0;

  std::string_view text_of(size_t id) const {
    const size_t begin = id == 0 ? 0 : ends_[id - 1];
    return std::string_view(texts_).substr(begin, ends_[id] - begin);
  }

 private:
  size_t longest_added_ = 0;
  std::array<AddedTokens, 2> added_;
  bool add_bos_;
  int32_t bos_;
  std::vector<int32_t> eos_;
  std::map<std::string, std::string> special_tokens_;
  std::string texts_;         // of all tokens, one after the other
  std::vector<size_t> ends_;  // where each ends
};

}  // namespace fut
