#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <limits>
#include <unordered_map>

#include "base/error.h"
#include "io/bpe.h"
#include "io/mapped_file.h"
#include "io/tokenizer.h"
#include "io/utf8.h"

namespace fut {
namespace {

/// Finds added tokens in text.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
    for (const AddedToken& token : tokens_) starts_[static_cast<unsigned char>(token.text[0])] = true;
  }

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
  /// Narrows the sorted list byte by byte; a token that ends at a byte sorts before all that go on.
  const AddedToken* longest(std::string_view text, size_t own_bytes) const {
    const AddedToken* found = nullptr;
    auto first = tokens_.begin(), last = tokens_.end();
    for (size_t i = 0; first != last; ++i) {
      if (first->text.size() == i) {
        if (!first->control || i <= own_bytes) found = &*first;
        ++first;
      }
      if (i == text.size()) break;
      const auto byte_of = [i](const AddedToken& token) { return static_cast<unsigned char>(token.text[i]); };
      const auto byte = static_cast<unsigned char>(text[i]);
      first = std::partition_point(first, last, [&](const AddedToken& token) { return byte_of(token) < byte; });
      last = std::partition_point(first, last, [&](const AddedToken& token) { return byte_of(token) == byte; });
    }
    return found;
  }

  std::vector<AddedToken> tokens_;
  std::array<bool, 256> starts_{};
};

size_t longest_text(const std::vector<AddedToken>& added) {
  size_t longest = 0;
  for (const AddedToken& token : added) longest = std::max(longest, token.text.size());
  return longest;
}

std::array<AddedTokens, 2> by_pass(std::vector<AddedToken> added, const std::string& source) {
  std::vector<AddedToken> passes[2];
  std::unordered_map<std::string, int32_t> seen;
  for (AddedToken& token : added) {
    const auto [other, is_new] = seen.emplace(token.text, token.id);
    FUT_CHECK(is_new, source, ": added token \"", printable(token.text), "\" is listed twice, as ", other->second,
              " and ", token.id);
    if (!token.text.empty()) passes[token.second_pass ? 1 : 0].push_back(std::move(token));
  }
  return {AddedTokens(std::move(passes[0])), AddedTokens(std::move(passes[1]))};
}

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeParts parts)
      : longest_added_(longest_text(parts.added)),
        added_(by_pass(std::move(parts.added), parts.source)),
        pre_(std::move(parts.pre)),
        merges_(parts.merges.size()),
        byte_level_(parts.byte_level),
        space_first_(parts.space_first),
        ignore_merges_(parts.ignore_merges),
        add_bos_(parts.add_bos),
        bos_(parts.bos),
        eos_(std::move(parts.eos)),
        special_tokens_(std::move(parts.special_tokens)) {
    const auto count = static_cast<int32_t>(parts.tokens.size());
    FUT_CHECK(bos_ >= -1 && bos_ < count, parts.source, ": beginning-of-sequence id ", bos_, ", expected one of 0 to ",
              count - 1);
    FUT_CHECK(!add_bos_ || bos_ >= 0, parts.source, ": asks for a beginning-of-sequence token but names none");
    for (const int32_t id : eos_) {
      FUT_CHECK(id >= 0 && id < count, parts.source, ": end-of-sequence id ", id, ", expected one of 0 to ", count - 1);
    }
    take_texts(parts.tokens);
    take_merges(parts);
  }

  std::vector<int32_t> encode(std::string_view text, bool add_bos, ControlTokens control) const override;
  std::vector<int32_t> encode_marked(std::string_view text, std::string_view marks) const override;

  std::string bytes(int32_t id) const override {
    return id < 0 || id >= size() ? std::string() : std::string(text_of(static_cast<size_t>(id)));
  }
  bool adds_bos() const override { return add_bos_; }
  int32_t bos() const override { return bos_; }
  std::vector<int32_t> eos() const override { return eos_; }
  int64_t size() const override { return static_cast<int64_t>(ends_.size()); }
  const std::map<std::string, std::string>& special_tokens() const override { return special_tokens_; }

 private:
  class Encoding;

  std::string_view text_of(size_t id) const {
    const size_t begin = id == 0 ? 0 : ends_[id - 1];
    return std::string_view(texts_).substr(begin, ends_[id] - begin);
  }

  void take_texts(const std::vector<BpeToken>& tokens);
  void take_merges(const BpeParts& parts);
  void append_piece(std::string_view piece, std::vector<int32_t>& ids) const;
  std::vector<int32_t> symbols_of(std::string_view piece) const;

  size_t longest_added_ = 0;
  std::array<AddedTokens, 2> added_;
  PreTokenizer pre_;
  MergeTable merges_;
  bool byte_level_, space_first_, ignore_merges_, add_bos_;
  int32_t bos_;
  std::vector<int32_t> eos_;
  std::map<std::string, std::string> special_tokens_;
  std::string texts_;                                    // of all tokens, one after the other
  std::vector<size_t> ends_;                             // where each ends
  std::array<int32_t, 256> byte_ids_{};                  // the token of each single byte, or -1
  std::unordered_map<std::string_view, int32_t> words_;  // whole tokens, where pieces or characters are looked up
};

void BpeTokenizer::take_texts(const std::vector<BpeToken>& tokens) {
  for (const BpeToken& token : tokens) {
    if (token.kind == TokenKind::normal || token.kind == TokenKind::user_defined) texts_ += token.text;
    ends_.push_back(texts_.size());
  }
  byte_ids_.fill(-1);
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string& spelling = tokens[id].spelling;
    if (spelling.empty() || tokens[id].kind == TokenKind::absent) continue;
    const std::optional<std::string> bytes = byte_level_ ? bytes_of_spelling(spelling) : spelling;
    if (!bytes) continue;  // no text is spelled like this
    if (byte_level_ && bytes->size() == 1)
      byte_ids_[static_cast<unsigned char>(bytes->front())] = static_cast<int32_t>(id);
    if ((ignore_merges_ || !byte_level_) && text_of(id) == *bytes)
      words_.emplace(text_of(id), static_cast<int32_t>(id));
  }
}

void BpeTokenizer::take_merges(const BpeParts& parts) {
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(parts.tokens.size());
  for (size_t id = 0; id < parts.tokens.size(); ++id) {
    const std::string& spelling = parts.tokens[id].spelling;
    if (spelling.empty()) continue;
    const auto [other, is_new] = ids.emplace(spelling, static_cast<int32_t>(id));
    FUT_CHECK(is_new, parts.source, ": tokens ", other->second, " and ", id, " are both \"", printable(spelling), "\"");
  }
  FUT_CHECK(parts.merges.size() < size_t{std::numeric_limits<int32_t>::max()}, parts.source, ": ", parts.merges.size(),
            " merges");
  int32_t rank = 0;
  for (const auto& [left, right] : parts.merges) {
    const auto id_of = [&](const std::string& spelling) {
      const auto found = ids.find(spelling);
      FUT_CHECK(found != ids.end(), parts.source, ": merge ", rank, " (\"", printable(left), "\" with \"",
                printable(right), "\") needs token \"", printable(spelling), "\", which is not in the vocabulary");
      return found->second;
    };
    const int32_t left_id = id_of(left), right_id = id_of(right);
    merges_.set(left_id, right_id, {rank, id_of(left + right)});
    ++rank;
  }
}

/// One call of encode(). Pieces repeat a lot, so the ids of one already seen are copied from where they were put first;
/// a slot of the cache belongs to the latest piece, which bounds its size and the harm that chosen collisions can do.
class BpeTokenizer::Encoding {
 public:
  /// Control tokens are found outside the marked bytes of `text`, or nowhere.
  Encoding(const BpeTokenizer& tokenizer, std::string_view text, std::string_view marks, ControlTokens control)
      : tokenizer_(tokenizer),
        text_(text),
        marks_(marks),
        control_(control),
        seen_(std::bit_ceil(std::clamp<size_t>(text.size() / 8, 16, 1 << 15))) {}

  void run() { cut_added(text_, 0); }

  std::vector<int32_t> ids;

 private:
  struct Seen {
    std::string_view piece;
    size_t begin, count;  // in ids
  };

  void cut_added(std::string_view text, size_t pass) {
    if (pass == tokenizer_.added_.size()) return split(text);
    const AddedTokens& added = tokenizer_.added_[pass];
    const auto own = [&](size_t at) { return own_bytes(static_cast<size_t>(text.data() - text_.data()) + at); };
    size_t done = 0;
    for (auto match = added.next(text, 0, own); match.token; match = added.next(text, done, own)) {
      const AddedToken* token = match.token;
      size_t begin = match.at, end = begin + token->text.size();
      if (token->takes_space_before) begin -= trailing_space(text.substr(done, begin - done));
      if (token->takes_space_after) end += leading_space(text.substr(end));
      cut_added(text.substr(done, begin - done), pass + 1);
      ids.push_back(token->id);
      done = end;
    }
    cut_added(text.substr(done), pass + 1);
  }

  /// How many bytes from `at` on are no data, as far as a token can reach.
  size_t own_bytes(size_t at) const {
    if (control_ == ControlTokens::as_text) return 0;
    const std::string_view reach = marks_.substr(std::min(at, marks_.size()), tokenizer_.longest_added_);
    const size_t data = reach.find_first_not_of('\0');
    return data == std::string_view::npos ? text_.size() - at : data;
  }

  void split(std::string_view text) {
    if (text.empty()) return;
    if (tokenizer_.space_first_ && text[0] != ' ') text = spaced_.emplace_back(" " + std::string(text));
    tokenizer_.pre_.split(text, [this](std::string_view piece) { take(piece); });
  }

  void take(std::string_view piece) {
    Seen& seen = seen_[std::hash<std::string_view>()(piece) & (seen_.size() - 1)];
    if (seen.piece == piece) {
      for (size_t i = 0; i < seen.count; ++i) ids.push_back(ids[seen.begin + i]);
      return;
    }
    const size_t begin = ids.size();
    tokenizer_.append_piece(piece, ids);
    seen = {piece, begin, ids.size() - begin};
  }

  const BpeTokenizer& tokenizer_;
  std::string_view text_, marks_;
  ControlTokens control_;
  std::vector<Seen> seen_;
  std::deque<std::string> spaced_;  // keeps what seen_ points into
};

std::vector<int32_t> BpeTokenizer::encode(std::string_view text, bool add_bos, ControlTokens control) const {
  Encoding encoding(*this, text, {}, control);
  if (add_bos && add_bos_) encoding.ids.push_back(bos_);
  encoding.run();
  return std::move(encoding.ids);
}

std::vector<int32_t> BpeTokenizer::encode_marked(std::string_view text, std::string_view marks) const {
  FUT_CHECK(marks.empty() || marks.size() == text.size(), marks.size(), " marks for ", text.size(), " bytes of text");
  Encoding encoding(*this, text, marks, ControlTokens::parsed);
  encoding.run();
  return std::move(encoding.ids);
}

void BpeTokenizer::append_piece(std::string_view piece, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    if (const auto word = words_.find(piece); word != words_.end()) return ids.push_back(word->second);
  }
  std::vector<int32_t> symbols = symbols_of(piece);
  apply_merges(merges_, symbols);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

/// Bytes or characters as tokens. Those that the vocabulary lacks are left out, as Hugging Face and llama.cpp do:
/// SmolLM2, for one, has no token for 21 of the bytes.
std::vector<int32_t> BpeTokenizer::symbols_of(std::string_view piece) const {
  std::vector<int32_t> symbols;
  symbols.reserve(piece.size());
  for (size_t at = 0; at < piece.size();) {
    const size_t length = byte_level_ ? 1 : utf8_at(piece, at).length;
    if (byte_level_) {
      symbols.push_back(byte_ids_[static_cast<unsigned char>(piece[at])]);
    } else {
      const auto word = words_.find(piece.substr(at, length));
      symbols.push_back(word == words_.end() ? -1 : word->second);
    }
    at += length;
  }
  std::erase(symbols, -1);
  return symbols;
}

BpeToken token_of_type(const std::string& spelling, int type, size_t id, const std::string& source) {
  switch (type) {
    case 1: return {spelling, bytes_of_spelling(spelling).value_or(spelling), TokenKind::normal};
    case 2:  // the unknown token
    case 3: return {spelling, spelling, TokenKind::control};
    case 4: return {spelling, spelling, TokenKind::user_defined};
    case 5: return {spelling, "", TokenKind::absent};
    case 6: return {spelling, bytes_of_spelling(spelling).value_or(spelling), TokenKind::normal};
    default: fail(source, ": token ", id, " is of type ", type, ", expected 1 to 6");
  }
}

}  // namespace

const TokenizerFamily& tokenizer_family(const std::string& name, const std::string& source) {
  static const std::vector<TokenizerFamily> families = {
      {"gpt-2", {Split::gpt2}, false, false},   {"gpt2", {Split::gpt2}, false, false},
      {"default", {Split::gpt2}, false, false}, {"llama-bpe", {Split::llama3}, true, true},
      {"llama3", {Split::llama3}, true, true},  {"llama-v3", {Split::llama3}, true, true},
      {"qwen2", {Split::qwen2}, false, false},  {"smollm", {Split::single_digit, Split::gpt2}, false, false},
  };
  for (const TokenizerFamily& family : families) {
    if (family.name == name) return family;
  }
  fail(source, ": pre-tokenizer \"", printable(name), "\" is not supported (gpt-2, llama-bpe, qwen2 and smollm are)");
}

std::unique_ptr<Tokenizer> make_bpe_tokenizer(BpeParts parts) {
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

std::unique_ptr<Tokenizer> Tokenizer::from_vocabulary(const BpeVocabulary& vocabulary, const std::string& source) {
  const TokenizerFamily& family = tokenizer_family(vocabulary.pre, source);
  const auto& types = vocabulary.token_types;
  FUT_CHECK(!vocabulary.tokens.empty(), source, ": the vocabulary is empty");
  FUT_CHECK(types.empty() || types.size() == vocabulary.tokens.size(), source, ": ", vocabulary.tokens.size(),
            " tokens but ", types.size(), " token types");
  BpeParts parts;
  parts.source = source;
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    parts.tokens.push_back(token_of_type(vocabulary.tokens[id], types.empty() ? 1 : types[id], id, source));
    const BpeToken& token = parts.tokens.back();
    const bool control = token.kind == TokenKind::control;
    if (control || token.kind == TokenKind::user_defined) {
      parts.added.push_back({.text = token.text, .id = static_cast<int32_t>(id), .control = control});
    }
  }
  for (const std::string& merge : vocabulary.merges) parts.merges.push_back(split_merge(merge, source));
  parts.pre = PreTokenizer(family.rules);
  parts.ignore_merges = vocabulary.ignore_merges.value_or(family.ignore_merges);
  parts.add_bos = vocabulary.add_bos.value_or(family.add_bos && vocabulary.bos >= 0);
  parts.bos = vocabulary.bos;
  parts.eos = vocabulary.eos;
  const auto name_token = [&](const char* role, int32_t id) {
    if (id >= 0 && static_cast<size_t>(id) < vocabulary.tokens.size())
      parts.special_tokens[role] = vocabulary.tokens[static_cast<size_t>(id)];
  };
  name_token("bos_token", vocabulary.bos);
  name_token("eos_token", vocabulary.eos.empty() ? -1 : vocabulary.eos.front());
  return make_bpe_tokenizer(std::move(parts));
}

}  // namespace fut
