#include "io/utf8.h"

namespace fut {
namespace {

struct Lead {
  size_t length;                         // of the whole character; 0: no character begins with this byte
  unsigned char second_min, second_max;  // rules out overlong forms, surrogates and codes past U+10FFFF
};

Lead lead_of(unsigned char byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

Utf8Char utf8_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const Lead lead = lead_of(byte(0));
  if (lead.length == 0) return {kReplacement, 1, Utf8::invalid};
  if (lead.length == 1) return {byte(0), 1, Utf8::valid};
  char32_t code = byte(0) & (0x7Fu >> lead.length);
  for (size_t i = 1; i < lead.length; ++i) {
    if (at + i == text.size()) return {kReplacement, i, Utf8::cut_short};
    const unsigned char min = i == 1 ? lead.second_min : 0x80, max = i == 1 ? lead.second_max : 0xBF;
    if (byte(i) < min || byte(i) > max) return {kReplacement, i, Utf8::invalid};
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  return {code, lead.length, Utf8::valid};
}

void append_utf8(std::string& out, char32_t code) {
  const auto tail = [&](int shift) { out += static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12);
    tail(6), tail(0);
  } else {
    out += static_cast<char>(0xF0 | code >> 18);
    tail(12), tail(6), tail(0);
  }
}

size_t append_valid_utf8(std::string& out, std::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Char c = utf8_at(bytes, at);
    if (c.state == Utf8::cut_short) break;
    append_utf8(out, c.code);
    at += c.length;
  }
  return at;
}

}  // namespace fut
