// A vocabulary from GGUF as the tokenizer.json that Hugging Face's `tokenizers` and this project read.
#include "io/bpe.h"
#include "io/json.h"

namespace fut {
namespace {

using Json = nlohmann::json;

Json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

/// The family's rules; ByteLevel comes last and brings GPT-2's split itself.
Json pre_tokenizer(const TokenizerFamily& family) {
  Json parts = Json::array();
  bool gpt2 = false;
  for (Split rule : family.rules) {
    if (rule == Split::gpt2) {
      gpt2 = true;
    } else if (rule == Split::single_digit || rule == Split::digit_run) {
      parts.push_back({{"type", "Digits"}, {"individual_digits", rule == Split::single_digit}});
    } else {
      parts.push_back({{"type", "Split"},
                       {"pattern", {{"Regex", regex_of_split(rule)}}},
                       {"behavior", "Isolated"},
                       {"invert", false}});
    }
  }
  parts.push_back(byte_level(gpt2));
  if (parts.size() == 1) return parts[0];
  return {{"type", "Sequence"}, {"pretokenizers", parts}};
}

Json post_processor(const BpeVocabulary& vocabulary, bool add_bos) {
  if (!add_bos || vocabulary.bos < 0) return byte_level(true);
  const std::string& bos = vocabulary.tokens[vocabulary.bos];
  const Json special = {{"SpecialToken", {{"id", bos}, {"type_id", 0}}}};
  const auto sequence = [](const char* id, int type) { return Json{{"Sequence", {{"id", id}, {"type_id", type}}}}; };
  return {{"type", "TemplateProcessing"},
          {"single", Json::array({special, sequence("A", 0)})},
          {"pair", Json::array({special, sequence("A", 0), sequence("B", 1)})},
          {"special_tokens", {{bos, {{"id", bos}, {"ids", {vocabulary.bos}}, {"tokens", {bos}}}}}}};
}

}  // namespace

std::string tokenizer_json(const BpeVocabulary& vocabulary, const std::string& source) {
  const TokenizerFamily& family = tokenizer_family(vocabulary.pre, source);
  Json added = Json::array(), vocab = Json::object();
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const int type = vocabulary.token_types.empty() ? 1 : vocabulary.token_types[id];
    vocab[vocabulary.tokens[id]] = id;
    if (type < 2 || type > 4) continue;
    added.push_back({{"id", id},
                     {"content", vocabulary.tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", type != 4}});
  }
  const Json model = {{"type", "BPE"},
                      {"dropout", nullptr},
                      {"unk_token", nullptr},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", false},
                      {"byte_fallback", false},
                      {"ignore_merges", vocabulary.ignore_merges.value_or(family.ignore_merges)},
                      {"vocab", vocab},
                      {"merges", vocabulary.merges}};
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", pre_tokenizer(family)},
                     {"post_processor", post_processor(vocabulary, vocabulary.add_bos.value_or(family.add_bos))},
                     {"decoder", byte_level(true)},
                     {"model", model}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace fut
