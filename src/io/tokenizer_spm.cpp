#include <algorithm>
#include <bitset>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "io/bpe.h"
#include "io/mapped_file.h"
#include "io/spm.h"
#include "io/utf8.h"

namespace fut {
namespace {

using Kind = SpmPiece::Kind;

constexpr size_t kMaxPieceBytes = 1024;  // of a piece that merges make; SentencePiece's own default is 16 characters
constexpr char32_t kSpaceCode = 0x2581;

bool can_merge(const SpmPiece& piece) { return piece.kind == Kind::normal || piece.kind == Kind::user_defined; }

bool is_valid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = utf8_at(text, at);
    if (c.state != Utf8::valid) return false;
    at += c.length;
  }
  return true;
}

/// Pairs of characters that stand side by side in some piece. Between any others no merge ever reaches, so that text
/// can be cut there without a change: that is what makes pieces short, and the work linear.
class Neighbours {
 public:
  void add(std::string_view piece) {
    char32_t last = 0;
    for (size_t at = 0; at < piece.size();) {
      const Utf8Char c = utf8_at(piece, at);
      if (at > 0) note(last, c.code);
      last = c.code;
      at += c.length;
    }
  }

  bool contain(char32_t left, char32_t right) const {
    const size_t l = small(left), r = small(right);
    if (l < kSmall && r < kSmall) return table_[l * kSmall + r];
    return others_.contains(uint64_t{left} << 32 | right);
  }

 private:
  static constexpr size_t kSmall = 129;  // ASCII and the mark for a space

  static size_t small(char32_t code) { return code < 128 ? code : code == kSpaceCode ? 128 : kSmall; }

  void note(char32_t left, char32_t right) {
    const size_t l = small(left), r = small(right);
    if (l < kSmall && r < kSmall) {
      table_[l * kSmall + r] = true;
    } else {
      others_.insert(uint64_t{left} << 32 | right);
    }
  }

  std::bitset<kSmall * kSmall> table_;
  std::unordered_set<uint64_t> others_;
};

/// What a token adds to the text.
std::string decoded(const SpmPiece& piece) {
  if (piece.kind == Kind::byte) return std::string(1, static_cast<char>(byte_of_piece(piece.text)));
  if (piece.kind != Kind::normal && piece.kind != Kind::user_defined) return "";
  std::string text;
  for (size_t at = 0; at < piece.text.size();) {
    const bool space = std::string_view(piece.text).substr(at).starts_with(kSpaceMark);
    text += space ? ' ' : piece.text[at];
    at += space ? kSpaceMark.size() : 1;
  }
  return text;
}

VocabularyParts shared_parts(SpmParts& parts) {
  VocabularyParts shared{parts.source,
                         {},
                         std::move(parts.added),
                         parts.add_bos,
                         parts.bos,
                         std::move(parts.eos),
                         std::move(parts.special_tokens)};
  for (const SpmPiece& piece : parts.pieces) shared.texts.push_back(decoded(piece));
  return shared;
}

class SpmTokenizer final : public VocabularyTokenizer {
 public:
  explicit SpmTokenizer(SpmParts parts)
      : VocabularyTokenizer(shared_parts(parts)),
        prefix_(parts.prefix),
        drops_leading_space_(parts.drops_leading_space && parts.prefix != PrefixSpace::never),
        words_apart_(parts.words_apart),
        fuse_unknown_(parts.fuse_unknown),
        unknown_(parts.unknown),
        merges_(0) {
    FUT_CHECK(unknown_ >= -1 && unknown_ < size(), parts.source, ": unknown token ", unknown_,
              ", expected one of 0 to ", size() - 1);
    byte_ids_.fill(-1);
    for (size_t id = 0; parts.byte_fallback && id < parts.pieces.size(); ++id) {
      if (parts.pieces[id].kind != Kind::byte) continue;
      byte_ids_[static_cast<size_t>(byte_of_piece(parts.pieces[id].text))] = static_cast<int32_t>(id);
    }
    has_unknown_ = std::find(byte_ids_.begin(), byte_ids_.end(), -1) != byte_ids_.end();
    take_symbols(parts);
    take_merges(parts);
  }

  bool leads_with_space() const override { return drops_leading_space_; }

 private:
  void cut(std::string_view text, Place place, Encoding& encoding) const override;
  void append_piece(std::string_view piece, std::vector<int32_t>& ids) const override;

  void take_symbols(const SpmParts& parts);
  void take_merges(SpmParts& parts);
  bool is_token(std::string_view character) const {
    const auto symbol = symbols_.find(std::string(character));
    return symbol != symbols_.end() && symbol->second < size();
  }
  bool wants_prefix(std::string_view text, Place place) const;
  std::string with_marks(std::string_view text, Place place) const;
  void append_bytes(std::string_view character, bool& after_unknown, std::vector<int32_t>& ids) const;

  PrefixSpace prefix_;
  bool drops_leading_space_, words_apart_, fuse_unknown_;
  int32_t unknown_;
  bool has_unknown_ = false;  // not every byte has a token
  MergeTable merges_;
  Neighbours neighbours_;
  std::array<int32_t, 256> byte_ids_{};               // the token of each byte, or -1
  std::unordered_map<std::string, int32_t> symbols_;  // pieces, and beyond size() characters that only merge
  std::vector<std::string> characters_;               // those, from size() on
};

/// Ids of pieces, and further ones for characters that are no pieces but parts of some.
void SpmTokenizer::take_symbols(const SpmParts& parts) {
  for (size_t id = 0; id < parts.pieces.size(); ++id) {
    const SpmPiece& piece = parts.pieces[id];
    if (!can_merge(piece) || piece.text.empty() || !is_valid_utf8(piece.text)) continue;
    FUT_CHECK(piece.text.size() <= kMaxPieceBytes || piece.kind == Kind::user_defined, parts.source, ": token ", id,
              " has ", piece.text.size(), " bytes, expected at most ", kMaxPieceBytes);
    const auto [other, is_new] = symbols_.emplace(piece.text, static_cast<int32_t>(id));
    FUT_CHECK(is_new, parts.source, ": tokens ", other->second, " and ", id, " are both \"", printable(piece.text),
              "\"");
  }
}

void SpmTokenizer::take_merges(SpmParts& parts) {
  std::vector<int32_t> ranks;
  const auto merges =
      parts.merges_by_score ? merges_of_scores(parts.pieces, &ranks, parts.source) : std::move(parts.merges);
  FUT_CHECK(merges.size() < size_t{std::numeric_limits<int32_t>::max()}, parts.source, ": ", merges.size(), " merges");
  merges_ = MergeTable(merges.size());
  const auto id_of = [&](const std::string& half) {
    const auto [symbol, is_new] =
        symbols_.emplace(half, static_cast<int32_t>(size() + static_cast<int64_t>(characters_.size())));
    if (is_new) characters_.push_back(half);
    return symbol->second;
  };
  std::unordered_set<std::string_view> control;
  for (const SpmPiece& piece : parts.pieces) {
    if (piece.kind == Kind::control || piece.kind == Kind::unknown) control.insert(piece.text);
  }
  for (size_t i = 0; i < merges.size(); ++i) {
    const auto& [left, right] = merges[i];
    if (control.contains(left + right) && !symbols_.contains(left + right))
      continue;                                                      // text never makes control tokens
    for (const std::string& needed : {left, right, left + right}) {  // scores make only halves and results that exist
      FUT_CHECK(parts.merges_by_score || symbols_.contains(needed), parts.source, ": merge ", i, " (\"",
                printable(left), "\" with \"", printable(right), "\") needs token \"", printable(needed),
                "\", which is not in the vocabulary");
    }
    neighbours_.add(left + right);
    const int32_t left_id = id_of(left), right_id = id_of(right);
    merges_.set(left_id, right_id, {ranks.empty() ? static_cast<int32_t>(i) : ranks[i], symbols_.at(left + right)});
  }
}

bool SpmTokenizer::wants_prefix(std::string_view text, Place place) const {
  const bool starts_with_space = text.starts_with(' ') || text.starts_with(kSpaceMark);
  switch (prefix_) {
    case PrefixSpace::never: return false;
    case PrefixSpace::each: return place != Place::inside;
    case PrefixSpace::first: return place == Place::text_start;
    case PrefixSpace::each_unless: return !starts_with_space;
    case PrefixSpace::first_unless: return place == Place::text_start && !starts_with_space;
  }
  return false;
}

std::string SpmTokenizer::with_marks(std::string_view text, Place place) const {
  std::string marked(wants_prefix(text, place) ? kSpaceMark : "");
  marked.reserve(text.size() + text.size() / 2);
  for (size_t at = 0; at < text.size();) {
    const size_t space = std::min(text.find(' ', at), text.size());
    marked.append(text.substr(at, space - at));
    if (space < text.size()) marked.append(kSpaceMark);
    at = space + 1;
  }
  return marked;
}

void SpmTokenizer::cut(std::string_view text, Place place, Encoding& encoding) const {
  const std::string_view marked = encoding.keep(with_marks(text, place));
  size_t begin = 0;
  char32_t last = 0;
  bool last_unknown = false;
  for (size_t at = 0; at < marked.size();) {
    const Utf8Char c = utf8_at(marked, at);
    const char32_t code = c.state == Utf8::valid ? c.code : ~char32_t{0};
    const bool unknown = has_unknown_ && !is_token(marked.substr(at, c.length));
    const bool new_word = words_apart_ && code == kSpaceCode;
    // Characters in a row that are no tokens stay together, because together they may be one unknown token.
    if (at > begin && (new_word || !(neighbours_.contain(last, code) || (unknown && last_unknown)))) {
      encoding.take(marked.substr(begin, at - begin));
      begin = at;
    }
    last = code;
    last_unknown = unknown;
    at += c.length;
  }
  encoding.take(marked.substr(begin));
}

/// Characters that are neither pieces nor parts of one become their bytes at once: nothing merges with those.
void SpmTokenizer::append_piece(std::string_view piece, std::vector<int32_t>& ids) const {
  std::vector<int32_t> symbols;
  bool after_unknown = false;
  const auto flush = [&] {
    if (symbols.empty()) return;
    apply_merges(merges_, symbols);
    for (const int32_t symbol : symbols) {
      if (symbol < size()) {
        ids.push_back(symbol);
        after_unknown = false;
      } else {
        append_bytes(characters_[static_cast<size_t>(symbol - size())], after_unknown, ids);
      }
    }
    symbols.clear();
  };
  for (size_t at = 0; at < piece.size();) {
    const size_t length = utf8_at(piece, at).length;
    const std::string character(piece.substr(at, length));
    if (const auto symbol = symbols_.find(character); symbol != symbols_.end()) {
      symbols.push_back(symbol->second);
    } else {
      flush();
      append_bytes(character, after_unknown, ids);
    }
    at += length;
  }
  flush();
}

/// A character as its bytes, or as the unknown token, or, if there is none, not at all.
void SpmTokenizer::append_bytes(std::string_view character, bool& after_unknown, std::vector<int32_t>& ids) const {
  const auto token = [this](char byte) { return byte_ids_[static_cast<unsigned char>(byte)]; };
  if (std::all_of(character.begin(), character.end(), [&](char byte) { return token(byte) >= 0; })) {
    for (const char byte : character) ids.push_back(token(byte));
    after_unknown = false;
  } else if (unknown_ >= 0) {
    if (!fuse_unknown_ || !after_unknown) ids.push_back(unknown_);
    after_unknown = true;
  }
}

}  // namespace

int byte_of_piece(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return -1;
  int value = 0;
  for (const char c : piece.substr(3, 2)) {
    const size_t digit = std::string_view("0123456789ABCDEF").find(c);
    if (digit == std::string_view::npos) return -1;
    value = value * 16 + static_cast<int>(digit);
  }
  return value;
}

std::vector<std::pair<std::string, std::string>> merges_of_scores(const std::vector<SpmPiece>& pieces,
                                                                  std::vector<int32_t>* ranks,
                                                                  const std::string& source) {
  std::unordered_set<std::string_view> known;
  std::vector<size_t> order;
  for (size_t id = 0; id < pieces.size(); ++id) {
    const SpmPiece& piece = pieces[id];
    if (!can_merge(piece) || piece.text.size() > kMaxPieceBytes || !is_valid_utf8(piece.text)) continue;
    FUT_CHECK(std::isfinite(piece.score), source, ": token ", id, " has the score ", piece.score);
    known.insert(piece.text);
    if (piece.kind == Kind::normal) order.push_back(id);  // user-defined ones are found, not made
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return pieces[a].score > pieces[b].score; });
  std::vector<std::pair<std::string, std::string>> merges;
  int32_t rank = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && pieces[order[i]].score < pieces[order[i - 1]].score) ++rank;  // equal scores: the leftmost goes first
    const std::string_view text = pieces[order[i]].text;
    const auto is_half = [&](std::string_view half) {
      return utf8_at(half, 0).length == half.size() || known.contains(half);
    };
    for (size_t at = text.empty() ? 0 : utf8_at(text, 0).length; at < text.size(); at += utf8_at(text, at).length) {
      if (!is_half(text.substr(0, at)) || !is_half(text.substr(at))) continue;
      merges.emplace_back(text.substr(0, at), text.substr(at));
      if (ranks) ranks->push_back(rank);
    }
  }
  return merges;
}

void add_special_pieces(SpmParts& parts) {
  for (size_t id = 0; id < parts.pieces.size(); ++id) {
    const SpmPiece& piece = parts.pieces[id];
    const bool control = piece.kind == Kind::control || piece.kind == Kind::unknown;
    if (!control && piece.kind != Kind::user_defined) continue;
    FUT_CHECK(control || piece.text.find(kSpaceMark) == std::string::npos, parts.source, ": token ", id, " (\"",
              printable(piece.text), "\") is user-defined and holds a space, which is not supported");
    const std::string& text = piece.text;
    parts.added.push_back({.text = text, .id = static_cast<int32_t>(id), .control = control});
  }
  const auto name = [&](const char* role, int32_t id) {
    if (id >= 0 && static_cast<size_t>(id) < parts.pieces.size()) {
      parts.special_tokens.emplace(role, parts.pieces[static_cast<size_t>(id)].text);
    }
  };
  name("bos_token", parts.bos);
  name("eos_token", parts.eos.empty() ? -1 : parts.eos.front());
  name("unk_token", parts.unknown);
}

std::unique_ptr<Tokenizer> make_spm_tokenizer(SpmParts parts) {
  return std::make_unique<SpmTokenizer>(std::move(parts));
}

}  // namespace fut
