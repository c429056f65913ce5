// Who owns which pages of the KV cache: a pool shared by all sequences, and what each sequence holds of it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "model/llama.h"

namespace fut {

class KvPool;

/// One sequence's place in the cache, given back when it dies. Empty until KvPool::admit.
struct CachedSequence {
  CachedSequence() = default;
  CachedSequence(CachedSequence&& other) noexcept { *this = std::move(other); }
  CachedSequence& operator=(CachedSequence&& other) noexcept;
  ~CachedSequence();

  KvPool* pool = nullptr;
  int64_t slot = -1;           ///< its tails and sinks
  int64_t length = 0;          ///< tokens written
  int8_t tail = 0;             ///< which of its two tails holds the current page
  std::vector<int64_t> pages;  ///< enough for the tokens it was admitted with
};

/// Fixed-size pools over all layers. Pages are reserved when a sequence is admitted, for as many tokens as it may ever
/// reach: once admitted, it always finishes.
class KvPool {
 public:
  KvPool(Backend& backend, const LlamaConfig& config, Dtype dtype, int64_t tokens, int64_t slots);

  /// Bytes of one token over all layers, a page's share.
  static int64_t bytes_per_token(const LlamaConfig& config, Dtype dtype);
  /// Bytes of the BF16 tails and sinks of one slot over all layers; 0 for formats written token by token.
  static int64_t bytes_per_slot(const LlamaConfig& config, Dtype dtype);

  int64_t token_capacity() const { return page_count_ * kKvPageTokens; }
  bool could_ever_fit(int64_t tokens) const;

  /// False if there is no room now.
  bool admit(CachedSequence& sequence, int64_t tokens);
  void release(CachedSequence& sequence);
  int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }

  /// The arguments of a forward pass over `rows[i]` new tokens of each sequence. Valid until the next call.
  ForwardPass make_pass(const std::vector<CachedSequence*>& sequences, const std::vector<int64_t>& rows,
                        const std::vector<int32_t>& tokens);

  /// After the pass: the tokens are in the cache.
  static void advance(CachedSequence& sequence, int64_t rows);

 private:
  int64_t page_count_;
  KvPageLayout layout_;
  LayeredCache cache_;
  Buffer pages_, tails_, sinks_;
  std::vector<int64_t> free_pages_, free_slots_;
  // what the last pass points to
  std::vector<int32_t> tokens_;
  std::vector<int64_t> start_, past_, page_table_, slot_;
  std::vector<int8_t> tail_in_, tail_out_;
};

}  // namespace fut
