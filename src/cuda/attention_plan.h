// How attention_prefill() on the card cuts a call into items, and where it finds their keys. Host code, free of CUDA.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/ops.h"

namespace fut::cuda {

inline constexpr int kAttentionTile = 2 * kKvPageTokens;  ///< queries of an item, and keys of a block

/// Where the keys of the queries' own pages are.
enum class OwnPages {
  call,    ///< in k and v of this call, which also are all that was before: a BF16 cache without a past
  apart,   ///< there too, but later pages see them otherwise: INT4
  stored,  ///< in the cache, like all others
};

inline constexpr int kNowhere = 1 << 30;  ///< a row beyond every matrix: the copy engine brings zeros

/// Two pages of queries of one sequence, from an even page on. Rows are packed rows; those of k, v and scratch too.
struct AttentionTile {
  int32_t row;          ///< of the tile's first position; may lie before `first`
  int32_t first, last;  ///< the sequence has rows first .. last - 1
  int32_t seen;         ///< row, among what is seen, of the sequence's position 0
  int32_t blocks;       ///< of kAttentionTile tokens before the tile
  int32_t own[2];       ///< row of the page in k and v of this call (stored: among what is seen)
  int32_t edges;        ///< bit w: page w is `own[w]` in the edges instead
};

/// The tiles of a call, longest first, and the scratch that it needs.
struct AttentionPlan {
  OwnPages own = OwnPages::call;
  std::vector<AttentionTile> tiles;
  std::vector<int64_t> seen_start;  ///< (B) row of position 0
  int64_t seen_rows = 0;            ///< to be unpacked; 0 where k and v of this call serve
  int64_t seen_pages = 0;           ///< to be unpacked, of the sequence with most of them

  AttentionPlan(const Batch& batch, Dtype kv);
};

inline AttentionPlan::AttentionPlan(const Batch& batch, Dtype kv) {
  const bool past = std::any_of(batch.past, batch.past + batch.sequences, [](int64_t p) { return p > 0; });
  own = kv == Dtype::int4 ? OwnPages::apart : kv == Dtype::bf16 && !past ? OwnPages::call : OwnPages::stored;
  for (int64_t b = 0; b < batch.sequences; ++b) {
    const int64_t first = batch.start[b], rows = batch.start[b + 1] - first, end = batch.past[b] + rows;
    seen_start.push_back(own == OwnPages::call ? first : seen_rows);
    if (rows == 0) continue;
    const int64_t first_page = batch.past[b] / kKvPageTokens, last_page = (end - 1) / kKvPageTokens;
    const int64_t pages = own == OwnPages::apart ? last_page : own == OwnPages::stored ? (last_page / 2 + 1) * 2 : 0;
    seen_rows += pages * kKvPageTokens;
    seen_pages = std::max(seen_pages, pages);
    for (int64_t i = first_page / 2; i <= last_page / 2; ++i) {
      AttentionTile t{};
      t.row = static_cast<int32_t>(first - batch.past[b] + i * kAttentionTile);
      t.first = static_cast<int32_t>(first), t.last = static_cast<int32_t>(first + rows);
      t.seen = static_cast<int32_t>(seen_start[b]);
      t.blocks = static_cast<int32_t>(i);
      for (int w = 0; w < 2; ++w) {
        const int64_t page = 2 * i + w;
        const bool edge = page == first_page || page == last_page;
        if (own == OwnPages::stored) {
          t.own[w] = static_cast<int32_t>(t.seen + page * kKvPageTokens);
        } else if (page < first_page || page > last_page) {
          t.own[w] = kNowhere;
        } else if (edge) {
          t.own[w] = static_cast<int32_t>((2 * b + (page != first_page)) * kKvPageTokens);
          t.edges |= 1 << w;
        } else {
          t.own[w] = t.row + w * kKvPageTokens;
        }
      }
      tiles.push_back(t);
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const auto& a, const auto& b) { return a.blocks > b.blocks; });
}

}  // namespace fut::cuda
