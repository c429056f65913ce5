#include "io/bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <queue>
#include <unordered_map>

#include "base/error.h"
#include "io/mapped_file.h"
#include "io/utf8.h"

namespace fut {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr uint32_t kNone = ~uint32_t{0};

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

/// Bytes that GPT-2's alphabet leaves as they are (as Latin-1); the others, in order, are U+0100 onwards.
bool is_visible(char32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

/// alphabet[code] = the byte that this code point stands for, or -1.
std::vector<int> make_alphabet() {
  std::vector<int> alphabet(0x100, -1);
  for (int byte = 0; byte < 0x100; ++byte) {
    if (is_visible(static_cast<char32_t>(byte))) {
      alphabet[static_cast<size_t>(byte)] = byte;
    } else {
      alphabet.push_back(byte);
    }
  }
  return alphabet;
}

struct Node {
  int32_t symbol;  // -1: merged into the one before
  uint32_t previous, next;
};

/// A merge that was possible when it was noted.
struct Noted {
  int32_t rank;
  uint32_t at;
};

/// Noted merges, lowest rank first and leftmost among equals. One heap of them all would miss the cache at nearly every
/// step of a long word, so there is a list of positions a rank. They come nearly in order, and are sorted when their
/// rank's turn comes; what comes out of order after that goes into a heap.
class MergeQueue {
 public:
  bool empty() const { return turns_.empty(); }

  void push(Noted merge) {
    const auto [known, is_new] = list_of_.try_emplace(merge.rank, static_cast<uint32_t>(lists_.size()));
    if (is_new) lists_.emplace_back();
    List& list = lists_[known->second];
    if (list.empty()) turns_.push(static_cast<uint64_t>(merge.rank) << 32 | known->second);
    list.push(merge.at);
  }

  Noted pop() {
    const uint64_t turn = turns_.top();
    List& list = lists_[static_cast<uint32_t>(turn)];
    const uint32_t at = list.pop();
    if (list.empty()) turns_.pop();
    return {static_cast<int32_t>(turn >> 32), at};
  }

 private:
  class List {
   public:
    bool empty() const { return next_ == positions_.size() && late_.empty(); }

    void push(uint32_t at) {
      const bool in_order = positions_.empty() || positions_.back() <= at;
      if (next_ > 0 && !in_order) return late_.push(at);
      sorted_ = sorted_ && in_order;
      positions_.push_back(at);
    }

    uint32_t pop() {
      if (!sorted_) std::sort(positions_.begin(), positions_.end()), sorted_ = true;
      uint32_t at;
      if (next_ == positions_.size() || (!late_.empty() && late_.top() < positions_[next_])) {
        at = late_.top();
        late_.pop();
      } else {
        at = positions_[next_++];
      }
      if (empty()) positions_.clear(), next_ = 0;
      return at;
    }

   private:
    std::vector<uint32_t> positions_;  // sorted once the first was taken
    size_t next_ = 0;
    bool sorted_ = true;
    std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> late_;
  };

  std::unordered_map<int32_t, uint32_t> list_of_;  // by rank
  std::vector<List> lists_;
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> turns_;  // ranks that have a merge, with lists
};

/// A long word as a linked list, and its noted merges. One whose symbols have changed since has another rank by now and
/// is passed over.
class Merging {
 public:
  Merging(const MergeTable& merges, const std::vector<int32_t>& symbols) : merges_(merges), nodes_(symbols.size()) {
    const auto count = static_cast<uint32_t>(symbols.size());
    for (uint32_t i = 0; i < count; ++i)
      nodes_[i] = {symbols[i], i == 0 ? kNone : i - 1, i + 1 == count ? kNone : i + 1};
    for (uint32_t i = 0; i < count; ++i) note(i);
  }

  void run() {
    while (!noted_.empty()) {
      const Noted noted = noted_.pop();
      const MergeTable::Merge* merge = merge_at(noted.at);
      if (merge && merge->rank == noted.rank) join(noted.at, merge->result);
    }
  }

  void collect(std::vector<int32_t>& symbols) const {
    symbols.clear();
    for (const Node& node : nodes_) {
      if (node.symbol >= 0) symbols.push_back(node.symbol);
    }
  }

 private:
  const MergeTable::Merge* merge_at(uint32_t at) const {
    const Node& left = nodes_[at];
    return left.symbol < 0 || left.next == kNone ? nullptr : merges_.find(left.symbol, nodes_[left.next].symbol);
  }

  void note(uint32_t at) {
    if (const auto* merge = merge_at(at)) noted_.push({merge->rank, at});
  }

  void join(uint32_t at, int32_t result) {
    Node& left = nodes_[at];
    Node& right = nodes_[left.next];
    left.symbol = result;
    left.next = right.next;
    right.symbol = -1;
    if (left.next != kNone) nodes_[left.next].previous = at;
    if (left.previous != kNone) note(left.previous);
    note(at);
  }

  const MergeTable& merges_;
  std::vector<Node> nodes_;
  MergeQueue noted_;
};

constexpr size_t kShort = 64;

/// A short word: what each symbol and the next make, searched for the lowest rank as often as there is one. Quadratic,
/// but with the fewest look-ups.
void merge_short(const MergeTable& merges, std::vector<int32_t>& symbols) {
  constexpr MergeTable::Merge kNothing = {std::numeric_limits<int32_t>::max(), -1};
  std::array<MergeTable::Merge, kShort> with_next;
  size_t pairs = symbols.size() - 1;
  const auto look_up = [&](size_t i) {
    const auto* merge = merges.find(symbols[i], symbols[i + 1]);
    with_next[i] = merge ? *merge : kNothing;
  };
  for (size_t i = 0; i < pairs; ++i) look_up(i);
  while (pairs > 0) {
    size_t best = 0;
    for (size_t i = 1; i < pairs; ++i) {
      if (with_next[i].rank < with_next[best].rank) best = i;
    }
    if (with_next[best].result < 0) break;
    symbols[best] = with_next[best].result;
    std::copy(symbols.begin() + best + 2, symbols.begin() + pairs + 1, symbols.begin() + best + 1);
    std::copy(with_next.begin() + best + 1, with_next.begin() + pairs, with_next.begin() + best);
    --pairs;
    if (best > 0) look_up(best - 1);
    if (best < pairs) look_up(best);
  }
  symbols.resize(pairs + 1);
}

}  // namespace

std::optional<std::string> bytes_of_spelling(std::string_view spelling) {
  static const std::vector<int> alphabet = make_alphabet();
  std::string bytes;
  for (size_t at = 0; at < spelling.size();) {
    const Utf8Char c = utf8_at(spelling, at);
    if (c.state != Utf8::valid || c.code >= alphabet.size() || alphabet[c.code] < 0) return std::nullopt;
    bytes += static_cast<char>(alphabet[c.code]);
    at += c.length;
  }
  return bytes;
}

std::pair<std::string, std::string> split_merge(std::string_view merge, const std::string& source) {
  const size_t space = merge.find(' ');
  FUT_CHECK(space != std::string_view::npos && space == merge.rfind(' ') && space > 0 && space + 1 < merge.size(),
            source, ": merge \"", printable(merge), "\", expected two tokens with a space between");
  return {std::string(merge.substr(0, space)), std::string(merge.substr(space + 1))};
}

MergeTable::MergeTable(size_t merges)
    : slots_(std::bit_ceil(std::max<size_t>(2 * merges, 2)), Slot{kEmpty, {}}),
      shift_(64 - std::countr_zero(slots_.size())) {}

size_t MergeTable::slot_of(uint64_t key) const {
  size_t slot = key * 0x9E3779B97F4A7C15u >> shift_;  // Fibonacci hashing: the high bits depend on all of the key
  while (slots_[slot].key != key && slots_[slot].key != kEmpty) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

void MergeTable::set(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = pair_key(left, right);
  slots_[slot_of(key)] = {key, merge};
}

const MergeTable::Merge* MergeTable::find(int32_t left, int32_t right) const {
  const Slot& slot = slots_[slot_of(pair_key(left, right))];
  return slot.key == kEmpty ? nullptr : &slot.merge;
}

void apply_merges(const MergeTable& merges, std::vector<int32_t>& symbols) {
  if (symbols.size() < 2) return;
  FUT_CHECK(symbols.size() < kNone, "a piece of ", symbols.size(), " symbols is too long to tokenize");
  if (symbols.size() <= kShort) return merge_short(merges, symbols);
  Merging merging(merges, symbols);
  merging.run();
  merging.collect(symbols);
}

}  // namespace fut
