#include "engine/calibrate.h"

#include <algorithm>

#include "base/error.h"
#include "engine/backends.h"
#include "engine/kv_cache.h"
#include "model/llama.h"

namespace fut {
namespace {

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

std::vector<std::vector<int32_t>> calibration_pieces(const ModelSource& source, const CalibrateOptions& options) {
  FUT_CHECK(options.samples >= 1 && options.length >= 2, "calibration needs at least 1 sample of 2 tokens, not ",
            options.samples, " of ", options.length);
  const std::unique_ptr<Tokenizer> tokenizer = source.tokenizer();
  const std::vector<int32_t> tokens = tokenizer->encode(options.text, false, ControlTokens::as_text);
  FUT_CHECK(tokens.size() >= 2, "the calibration text has ", tokens.size(), " tokens");
  const bool bos = tokenizer->adds_bos() && tokenizer->bos() >= 0;
  const auto available = static_cast<int64_t>(tokens.size());
  const int64_t length = std::min(available, std::min(options.length, source.config.positions) - bos);
  const int64_t whole = available / length, count = std::min(options.samples, whole);
  std::vector<std::vector<int32_t>> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = count == 1 ? 0 : i * (whole - 1) / (count - 1) * length;
    pieces.emplace_back(bos ? 1 : 0, tokenizer->bos());
    pieces.back().insert(pieces.back().end(), tokens.begin() + begin, tokens.begin() + begin + length);
  }
  return pieces;
}

Calibration calibrate(const ModelSource& source, const CalibrateOptions& options) {
  const LlamaConfig& c = source.config;
  const std::vector<std::vector<int32_t>> pieces = calibration_pieces(source, options);
  const std::unique_ptr<Backend> backend = make_backend("auto", c, {Dtype::bf16});
  LlamaOptions llama;
  llama.weights.prefill = llama.weights.decode = Dtype::bf16;
  llama.weights.rotate_values = true;
  llama.weights.on_progress = options.on_progress;
  const auto length = static_cast<int64_t>(pieces[0].size());
  llama.max_positions = length;
  LlamaModel model(*backend, source, llama);
  model.record_amax(true);
  KvPool pool(*backend, c, Dtype::bf16, length, 1);
  KeyMeans keys(c);
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
