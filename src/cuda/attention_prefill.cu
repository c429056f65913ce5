// MATH       o[t, h] = softmax(q[t, h] . K) V over tokens 0 .. position(t) of t's sequence, base two: q comes times
//            log2(e) / sqrt(E). What a query sees of a token: kv_page.h.
// SHAPES     E = 64, 128; any H / J; INT4, BF16 and E4M3 caches; sequences of any length, from any position on.
// LAYOUT     q, k, v packed rows. What is not in them is unpacked first (attention_unpack.cuh).
// SCHEDULE   An item is a head of 128 queries: two pages, the first of them even. A block an SM takes items off a
//            counter, longest first, heads of a tile side by side (they share K and V in L2).
//            Warpgroup 0 copies: the item's Q, then blocks of 128 keys and values through two rings.
//            Warpgroups 1 and 2 multiply, a page of queries each. First the block on the diagonal: with an INT4 cache
//            it has three pages, because the second page's queries see the first one in INT4, which its own queries see
//            exactly; it comes as a second pair of stages. Then all earlier blocks, last one first: S of a block is
//            issued, then O += P V of the one before, and the softmax of S runs under that. The two warpgroups take
//            turns in issuing (named barriers), so that one's softmax runs under the other's products.
// NUMERICS   S and O in FP32; P rounded to BF16; sums of the unrounded P in FP32, in an order of positions alone.
// ROOFLINE   4 E H sum(n^2) / 2 flops; compute-bound. Not measured yet.
// REFERENCE  Shah et al., FlashAttention-3 (2024): warp specialisation, and the softmax under the products.
#include <algorithm>

#include "cuda/attention_prefill.h"
#include "cuda/attention_state.cuh"
#include "cuda/attention_unpack.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"

namespace fut::cuda {
namespace {

constexpr int kMathRegisters = 232, kCopyRegisters = 40, kBlockThreads = 384;
constexpr int kTurns = 1;  ///< named barriers kTurns, kTurns + 1: a warpgroup's turn

struct PrefillMaps {
  CUtensorMap q, seen[2], own[2], edges[2];  // keys, values
};

struct PrefillItems {
  const AttentionTile* tiles;
  unsigned* next;
  int count, heads, group;  ///< of items; H; H / J
  bool apart;               ///< OwnPages::apart
  void* out;
  Dtype out_type;
  float out_scale;
  unsigned long long* saturated;
};

/// Shared memory. A tile is 128 rows: E / 64 pieces of 64 columns, each 128 rows of 128 bytes.
template <int kHeadDim>
struct PrefillMemory {
  static constexpr int E = kHeadDim, kPieces = E / 64, kPagePieceBytes = kKvPageTokens * 128,
                       kPieceBytes = 2 * kPagePieceBytes, kTileBytes = kPieces * kPieceBytes;
  static constexpr int kStages = E == 128 ? 2 : 4;
  static constexpr int kRingBytes = kStages * kTileBytes, kBarriersAt = kTileBytes + 2 * kRingBytes;
  static constexpr int kItemAt = kBarriersAt + (4 * kStages + 2) * 8, kBytes = kItemAt + 16;

  uint32_t base;
  __device__ uint32_t stage(int which, int i) const { return base + kTileBytes + which * kRingBytes + i * kTileBytes; }
  __device__ uint32_t full(int which, int i) const { return base + kBarriersAt + (which * kStages + i) * 16; }
  __device__ uint32_t empty(int which, int i) const { return full(which, i) + 8; }
  __device__ uint32_t item_full() const { return full(2, 0); }
  __device__ uint32_t item_empty() const { return empty(2, 0); }
  __device__ uint32_t item() const { return base + kItemAt; }
};

/// A stage of a ring and the parity of its round.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t round = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
};

// ---- the copying thread -----------------------------------------------------------------------------------------

template <class Memory>
struct PrefillCopies {
  const Memory& m;
  const PrefillMaps& maps;
  Place<Memory::kStages> place[2];

  __device__ void page(uint32_t to, const CUtensorMap* map, int x, int row, uint32_t barrier) {
#pragma unroll
    for (int i = 0; i < Memory::kPieces; ++i) tensor_copy(to + i * Memory::kPieceBytes, map, x + 64 * i, row, barrier);
  }
  /// `count` pages into the next stage of ring `which`.
  template <class MapOf>
  __device__ void block(int which, int x, int count, MapOf map_and_row) {
    Place<Memory::kStages>& at = place[which];
    const uint32_t full = m.full(which, at.stage), to = m.stage(which, at.stage);
    barrier_wait(m.empty(which, at.stage), at.round ^ 1);
    barrier_expect(full, count * (Memory::kTileBytes / 2));
    for (int i = 0; i < count; ++i) {
      int row;
      const CUtensorMap* map = map_and_row(i, row);
      page(to + i * Memory::kPagePieceBytes, map, x, row, full);
    }
    at.next();
  }
  __device__ void seen(int which, int x, int count, int first_row) {
    block(which, x, count, [&](int i, int& row) {
      row = first_row + i * kKvPageTokens;
      return &maps.seen[which];
    });
  }
  __device__ void diagonal(int which, int x, const AttentionTile& t, bool apart) {
    block(which, x, 2, [&](int i, int& row) {
      row = i ? t.own[1] : t.own[0];
      return t.edges >> i & 1 ? &maps.edges[which] : &maps.own[which];
    });
    if (apart) seen(which, x, 1, t.seen + t.blocks * kAttentionTile);
  }
};

template <class Memory>
__device__ void copy_items(const Memory& m, const PrefillMaps& maps, const PrefillItems& items) {
  PrefillCopies<Memory> copies{m, maps, {}};
  uint32_t turn = 0;
  int item = blockIdx.x;
  for (; item < items.count; turn ^= 1) {
    const int next = atomicAdd(items.next, 1u) + gridDim.x;
    const AttentionTile t = items.tiles[item / items.heads];
    const int head = item % items.heads, x = head / items.group * Memory::E;
    copies.diagonal(0, x, t, items.apart);
    barrier_wait(m.item_empty(), turn ^ 1);
    store_shared_4(m.item(), item);
    barrier_expect(m.item_full(), Memory::kTileBytes);
    for (int i = 0; i < 2; ++i)
      copies.page(m.base + i * Memory::kPagePieceBytes, &maps.q, head * Memory::E, t.row + i * kKvPageTokens,
                  m.item_full());
    copies.diagonal(1, x, t, items.apart);
#pragma unroll 1
    for (int n = t.blocks - 1; n >= 0; --n) {
      for (int which = 0; which < 2; ++which) copies.seen(which, x, 2, t.seen + n * kAttentionTile);
    }
    item = next;
  }
  barrier_wait(m.item_empty(), turn ^ 1);
  store_shared_4(m.item(), ~0u);
  barrier_arrive(m.item_full());
}

// ---- the multiplying warpgroups ---------------------------------------------------------------------------------

/// Of the rows g and g + 8 of a lane.
struct RowState {
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
};

/// Scores become weights under the rows' new maxima; factor: what earlier weights are worth now.
__device__ __forceinline__ void weigh(float (&s)[64], RowState& state, float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top[2] = {s[2 * r], s[2 * r + 1]}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 4; j < 64; j += 4) {
      top[0] = fmaxf(top[0], s[j + 2 * r]);
      top[1] = fmaxf(top[1], s[j + 2 * r + 1]);
    }
    float largest = fmaxf(top[0], top[1]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float before = state.top[r], now = fmaxf(before, largest);
    state.top[r] = now;
    factor[r] = fast_exp2(before - now);
#pragma unroll
    for (int j = 0; j < 64; j += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[j + 2 * r + c];
        x = fast_exp2(x - now);
        sum[c] += x;
      }
    }
    state.sum[r] = fmaf(state.sum[r], factor[r], sum[0] + sum[1]);
  }
}

/// The block on the diagonal: group 0's page is the first of the block, group 1's the second.
__device__ __forceinline__ void mask_diagonal(float (&s)[64], int group, int row, int column) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int q = group * kKvPageTokens + row + (i & 2) * 4, k = i / 4 * 8 + column + (i & 1);
    if (k > q) s[i] = -INFINITY;
  }
}

__device__ __forceinline__ void round_weights(uint32_t (&p)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = bf16_pair(s[2 * i], s[2 * i + 1]);
}

/// x[i] of lane t of a quad becomes what lane i had in x[t].
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
    (upper ? x[i] : x[i + 2]) = got;
  }
}

/// O of 64 rows by the rows' sums, at rows `row` and `row` + 8 (a lane's) of head `head`.
template <int E>
__device__ __forceinline__ void store_rows(const PrefillItems& items, const AttentionTile& tile, int head, int row,
                                           int lane, const float (&o)[E / 2], const float (&sum)[2]) {
  const float inverse_scale = 1.0f / items.out_scale;
  unsigned clamped = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = row + 8 * r;
    const bool stored = t >= tile.first && t < tile.last;
    const float inverse = 1.0f / sum[r];
    const int64_t at = (int64_t{t} * items.heads + head) * E;
#pragma unroll
    for (int j = 0; j < E / 8; j += 4) {  // 32 columns; a lane stores 8 of them
      if (items.out_type == Dtype::f32) {
        float* to = static_cast<float*>(items.out) + at + 8 * j + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int d = 4 * (j + i) + 2 * r;
          if (stored) *reinterpret_cast<float2*>(to + 8 * i) = make_float2(o[d] * inverse, o[d + 1] * inverse);
        }
        continue;
      }
      uint32_t x[4];
      const int64_t to = at + 8 * (j + lane % 4);
      if (items.out_type == Dtype::bf16) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = bf16_pair(o[4 * (j + i) + 2 * r] * inverse, o[4 * (j + i) + 2 * r + 1] * inverse);
        transpose_quad(x, lane);
        if (stored) *reinterpret_cast<uint4*>(static_cast<Bf16*>(items.out) + to) = make_uint4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int d = 4 * (j + i) + 2 * r;
          const float low = o[d] * inverse * inverse_scale, high = o[d + 1] * inverse * inverse_scale;
          if (stored) clamped += (fabsf(low) > kE4m3Max) + (fabsf(high) > kE4m3Max);
          x[i] = e4m3_pair_of(low, high);
        }
        transpose_quad(x, lane);
        if (!stored) continue;
        *reinterpret_cast<uint2*>(static_cast<E4m3*>(items.out) + to) =
            make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
      }
    }
  }
  if (clamped && items.saturated) atomicAdd(items.saturated, static_cast<unsigned long long>(clamped));
}

template <class Memory>
__device__ void multiply_items(const Memory& m, const PrefillItems& items, int group) {
  constexpr int E = Memory::E, kStages = Memory::kStages;
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  Place<kStages> keys, values;
  const auto release = [&](int which, int stage) {
    if (lane == 0) barrier_arrive(m.empty(which, stage));
  };
  const uint64_t q = operand_at(m.base + group * Memory::kPagePieceBytes);
  const auto step = [](int i) { return i / 4 * (Memory::kPieceBytes / 16) + i % 4 * 2; };  // 16 columns of Q, K

  // O (+)= P V for the block before: of the diagonal's stages, or of one. Issued here, ended by whoever waits.
  const auto weigh_values = [&](float(&o)[E / 2], const uint32_t(&p)[32], bool diagonal) {
    const int first = values.stage;
    barrier_wait(m.full(1, first), values.round);
    values.next();
    int low = first;
    if (diagonal && items.apart) {
      barrier_wait(m.full(1, values.stage), values.round);
      if (group == 1) low = values.stage;
      values.next();
    }
    const uint64_t v_low = column_operand_at(m.stage(1, low), Memory::kPieceBytes),
                   v_high = column_operand_at(m.stage(1, first) + Memory::kPagePieceBytes, Memory::kPieceBytes);
    open_products();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      multiply_rows(Bf16{}, o, p + 4 * i, (i < 4 ? v_low : v_high) + i % 4 * (16 * 128 / 16), !diagonal || i > 0);
    commit_products();
  };
  const auto release_values = [&](bool diagonal) {
    const int last = values.stage == 0 ? kStages - 1 : values.stage - 1;
    release(1, last);
    if (diagonal && items.apart) release(1, last == 0 ? kStages - 1 : last - 1);
  };

  if (group == 1) named_barrier_arrive(kTurns, 256);
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    barrier_wait(m.item_full(), turn);
    const int item = static_cast<int>(load_shared_4(m.item()));
    if (item < 0) break;
    const int blocks = items.tiles[item / items.heads].blocks;
    RowState state;
    float factor[2], s[64] = {}, o[E / 2];  // s: two products into halves of what is undefined would be serialised
    uint32_t p[32];

    const int first = keys.stage;
    barrier_wait(m.full(0, first), keys.round);
    keys.next();
    int low = first;
    if (items.apart) {
      barrier_wait(m.full(0, keys.stage), keys.round);
      if (group == 1) low = keys.stage;
      keys.next();
    }
    {
      const uint64_t k_low = operand_at(m.stage(0, low)),
                     k_high = operand_at(m.stage(0, first) + Memory::kPagePieceBytes);
      open_products();
#pragma unroll
      for (int i = 0; i < E / 16; ++i) {
        multiply_64_columns<0>(Bf16{}, s, q + step(i), k_low + step(i), i > 0);
        multiply_64_columns<32>(Bf16{}, s, q + step(i), k_high + step(i), i > 0);
      }
      commit_products();
      wait_products<0>();
      settle(s);
    }
    release(0, first);
    if (items.apart) release(0, first + 1 == kStages ? 0 : first + 1);
    if (blocks == 0 && lane == 0) barrier_arrive(m.item_empty());
    mask_diagonal(s, group, row, lane % 4 * 2);
    weigh(s, state, factor);
    round_weights(p, s);

#pragma unroll 1
    for (int n = blocks - 1; n >= 0; --n) {
      const bool diagonal = n == blocks - 1;
      const int stage = keys.stage;
      barrier_wait(m.full(0, stage), keys.round);
      keys.next();
      const uint64_t k = operand_at(m.stage(0, stage));
      named_barrier(kTurns + group, 256);  // closes: both warpgroups' products at once, and then both softmaxes
      open_products();
#pragma unroll
      for (int i = 0; i < E / 16; ++i) multiply(Bf16{}, s, q + step(i), k + step(i), i > 0);
      commit_products();
      weigh_values(o, p, diagonal);
      named_barrier_arrive(kTurns + (group ^ 1), 256);
      wait_products<1>();
      settle(s);
      release(0, stage);
      if (n == 0 && lane == 0) barrier_arrive(m.item_empty());
      weigh(s, state, factor);
      wait_products<0>();
      settle(o);
      release_values(diagonal);
#pragma unroll
      for (int i = 0; i < E / 2; ++i) o[i] *= factor[i >> 1 & 1];
      round_weights(p, s);
    }
    weigh_values(o, p, blocks == 0);
    wait_products<0>();
    settle(o);
    release_values(blocks == 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 1);
      state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 2);
    }
    const AttentionTile tile = items.tiles[item / items.heads];
    store_rows<E>(items, tile, item % items.heads, tile.row + group * kKvPageTokens + row, lane, o, state.sum);
  }
}

template <int E>
__global__ void __launch_bounds__(kBlockThreads, 1)
    attention_prefill_kernel(const __grid_constant__ PrefillMaps maps, const __grid_constant__ PrefillItems items) {
  using Memory = PrefillMemory<E>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const Memory m{shared_address(memory)};
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  if (threadIdx.x == 0) {
    for (int which = 0; which < 2; ++which) {
      for (int i = 0; i < Memory::kStages; ++i) {
        barrier_init(m.full(which, i), 1);
        barrier_init(m.empty(which, i), 8);
      }
    }
    barrier_init(m.item_full(), 1);
    barrier_init(m.item_empty(), 8);
    barrier_init_fence();
  }
  __syncthreads();  // closes: barriers used before they are there
  release_next_kernel();
  wait_for_previous_kernel();
  if (group < 0) {
    give_registers<kCopyRegisters>();
    if (threadIdx.x == 0) copy_items(m, maps, items);
  } else {
    take_registers<kMathRegisters>();
    multiply_items(m, items, group);
  }
}

template <int E>
void launch_items(const char* op, const PrefillMaps& maps, const PrefillItems& items, cudaStream_t stream) {
  launch(op, attention_prefill_kernel<E>, std::min(items.count, multiprocessors()), kBlockThreads,
         PrefillMemory<E>::kBytes, stream, maps, items);
}

constexpr int64_t kCounterElements = 128;  ///< the scratch begins with the counter of items

}  // namespace

void PrefillAttention::operator()(const char* op, const Batch& host, AttentionPrefill args, cudaStream_t stream) {
  const int J = args.cache.kv_heads, E = args.cache.layout.head_dim;
  FUT_CHECK(E == 64 || E == 128, op, ": head width ", E, ", this backend knows 64 and 128");
  FUT_CHECK(args.cache.layout.dtype != Dtype::f32, op, ": an f32 cache is for the CPU alone");
  const AttentionPlan plan(host, args.cache.layout.dtype);
  if (plan.tiles.empty()) return;
  plan_.begin();
  const size_t tiles = plan_.add(plan.tiles.data(), plan.tiles.size()),
               seen_start = plan_.add(plan.seen_start.data(), plan.seen_start.size());
  plan_.send(stream);
  args.tiles = plan_.at<AttentionTile>(tiles);
  args.seen_start = plan_.at<int64_t>(seen_start);
  const int64_t width = int64_t{J} * E, edge_rows = int64_t{args.sequences} * 2 * kKvPageTokens;
  Bf16* scratch = scratch_.reserve<Bf16>(kCounterElements + 2 * (edge_rows + plan.seen_rows) * width, stream);
  UnpackArgs unpack{args};
  unpack.next_item = reinterpret_cast<unsigned*>(scratch);
  unpack.edges = scratch + kCounterElements;
  unpack.edge_half = edge_rows * width;
  unpack.seen = unpack.edges + 2 * unpack.edge_half;
  unpack.seen_half = plan.seen_rows * width;
  unpack.own = plan.own;
  launch(op, E == 64 ? attention_unpack_kernel<64> : attention_unpack_kernel<128>,
         dim3(static_cast<unsigned>(2 + plan.seen_pages), 2 * J, args.sequences), dim3(256), 0, stream, unpack);

  const auto map = [&](const Bf16* data, int64_t rows, int64_t cols) {
    return tensor_map(Dtype::bf16, data, rows, cols, cols * 2, kKvPageTokens);
  };
  PrefillMaps maps;
  maps.q = map(args.q, args.rows, int64_t{args.heads} * E);
  for (int which = 0; which < 2; ++which) {
    const CUtensorMap call = map(which ? args.v : args.k, args.rows, width);
    maps.edges[which] = map(unpack.edges + which * unpack.edge_half, edge_rows, width);
    // A short INT4 prompt has seen nothing; its second page, which would read it, is not there.
    maps.seen[which] = plan.seen_rows ? map(unpack.seen + which * unpack.seen_half, plan.seen_rows, width) : call;
    maps.own[which] = plan.own == OwnPages::stored ? maps.seen[which] : call;
  }
  PrefillItems items{};
  items.tiles = args.tiles;
  items.next = unpack.next_item;
  items.count = static_cast<int>(plan.tiles.size()) * args.heads;
  items.heads = args.heads;
  items.group = args.heads / J;
  items.apart = plan.own == OwnPages::apart;
  items.out = args.out;
  items.out_type = args.out_type;
  items.out_scale = args.out_scale;
  items.saturated = args.saturated;
  E == 64 ? launch_items<64>(op, maps, items, stream) : launch_items<128>(op, maps, items, stream);
}

}  // namespace fut::cuda
