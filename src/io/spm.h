// SentencePiece BPE, as Llama 1 and 2 and early Mistral models use it: what its three file formats have in common.
//
// A text is one long word in which U+2581 stands for each space. Characters are merged like byte-pair encoding's bytes,
// best score first; a character that the vocabulary lacks is written as its bytes <0xXX>.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/vocab_tokenizer.h"

namespace fut {

inline constexpr std::string_view kSpaceMark = "\xe2\x96\x81";  // U+2581

/// What is put before a stretch of text that no added token interrupts.
enum class PrefixSpace {
  never,
  each,         ///< a space before every stretch: SentencePiece itself, Hugging Face's normalizer "Prepend", GGUF
  first,        ///< only before the text
  each_unless,  ///< as `each`, but not where it begins with a space already: Hugging Face's Metaspace, "always"
  first_unless  ///< Metaspace, "first"
};

struct SpmPiece {
  enum class Kind : uint8_t { absent, normal, unknown, control, user_defined, byte };
  std::string text;  ///< with U+2581 for spaces; "<0x0A>" for a byte
  Kind kind = Kind::absent;
  float score = 0;
};

struct SpmParts {
  std::string source;  ///< the file, for messages
  std::vector<SpmPiece> pieces;
  bool merges_by_score = true;  ///< any two neighbours that make a piece merge, best score first
  std::vector<std::pair<std::string, std::string>> merges = {};  ///< otherwise: these, best first
  std::vector<AddedToken> added = {};
  PrefixSpace prefix = PrefixSpace::each;
  bool drops_leading_space = true;  ///< decoding takes the prefix away again
  bool words_apart = false;         ///< no merge goes over the beginning of a word (Metaspace with "split")
  bool byte_fallback = true;
  bool fuse_unknown = true;  ///< several unknown characters in a row are one unknown token
  bool add_bos = true;
  int32_t bos = -1, unknown = -1;
  std::vector<int32_t> eos = {};
  std::map<std::string, std::string> special_tokens = {};
};

/// Adds control and user-defined pieces to parts.added, and the names of special tokens, where formats do not list
/// them.
void add_special_pieces(SpmParts& parts);

std::unique_ptr<Tokenizer> make_spm_tokenizer(SpmParts parts);

/// The merges that follow from scores, best first: left and right halves of pieces. Single characters that are no
/// pieces are halves too.
std::vector<std::pair<std::string, std::string>> merges_of_scores(const std::vector<SpmPiece>& pieces,
                                                                  std::vector<int32_t>* ranks,
                                                                  const std::string& source);

/// The text of a Hugging Face tokenizer.json with the same tokens and merges. What make_spm_tokenizer() refuses is
/// refused here.
std::string tokenizer_json(const SpmParts& parts);

/// The byte that "<0x0A>" stands for, or -1.
int byte_of_piece(std::string_view piece);

/// A tokenizer.model file; a tokenizer_config.json beside it may say `add_bos_token`, `legacy` and name special tokens.
SpmParts read_sentencepiece_model(const std::string& path);

}  // namespace fut
