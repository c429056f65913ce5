// Scoring a text: every token once, in windows of a fixed length.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "engine/engine_impl.h"

namespace fut {
namespace {

/// A stretch of the text run as one sequence. Its first scored token is number `scored`, its last is `end` - 1.
struct Window {
  int64_t begin, scored, end;
};

/// Windows of `context` rows over `count` tokens. With a leading BOS, every token is scored; without, all but the very
/// first, because a window needs one token to start from. Without a stride, windows do not overlap in what they score
/// and each starts afresh; with one, each scores `stride` new tokens after as many earlier ones as fit.
std::vector<Window> cut(int64_t count, int64_t context, int64_t stride, bool bos) {
  const int64_t capacity = context - (bos ? 1 : 0);
  const int64_t step = stride > 0 ? std::min(stride, context - 1) : context - 1;
  std::vector<Window> windows;
  for (int64_t scored = bos ? 0 : 1, end = std::min(count, capacity); scored < end;
       scored = end, end = std::min(count, end + step)) {
    const int64_t begin =
        stride > 0 ? std::max<int64_t>(0, end - capacity) : std::max<int64_t>(0, scored - (bos ? 0 : 1));
    windows.push_back({begin, scored, end});
  }
  return windows;
}

double negative_log_likelihood(const float* logits, int64_t vocabulary, int32_t token) {
  const double largest = *std::max_element(logits, logits + vocabulary);
  double sum = 0;
  for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(logits[i] - largest);
  return std::log(sum) + largest - logits[token];
}

class Scorer {
 public:
  Scorer(EngineImpl& engine, const std::vector<int32_t>& tokens, const ScoreOptions& options,
         const ScoreCallback& on_token)
      : engine_(engine), tokens_(tokens), options_(options), on_token_(on_token) {}

  Score run() {
    const int64_t vocabulary = engine_.info().vocabulary;
    const int32_t bos = options_.add_bos && has_bos() ? engine_.tokenizer().bos() : -1;
    bos_ = bos;
    require_option(options_.context >= 2 && options_.context <= engine_.context(), "context size ", options_.context,
                   " is outside 2..", engine_.context());
    for (int32_t id : tokens_) {
      FUT_CHECK(id >= 0 && id < vocabulary, "token id ", id, " is outside the model's vocabulary of ", vocabulary);
    }
    result_.bos = bos >= 0;
    const std::vector<Window> windows =
        cut(static_cast<int64_t>(tokens_.size()), options_.context, options_.stride, result_.bos);
    FUT_CHECK(!windows.empty(), "nothing to score: the text has ", tokens_.size(),
              tokens_.size() == 1 ? " token" : " tokens");
    result_.windows = static_cast<int64_t>(windows.size());
    FUT_CHECK(engine_.pool().could_ever_fit(options_.context), "a window of ", options_.context,
              " tokens does not fit the KV cache of ", engine_.pool().token_capacity(), ": raise --kv-tokens");
    for (size_t next = 0; next < windows.size();)
      next = options_.decode ? decode_group(windows, next) : prefill_one(windows, next);
    return result_;
  }

 private:
  bool has_bos() const {
    try {
      return engine_.tokenizer().adds_bos() && engine_.tokenizer().bos() >= 0;
    } catch (const Error&) {
      return false;
    }
  }

  /// What row `i` of a window is fed.
  int32_t input(const Window& w, int64_t i) const {
    if (bos_ >= 0 && i == 0) return bos_;
    return tokens_[w.begin + i - (bos_ >= 0)];
  }
  /// Row of a window whose logits predict text token `index`.
  int64_t row_before(const Window& w, int64_t index) const { return index - w.begin - 1 + (bos_ >= 0); }
  /// Rows that have something to predict: the last token is only ever a target.
  int64_t rows(const Window& w) const { return row_before(w, w.end - 1) + 1; }

  void record(int64_t index, const float* logits) {
    const double nll = negative_log_likelihood(logits, engine_.info().vocabulary, tokens_[index]);
    FUT_CHECK(std::isfinite(nll), "the likelihood of token ", index, " is not finite (", nll, ")");
    result_.nll += nll;
    ++result_.tokens;
    if (on_token_) on_token_(index, nll, logits);
  }

  size_t prefill_one(const std::vector<Window>& windows, size_t at) {
    const Window& w = windows[at];
    const auto start = std::chrono::steady_clock::now();
    CachedSequence sequence;
    FUT_CHECK(engine_.pool().admit(sequence, options_.context), "the KV cache is in use");
    for (int64_t from = 0; from < rows(w);) {
      const int64_t count = std::min(rows(w) - from, engine_.options().prefill_chunk);
      std::vector<int32_t> fed(count);
      for (int64_t i = 0; i < count; ++i) fed[i] = input(w, from + i);
      engine_.model().prefill(engine_.pool().make_pass({&sequence}, {count}, fed));
      KvPool::advance(sequence, count);
      score_rows(w, from, count);
      from += count;
    }
    engine_.pool().release(sequence);
    engine_.timing().prefill_tokens += rows(w);
    engine_.timing().prefill_seconds += seconds_since(start);
    return at + 1;
  }

  /// Logits are as wide as the vocabulary: a few rows at a time.
  void score_rows(const Window& w, int64_t from, int64_t count) {
    constexpr int64_t kRowsAtOnce = 64;
    for (int64_t i = std::max(from, row_before(w, w.scored)); i < from + count; i += kRowsAtOnce) {
      std::vector<int64_t> picked(std::min(kRowsAtOnce, from + count - i));
      std::iota(picked.begin(), picked.end(), i - from);
      logits_.resize(picked.size() * engine_.info().vocabulary);
      engine_.model().logits(picked, logits_.data());
      for (size_t j = 0; j < picked.size(); ++j) {
        record(i + static_cast<int64_t>(j) + w.begin + 1 - (bos_ >= 0), logits_.data() + j * engine_.info().vocabulary);
      }
    }
  }

  /// Several windows side by side, one token of each a step.
  size_t decode_group(const std::vector<Window>& windows, size_t first) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<CachedSequence> sequences;
    size_t count = 0;
    while (first + count < windows.size()) {
      CachedSequence sequence;
      if (!engine_.pool().admit(sequence, options_.context)) break;
      sequences.push_back(std::move(sequence));
      ++count;
    }
    FUT_CHECK(count > 0, "the KV cache is in use");
    for (int64_t step = 0;; ++step) {
      std::vector<CachedSequence*> members;
      std::vector<size_t> window_of;
      std::vector<int32_t> fed;
      for (size_t i = 0; i < count; ++i) {
        const Window& w = windows[first + i];
        if (step >= rows(w)) continue;
        members.push_back(&sequences[i]);
        window_of.push_back(first + i);
        fed.push_back(input(w, step));
      }
      if (members.empty()) break;
      engine_.model().decode_step(engine_.pool().make_pass(members, std::vector<int64_t>(members.size(), 1), fed));
      engine_.timing().decode_tokens += static_cast<int64_t>(members.size());
      std::vector<int64_t> picked;
      for (size_t i = 0; i < members.size(); ++i) {
        KvPool::advance(*members[i], 1);
        if (step >= row_before(windows[window_of[i]], windows[window_of[i]].scored))
          picked.push_back(static_cast<int64_t>(i));
      }
      logits_.resize(picked.size() * engine_.info().vocabulary);
      if (!picked.empty()) engine_.model().logits(picked, logits_.data());
      for (size_t j = 0; j < picked.size(); ++j) {
        const Window& w = windows[window_of[picked[j]]];
        record(step + w.begin + 1 - (bos_ >= 0), logits_.data() + j * engine_.info().vocabulary);
      }
    }
    for (CachedSequence& sequence : sequences) engine_.pool().release(sequence);
    engine_.timing().decode_seconds += seconds_since(start);
    return first + count;
  }

  static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  EngineImpl& engine_;
  const std::vector<int32_t>& tokens_;
  const ScoreOptions& options_;
  const ScoreCallback& on_token_;
  int32_t bos_ = -1;
  Score result_;
  std::vector<float> logits_;
};

}  // namespace

Score EngineImpl::score(const std::vector<int32_t>& tokens, const ScoreOptions& options,
                        const ScoreCallback& on_token) {
  start_timing();
  return Scorer(*this, tokens, options, on_token).run();
}

}  // namespace fut
