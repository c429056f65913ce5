// Hugging Face's tokenizer.json: what is not known to give the same ids as there is refused by name. A folder with only
// a tokenizer.model is read here too, because tokenizer_config.json adds to both.
#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "io/bpe.h"
#include "io/json.h"
#include "io/mapped_file.h"
#include "io/nfc.h"
#include "io/spm.h"
#include "io/tokenizer.h"

namespace fut {
namespace {

using nlohmann::json;

constexpr int64_t kMaxId = 1 << 24;

/// A JSON value with its place in the file: every question that it cannot answer is an error that names the place.
class Node {
 public:
  Node(const json& value, std::string place) : value_(value), place_(std::move(place)) {}

  const json& value() const { return value_; }
  const std::string& place() const { return place_; }

  [[noreturn]] void refuse(const std::string& why) const { fail(place_, ": ", why); }

  /// Absent and null are the same thing in these files.
  bool has(const std::string& key) const {
    if (!value_.is_object()) refuse("expected an object, found " + found());
    const auto member = value_.find(key);
    return member != value_.end() && !member->is_null();
  }

  Node at(const std::string& key) const {
    if (!has(key)) refuse("no \"" + printable(key) + "\"");
    return {value_.at(key), place_ + "." + printable(key)};
  }

  std::string text() const {
    if (!value_.is_string()) refuse("expected a string, found " + found());
    return value_.get<std::string>();
  }

  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    const Node node = at(key);
    if (!node.value_.is_boolean()) node.refuse("expected true or false, found " + node.found());
    return node.value_.get<bool>();
  }

  int32_t id() const {
    const bool whole = value_.is_number_integer();
    const bool fits =
        whole && (value_.is_number_unsigned() ? value_.get<uint64_t>() < uint64_t{kMaxId}
                                              : value_.get<int64_t>() >= 0 && value_.get<int64_t>() < kMaxId);
    if (!fits) refuse("token id " + found() + ", expected a whole number from 0 to " + std::to_string(kMaxId - 1));
    return value_.get<int32_t>();
  }

  std::vector<Node> items() const {
    if (!value_.is_array()) refuse("expected an array, found " + found());
    std::vector<Node> nodes;
    for (size_t i = 0; i < value_.size(); ++i) nodes.emplace_back(value_[i], place_ + "[" + std::to_string(i) + "]");
    return nodes;
  }

  std::string found() const {
    return value_.is_structured() ? std::string(value_.type_name()) : printable(value_.dump().substr(0, 60));
  }

 private:
  const json& value_;
  std::string place_;
};

std::string type_of(const Node& node) { return node.at("type").text(); }

[[noreturn]] void refuse_type(const Node& node) {
  node.refuse("type \"" + printable(type_of(node)) + "\" is not supported");
}

void refuse_flag(const Node& node, const std::string& key) {
  if (node.flag(key, false)) node.refuse("\"" + key + "\" is not supported");
}

/// Whether text is brought into Unicode's form C: the only thing done to it that is known here.
bool asks_for_nfc(const Node& node) {
  if (type_of(node) == "NFC") return true;
  if (type_of(node) != "Sequence") refuse_type(node);
  bool asks = false;
  for (const Node& part : node.at("normalizers").items()) asks |= asks_for_nfc(part);
  return asks;
}

/// Text that is normalised is no longer that of which the caller said what is data.
void check_added_for_nfc(const Node& list, const BpeParts& parts) {
  for (const AddedToken& added : parts.added) {
    if (added.second_pass && (added.control || to_nfc(added.text)))
      list.refuse("\"" + printable(added.text) + "\", which is \"normalized\" and " +
                  (added.control ? "special" : "not in NFC") + ", is not supported beside the normalizer NFC");
  }
}

void check_model(const Node& model) {
  if (model.has("type") && type_of(model) != "BPE") refuse_type(model);
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.has(key)) continue;
    const json& value = model.value().at(key);
    const bool without_effect = value == "" || value == 0.0;
    if (!without_effect) model.refuse(std::string("\"") + key + "\" is not supported");
  }
}

/// A vocabulary may leave out ids, but not so many that its table would be mostly holes.
void make_room(std::vector<BpeToken>& tokens, int32_t id, size_t named, const Node& node) {
  const auto needed = static_cast<size_t>(id) + 1;
  if (needed <= tokens.size()) return;
  if (needed > 16 * named + 65536) {
    node.refuse("token id " + std::to_string(id) + ", but the file names only " + std::to_string(named) + " tokens");
  }
  tokens.resize(needed);
}

/// Returns how many of the 256 bytes have a token.
int read_vocabulary(const Node& vocabulary, size_t named, BpeParts& parts) {
  int bytes_named = 0;
  if (!vocabulary.value().is_object()) vocabulary.refuse("expected an object, found " + vocabulary.found());
  for (const auto& [spelling, value] : vocabulary.value().items()) {
    const Node node(value, vocabulary.place() + "." + printable(spelling));
    const int32_t id = node.id();
    make_room(parts.tokens, id, named, node);
    BpeToken& token = parts.tokens[static_cast<size_t>(id)];
    if (token.kind != TokenKind::absent) {
      node.refuse("id " + std::to_string(id) + " is also that of \"" + printable(token.spelling) + "\"");
    }
    const auto bytes = parts.byte_level ? bytes_of_spelling(spelling) : std::nullopt;
    token = {spelling, bytes.value_or(spelling), TokenKind::normal};
    bytes_named += bytes && bytes->size() == 1;
  }
  return bytes_named;
}

void read_merges(const Node& merges, BpeParts& parts) {
  if (!merges.value().is_array()) merges.refuse("expected an array, found " + merges.found());
  for (const json& merge : merges.value()) {
    if (merge.is_string()) {
      parts.merges.push_back(split_merge(merge.get_ref<const std::string&>(), merges.place()));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      parts.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
    } else {
      merges.refuse("entry " + std::to_string(parts.merges.size()) + " is " + shown(merge) +
                    ", expected \"left right\" or [\"left\", \"right\"]");
    }
  }
}

void read_added_tokens(const Node& list, const json& vocabulary, size_t named, BpeParts& parts) {
  for (const Node& node : list.items()) {
    AddedToken added;
    added.text = node.at("content").text();
    added.id = node.at("id").id();
    added.control = node.flag("special", false);
    added.takes_space_before = node.flag("lstrip", false);
    added.takes_space_after = node.flag("rstrip", false);
    added.second_pass = node.flag("normalized", !added.control);
    refuse_flag(node, "single_word");
    if (const auto other = vocabulary.find(added.text); other != vocabulary.end() && *other != added.id) {
      node.refuse("\"" + printable(added.text) + "\" has id " + std::to_string(added.id) +
                  ", in the vocabulary it has " + other->dump());
    }
    make_room(parts.tokens, added.id, named, node);
    BpeToken& token = parts.tokens[static_cast<size_t>(added.id)];
    if (token.kind != TokenKind::absent && (token.spelling.empty() ? token.text : token.spelling) != added.text) {
      node.refuse("id " + std::to_string(added.id) + " for \"" + printable(added.text) + "\" is also that of \"" +
                  printable(token.spelling.empty() ? token.text : token.spelling) + "\"");
    }
    token.text = added.text;
    token.kind = added.control ? TokenKind::control : TokenKind::user_defined;
    parts.added.push_back(std::move(added));
  }
}

/// Split: one of the patterns that pretokenizer.h knows. They leave no gaps between matches, so that keeping the
/// matches (behavior "Removed", inverted) is the same as isolating them.
Split split_rule(const Node& node) {
  const Node pattern = node.at("pattern");
  const std::string regex = pattern.at("Regex").text();
  const auto rule = split_of_regex(regex);
  if (!rule) pattern.refuse("unknown pattern " + printable(regex));
  const std::string behavior = node.at("behavior").text();
  const bool invert = node.flag("invert", false);
  if (!(behavior == "Isolated" && !invert) && !(behavior == "Removed" && invert)) {
    node.refuse("behavior \"" + printable(behavior) + "\"" + (invert ? ", inverted," : "") + " is not supported");
  }
  return *rule;
}

/// Appends the rules of one component. ByteLevel ends the list: what came after it would see its alphabet, not the
/// text.
void read_pre_tokenizer(const Node& node, BpeParts& parts, std::vector<Split>& rules) {
  const std::string type = type_of(node);
  if (type == "Sequence") {
    for (const Node& part : node.at("pretokenizers").items()) read_pre_tokenizer(part, parts, rules);
    return;
  }
  if (parts.byte_level) node.refuse("\"" + printable(type) + "\" after ByteLevel is not supported");
  if (type == "Split") {
    rules.push_back(split_rule(node));
  } else if (type == "Digits") {
    rules.push_back(node.flag("individual_digits", false) ? Split::single_digit : Split::digit_run);
  } else if (type == "ByteLevel") {
    parts.byte_level = true;
    parts.space_first = node.flag("add_prefix_space", true);
    if (parts.space_first && !rules.empty()) node.refuse("\"add_prefix_space\" after another rule is not supported");
    if (node.flag("use_regex", true)) rules.push_back(Split::gpt2);
  } else {
    refuse_type(node);
  }
}

/// The token that a template puts before the text, or -1.
int32_t leading_token(const Node& node) {
  int32_t bos = -1;
  bool seen_text = false;
  for (const Node& part : node.at("single").items()) {
    if (part.has("Sequence")) {
      seen_text = true;
      continue;
    }
    const std::string name = part.at("SpecialToken").at("id").text();
    const auto ids = node.at("special_tokens").at(name).at("ids").items();
    if (seen_text || bos >= 0 || ids.size() != 1) part.refuse("only one token, before the text, is supported");
    bos = ids[0].id();
  }
  if (!seen_text) node.refuse("the template leaves the text out");
  return bos;
}

/// Whether something in the post-processor says if there is a beginning-of-sequence token; if so, it is in `parts`.
bool read_post_processor(const Node& node, BpeParts& parts) {
  const std::string type = type_of(node);
  if (type == "ByteLevel") return false;  // moves offsets only
  if (type == "TemplateProcessing") {
    if (parts.add_bos) node.refuse("a second template");
    parts.bos = leading_token(node);
    parts.add_bos = parts.bos >= 0;
    return true;
  }
  if (type != "Sequence") refuse_type(node);
  bool decided = false;
  for (const Node& part : node.at("processors").items()) decided |= read_post_processor(part, parts);
  return decided;
}

/// bos_token or eos_token of tokenizer_config.json: a string or an added token's description.
int32_t named_token(const Node& config, const std::string& key, const BpeParts& parts) {
  if (!config.has(key)) return -1;
  const Node node = config.at(key);
  const std::string text = node.value().is_object() ? node.at("content").text() : node.text();
  for (size_t id = 0; id < parts.tokens.size(); ++id) {
    const BpeToken& token = parts.tokens[id];
    if (token.kind != TokenKind::absent && token.text == text) return static_cast<int32_t>(id);
  }
  node.refuse("\"" + printable(text) + "\" is not in the vocabulary");
}

/// The roles that a configuration names tokens for.
void read_special_tokens(const Node& config, std::map<std::string, std::string>& tokens) {
  for (const char* role :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    if (!config.has(role)) continue;
    const Node node = config.at(role);
    tokens.emplace(role, node.value().is_object() ? node.at("content").text() : node.text());
  }
}

// ---- SentencePiece vocabularies, in the two layouts that have been in use

/// What tells a SentencePiece vocabulary from a byte-level one.
struct SpmLayout {
  PrefixSpace prefix = PrefixSpace::never;
  bool drops_leading_space = false, words_apart = false;
};

void expect_text(const Node& node, const std::string& key, std::string_view expected) {
  const std::string text = node.at(key).text();
  if (text != expected) node.at(key).refuse("\"" + printable(text) + "\" is not supported");
}

/// Older layout: a normalizer puts U+2581 before the text and in place of each space.
void read_spm_normalizer(const Node& node, SpmLayout& layout) {
  const std::string type = type_of(node);
  if (type == "Sequence") {
    for (const Node& part : node.at("normalizers").items()) read_spm_normalizer(part, layout);
  } else if (type == "Prepend") {
    expect_text(node, "prepend", kSpaceMark);
    layout.prefix = PrefixSpace::each;
  } else if (type == "Replace") {
    expect_text(node.at("pattern"), "String", " ");
    expect_text(node, "content", kSpaceMark);
  } else {
    refuse_type(node);
  }
}

/// Newer layout: the pre-tokenizer Metaspace does the same, but no space goes before one that is there.
void read_metaspace(const Node& node, SpmLayout& layout) {
  if (type_of(node) != "Metaspace") refuse_type(node);
  expect_text(node, "replacement", kSpaceMark);
  const std::string standard = node.flag("add_prefix_space", true) ? "always" : "never";
  const std::string scheme = node.has("prepend_scheme") ? node.at("prepend_scheme").text() : standard;
  if (scheme == "always") {
    layout.prefix = PrefixSpace::each_unless;
  } else if (scheme == "first") {
    layout.prefix = PrefixSpace::first_unless;
  } else if (scheme != "never") {
    node.at("prepend_scheme").refuse("\"" + printable(scheme) + "\" is not supported");
  }
  layout.words_apart = node.flag("split", true);
}

void read_spm_decoder(const Node& node, SpmLayout& layout) {
  const std::string type = type_of(node);
  if (type == "Sequence") {
    for (const Node& part : node.at("decoders").items()) read_spm_decoder(part, layout);
  } else if (type == "Metaspace") {
    layout.drops_leading_space = true;
  } else if (type == "Replace") {
    expect_text(node.at("pattern"), "String", kSpaceMark);
    expect_text(node, "content", " ");
  } else if (type == "Strip") {
    expect_text(node, "content", " ");
    if (node.at("start").value() != 1 || node.at("stop").value() != 0) node.refuse("expected one space at the start");
    layout.drops_leading_space = true;
  } else if (type != "ByteFallback" && type != "Fuse") {
    refuse_type(node);
  }
}

bool names_type(const json& component, std::string_view type) {
  if (component.is_object() && component.value("type", json()) == type) return true;
  for (const char* list : {"normalizers", "pretokenizers"}) {
    if (!component.is_object() || !component.contains(list)) continue;
    for (const json& part : component[list]) {
      if (part.is_object() && part.value("type", json()) == type) return true;
    }
  }
  return false;
}

std::optional<SpmLayout> spm_layout(const Node& root) {
  const auto has = [&](const char* key, const char* type) {
    return root.has(key) && names_type(root.at(key).value(), type);
  };
  const bool is_spm = root.at("model").flag("byte_fallback", false) || has("normalizer", "Prepend") ||
                      has("normalizer", "Replace") || has("pre_tokenizer", "Metaspace");
  if (!is_spm) return std::nullopt;
  SpmLayout layout;
  if (root.has("normalizer")) read_spm_normalizer(root.at("normalizer"), layout);
  if (root.has("pre_tokenizer")) {
    const Node pre = root.at("pre_tokenizer");
    if (layout.prefix != PrefixSpace::never)
      pre.refuse("a pre-tokenizer beside the normalizer \"Prepend\" is not supported");
    read_metaspace(pre, layout);
  }
  if (root.has("decoder")) read_spm_decoder(root.at("decoder"), layout);
  return layout;
}

SpmParts spm_parts(const Node& model, const SpmLayout& layout, BpeParts parts) {
  SpmParts spm;
  spm.source = parts.source;
  spm.byte_fallback = model.flag("byte_fallback", false);
  spm.fuse_unknown = model.flag("fuse_unk", false);
  refuse_flag(model, "ignore_merges");
  for (BpeToken& token : parts.tokens) {
    constexpr SpmPiece::Kind kKinds[] = {SpmPiece::Kind::absent, SpmPiece::Kind::normal, SpmPiece::Kind::control,
                                         SpmPiece::Kind::user_defined};
    SpmPiece piece{token.spelling.empty() ? token.text : token.spelling, kKinds[static_cast<int>(token.kind)]};
    if (spm.byte_fallback && token.kind == TokenKind::normal && byte_of_piece(piece.text) >= 0) {
      piece.kind = SpmPiece::Kind::byte;
    }
    spm.pieces.push_back(std::move(piece));
  }
  if (model.has("unk_token")) {
    const std::string unknown = model.at("unk_token").text();
    const auto found = std::find_if(spm.pieces.begin(), spm.pieces.end(), [&](const SpmPiece& piece) {
      return piece.kind != SpmPiece::Kind::absent && piece.text == unknown;
    });
    if (found == spm.pieces.end())
      model.at("unk_token").refuse("\"" + printable(unknown) + "\" is not in the vocabulary");
    spm.unknown = static_cast<int32_t>(found - spm.pieces.begin());
  }
  spm.merges_by_score = false;
  spm.merges = std::move(parts.merges);
  spm.added = std::move(parts.added);
  spm.prefix = layout.prefix;
  spm.drops_leading_space = layout.drops_leading_space;
  spm.words_apart = layout.words_apart;
  spm.add_bos = parts.add_bos;
  spm.bos = parts.bos;
  spm.eos = std::move(parts.eos);
  spm.special_tokens = std::move(parts.special_tokens);
  return spm;
}

BpeParts read_tokenizer(const Node& root, bool is_spm) {
  BpeParts parts;
  parts.source = root.place();
  parts.byte_level = false;
  const Node model = root.at("model");
  check_model(model);
  if (!is_spm) {
    if (root.has("normalizer")) parts.nfc = asks_for_nfc(root.at("normalizer"));
    std::vector<Split> rules;
    if (root.has("pre_tokenizer")) read_pre_tokenizer(root.at("pre_tokenizer"), parts, rules);
    parts.pre = PreTokenizer(rules);
    if (root.has("decoder") && type_of(root.at("decoder")) != "ByteLevel") refuse_type(root.at("decoder"));
  }
  parts.ignore_merges = model.flag("ignore_merges", false);

  const Node vocabulary = model.at("vocab");
  const bool has_added = root.has("added_tokens");
  const size_t named = vocabulary.value().size() + (has_added ? root.at("added_tokens").value().size() : 0);
  const int bytes_named = read_vocabulary(vocabulary, named, parts);
  if (has_added) read_added_tokens(root.at("added_tokens"), vocabulary.value(), named, parts);
  if (has_added && parts.nfc) check_added_for_nfc(root.at("added_tokens"), parts);
  if (!is_spm && bytes_named < 256 && model.has("unk_token") && !model.at("unk_token").text().empty()) {
    model.refuse("\"unk_token\" is supported only where every byte has a token and it is never used");
  }
  read_merges(model.at("merges"), parts);
  return parts;
}

/// Tokens that tokenizer_config.json has beyond those of tokenizer.model.
void add_config_tokens(const Node& config, SpmParts& parts) {
  if (!config.has("added_tokens_decoder")) return;
  const Node list = config.at("added_tokens_decoder");
  if (!list.value().is_object()) list.refuse("expected an object, found " + list.found());
  for (const auto& [key, value] : list.value().items()) {
    const Node node(value, list.place() + "." + printable(key));
    const std::string text = node.at("content").text();
    const json number = json::parse(key, nullptr, false);
    const auto id = static_cast<size_t>(Node(number, node.place()).id());
    const bool is_new = id >= parts.pieces.size() || parts.pieces[id].kind == SpmPiece::Kind::absent;
    if (!is_new && parts.pieces[id].text != text) {
      node.refuse("\"" + printable(text) + "\", in the vocabulary it is \"" + printable(parts.pieces[id].text) + "\"");
    }
    if (!is_new || text.empty()) continue;
    if (id > 16 * parts.pieces.size() + 65536) node.refuse("token id " + key + " is far beyond the vocabulary");
    if (id >= parts.pieces.size()) parts.pieces.resize(id + 1);
    const bool control = node.flag("special", false);
    parts.pieces[id] = {text, control ? SpmPiece::Kind::control : SpmPiece::Kind::user_defined};
    parts.added.push_back({text, static_cast<int32_t>(id), control, node.flag("lstrip", false),
                           node.flag("rstrip", false), node.flag("normalized", !control)});
  }
}

/// A tokenizer.model with what tokenizer_config.json says of it. "legacy": false means, as in transformers, that only
/// the beginning of the text gets a space and not what follows a special token.
std::unique_ptr<Tokenizer> from_sentencepiece(const std::string& path, const Node& config) {
  SpmParts parts = read_sentencepiece_model(path);
  parts.add_bos = config.flag("add_bos_token", parts.bos >= 0);
  if (!config.flag("legacy", true) && parts.prefix == PrefixSpace::each) parts.prefix = PrefixSpace::first;
  add_config_tokens(config, parts);
  std::map<std::string, std::string> named;
  read_special_tokens(config, named);
  named.merge(parts.special_tokens);
  parts.special_tokens = std::move(named);
  return make_spm_tokenizer(std::move(parts));
}

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::from_hf_folder(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json", config_path = folder + "/tokenizer_config.json";
  std::error_code ignored;  // what cannot be looked at says why when it is opened
  const bool has_config = std::filesystem::exists(config_path, ignored);
  const json config_file = has_config ? parse_json_file(config_path) : json::object();
  const Node config(config_file, config_path);
  if (!std::filesystem::exists(path, ignored) && std::filesystem::exists(folder + "/tokenizer.model", ignored)) {
    return from_sentencepiece(folder + "/tokenizer.model", config);
  }
  const json file = parse_json_file(path);
  const Node root(file, path);
  const auto layout = spm_layout(root);
  BpeParts parts = read_tokenizer(root, layout.has_value());
  const bool decided = root.has("post_processor") && read_post_processor(root.at("post_processor"), parts);

  if (has_config) {
    read_special_tokens(config, parts.special_tokens);
    if (parts.bos < 0) parts.bos = named_token(config, "bos_token", parts);
    const bool asks_for_bos = config.flag("add_bos_token", false);
    if (!decided) parts.add_bos = asks_for_bos;
    if (const int32_t eos = named_token(config, "eos_token", parts); eos >= 0) parts.eos.push_back(eos);
  }
  if (parts.bos >= 0 && static_cast<size_t>(parts.bos) < parts.tokens.size()) {
    parts.special_tokens.emplace("bos_token", parts.tokens[static_cast<size_t>(parts.bos)].text);
  }
  if (layout) return make_spm_tokenizer(spm_parts(root.at("model"), *layout, std::move(parts)));
  return make_bpe_tokenizer(std::move(parts));
}

}  // namespace fut
