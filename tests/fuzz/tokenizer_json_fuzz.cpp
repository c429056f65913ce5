// tokenizer.json with tokenizer_config.json beside it: byte-level and SentencePiece vocabularies, then a text through
// what came out.
#include "mutate.h"
#include "use_tokenizer.h"

namespace fut::fuzz {
namespace {

constexpr char kTokenizer[] = "tokenizer.json", kConfig[] = "tokenizer_config.json", kText[] = "text.txt";

const std::vector<std::string> kWords = {"type",
                                         "BPE",
                                         "model",
                                         "vocab",
                                         "merges",
                                         "added_tokens",
                                         "id",
                                         "content",
                                         "special",
                                         "normalized",
                                         "lstrip",
                                         "rstrip",
                                         "single_word",
                                         "normalizer",
                                         "normalizers",
                                         "NFC",
                                         "Sequence",
                                         "Prepend",
                                         "prepend",
                                         "Replace",
                                         "pattern",
                                         "String",
                                         "Regex",
                                         "pre_tokenizer",
                                         "pretokenizers",
                                         "Split",
                                         "behavior",
                                         "Isolated",
                                         "Removed",
                                         "invert",
                                         "Digits",
                                         "individual_digits",
                                         "ByteLevel",
                                         "add_prefix_space",
                                         "use_regex",
                                         "Metaspace",
                                         "replacement",
                                         "prepend_scheme",
                                         "always",
                                         "first",
                                         "never",
                                         "split",
                                         "post_processor",
                                         "processors",
                                         "TemplateProcessing",
                                         "single",
                                         "SpecialToken",
                                         "special_tokens",
                                         "ids",
                                         "decoder",
                                         "decoders",
                                         "ByteFallback",
                                         "Fuse",
                                         "Strip",
                                         "start",
                                         "stop",
                                         "byte_fallback",
                                         "fuse_unk",
                                         "unk_token",
                                         "ignore_merges",
                                         "dropout",
                                         "continuing_subword_prefix",
                                         "bos_token",
                                         "eos_token",
                                         "add_bos_token",
                                         "legacy",
                                         "added_tokens_decoder",
                                         "<s>",
                                         "</s>",
                                         "<unk>",
                                         "<0x0A>",
                                         "\u2581",
                                         "\u0120",
                                         "a b",
                                         "t h",
                                         "th"};

class TokenizerJsonTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kTokenizer, kConfig, kText}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    if (random.chance(5)) return mutate_bytes(input[kTokenizer], random, random.pick(seeds).at(kTokenizer));
    if (random.chance(80)) input[kTokenizer] = mutated_json(input[kTokenizer], random, kWords);
    if (random.chance(15)) input[kConfig] = mutated_json(input[kConfig], random, kWords);
    if (random.chance(30)) mutate_bytes(input[kText], random, input[kTokenizer]);
    if (random.chance(2)) input.erase(kConfig);
  }

  void run(const Input& input, const std::string& folder) const override {
    use_tokenizer(*Tokenizer::from_hf_folder(folder), input.at(kText));
  }
};

}  // namespace

std::unique_ptr<Target> tokenizer_json_target() { return std::make_unique<TokenizerJsonTarget>(); }

}  // namespace fut::fuzz
