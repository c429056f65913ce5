#include "engine/calibrate.h"

#include <algorithm>

#include "base/error.h"
#include "engine/backends.h"
#include "engine/kv_cache.h"
#include "model/llama.h"

namespace fut {
namespace {

/// Evenly spaced pieces; fewer than asked for where the text is short.
std::vector<std::vector<int32_t>> cut_pieces(const std::vector<int32_t>& tokens, int64_t samples, int64_t length) {
  const int64_t count = static_cast<int64_t>(tokens.size()), whole = std::max<int64_t>(1, count / length);
  std::vector<std::vector<int32_t>> pieces;
  for (int64_t i = 0; i < std::min(samples, whole); ++i) {
    const int64_t begin = std::min(samples, whole) == 1 ? 0 : i * (whole - 1) / (std::min(samples, whole) - 1) * length;
    pieces.emplace_back(tokens.begin() + begin, tokens.begin() + std::min(count, begin + length));
  }
  return pieces;
}

/// Sums of keys over all pieces: (L)(J * E).
class KeyMeans {
 public:
  explicit KeyMeans(const LlamaConfig& c) : config_(c), sum_(c.layers, std::vector<double>(c.kv_heads * c.head_dim)) {}

  void add(Backend& backend, const ForwardPass& pass, int64_t tokens) {
    const KvCache& cache = pass.cache.first;
    const int64_t J = config_.kv_heads, E = config_.head_dim, page_bytes = cache.layout.page_bytes();
    std::vector<uint8_t> page(page_bytes);
    std::vector<float> key(E), value(E);
    for (int64_t l = 0; l < config_.layers; ++l) {
      for (int64_t at = 0; at < tokens; at += kKvPageTokens) {
        for (int64_t j = 0; j < J; ++j) {
          const int64_t id = cache.page_table[at / kKvPageTokens];
          backend.download(page.data(), cache.pages + l * pass.cache.pages_stride + (id * J + j) * page_bytes,
                           page_bytes);
          for (int64_t t = at; t < std::min(tokens, at + kKvPageTokens); ++t) {
            kv_load_token(page.data(), cache.layout, static_cast<int>(t - at), key.data(), value.data());
            for (int64_t i = 0; i < E; ++i) sum_[l][j * E + i] += key[i];
          }
        }
      }
    }
    count_ += tokens;
  }

  std::vector<std::vector<float>> means() const {
    std::vector<std::vector<float>> means;
    for (const std::vector<double>& layer : sum_) {
      means.emplace_back();
      for (double sum : layer) means.back().push_back(static_cast<float>(sum / static_cast<double>(count_)));
    }
    return means;
  }

 private:
  const LlamaConfig& config_;
  std::vector<std::vector<double>> sum_;
  int64_t count_ = 0;
};

}  // namespace

Calibration calibrate(const ModelSource& source, const CalibrateOptions& options) {
  const LlamaConfig& c = source.config;
  FUT_CHECK(options.samples >= 1 && options.length >= 2, "calibration needs at least 1 sample of 2 tokens, not ",
            options.samples, " of ", options.length);
  const std::vector<int32_t> tokens = source.tokenizer()->encode(options.text, true, ControlTokens::as_text);
  FUT_CHECK(tokens.size() >= 2, "the calibration text has ", tokens.size(), " tokens");
  const std::unique_ptr<Backend> backend = make_backend("auto", c, {Dtype::bf16});
  LlamaOptions llama;
  llama.weights.prefill = llama.weights.decode = Dtype::bf16;
  llama.weights.rotate_values = true;
  llama.weights.on_progress = options.on_progress;
  const int64_t length = std::min(options.length, c.positions);
  llama.max_positions = length;
  LlamaModel model(*backend, source, llama);
  model.record_amax(true);
  KvPool pool(*backend, c, Dtype::bf16, length, 1);
  KeyMeans keys(c);
  const std::vector<std::vector<int32_t>> pieces = cut_pieces(tokens, options.samples, length);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (options.on_progress)
      options.on_progress("calibration", static_cast<int64_t>(i), static_cast<int64_t>(pieces.size()));
    CachedSequence sequence;
    const auto rows = static_cast<int64_t>(pieces[i].size());
    FUT_CHECK(pool.admit(sequence, rows), "the calibration's KV cache is full");
    const ForwardPass pass = pool.make_pass({&sequence}, {rows}, pieces[i]);
    model.prefill(pass);
    keys.add(*backend, pass, rows);
    pool.release(sequence);
  }
  Calibration result = model.recorded();
  result.key_mean = keys.means();
  return result;
}

}  // namespace fut
