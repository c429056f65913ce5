#include "io/nfc.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "io/nfc_tables.h"
#include "io/utf8.h"

namespace fut {
namespace {

/// Syllables are made of a leading consonant, a vowel and perhaps a trailing consonant (Unicode, section 3.12).
struct Hangul {
  static constexpr char32_t kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11A7, kSyllable = 0xAC00;
  static constexpr char32_t kLeads = 19, kVowels = 21, kTrails = 28, kSyllables = kLeads * kVowels * kTrails;
  static bool is_vowel(char32_t c) { return c >= kVowel && c < kVowel + kVowels; }
  static bool is_trail(char32_t c) { return c > kTrail && c < kTrail + kTrails; }
};

constexpr char32_t kFirstSpecial = 0x300;  // nothing below takes part, unless something from here on follows

unsigned char combining_class(char32_t code) {
  const auto* range = std::partition_point(std::begin(kCombining), std::end(kCombining),
                                           [code](const CombiningRange& r) { return r.last < code; });
  return range != std::end(kCombining) && range->first <= code ? range->combining_class : 0;
}

template <size_t n>
const CanonicalPair* find_whole(const CanonicalPair (&table)[n], char32_t code) {
  const auto* pair = std::partition_point(std::begin(table), std::end(table),
                                          [code](const CanonicalPair& p) { return p.whole < code; });
  return pair != std::end(table) && pair->whole == code ? pair : nullptr;
}

/// 0: there is no such character.
char32_t composed(char32_t first, char32_t second) {
  using H = Hangul;
  if (first >= H::kLead && first < H::kLead + H::kLeads && H::is_vowel(second))
    return H::kSyllable + ((first - H::kLead) * H::kVowels + (second - H::kVowel)) * H::kTrails;
  const bool open =
      first >= H::kSyllable && first < H::kSyllable + H::kSyllables && (first - H::kSyllable) % H::kTrails == 0;
  if (open && H::is_trail(second)) return first + (second - H::kTrail);
  static const std::map<std::pair<char32_t, char32_t>, char32_t> pairs = [] {
    std::map<std::pair<char32_t, char32_t>, char32_t> made;
    for (const CanonicalPair& p : kComposing) made[{p.first, p.second}] = p.whole;
    return made;
  }();
  const auto found = pairs.find({first, second});
  return found == pairs.end() ? 0 : found->second;
}

/// Whether a character stays as it is and whatever stands before it has no say in it.
bool stands_alone(char32_t code) {
  static const std::set<char32_t> seconds = [] {
    std::set<char32_t> made;
    for (const CanonicalPair& p : kComposing) made.insert(p.second);
    return made;
  }();
  if (code < kFirstSpecial) return true;
  return combining_class(code) == 0 && !find_whole(kDecomposing, code) && !Hangul::is_vowel(code) &&
         !Hangul::is_trail(code) && !seconds.contains(code);
}

struct Mark {
  char32_t code;
  unsigned char combining_class;
};

void append_decomposed(std::vector<Mark>& out, char32_t code) {
  using H = Hangul;
  if (code >= H::kSyllable && code < H::kSyllable + H::kSyllables) {
    const char32_t index = code - H::kSyllable, trail = index % H::kTrails;
    out.push_back({H::kLead + index / H::kTrails / H::kVowels, 0});
    out.push_back({H::kVowel + index / H::kTrails % H::kVowels, 0});
    if (trail) out.push_back({H::kTrail + trail, 0});
    return;
  }
  const CanonicalPair* pair = find_whole(kComposing, code);
  if (!pair) pair = find_whole(kDecomposing, code);
  if (!pair) return out.push_back({code, combining_class(code)});
  append_decomposed(out, pair->first);
  if (pair->second) append_decomposed(out, pair->second);
}

/// Marks between two characters of class 0 go by their classes.
void reorder(std::vector<Mark>& marks) {
  for (auto at = marks.begin(); at != marks.end();) {
    const auto end = std::find_if(at, marks.end(), [](const Mark& m) { return m.combining_class == 0; });
    std::stable_sort(at, end, [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
    at = end == marks.end() ? end : end + 1;
  }
}

/// A character goes into the last one of class 0, unless one that stays between them is of no lower class.
void compose(std::vector<Mark>& marks) {
  size_t kept = 0, starter = marks.size();
  for (const Mark mark : std::vector<Mark>(marks)) {
    const bool near = starter + 1 == kept;
    if (starter < kept && (near || marks[kept - 1].combining_class < mark.combining_class)) {
      if (const char32_t whole = composed(marks[starter].code, mark.code)) {
        marks[starter].code = whole;
        continue;
      }
    }
    if (mark.combining_class == 0) starter = kept;
    marks[kept++] = mark;
  }
  marks.resize(kept);
}

void append_normalised(std::string& out, std::string_view text) {
  std::vector<Mark> marks;
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = utf8_at(text, at);
    append_decomposed(marks, c.code);
    at += c.length;
  }
  reorder(marks);
  compose(marks);
  for (const Mark& mark : marks) append_utf8(out, mark.code);
}

}  // namespace

/// Only stretches with a character that does not stand alone are taken apart; each begins with the one before it.
std::optional<std::string> to_nfc(std::string_view text) {
  std::string out;
  size_t done = 0, previous = 0;  // what is in `out`; where the character before `at` begins, if it is one
  for (size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      previous = at++;
      continue;
    }
    Utf8Char c = utf8_at(text, at);
    if (c.state != Utf8::valid || stands_alone(c.code)) {
      previous = c.state == Utf8::valid ? at : at + std::max<size_t>(c.length, 1);
      at += std::max<size_t>(c.length, 1);
      continue;
    }
    const size_t begin = previous;
    while (c.state == Utf8::valid && !stands_alone(c.code)) {
      at += c.length;
      if (at == text.size()) break;
      c = utf8_at(text, at);
    }
    out += text.substr(done, begin - done);
    append_normalised(out, text.substr(begin, at - begin));
    done = previous = at;
  }
  if (done == 0) return std::nullopt;
  out += text.substr(done);
  if (out == text) return std::nullopt;
  return out;
}

}  // namespace fut
