// A vocabulary from GGUF as the tokenizer.json that Hugging Face's `tokenizers` and this project read.
#include "io/bpe.h"
#include "io/json.h"
#include "io/spm.h"

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

/// Puts `bos` (its spelling) before the text, unless `id` is negative.
Json bos_template(const std::string& bos, int32_t id) {
  const Json special = {{"SpecialToken", {{"id", bos}, {"type_id", 0}}}};
  const auto sequence = [](const char* name, int type) {
    return Json{{"Sequence", {{"id", name}, {"type_id", type}}}};
  };
  Json single = Json::array(), tokens = Json::object();
  if (id >= 0) {
    single.push_back(special);
    tokens[bos] = {{"id", bos}, {"ids", {id}}, {"tokens", {bos}}};
  }
  single.push_back(sequence("A", 0));
  Json pair = single;
  pair.push_back(sequence("B", 1));
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
}

Json post_processor(const BpeVocabulary& vocabulary, bool add_bos) {
  if (!add_bos || vocabulary.bos < 0) return byte_level(true);
  return bos_template(vocabulary.tokens[vocabulary.bos], vocabulary.bos);
}

Json added_token(size_t id, const std::string& text, bool control) {
  return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", control}};
}

Json bpe_model(const Json& vocabulary, const Json& merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", vocabulary},
          {"merges", merges}};
}

std::string file_text(const Json& added, const Json& normalizer, const Json& pre_tokenizer, const Json& post_processor,
                      const Json& decoder, const Json& model, const std::string& source) {
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", normalizer},
                     {"pre_tokenizer", pre_tokenizer},
                     {"post_processor", post_processor},
                     {"decoder", decoder},
                     {"model", model}};
  return json_text(json, 1, source + ": vocabulary") + "\n";
}

}  // namespace

std::string tokenizer_json(const BpeVocabulary& vocabulary, const std::string& source) {
  Tokenizer::from_vocabulary(vocabulary, source);  // what cannot be read is not written
  const TokenizerFamily& family = tokenizer_family(vocabulary.pre, source);
  Json added = Json::array(), vocab = Json::object();
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const int type = vocabulary.token_types.empty() ? 1 : vocabulary.token_types[id];
    vocab[vocabulary.tokens[id]] = id;
    if (type >= 2 && type <= 4) added.push_back(added_token(id, vocabulary.tokens[id], type != 4));
  }
  Json model = bpe_model(vocab, vocabulary.merges);
  model["ignore_merges"] = vocabulary.ignore_merges.value_or(family.ignore_merges);
  return file_text(added, family.nfc ? Json{{"type", "NFC"}} : Json(), pre_tokenizer(family),
                   post_processor(vocabulary, vocabulary.add_bos.value_or(family.add_bos)), byte_level(true), model,
                   source);
}

/// In the layout with a normalizer, which is the one that puts a space before every stretch of text. Of pieces with
/// equal scores, which merge from the left, it can only say that one comes first.
std::string tokenizer_json(const SpmParts& parts) {
  make_spm_tokenizer(parts);
  Json added = Json::array(), vocab = Json::object();
  for (size_t id = 0; id < parts.pieces.size(); ++id) {
    if (parts.pieces[id].kind != SpmPiece::Kind::absent) vocab[parts.pieces[id].text] = id;
  }
  for (const AddedToken& token : parts.added)
    added.push_back(added_token(static_cast<size_t>(token.id), token.text, token.control));
  const std::string mark(kSpaceMark);
  Json merges = Json::array();
  for (const auto& [left, right] : merges_of_scores(parts.pieces, nullptr, parts.source)) {
    if (vocab.contains(left) && vocab.contains(right)) merges.push_back({left, right});
  }
  Json model = bpe_model(vocab, merges);
  if (parts.unknown >= 0) model["unk_token"] = parts.pieces[static_cast<size_t>(parts.unknown)].text;
  model["fuse_unk"] = parts.fuse_unknown;
  model["byte_fallback"] = parts.byte_fallback;
  Json normalizers = Json::array();
  if (parts.prefix != PrefixSpace::never) normalizers.push_back({{"type", "Prepend"}, {"prepend", mark}});
  normalizers.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", mark}});
  Json decoders = Json::array({{{"type", "Replace"}, {"pattern", {{"String", mark}}}, {"content", " "}},
                               {{"type", "ByteFallback"}},
                               {{"type", "Fuse"}}});
  if (parts.prefix != PrefixSpace::never) {
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  const int32_t bos = parts.add_bos ? parts.bos : -1;
  return file_text(added, {{"type", "Sequence"}, {"normalizers", normalizers}}, nullptr,
                   bos_template(bos < 0 ? "" : parts.pieces[static_cast<size_t>(bos)].text, bos),
                   {{"type", "Sequence"}, {"decoders", decoders}}, model, parts.source);
}

}  // namespace fut
