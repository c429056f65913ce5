// SHA-256 (FIPS 180-4), to name a text in a report.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

namespace fut::app {

class Sha256 {
 public:
  /// The digest as 64 hexadecimal digits.
  static std::string hex(std::string_view message) {
    Sha256 state;
    size_t whole = message.size() / 64 * 64;
    for (size_t at = 0; at < whole; at += 64) state.absorb(message.data() + at);

    std::string tail(message.substr(whole));
    tail += '\x80';
    while (tail.size() % 64 != 56) tail += '\0';
    const uint64_t bits = uint64_t{message.size()} * 8;
    for (int shift = 56; shift >= 0; shift -= 8) tail += static_cast<char>(bits >> shift & 0xff);
    for (size_t at = 0; at < tail.size(); at += 64) state.absorb(tail.data() + at);

    std::string digits;
    for (const uint32_t word : state.hash_) {
      for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
    }
    return digits;
  }

 private:
  /// The standard's constants: the first 32 bits of the fractional parts of roots of the first primes.
  template <size_t N, class Root>
  static std::array<uint32_t, N> fractions_of_roots(Root root) {
    std::array<uint32_t, N> words{};
    size_t found = 0;
    for (int candidate = 2; found < N; ++candidate) {
      bool prime = true;
      for (int divisor = 2; divisor * divisor <= candidate; ++divisor) prime = prime && candidate % divisor != 0;
      if (!prime) continue;
      const long double value = root(static_cast<long double>(candidate));
      words[found++] = static_cast<uint32_t>((value - std::floor(value)) * 4294967296.0L);
    }
    return words;
  }

  void absorb(const char* block) {
    static const auto kRound = fractions_of_roots<64>([](long double p) { return std::cbrt(p); });
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<uint8_t>(block[i]);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = hash_;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 =
          h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) hash_[i] += add[i];
  }

  std::array<uint32_t, 8> hash_ = fractions_of_roots<8>([](long double p) { return std::sqrt(p); });
};

}  // namespace fut::app
