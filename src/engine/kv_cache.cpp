#include "engine/kv_cache.h"

#include <algorithm>

#include "base/error.h"

namespace fut {
namespace {

int64_t pages_for(int64_t tokens) { return (tokens + kKvPageTokens - 1) / kKvPageTokens; }

KvPageLayout layout_of(const LlamaConfig& c, Dtype dtype) { return {dtype, static_cast<int>(c.head_dim)}; }

/// BF16 elements of one slot's tails (or sinks) in one layer.
int64_t tail_elements(const LlamaConfig& c) { return 2 * c.kv_heads * 2 * kKvPageTokens * c.head_dim; }
int64_t sink_elements(const LlamaConfig& c) { return c.kv_heads * 2 * kKvSinkTokens * c.head_dim; }

/// The tail flips when the page does (kv_page.h, ops.h).
int8_t tail_after(const CachedSequence& s, int64_t rows) {
  const bool same_page = s.length / kKvPageTokens == (s.length + rows) / kKvPageTokens;
  return same_page ? s.tail : static_cast<int8_t>(1 - s.tail);
}

}  // namespace

int64_t KvPool::bytes_per_token(const LlamaConfig& c, Dtype dtype) {
  return layout_of(c, dtype).page_bytes() * c.kv_heads * c.layers / kKvPageTokens;
}

int64_t KvPool::bytes_per_slot(const LlamaConfig& c, Dtype dtype) {
  if (dtype != Dtype::int4) return 0;
  return (tail_elements(c) + sink_elements(c)) * c.layers * static_cast<int64_t>(sizeof(Bf16));
}

KvPool::KvPool(Backend& backend, const LlamaConfig& c, Dtype dtype, int64_t tokens, int64_t slots)
    : page_count_(pages_for(tokens)), layout_(layout_of(c, dtype)) {
  cache_.first.layout = layout_;
  cache_.first.kv_heads = static_cast<int>(c.kv_heads);
  cache_.first.page_count = page_count_;
  cache_.pages_stride = page_count_ * c.kv_heads * layout_.page_bytes();
  pages_ = Buffer(backend, static_cast<size_t>(cache_.pages_stride * c.layers));
  cache_.first.pages = pages_.as<uint8_t>();
  if (dtype == Dtype::int4) {
    cache_.tails_stride = slots * tail_elements(c);
    cache_.sinks_stride = slots * sink_elements(c);
    tails_ = Buffer(backend, cache_.tails_stride * c.layers * sizeof(Bf16));
    sinks_ = Buffer(backend, cache_.sinks_stride * c.layers * sizeof(Bf16));
    cache_.first.tails = tails_.as<Bf16>();
    cache_.first.sinks = sinks_.as<Bf16>();
  }
  // The lowest ids are handed out first, so that a large pool costs only the memory that was ever used.
  for (int64_t page = page_count_; page-- > 0;) free_pages_.push_back(page);
  for (int64_t slot = slots; slot-- > 0;) free_slots_.push_back(slot);
}

bool KvPool::could_ever_fit(int64_t tokens) const { return pages_for(tokens) <= page_count_; }

bool KvPool::admit(CachedSequence& sequence, int64_t tokens) {
  const int64_t pages = pages_for(tokens);
  if (free_slots_.empty() || pages > free_pages()) return false;
  sequence = CachedSequence{};
  sequence.pool = this;
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  for (int64_t i = 0; i < pages; ++i) {
    sequence.pages.push_back(free_pages_.back());
    free_pages_.pop_back();
  }
  return true;
}

void KvPool::release(CachedSequence& sequence) {
  if (!sequence.pool) return;
  sequence.pool = nullptr;
  free_slots_.push_back(sequence.slot);
  free_pages_.insert(free_pages_.end(), sequence.pages.rbegin(), sequence.pages.rend());
  sequence.slot = -1;
  sequence.length = 0;
  sequence.tail = 0;
  sequence.pages.clear();
}

CachedSequence& CachedSequence::operator=(CachedSequence&& other) noexcept {
  std::swap(pool, other.pool);
  std::swap(slot, other.slot);
  std::swap(length, other.length);
  std::swap(tail, other.tail);
  std::swap(pages, other.pages);
  return *this;
}

CachedSequence::~CachedSequence() {
  if (pool) pool->release(*this);
}

ForwardPass KvPool::make_pass(const std::vector<CachedSequence*>& sequences, const std::vector<int64_t>& rows,
                              const std::vector<int32_t>& tokens) {
  tokens_ = tokens;
  start_.assign(1, 0);
  past_.clear();
  slot_.clear();
  tail_in_.clear();
  tail_out_.clear();
  size_t table_width = 1;
  for (const CachedSequence* s : sequences) table_width = std::max(table_width, s->pages.size());
  page_table_.assign(sequences.size() * table_width, 0);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const CachedSequence& s = *sequences[i];
    start_.push_back(start_.back() + rows[i]);
    past_.push_back(s.length);
    slot_.push_back(s.slot);
    tail_in_.push_back(s.tail);
    tail_out_.push_back(tail_after(s, rows[i]));
    std::copy(s.pages.begin(), s.pages.end(), page_table_.begin() + static_cast<int64_t>(i * table_width));
  }
  ForwardPass pass;
  pass.batch = {static_cast<int64_t>(sequences.size()), start_.back(), start_.data(), past_.data()};
  pass.tokens = tokens_.data();
  pass.cache = cache_;
  KvCache& c = pass.cache.first;
  c.page_table = page_table_.data();
  c.table_width = static_cast<int64_t>(table_width);
  c.slot = slot_.data();
  c.tail_in = tail_in_.data();
  c.tail_out = tail_out_.data();
  return pass;
}

void KvPool::advance(CachedSequence& sequence, int64_t rows) {
  sequence.tail = tail_after(sequence, rows);
  sequence.length += rows;
}

}  // namespace fut
