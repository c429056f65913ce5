// The card's cut of prefill attention into items, followed by hand: every query must meet each token that it may see
// once, in the form that kv_page.h promises it.
#include "cuda/attention_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

using namespace fut;
using namespace fut::cuda;

namespace {

constexpr int kPage = kKvPageTokens;

struct Call {
  Call(Dtype dtype, std::vector<int64_t> before, const std::vector<int64_t>& rows)
      : kv(dtype), past(std::move(before)) {
    start.assign(1, 0);
    for (int64_t r : rows) start.push_back(start.back() + r);
  }
  Batch batch() const { return {static_cast<int64_t>(past.size()), start.back(), start.data(), past.data()}; }
  int64_t end(int64_t b) const { return past[b] + start[b + 1] - start[b]; }

  Dtype kv;
  std::vector<int64_t> past, start;
};

/// A row of keys: whose token it is, and whether it is exact. Token -1: zeros.
struct Key {
  int64_t sequence = -1, token = -1;
  bool exact = false;
};

Key seen_key(const Call& call, const AttentionPlan& plan, int64_t row) {
  for (int64_t b = 0; b < call.batch().sequences; ++b) {
    if (call.end(b) == call.past[b]) continue;
    const int64_t token = row - plan.seen_start[b];
    if (token >= 0 && token < call.end(b) && (plan.own != OwnPages::apart || token < (call.end(b) - 1) / kPage * kPage))
      return {b, token, plan.own != OwnPages::apart};
  }
  return {};
}

Key own_key(const Call& call, const AttentionPlan& plan, const AttentionTile& t, int page, int slot) {
  const int64_t row = t.own[page] + slot;
  if (t.edges >> page & 1) {  // as attention_unpack.cuh gathers it
    const int64_t b = row / (2 * kPage), first = call.past[b] / kPage, last = (call.end(b) - 1) / kPage;
    const int64_t token = (row / kPage % 2 ? last : first) * kPage + row % kPage;
    return token < call.end(b) ? Key{b, token, true} : Key{};
  }
  if (plan.own == OwnPages::stored) return seen_key(call, plan, row);
  for (int64_t b = 0; b < call.batch().sequences; ++b) {
    if (row >= call.start[b] && row < call.start[b + 1]) return {b, row - call.start[b] + call.past[b], true};
  }
  return {};
}

/// What the kernel multiplies with the query in row `row` of the tile.
std::vector<Key> keys_of(const Call& call, const AttentionPlan& plan, const AttentionTile& t, int row) {
  std::vector<Key> keys;
  for (int64_t i = 0; i < int64_t{t.blocks} * kAttentionTile; ++i) keys.push_back(seen_key(call, plan, t.seen + i));
  const int page = row / kPage;
  for (int i = 0; i <= row; ++i) {
    const bool from_seen = i < kPage && page == 1 && plan.own == OwnPages::apart;
    keys.push_back(from_seen ? seen_key(call, plan, t.seen + int64_t{t.blocks} * kAttentionTile + i)
                             : own_key(call, plan, t, i / kPage, i % kPage));
  }
  return keys;
}

void follow(const Call& call) {
  const AttentionPlan plan(call.batch(), call.kv);
  std::set<int64_t> done;
  for (const AttentionTile& t : plan.tiles) {
    for (int r = 0; r < kAttentionTile; ++r) {
      const int64_t row = t.row + r;
      if (row < t.first || row >= t.last) continue;
      ASSERT_TRUE(done.insert(row).second) << "row " << row << " twice";
      int64_t b = 0;
      while (row >= call.start[b + 1]) ++b;
      const int64_t position = call.past[b] + row - call.start[b];
      const std::vector<Key> keys = keys_of(call, plan, t, r);
      ASSERT_EQ(static_cast<int64_t>(keys.size()), position + 1);
      for (int64_t j = 0; j <= position; ++j) {
        ASSERT_EQ(keys[j].sequence, b) << "row " << row << ", token " << j;
        ASSERT_EQ(keys[j].token, j) << "row " << row;
        const bool exact = call.kv != Dtype::int4 || j / kPage == position / kPage;
        ASSERT_EQ(keys[j].exact, exact) << "row " << row << ", token " << j;
      }
    }
  }
  ASSERT_EQ(static_cast<int64_t>(done.size()), call.start.back());
}

TEST(AttentionPlan, EveryQueryMeetsWhatItMaySee) {
  std::mt19937 bits(7);
  const std::vector<int64_t> lengths = {0, 1, 15, 63, 64, 65, 127, 128, 129, 200, 300},
                             pasts = {0, 0, 5, 63, 64, 100, 128, 300};
  for (Dtype kv : {Dtype::int4, Dtype::bf16, Dtype::e4m3}) {
    for (int turn = 0; turn < 60; ++turn) {
      std::vector<int64_t> past, rows;
      for (int b = 0; b < 4; ++b) {
        past.push_back(turn % 3 == 0 ? 0 : pasts[bits() % pasts.size()]);
        rows.push_back(lengths[bits() % lengths.size()]);
      }
      SCOPED_TRACE(testing::Message() << name_of(kv) << " past " << testing::PrintToString(past) << " rows "
                                      << testing::PrintToString(rows));
      follow(Call(kv, past, rows));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(AttentionPlan, LongestFirst) {
  const Call call(Dtype::int4, {0, 500}, {1000, 700});
  const AttentionPlan plan(call.batch(), call.kv);
  for (size_t i = 1; i < plan.tiles.size(); ++i) EXPECT_GE(plan.tiles[i - 1].blocks, plan.tiles[i].blocks);
}

}  // namespace
