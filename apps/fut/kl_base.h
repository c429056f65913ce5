// What one run predicted for every token of a text, in a file, and how far another run is from it.
//
// The file: a header of 128 bytes, then a row a scored token.
//   header  "futklb1\n"; SHA-256 of the text as 64 hexadecimal digits; 7 int64, little-endian: tokens of the text that
//           were taken, context, stride, whether windows began with BOS (0 or 1), vocabulary V, and two zeros
//   row     of token BOS ? 0 : 1 and every later one: float32 the token's negative log-likelihood; then V uint16: how
//   far the logarithm of a token's probability is
//           below that of the best one, in steps of 1/2048 nat (65535: 32 nats or more)
// That is 2 V + 4 bytes a token. Rows come in any order, by the token's index, because decode scores windows side by
// side. Probabilities are normalised again when read, so a divergence is never below zero.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace fut::app {

/// What two runs must share for their rows to be comparable.
struct KlSubject {
  std::string text_sha256;
  int64_t tokens = 0, context = 0, stride = 0, bos = 0, vocabulary = 0;

  int64_t first() const { return bos ? 0 : 1; }  ///< the first token that has a prediction
  int64_t row_bytes() const { return 2 * vocabulary + 4; }
};

/// Writes a base through PATH.partial: PATH appears when it is whole.
class KlWriter {
 public:
  KlWriter(const std::string& path, const KlSubject& subject);
  ~KlWriter();
  void add(int64_t index, double nll, const float* logits);
  void finish();

 private:
  void write(const void* data, size_t bytes);

  KlSubject subject_;
  std::string path_, partial_;
  std::FILE* file_ = nullptr;
  int64_t rows_ = 0;
  std::vector<uint16_t> codes_;
};

struct KlResult {
  int64_t tokens = 0;
  double mean = 0, p99 = 0, max = 0;                 ///< KL(base || this), nats a token
  double top1_agreement = 0;                         ///< share of tokens for which both have the same best token
  double nll_difference = 0, nll_difference_se = 0;  ///< this minus base, mean over tokens, and its standard error
};

/// Compares row by row with an existing base. Refuses a base of another subject.
class KlReader {
 public:
  KlReader(const std::string& path, const KlSubject& subject);
  void add(int64_t index, double nll, const float* logits);
  KlResult finish();

 private:
  bool read(void* data, size_t bytes);

  KlSubject subject_;
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::vector<uint16_t> codes_;
  std::vector<double> divergences_, nll_differences_;
  int64_t same_best_ = 0;
};

}  // namespace fut::app
