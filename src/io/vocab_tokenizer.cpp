#include "io/vocab_tokenizer.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "base/error.h"
#include "io/mapped_file.h"
#include "io/pretokenizer.h"

namespace fut {
namespace {

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

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
  for (const AddedToken& token : tokens_) starts_[static_cast<unsigned char>(token.text[0])] = true;
}

/// Narrows the sorted list byte by byte; a token that ends at a byte sorts before all that go on.
const AddedToken* AddedTokens::longest(std::string_view text, size_t own_bytes) const {
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

VocabularyTokenizer::VocabularyTokenizer(VocabularyParts parts)
    : add_bos_(parts.add_bos),
      bos_(parts.bos),
      eos_(std::move(parts.eos)),
      special_tokens_(std::move(parts.special_tokens)) {
  const auto count = static_cast<int32_t>(parts.texts.size());
  FUT_CHECK(bos_ >= -1 && bos_ < count, parts.source, ": beginning-of-sequence id ", bos_, ", expected one of 0 to ",
            count - 1);
  FUT_CHECK(!add_bos_ || bos_ >= 0, parts.source, ": asks for a beginning-of-sequence token but names none");
  for (const int32_t id : eos_) {
    FUT_CHECK(id >= 0 && id < count, parts.source, ": end-of-sequence id ", id, ", expected one of 0 to ", count - 1);
  }
  for (const AddedToken& token : parts.added) longest_added_ = std::max(longest_added_, token.text.size());
  added_ = by_pass(std::move(parts.added), parts.source);
  for (const std::string& text : parts.texts) {
    texts_ += text;
    ends_.push_back(texts_.size());
  }
}

std::vector<int32_t> VocabularyTokenizer::encode(std::string_view text, bool add_bos, ControlTokens control) const {
  Encoding encoding(*this, text, {}, control);
  if (add_bos && add_bos_) encoding.ids.push_back(bos_);
  encoding.run();
  return std::move(encoding.ids);
}

std::vector<int32_t> VocabularyTokenizer::encode_marked(std::string_view text, std::string_view marks) const {
  FUT_CHECK(marks.empty() || marks.size() == text.size(), marks.size(), " marks for ", text.size(), " bytes of text");
  Encoding encoding(*this, text, marks, ControlTokens::parsed);
  encoding.run();
  return std::move(encoding.ids);
}

VocabularyTokenizer::Encoding::Encoding(const VocabularyTokenizer& tokenizer, std::string_view text,
                                        std::string_view marks, ControlTokens control)
    : tokenizer_(tokenizer),
      text_(text),
      marks_(marks),
      control_(control),
      seen_(std::bit_ceil(std::clamp<size_t>(text.size() / 8, 16, 1 << 15))) {}

void VocabularyTokenizer::Encoding::cut_added(std::string_view text, size_t pass, Place place) {
  if (pass == tokenizer_.added_.size()) {
    if (!text.empty()) tokenizer_.cut(text, place, *this);
    return;
  }
  bool as_given = true;
  if (pass == 1) {
    if (auto normalised = tokenizer_.normalised(text)) text = keep(std::move(*normalised)), as_given = false;
  }
  const AddedTokens& added = tokenizer_.added_[pass];
  // A normalised copy has no marks: no tokenizer that normalises has control tokens of the second pass.
  const auto own = [&](size_t at) {
    return as_given ? own_bytes(static_cast<size_t>(text.data() - text_.data()) + at) : 0;
  };
  const Place later = pass == 0 ? Place::after_token : Place::inside;
  size_t done = 0;
  for (auto match = added.next(text, 0, own); match.token; match = added.next(text, done, own)) {
    const AddedToken* token = match.token;
    size_t begin = match.at, end = begin + token->text.size();
    if (token->takes_space_before) begin -= trailing_space(text.substr(done, begin - done));
    if (token->takes_space_after) end += leading_space(text.substr(end));
    cut_added(text.substr(done, begin - done), pass + 1, done == 0 ? place : later);
    ids.push_back(token->id);
    done = end;
  }
  cut_added(text.substr(done), pass + 1, done == 0 ? place : later);
}

/// How many bytes from `at` on are no data, as far as a token can reach.
size_t VocabularyTokenizer::Encoding::own_bytes(size_t at) const {
  if (control_ == ControlTokens::as_text) return 0;
  const std::string_view reach = marks_.substr(std::min(at, marks_.size()), tokenizer_.longest_added_);
  const size_t data = reach.find_first_not_of('\0');
  return data == std::string_view::npos ? text_.size() - at : data;
}

void VocabularyTokenizer::Encoding::take(std::string_view piece) {
  Seen& seen = seen_[std::hash<std::string_view>()(piece) & (seen_.size() - 1)];
  if (seen.piece == piece) {
    for (size_t i = 0; i < seen.count; ++i) ids.push_back(ids[seen.begin + i]);
    return;
  }
  const size_t begin = ids.size();
  tokenizer_.append_piece(piece, ids);
  seen = {piece, begin, ids.size() - begin};
}

}  // namespace fut
