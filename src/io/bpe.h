// Byte-pair encoding: the parts that both file formats share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/pretokenizer.h"
#include "io/tokenizer.h"
#include "io/vocab_tokenizer.h"

namespace fut {

/// Bytes that a token spells in GPT-2's alphabet, in which each byte is one visible character (a space is U+0120);
/// nothing if some character is outside that alphabet.
std::optional<std::string> bytes_of_spelling(std::string_view spelling);

/// "left right" as its halves: exactly one space, which no half in GPT-2's alphabet can hold.
std::pair<std::string, std::string> split_merge(std::string_view merge, const std::string& source);

/// (left, right) -> the token they merge into, and how early. Open addressing: a look-up is one cache miss.
class MergeTable {
 public:
  struct Merge {
    int32_t rank, result;
  };
  explicit MergeTable(size_t merges);
  void set(int32_t left, int32_t right, Merge merge);  ///< a later merge of the same pair replaces the earlier
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t key;
    Merge merge;
  };
  size_t slot_of(uint64_t key) const;

  std::vector<Slot> slots_;
  int shift_;
};

/// Merges neighbours, lowest rank first and leftmost among equals, until no pair is in the table. n log n.
void apply_merges(const MergeTable& merges, std::vector<int32_t>& symbols);

/// What a token is besides its text.
enum class TokenKind : uint8_t {
  absent,        ///< no token has this id, or none that text can come from
  normal,        ///< from merges
  control,       ///< matched where control tokens are parsed; no text of its own
  user_defined,  ///< always matched, before anything is split
};

/// What a GGUF pre-tokenizer name stands for.
struct TokenizerFamily {
  std::string_view name;
  std::vector<Split> rules;
  bool ignore_merges, add_bos;
  bool nfc = false;  ///< text is normalised first, which GGUF does not say
};

/// Throws for a name that is not known; `source` names the file.
const TokenizerFamily& tokenizer_family(const std::string& name, const std::string& source);

struct BpeToken {
  std::string spelling;  ///< as the merges have it
  std::string text;      ///< bytes in the text
  TokenKind kind = TokenKind::absent;
};

struct BpeParts {
  std::string source;  ///< the file, for messages
  std::vector<BpeToken> tokens;
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<AddedToken> added;
  PreTokenizer pre;
  bool byte_level = true;    ///< symbols are bytes; else characters, and pieces are spelled as they are
  bool space_first = false;  ///< a space goes before text that does not begin with one
  bool nfc = false;          ///< text is brought into Unicode's form C first
  bool ignore_merges = false;
  bool add_bos = false;
  int32_t bos = -1;
  std::vector<int32_t> eos;
  std::map<std::string, std::string> special_tokens;
};

std::unique_ptr<Tokenizer> make_bpe_tokenizer(BpeParts parts);

}  // namespace fut
