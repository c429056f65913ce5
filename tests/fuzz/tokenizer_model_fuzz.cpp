// tokenizer.model: a protocol buffer whose fields have wrong numbers, types, lengths and values.
#include "io/spm.h"
#include "mutate.h"
#include "use_tokenizer.h"

namespace fut::fuzz {
namespace {

constexpr char kModel[] = "tokenizer.model", kConfig[] = "tokenizer_config.json", kText[] = "text.txt";

const std::vector<std::string> kPieces = {"<unk>",  "<s>",     "</s>",   "<0x00>",   "<0xFF>",
                                          "<0xfg>", "\u2581",  "a",      "b",        "ab",
                                          "aab",    "\u2581a", "\u00e9", "\xe2\x96", "aaaaaaaaaaaaaaaa"};
const std::vector<std::string> kWords = {"add_bos_token",
                                         "legacy",
                                         "added_tokens_decoder",
                                         "content",
                                         "special",
                                         "lstrip",
                                         "rstrip",
                                         "normalized",
                                         "0",
                                         "40",
                                         "65000",
                                         "<extra>",
                                         "bos_token",
                                         "eos_token"};

/// One field: of wire type 2 either bytes or further fields.
struct Field {
  uint64_t number, wire, value;
  std::string bytes;
  std::vector<Field> fields;
};

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

uint64_t take_varint(const std::string& bytes, size_t& at) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes.at(at++));
    value |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return value;
  }
}

/// The fields of a seed; those of depth 0 are messages.
std::vector<Field> read_fields(const std::string& bytes, int depth) {
  std::vector<Field> fields;
  for (size_t at = 0; at < bytes.size();) {
    const uint64_t key = take_varint(bytes, at);
    Field field{key >> 3, key & 7, 0, "", {}};
    if (field.wire == 0) {
      field.value = take_varint(bytes, at);
    } else {
      const size_t length = field.wire == 2 ? take_varint(bytes, at) : field.wire == 1 ? 8 : 4;
      field.bytes = bytes.substr(at, length);
      at += length;
      if (field.wire == 2 && depth == 0) field.fields = read_fields(field.bytes, 1);
    }
    fields.push_back(std::move(field));
  }
  return fields;
}

std::string to_bytes(const std::vector<Field>& fields, Random& random) {
  std::string all;
  for (const Field& field : fields) {
    all += varint(field.number << 3 | field.wire);
    if (field.wire == 0) {
      all += varint(field.value);
      if (random.chance(1)) all.back() |= '\x80';  // a number without an end
      continue;
    }
    const std::string bytes = field.fields.empty() ? field.bytes : to_bytes(field.fields, random);
    const bool lies = field.wire == 2 && random.below(400) == 0;
    if (field.wire == 2) all += varint(lies ? odd_number(random) : bytes.size());
    all += bytes;
  }
  return all;
}

void change_field(Field& field, Random& random) {
  switch (random.below(7)) {
    case 0: field.number = random.chance(80) ? random.below(50) : odd_number(random) & ~uint64_t{7}; break;
    case 1: field.wire = random.below(8); break;
    case 2: field.value = random.chance(50) ? random.below(8) : odd_number(random); break;
    case 3: field.bytes = odd_text(random, kPieces); break;
    default:
      if (field.wire == 0) {
        field.value = random.chance(50) ? random.below(50) : odd_number(random);
      } else if (field.wire == 5) {
        mutate_bytes(field.bytes, random, std::string("\0\0\xc0\x7f\0\0\x80\x7f", 8));  // a NaN, an infinity
        field.bytes.resize(4);
      } else if (random.chance(50)) {
        field.bytes = odd_text(random, kPieces);
      } else {
        mutate_bytes(field.bytes, random);
      }
  }
}

void change_fields(std::vector<Field>& fields, Random& random) {
  if (fields.empty()) return;
  const auto at = fields.begin() + static_cast<std::ptrdiff_t>(random.below(fields.size()));
  const size_t what = random.below(12);
  if (what == 0) {
    fields.erase(at);
  } else if (what == 1) {
    fields.insert(at, Field(*at));
  } else if (what == 2) {
    std::swap(*at, fields[random.below(fields.size())]);
  } else if (!at->fields.empty() && what < 11) {
    change_fields(at->fields, random);
  } else {
    change_field(*at, random);
  }
}

class TokenizerModelTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kModel, kConfig, kText}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string& model = input[kModel];
    if (random.chance(10)) return mutate_bytes(model, random, random.pick(seeds).at(kModel));
    std::vector<Field> fields = read_fields(model, 0);
    for (size_t count = 1 + random.below(random.chance(70) ? 2 : 8); count > 0; --count) change_fields(fields, random);
    if (random.chance(90)) model = to_bytes(fields, random);
    if (random.chance(20)) input[kConfig] = mutated_json(input[kConfig], random, kWords);
    if (random.chance(30)) mutate_bytes(input[kText], random, model);
    if (random.chance(5)) input.erase(kConfig);
  }

  void run(const Input& input, const std::string& folder) const override {
    use_tokenizer(*Tokenizer::from_hf_folder(folder), input.at(kText));
    tokenizer_json(read_sentencepiece_model(folder + "/" + kModel));
  }
};

}  // namespace

std::unique_ptr<Target> tokenizer_model_target() { return std::make_unique<TokenizerModelTarget>(); }

}  // namespace fut::fuzz
