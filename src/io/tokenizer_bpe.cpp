#include <array>
#include <limits>
#include <unordered_map>

#include "base/error.h"
#include "io/bpe.h"
#include "io/mapped_file.h"
#include "io/nfc.h"
#include "io/tokenizer.h"
#include "io/utf8.h"

namespace fut {
namespace {

/// Texts by id, and the parts that all tokenizers share.
VocabularyParts shared_parts(BpeParts& parts) {
  VocabularyParts shared{parts.source,
                         {},
                         std::move(parts.added),
                         parts.add_bos,
                         parts.bos,
                         std::move(parts.eos),
                         std::move(parts.special_tokens)};
  for (const BpeToken& token : parts.tokens) {
    const bool has_text = token.kind == TokenKind::normal || token.kind == TokenKind::user_defined;
    shared.texts.push_back(has_text ? token.text : "");
  }
  return shared;
}

class BpeTokenizer final : public VocabularyTokenizer {
 public:
  explicit BpeTokenizer(BpeParts parts)
      : VocabularyTokenizer(shared_parts(parts)),
        pre_(std::move(parts.pre)),
        merges_(parts.merges.size()),
        byte_level_(parts.byte_level),
        space_first_(parts.space_first),
        nfc_(parts.nfc),
        ignore_merges_(parts.ignore_merges) {
    take_spellings(parts.tokens);
    take_merges(parts);
  }

 private:
  std::optional<std::string> normalised(std::string_view text) const override {
    return nfc_ ? to_nfc(text) : std::nullopt;
  }
  void cut(std::string_view text, Place place, Encoding& encoding) const override;
  void append_piece(std::string_view piece, std::vector<int32_t>& ids) const override;
  void take_spellings(const std::vector<BpeToken>& tokens);
  void take_merges(const BpeParts& parts);
  std::vector<int32_t> symbols_of(std::string_view piece) const;

  PreTokenizer pre_;
  MergeTable merges_;
  bool byte_level_, space_first_, nfc_, ignore_merges_;
  std::array<int32_t, 256> byte_ids_{};                  // the token of each single byte, or -1
  std::unordered_map<std::string_view, int32_t> words_;  // whole tokens, where pieces or characters are looked up
};

void BpeTokenizer::take_spellings(const std::vector<BpeToken>& tokens) {
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

void BpeTokenizer::cut(std::string_view text, Place, Encoding& encoding) const {
  if (space_first_ && text[0] != ' ') text = encoding.keep(" " + std::string(text));
  pre_.split(text, [&](std::string_view piece) { encoding.take(piece); });
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
      {"gpt-2", {Split::gpt2}, false, false},        {"gpt2", {Split::gpt2}, false, false},
      {"default", {Split::gpt2}, false, false},      {"llama-bpe", {Split::llama3}, true, true},
      {"llama3", {Split::llama3}, true, true},       {"llama-v3", {Split::llama3}, true, true},
      {"qwen2", {Split::qwen2}, false, false, true}, {"smollm", {Split::single_digit, Split::gpt2}, false, false},
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
  parts.nfc = family.nfc;
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
