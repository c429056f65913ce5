// Text to token ids and back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fut {

/// Whether strings such as <|eot_id|> in a text become control tokens or stay text. Tokens that a vocabulary adds for
/// users (not control tokens) are found in either case.
enum class ControlTokens { as_text, parsed };

/// A byte-level BPE vocabulary as GGUF metadata states it (tokenizer.ggml.model = "gpt2").
struct BpeVocabulary {
  std::vector<std::string>
      tokens;                    ///< by id; normal tokens in GPT-2's byte-to-character spelling, others as in the text
  std::vector<int> token_types;  ///< 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; empty: all 1
  std::vector<std::string> merges;  ///< "left right", best first
  std::string pre;   ///< how text is split: "gpt-2", "llama-bpe", "smollm", "qwen2", ...; unknown: refused
  int32_t bos = -1;  ///< -1: none
  std::vector<int32_t> eos;
  std::optional<bool> add_bos;        ///< not stated: Llama-3 adds one, the others do not
  std::optional<bool> ignore_merges;  ///< a piece that is a token needs no merges; not stated: as the family does
};

/// The same vocabulary as the text of a Hugging Face tokenizer.json, for folders that other programs read too. `source`
/// names the file in messages. What Tokenizer::from_vocabulary() refuses is refused here.
std::string tokenizer_json(const BpeVocabulary& vocabulary, const std::string& source);

/// A model's vocabulary. Immutable after loading and safe to share between threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Reads a Hugging Face tokenizer.json (and, beside it, tokenizer_config.json when it is there).
  static std::unique_ptr<Tokenizer> from_hf_folder(const std::string& folder);

  /// `source` names the file in messages.
  static std::unique_ptr<Tokenizer> from_vocabulary(const BpeVocabulary& vocabulary, const std::string& source);

  /// Ids of `text`, which is taken byte for byte: it is not normalised, unless the file asks for NFC (Qwen2, Qwen3),
  /// and a byte that is no UTF-8 counts as a symbol where the text is split. Bytes that the vocabulary has no token for
  /// are left out, as Hugging Face does (Llama-3 has all). `add_bos`: put the beginning-of-sequence token first if this
  /// tokenizer does so (adds_bos()), whether or not the text spells one out itself.
  virtual std::vector<int32_t> encode(std::string_view text, bool add_bos, ControlTokens control) const = 0;

  /// Ids of a text of which parts are data (marks: a byte a byte of `text`, 0 for what is not; or empty). Control
  /// tokens are parsed where all their bytes are no data, and nowhere else.
  virtual std::vector<int32_t> encode_marked(std::string_view text, std::string_view marks) const = 0;

  /// Bytes of one token as they appear in the text; empty for control tokens and for ids that name no token.
  virtual std::string bytes(int32_t id) const = 0;

  /// Bytes of a whole sequence from its beginning. Not necessarily valid UTF-8: see StreamDecoder.
  std::string decode(const std::vector<int32_t>& ids) const;

  /// Whether encoding puts a space before the text, so that decoding a sequence from its beginning drops one.
  virtual bool leads_with_space() const { return false; }

  virtual bool adds_bos() const = 0;
  virtual int32_t bos() const = 0;               ///< -1 if there is none
  virtual std::vector<int32_t> eos() const = 0;  ///< what the tokenizer's own files name as end tokens; may be empty
  virtual int64_t size() const = 0;              ///< largest id + 1

  /// What the files name by role, as texts: "bos_token", "eos_token", "pad_token" and so on.
  virtual const std::map<std::string, std::string>& special_tokens() const = 0;
};

/// Turns tokens into text as they come: never half a character, invalid bytes as U+FFFD (one for each maximal invalid
/// subpart, as Unicode recommends), and the concatenated pieces equal the text of the whole sequence. Tokens that
/// follow a prompt keep the space that their text begins with; `from_start` says that none went before.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool from_start = false)
      : tokenizer_(tokenizer), drops_space_(from_start && tokenizer.leads_with_space()) {}
  std::string add(int32_t id);  ///< text that is complete now
  std::string finish();         ///< what is left: U+FFFD for a dangling part of a character

 private:
  const Tokenizer& tokenizer_;
  bool drops_space_;
  std::string pending_;
};

}  // namespace fut
