#include "kl_base.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace fut::app {
namespace {

constexpr double kStepsPerNat = 2048;
constexpr size_t kHeaderBytes = 128;
constexpr char kMagic[] = "futklb1\n";

std::string header_of(const KlSubject& subject) {
  std::string header = kMagic + subject.text_sha256;
  for (const int64_t value : {subject.tokens, subject.context, subject.stride, subject.bos, subject.vocabulary}) {
    for (int shift = 0; shift < 64; shift += 8) header += static_cast<char>(value >> shift & 0xff);
  }
  header.resize(kHeaderBytes);
  return header;
}

KlSubject subject_of(const std::string& header) {
  KlSubject subject{.text_sha256 = header.substr(8, 64)};
  size_t at = 72;
  for (int64_t* value : {&subject.tokens, &subject.context, &subject.stride, &subject.bos, &subject.vocabulary}) {
    for (size_t i = 0; i < 8; ++i) *value |= int64_t{static_cast<uint8_t>(header[at + i])} << 8 * i;
    at += 8;
  }
  return subject;
}

/// log(sum(exp(x - max))): what to subtract, beside the maximum, to make x logarithms of probabilities.
double log_normaliser(const float* x, size_t count, float largest) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += std::exp(static_cast<double>(x[i] - largest));
  return std::log(sum);
}

/// Where the row of a token begins; false if the file cannot be moved there.
bool seek_row(std::FILE* file, const KlSubject& subject, int64_t index) {
  return fseeko(file, static_cast<off_t>(kHeaderBytes) + (index - subject.first()) * subject.row_bytes(), SEEK_SET) ==
         0;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double standard_error(const std::vector<double>& values, double mean_value) {
  if (values.size() < 2) return 0;
  double squares = 0;
  for (const double value : values) squares += (value - mean_value) * (value - mean_value);
  const auto count = static_cast<double>(values.size());
  return std::sqrt(squares / (count - 1) / count);
}

/// Probability of each code relative to the best token's.
const std::vector<double>& code_probabilities() {
  static const std::vector<double> table = [] {
    std::vector<double> values(65536);
    for (size_t code = 0; code < values.size(); ++code)
      values[code] = std::exp(-static_cast<double>(code) / kStepsPerNat);
    return values;
  }();
  return table;
}

}  // namespace

KlWriter::KlWriter(const std::string& path, const KlSubject& subject)
    : subject_(subject), path_(path), partial_(path + ".partial"), codes_(static_cast<size_t>(subject.vocabulary)) {
  file_ = std::fopen(partial_.c_str(), "wb");
  FUT_CHECK(file_ != nullptr, partial_, ": cannot be written: ", std::strerror(errno));
  const std::string header = header_of(subject);
  write(header.data(), header.size());
}

KlWriter::~KlWriter() {
  if (!file_) return;
  std::fclose(file_);
  std::remove(partial_.c_str());
}

void KlWriter::write(const void* data, size_t bytes) {
  FUT_CHECK(std::fwrite(data, 1, bytes, file_) == bytes, partial_, ": cannot be written: ", std::strerror(errno));
}

void KlWriter::add(int64_t index, double nll, const float* logits) {
  const float largest = *std::max_element(logits, logits + codes_.size());
  FUT_CHECK(std::isfinite(largest) && std::isfinite(nll), path_,
            ": the model's logits are not finite: no base can be made of them");
  for (size_t i = 0; i < codes_.size(); ++i) {
    const double steps = (static_cast<double>(largest) - logits[i]) * kStepsPerNat;
    codes_[i] = steps < 65535 ? static_cast<uint16_t>(steps + 0.5) : uint16_t{65535};
  }
  FUT_CHECK(seek_row(file_, subject_, index), partial_, ": cannot be written: ", std::strerror(errno));
  const auto stored = static_cast<float>(nll);
  write(&stored, sizeof stored);
  write(codes_.data(), codes_.size() * sizeof codes_[0]);
  ++rows_;
}

void KlWriter::finish() {
  const int64_t expected = subject_.tokens - subject_.first();
  FUT_CHECK(rows_ == expected, path_, ": ", rows_, " tokens were scored, expected ", expected);
  std::FILE* file = std::exchange(file_, nullptr);
  const bool written = std::fclose(file) == 0 && std::rename(partial_.c_str(), path_.c_str()) == 0;
  if (written) return;
  const int reason = errno;
  std::remove(partial_.c_str());
  fail(path_, ": cannot be written: ", std::strerror(reason));
}

KlReader::KlReader(const std::string& path, const KlSubject& subject)
    : subject_(subject),
      path_(path),
      file_(std::fopen(path.c_str(), "rb"), std::fclose),
      codes_(static_cast<size_t>(subject.vocabulary)) {
  FUT_CHECK(file_ != nullptr, path, ": cannot be opened: ", std::strerror(errno));
  std::string header(kHeaderBytes, '\0');
  FUT_CHECK(read(header.data(), header.size()) && header.starts_with(kMagic), path,
            ": is no base that `fut perplexity --kl-base` wrote");
  const KlSubject base = subject_of(header);
  FUT_CHECK(base.text_sha256 == subject.text_sha256, path, ": is a base of another text (sha256 ", base.text_sha256,
            ", this one has ", subject.text_sha256, ")");
  const auto same = [&](const char* what, int64_t theirs, int64_t ours) {
    FUT_CHECK(theirs == ours, path, ": was made with ", what, " ", theirs, ", this run has ", ours);
  };
  same("tokens", base.tokens, subject.tokens);
  same("context", base.context, subject.context);
  same("stride", base.stride, subject.stride);
  same("BOS (1: yes)", base.bos, subject.bos);
  same("vocabulary", base.vocabulary, subject.vocabulary);
}

bool KlReader::read(void* data, size_t bytes) { return std::fread(data, 1, bytes, file_.get()) == bytes; }

void KlReader::add(int64_t index, double nll, const float* logits) {
  float base_nll;
  FUT_CHECK(seek_row(file_.get(), subject_, index) && read(&base_nll, sizeof base_nll) &&
                read(codes_.data(), codes_.size() * sizeof codes_[0]),
            path_, ": the row of token ", index, " cannot be read");
  const auto best = static_cast<size_t>(std::max_element(logits, logits + codes_.size()) - logits);
  const double normaliser = log_normaliser(logits, codes_.size(), logits[best]);
  const std::vector<double>& probability = code_probabilities();
  double sum = 0;
  for (const uint16_t code : codes_) sum += probability[code];
  const double base_normaliser = std::log(sum);
  double divergence = 0;
  for (size_t i = 0; i < codes_.size(); ++i) {
    const double base_log = -codes_[i] / kStepsPerNat - base_normaliser;
    const double log = static_cast<double>(logits[i]) - logits[best] - normaliser;
    divergence += probability[codes_[i]] / sum * (base_log - log);
  }
  divergences_.push_back(std::max(divergence, 0.0));  // below zero only by rounding
  nll_differences_.push_back(nll - base_nll);
  same_best_ += codes_[best] == 0;
}

KlResult KlReader::finish() {
  KlResult result{.tokens = static_cast<int64_t>(divergences_.size())};
  FUT_CHECK(result.tokens > 0, path_, ": no token to compare");
  std::sort(divergences_.begin(), divergences_.end());
  result.mean = mean(divergences_);
  result.max = divergences_.back();
  const auto rank = static_cast<size_t>(std::ceil(0.99 * static_cast<double>(divergences_.size())));
  result.p99 = divergences_[rank - 1];
  result.top1_agreement = static_cast<double>(same_best_) / static_cast<double>(result.tokens);
  result.nll_difference = mean(nll_differences_);
  result.nll_difference_se = standard_error(nll_differences_, result.nll_difference);
  return result;
}

}  // namespace fut::app
