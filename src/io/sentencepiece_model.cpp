// tokenizer.model: SentencePiece's ModelProto, read by hand. Of protocol buffers only what the file needs: fields of
// four wire types, every length checked against what is left.
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "io/mapped_file.h"
#include "io/spm.h"

namespace fut {
namespace {

using Kind = SpmPiece::Kind;

constexpr uint64_t kMaxModelBytes = 100'000'000;

/// One field of a message: its number, and its value as the wire type has it.
struct Field {
  uint32_t number;
  uint32_t wire_type;      // 0 varint, 1 eight bytes, 2 a length and bytes, 5 four bytes
  uint64_t value = 0;      // of types 0, 1 and 5
  std::string_view bytes;  // of type 2
};

class Message {
 public:
  Message(std::string_view bytes, const std::string& where) : rest_(bytes), where_(where) {}

  /// The next field, or nothing at the end.
  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    const uint64_t key = varint();
    Field field{static_cast<uint32_t>(key >> 3), static_cast<uint32_t>(key & 7), 0, {}};
    FUT_CHECK(key >> 3 > 0 && key >> 3 < 1u << 29, where_, ": a field with the number ", key >> 3);
    switch (field.wire_type) {
      case 0: field.value = varint(); break;
      case 1: field.value = fixed(8); break;
      case 2: {
        const uint64_t length = varint();
        FUT_CHECK(length <= rest_.size(), where_, ": field ", field.number, " of ", length, " bytes, ", rest_.size(),
                  " are left");
        field.bytes = rest_.substr(0, length);
        rest_.remove_prefix(length);
        break;
      }
      case 5: field.value = fixed(4); break;
      default: fail(where_, ": field ", field.number, " has the wire type ", field.wire_type, ", which is not known");
    }
    return field;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      FUT_CHECK(!rest_.empty(), where_, ": ends inside a number");
      const auto byte = static_cast<unsigned char>(rest_[0]);
      rest_.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    fail(where_, ": a number of more than ten bytes");
  }

  uint64_t fixed(size_t bytes) {
    FUT_CHECK(rest_.size() >= bytes, where_, ": ends inside a number");
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= uint64_t{static_cast<unsigned char>(rest_[i])} << 8 * i;
    rest_.remove_prefix(bytes);
    return value;
  }

  std::string_view rest_;
  const std::string& where_;
};

void expect_type(const Field& field, uint32_t wire_type, const std::string& where) {
  FUT_CHECK(field.wire_type == wire_type, where, ": field ", field.number, " has the wire type ", field.wire_type,
            ", expected ", wire_type);
}

SpmPiece read_piece(std::string_view bytes, const std::string& where) {
  SpmPiece piece{"", Kind::normal, 0};
  Message message(bytes, where);
  while (const auto field = message.next()) {
    if (field->number == 1) {
      expect_type(*field, 2, where);
      piece.text = field->bytes;
    } else if (field->number == 2) {
      expect_type(*field, 5, where);
      const auto bits = static_cast<uint32_t>(field->value);
      memcpy(&piece.score, &bits, sizeof bits);
    } else if (field->number == 3) {
      expect_type(*field, 0, where);
      constexpr Kind kKinds[] = {Kind::normal,       Kind::unknown, Kind::control,
                                 Kind::user_defined, Kind::absent,  Kind::byte};
      FUT_CHECK(field->value >= 1 && field->value <= 6, where, ": type ", field->value, ", expected 1 to 6");
      piece.kind = kKinds[field->value - 1];
    }
  }
  FUT_CHECK(!piece.text.empty(), where, ": has no text");
  FUT_CHECK(piece.kind != Kind::byte || byte_of_piece(piece.text) >= 0, where, ": is the byte \"",
            printable(piece.text), "\", expected <0x00> to <0xFF>");
  return piece;
}

/// trainer_spec: how the vocabulary was made, and the ids of its special tokens.
void read_trainer(std::string_view bytes, SpmParts& parts, int32_t* eos) {
  const std::string where = parts.source + ": trainer_spec";
  Message message(bytes, where);
  uint64_t model_type = 1;
  while (const auto field = message.next()) {
    if (field->wire_type != 0) continue;
    const auto id = static_cast<int32_t>(field->value);  // -1 is written as ten bytes
    switch (field->number) {
      case 3: model_type = field->value; break;
      case 24: FUT_CHECK(field->value == 0, where, ": treat_whitespace_as_suffix is not supported"); break;
      case 35: parts.byte_fallback = field->value != 0; break;
      case 40: parts.unknown = id; break;
      case 41: parts.bos = id; break;
      case 42: *eos = id; break;
      default: break;
    }
  }
  constexpr const char* kTypes[] = {"unigram", "bpe", "word", "char"};
  FUT_CHECK(model_type == 2, where, ": the model is ",
            model_type >= 1 && model_type <= 4 ? kTypes[model_type - 1] : "unknown", ", expected bpe");
}

/// normalizer_spec: this library never normalises, so that only what leaves the text alone is accepted.
void read_normalizer(std::string_view bytes, SpmParts& parts, bool* removes_spaces) {
  const std::string where = parts.source + ": normalizer_spec";
  Message message(bytes, where);
  while (const auto field = message.next()) {
    if (field->number == 2) {
      FUT_CHECK(field->wire_type == 2 && field->bytes.empty(), where, ": normalisation of characters is not supported");
    } else if (field->number == 3 && field->wire_type == 0) {
      parts.prefix = field->value ? PrefixSpace::each : PrefixSpace::never;
    } else if (field->number == 4 && field->wire_type == 0) {
      *removes_spaces = field->value != 0;
    } else if (field->number == 5 && field->wire_type == 0) {
      FUT_CHECK(field->value != 0, where, ": spaces that are not escaped are not supported");
    }
  }
}

}  // namespace

SpmParts read_sentencepiece_model(const std::string& path) {
  const MappedFile file(path);
  FUT_CHECK(file.size() <= kMaxModelBytes, path, ": ", file.size(), " bytes, expected at most ", kMaxModelBytes);
  SpmParts parts;
  parts.source = path;
  parts.unknown = 0, parts.bos = 1;  // SentencePiece's defaults, which files leave out
  parts.byte_fallback = false;
  int32_t eos = 2;
  bool removes_spaces = true, has_trainer = false;
  Message model(file.text(), path);
  while (const auto field = model.next()) {
    if (field->number > 3) continue;
    expect_type(*field, 2, path);
    if (field->number == 1) {
      parts.pieces.push_back(read_piece(field->bytes, cat(path, ": piece ", parts.pieces.size())));
    } else if (field->number == 2) {
      read_trainer(field->bytes, parts, &eos);
      has_trainer = true;
    } else {
      read_normalizer(field->bytes, parts, &removes_spaces);
    }
  }
  FUT_CHECK(!parts.pieces.empty() && has_trainer, path, ": ", parts.pieces.size(), " pieces and ",
            has_trainer ? "the" : "no",
            " settings of the trainer, expected both (no SentencePiece model, or cut off?)");
  FUT_CHECK(!removes_spaces, path, ": remove_extra_whitespaces is not supported");
  if (eos >= 0) parts.eos.push_back(eos);
  add_special_pieces(parts);
  return parts;
}

}  // namespace fut
