// MATH       o[t, h] = sum_j p_j v_j / sum_j p_j,  p_j = 2^(q[t, h] . k_j): q carries log2(e) / sqrt(E).
// SHAPES     E = 64, 128; 1 to 16 query heads a KV head; caches INT4, BF16, E4M3; any length. Refused: f32 caches.
// LAYOUT     kv_page.h. Keys are operand A (16 tokens x 16 channels), the group's query heads are n = 8 (two column
// tiles
//            beyond 8 heads); O^T = V^T P^T likewise, with P turned by movmatrix.
// SCHEDULE   A block takes (row, KV head, split): pages [s C, (s + 1) C) of the row, C = ceil(pages / splits). Its four
//            warps take items in turn: INT4 pages by one bulk copy each, or tiles of 16 tokens row by row (BF16, E4M3,
//            and an INT4 sequence's sinks and own page). A warp keeps two items in flight in buffers of its own. The
//            last block of a row and KV head to arrive merges the splits, in their order.
// NUMERICS   Scores and sums FP32. INT4: scales of keys multiply accumulators; scales of values multiply P, rounded to
//            FP16 after that, P times 2^15 (so that 2^-9 of a scale and 2^-14 of a weight stay normal numbers). BF16: P
//            is split into two BF16. Unwritten slots never reach a sum: their scores are replaced, their values zeroed.
// ROOFLINE   Page bytes over the read rate: 136 bytes a token and KV head at INT4, E = 128; docs/PERF.md.
// REFERENCE  Keys as operand A, split over pages: DESIGN section 6.
#pragma once

#include "cuda/attention.h"
#include "cuda/attention_state.cuh"
#include "cuda/launch.cuh"
#include "cuda/weight_tile.cuh"

namespace fut::cuda {

/// E4M3 codes without a sign, one in each half of x: as FP16, times 2^-8.
__device__ inline uint32_t scale_pair(uint32_t codes) { return codes << 7; }

template <class Shape>
class AttentionBlock {
 public:
  static constexpr int E = Shape::E, NB = Shape::NB, kSteps = E / 16;

  __device__ AttentionBlock(const AttentionLaunch& args, uint8_t* memory, uint64_t* landed, float* starts)
      : args_(args), warp_(threadIdx.x >> 5), lane_(threadIdx.x & 31), memory_(memory), starts_(starts) {
    const int unit = blockIdx.x / args.splits, J = args.cache.kv_heads;
    split_ = blockIdx.x % args.splits;
    head_ = unit % J;
    row_ = unit / J;
    group_ = args.heads / J;
    slots_ = shared_address(memory) + warp_ * kItemSlots * Shape::kSlotBytes;
    landed_ = shared_address(landed + warp_ * kItemSlots);
    if (lane_ == 0) {
      for (int i = 0; i < kItemSlots; ++i) barrier_init(landed_ + 8 * i, 1);
    }
    barrier_init_fence();
    __syncwarp();
  }

  __device__ void run() {
    locate();
    if (split_ >= pieces_) return;
    load_queries();
    state_.clear();
    for (int i = 0; i < kItemSlots; ++i) fetch(warp_ + i * kAttentionWarps, i);
    int slot = 0;
    uint32_t parity = 0;
    for (int item = warp_; item < items_; item += kAttentionWarps) {
      barrier_wait(landed_ + 8 * slot, parity);
      const uint32_t data = slots_ + slot * Shape::kSlotBytes;
      if (Shape::kInt4 && item >= tiles_) {
        if constexpr (Shape::kInt4) int4_page(data, first_ + item - tiles_ == 0);
      } else {
        tile(data, tile_start(item));
      }
      __syncwarp();  // closes: the slot overwritten while lanes still read it
      fetch(item + kItemSlots * kAttentionWarps, slot);
      if (++slot == kItemSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
    merge_warps();
  }

 private:
  /// The row's pages, this block's part of them, and its list of items: tiles first, then INT4 pages.
  __device__ void locate() {
    sequence_ = args_.map.sequence[row_];
    position_ = args_.map.position[row_];
    const int64_t pages = position_ / kKvPageTokens + 1, own = pages - 1;
    const int64_t piece = (pages + args_.splits - 1) / args_.splits;
    pieces_ = static_cast<int>((pages + piece - 1) / piece);
    first_ = split_ * piece;
    const int64_t last = min(pages, first_ + piece);
    if (Shape::kInt4) {
      own_tiles_ = last == pages ? static_cast<int>(position_ % kKvPageTokens) / 16 + 1 : 0;
      tiles_ = own_tiles_ + (first_ == 0 && own > 0);
      items_ = tiles_ + static_cast<int>(max(min(last, own) - first_, int64_t{0}));
    } else {
      const int64_t tokens = min(last * kKvPageTokens, position_ + 1) - first_ * kKvPageTokens;
      items_ = tiles_ = own_tiles_ = static_cast<int>((tokens + 15) / 16);
    }
  }

  /// First token of a tile item. INT4: the own page's tiles, then the sinks.
  __device__ int64_t tile_start(int item) const {
    if (!Shape::kInt4) return first_ * kKvPageTokens + item * 16;
    return item < own_tiles_ ? position_ / kKvPageTokens * kKvPageTokens + item * 16 : 0;
  }

  __device__ const uint8_t* page(int64_t index) const {
    const KvCache& c = args_.cache;
    const KvPageLayout layout{Shape::kDtype, E};
    return c.pages + (c.page_table[sequence_ * c.table_width + index] * c.kv_heads + head_) * layout.page_bytes();
  }

  /// Where the BF16 row (which: 0 key, 1 value) of a token lies: this call's rows, the tail, or the sinks.
  __device__ const Bf16* exact_row(int64_t token, int which, bool sink) const {
    const KvCache& c = args_.cache;
    const int64_t slot = c.slot[sequence_];
    if (sink) return c.sinks + (((slot * c.kv_heads + head_) * 2 + which) * kKvSinkTokens + token) * E;
    if (args_.k && token >= args_.map.past[sequence_]) {
      return (which ? args_.v : args_.k) + ((row_ - (position_ - token)) * c.kv_heads + head_) * E;
    }
    const int64_t tail = (slot * 2 + c.tail_in[sequence_]) * c.kv_heads + head_;
    return c.tails + ((tail * 2 + which) * kKvPageTokens + token % kKvPageTokens) * E;
  }

  __device__ void fetch(int item, int slot) {
    if (item >= items_) return;
    const uint32_t data = slots_ + slot * Shape::kSlotBytes, barrier = landed_ + 8 * slot;
    if (Shape::kInt4 && item >= tiles_) {
      const int64_t bytes = KvPageLayout{Shape::kDtype, E}.page_bytes();
      if (lane_ == 0) {
        barrier_expect(barrier, static_cast<uint32_t>(bytes));
        bulk_copy(data, page(first_ + item - tiles_), static_cast<uint32_t>(bytes), barrier);
      }
      return;
    }
    fetch_tile(tile_start(item), Shape::kInt4 && item >= own_tiles_, data, barrier);
  }

  /// Sixteen tokens, row by row: lanes 0-15 their keys, lanes 16-31 their values. Rows beyond the query are not there.
  __device__ void fetch_tile(int64_t start, bool sink, uint32_t data, uint32_t barrier) {
    const int valid = static_cast<int>(min(int64_t{16}, position_ + 1 - start));
    const int which = lane_ >> 4, row = lane_ & 15;
    const uint32_t to = data + which * Shape::kValueRows + row * Shape::kPitch;
    if (lane_ == 0) barrier_expect(barrier, 2 * valid * Shape::kRowBytes + (Shape::kE4m3 ? 128 : 0));
    if (row >= valid) {
      uint8_t* empty = memory_ + (to - shared_address(memory_));
      for (int i = 0; i < Shape::kRowBytes; i += 16) *reinterpret_cast<uint4*>(empty + i) = make_uint4(0, 0, 0, 0);
      copy_engine_fence();  // the slot's next contents come by the copy engine
    }
    __syncwarp();  // closes: bytes that land before they are expected; zeros read before they are written
    const KvPageLayout layout{Shape::kDtype, E};
    const int token = static_cast<int>(start % kKvPageTokens);
    if (row < valid) {
      const void* from;
      if constexpr (Shape::kInt4) {
        from = exact_row(start + row, which, sink);
      } else {
        from = page(start / kKvPageTokens) + which * layout.value_offset() + (token + row) * Shape::kRowBytes;
      }
      bulk_copy(to, from, Shape::kRowBytes, barrier);
    }
    if (Shape::kE4m3 && row == 0) {
      const int64_t scales = which ? layout.value_scale_offset() : layout.key_scale_offset();
      bulk_copy(data + Shape::kScales + which * 64, page(start / kKvPageTokens) + scales + token * 4, 64, barrier);
    }
  }

  __device__ const Bf16* query(int nb) const {
    const int g = lane_ >> 2, h = min(nb * 8 + g, group_ - 1);
    return args_.q + (int64_t{row_} * args_.heads + head_ * group_ + h) * E;
  }

  /// Channels that lane t multiplies in k-step `step`, as two pairs. E4M3 keys are read four codes at a time.
  __device__ int channel(int step, int pair) const {
    const int t = lane_ & 3;
    return step * 16 + (Shape::kE4m3 ? 4 * t + 2 * pair : 2 * t + 8 * pair);
  }

  /// FP16 queries for codes. A power of two a head brings the largest element to [1, 2), whatever the input.
  __device__ void load_queries() {
    if constexpr (Shape::kInt4 || Shape::kE4m3) {
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        uint32_t raw[kSteps][2], largest = 0;
        for (int s = 0; s < kSteps; ++s) {
          for (int i = 0; i < 2; ++i) {
            raw[s][i] = *reinterpret_cast<const uint32_t*>(query(nb) + channel(s, i));
            largest = max(largest, max(raw[s][i] << 16 & 0x7f800000u, raw[s][i] & 0x7f800000u));
          }
        }
        for (int step = 1; step < 4; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
        const int exponent = min(max(static_cast<int>(largest >> 23), 27), 227);  // also for all zeros, or NaN
        const float down = float_of(static_cast<uint32_t>(254 - exponent) << 23), up = float_of(exponent << 23);
        for (int s = 0; s < kSteps; ++s) {
          for (int i = 0; i < 2; ++i) {
            q_[s][nb][i] = half_pair(float_of(raw[s][i] << 16) * down, float_of(raw[s][i] & 0xffff0000u) * down);
          }
        }
        const int t = lane_ & 3;
        up_[nb][0] = __shfl_sync(~0u, up, 8 * t);
        up_[nb][1] = __shfl_sync(~0u, up, 8 * t + 4);
        if constexpr (Shape::kInt4) {
          const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
          for (int i = 0; i < E / kKvGroup; ++i) {
            float d[4] = {};
            mma(HalfOperand{}, d, ones, q_[2 * i][nb][0], q_[2 * i][nb][1]);
            mma(HalfOperand{}, d, ones, q_[2 * i + 1][nb][0], q_[2 * i + 1][nb][1]);
            if (threadIdx.x < 4) {
              starts_[(i * NB + nb) * 8 + 2 * t] = d[0] * (-7.5f / 16777216.0f);
              starts_[(i * NB + nb) * 8 + 2 * t + 1] = d[1] * (-7.5f / 16777216.0f);
            }
          }
        }
      }
      if (Shape::kInt4) __syncthreads();  // closes: starts read before they are written
    }
  }

  /// A page of INT4 keys and values. `sinks`: its first 16 tokens are read elsewhere, exactly.
  __device__ void int4_page(uint32_t data, bool sinks) {
    constexpr KvPageLayout layout{Dtype::int4, E};
    const int g = lane_ >> 2;
    float s[4][NB][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int nb = 0; nb < NB; ++nb) Running<Shape>::zero(s[i][nb]);
#pragma unroll
      for (int c = 0; c < E / 64; ++c) {
        const uint4 v =
            load_shared_16(data + static_cast<uint32_t>(layout.key_tile_offset(16 * i, 64 * c)) + lane_ * 16);
        const uint32_t code[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int group = 2 * c + half;
          const uint32_t scales = data + static_cast<uint32_t>(layout.key_scale_offset()) + group * 64 + 16 * i + g;
          const uint32_t pair = scale_pair(load_shared_1(scales) | load_shared_1(scales + 8) << 16);
          const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&pair));
#pragma unroll
          for (int nb = 0; nb < NB; ++nb) {
            const float2 start =
                load_shared_f2(shared_address(starts_) + ((group * NB + nb) * 8 + 2 * (lane_ & 3)) * 4);
            float d[4] = {start.x, start.y, 16.0f * start.x, 16.0f * start.y};
#pragma unroll
            for (int step = 2 * half; step < 2 * half + 2; ++step) {
              uint32_t a[4];
              unpack_int4(a, code[step]);
              mma(HalfOperand{}, d, a, q_[4 * c + step][nb][0], q_[4 * c + step][nb][1]);
            }
            s[i][nb][0] = fmaf(scale.x, d[0], s[i][nb][0]);
            s[i][nb][1] = fmaf(scale.x, d[1], s[i][nb][1]);
            s[i][nb][2] = fmaf(scale.y, d[2], s[i][nb][2]);
            s[i][nb][3] = fmaf(scale.y, d[3], s[i][nb][3]);
          }
        }
      }
    }
    const float unit = args_.cache.key_factor[head_] * 4294967296.0f;  // 2^24 of the mask, 2^8 of the scale
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int nb = 0; nb < NB; ++nb) {
        for (int c = 0; c < 4; ++c) s[i][nb][c] *= up_[nb][c & 1] * (c < 2 ? unit : unit * 0.0625f);
        if (i == 0 && sinks) s[i][nb][0] = s[i][nb][1] = s[i][nb][2] = s[i][nb][3] = -INFINITY;
      }
    }
    state_.template weigh<4>(s);
    int4_values(data, s);
  }

  __device__ void int4_values(uint32_t data, const float (&p)[4][NB][4]) {
    constexpr KvPageLayout layout{Dtype::int4, E};
    const int t = lane_ & 3;
    uint32_t weight[4][NB][2];  // B fragments: heads g, tokens 16 i + 2t, + 1 and + 8, + 9
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int nb = 0; nb < NB; ++nb) {
        weight[i][nb][0] = transpose_8x8(half_pair(p[i][nb][0], p[i][nb][1]));
        weight[i][nb][1] = transpose_8x8(half_pair(p[i][nb][2], p[i][nb][3]));
      }
    }
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
    for (int group = 0; group < E / kKvGroup; ++group) {
      const uint32_t scales = data + static_cast<uint32_t>(layout.value_scale_offset()) + group * 64 + 2 * t;
      const uint32_t tiles = data + static_cast<uint32_t>(layout.value_tile_offset(group * kKvGroup)) + lane_ * 16;
      const uint4 v0 = load_shared_16(tiles), v1 = load_shared_16(tiles + kInt4TileCodeBytes);
      const uint32_t code[2][4] = {{v0.x, v0.y, v0.z, v0.w}, {v1.x, v1.y, v1.z, v1.w}};
      float sum[NB][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t scale[2], a[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t codes = load_shared_2(scales + 16 * i + 8 * k);
          scale[k] = scale_pair((codes | codes << 8) & 0x00ff00ffu);
        }
        unpack_int4(a[0], code[0][i]);
        unpack_int4(a[1], code[1][i]);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          const uint32_t b0 = multiply_halves(weight[i][nb][0], scale[0]),
                         b1 = multiply_halves(weight[i][nb][1], scale[1]);
          mma(HalfOperand{}, state_.o[2 * group][nb], a[0], b0, b1);
          mma(HalfOperand{}, state_.o[2 * group + 1][nb], a[1], b0, b1);
          mma(HalfOperand{}, sum[nb], ones, b0, b1);
        }
      }
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        for (int c = 0; c < 2; ++c) state_.weights[group][nb][c] += sum[nb][c];
      }
    }
  }

  __device__ static uint32_t multiply_halves(uint32_t x, uint32_t y) {
    const __half2 z = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
    return *reinterpret_cast<const uint32_t*>(&z);
  }

  /// Sixteen tokens of BF16 or E4M3 rows.
  __device__ void tile(uint32_t data, int64_t start) {
    const int g = lane_ >> 2;
    const bool valid[2] = {start + g <= position_, start + g + 8 <= position_};
    float s[1][NB][4];
    for (int nb = 0; nb < NB; ++nb) Running<Shape>::zero(s[0][nb]);
    if constexpr (Shape::kE4m3) {
      e4m3_scores(data, s[0]);
    } else {
      bf16_scores(data, s[0]);
    }
    for (int nb = 0; nb < NB; ++nb) {
      for (int c = 0; c < 4; ++c) {
        if (!valid[c >> 1]) s[0][nb][c] = -INFINITY;  // a tile holds at least one valid token, so the maximum is finite
      }
    }
    state_.template weigh<1>(s);
    if constexpr (Shape::kE4m3) {
      e4m3_values(data, s[0], valid);
    } else {
      bf16_values(data, s[0]);
    }
  }

  __device__ void bf16_scores(uint32_t data, float (&s)[NB][4]) {
    const uint32_t row = data + ((lane_ & 15) * Shape::kPitch) + (lane_ >> 4) * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_matrices(a, row + step * 32);
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const uint32_t* q = reinterpret_cast<const uint32_t*>(query(nb) + step * 16 + 2 * (lane_ & 3));
        mma(Bf16Operand{}, s[nb], a, q[0], q[4]);
      }
    }
  }

  __device__ void bf16_values(uint32_t data, const float (&p)[NB][4]) {
    uint32_t high[NB][2], low[NB][2];
    for (int nb = 0; nb < NB; ++nb) {
      for (int i = 0; i < 2; ++i) {
        const float x = p[nb][2 * i], y = p[nb][2 * i + 1];
        const uint32_t pair = bf16_pair(x, y);
        high[nb][i] = transpose_8x8(pair);
        low[nb][i] = transpose_8x8(bf16_pair(x - float_of(pair << 16), y - float_of(pair & 0xffff0000u)));
      }
    }
    // INT4: O is kept in units of the codes; powers of two, so nothing is lost.
    const float unit = Shape::kInt4 ? 1.0f / (args_.cache.value_factor[head_] * 4294967296.0f) : 1.0f;
    const float upper = Shape::kInt4 ? 16.0f * unit : 1.0f;
    const uint32_t row =
        data + Shape::kValueRows + ((lane_ & 7) + (lane_ >> 4) * 8) * Shape::kPitch + (lane_ >> 3 & 1) * 16;
#pragma unroll
    for (int i = 0; i < E / 16; ++i) {
      uint32_t a[4];
      load_matrices_transposed(a, row + i * 32);
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        float d[4] = {};
        mma(Bf16Operand{}, d, a, high[nb][0], high[nb][1]);
        mma(Bf16Operand{}, d, a, low[nb][0], low[nb][1]);
        for (int c = 0; c < 4; ++c) state_.o[i][nb][c] = fmaf(d[c], c < 2 ? unit : upper, state_.o[i][nb][c]);
      }
    }
  }

  __device__ void e4m3_scores(uint32_t data, float (&s)[NB][4]) {
    const int g = lane_ >> 2, t = lane_ & 3;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t low = load_shared_4(data + g * Shape::kPitch + step * 16 + 4 * t);
      const uint32_t high = load_shared_4(data + (g + 8) * Shape::kPitch + step * 16 + 4 * t);
      const uint32_t a[4] = {e4m3x2_to_half2(low), e4m3x2_to_half2(high), e4m3x2_to_half2(low >> 16),
                             e4m3x2_to_half2(high >> 16)};
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) mma(HalfOperand{}, s[nb], a, q_[step][nb][0], q_[step][nb][1]);
    }
    for (int nb = 0; nb < NB; ++nb) {
      for (int c = 0; c < 4; ++c) {
        s[nb][c] *= up_[nb][c & 1] * float_of(load_shared_4(data + Shape::kScales + (g + (c < 2 ? 0 : 8)) * 4));
      }
    }
  }

  /// Value scales join P under a power of two of the tile, so that the product stays inside FP16.
  __device__ void e4m3_values(uint32_t data, const float (&p)[NB][4], const bool (&valid)[2]) {
    const int g = lane_ >> 2;
    float scale[2];
    for (int i = 0; i < 2; ++i) {
      scale[i] = valid[i] ? float_of(load_shared_4(data + Shape::kScales + 64 + (g + 8 * i) * 4)) : 0.0f;
    }
    float largest = fmaxf(scale[0], scale[1]);
    for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const uint32_t exponent = min(max(bits_of(largest) >> 23, 2u), 250u) + 1;
    const float up = float_of(exponent << 23), down = float_of((254 - exponent) << 23);
    uint32_t weight[NB][2];
    for (int nb = 0; nb < NB; ++nb) {
      for (int i = 0; i < 2; ++i) {
        const float factor = scale[i] * down;
        weight[nb][i] = transpose_8x8(half_pair(p[nb][2 * i] * factor, p[nb][2 * i + 1] * factor));
      }
    }
    const uint32_t row = data + Shape::kValueRows + (lane_ & 15) * Shape::kPitch + (lane_ >> 4) * 16;
#pragma unroll
    for (int i = 0; i < E / 32; ++i) {
      uint32_t m[4];  // tokens 0-7 and 8-15 of channels 32 i .. + 15, then of the next 16; pairs of channels by lane
      load_matrices_transposed(m, row + i * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t first = m[2 * half], second = m[2 * half + 1];
        const uint32_t a[4] = {
            e4m3x2_to_half2(__byte_perm(first, 0, 0x4420)), e4m3x2_to_half2(__byte_perm(first, 0, 0x4431)),
            e4m3x2_to_half2(__byte_perm(second, 0, 0x4420)), e4m3x2_to_half2(__byte_perm(second, 0, 0x4431))};
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          float d[4] = {};
          mma(HalfOperand{}, d, a, weight[nb][0], weight[nb][1]);
          float(&o)[4] = state_.o[2 * i + half][nb];
          for (int c = 0; c < 4; ++c) o[c] = fmaf(d[c], up, o[c]);
        }
      }
    }
  }

  /// True sums of this warp, into shared memory: [warp][head][E] and [warp][head][2] (largest, sum).
  __device__ void publish_warp(float* sums, float* ends) {
    const int g = lane_ >> 2, t = lane_ & 3;
    const float unit = Shape::kInt4 ? args_.cache.value_factor[head_] * 256.0f : 1.0f;
    for (int nb = 0; nb < NB; ++nb) {
      for (int c = 0; c < 2; ++c) {
        float sum = state_.sum[nb][c];
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int head = nb * 8 + 2 * t + c;
        if (g == 0) {
          ends[(warp_ * NB * 8 + head) * 2] = state_.largest[nb][c];
          ends[(warp_ * NB * 8 + head) * 2 + 1] = sum;
        }
        float* to = sums + (warp_ * NB * 8 + head) * E;
#pragma unroll
        for (int i = 0; i < E / 16; ++i) {
          float low = state_.o[i][nb][c], high = state_.o[i][nb][c + 2];
          if constexpr (Shape::kInt4) {
            const float level = 7.5f * state_.weights[i / 2][nb][c];
            low = (low * 16777216.0f - level) * unit;
            high = (high * 1048576.0f - level) * unit;
          }
          // E4M3: a lane's two rows are a pair of channels (e4m3_values); else g and g + 8.
          to[i * 16 + (Shape::kE4m3 ? 2 * g : g)] = low;
          to[i * 16 + (Shape::kE4m3 ? 2 * g + 1 : g + 8)] = high;
        }
      }
    }
  }

  /// Adds the warps' sums, in their order; the row's only piece is stored, others are left for merge_splits().
  __device__ void merge_warps() {
    float* sums = reinterpret_cast<float*>(memory_);
    float* ends = sums + kAttentionWarps * NB * 8 * E;
    __syncthreads();  // closes: slots of slower warps overwritten
    publish_warp(sums, ends);
    __syncthreads();  // closes: sums read before all warps have written theirs
    const int unit = row_ * args_.cache.kv_heads + head_;
    float* parts = args_.partial + int64_t{unit} * args_.splits * group_ * (E + 4);
    for (int i = threadIdx.x; i < group_ * E; i += kAttentionThreads) {
      const int h = i / E, c = i % E;
      float top = -INFINITY, sum = 0.0f, value = 0.0f;
      for (int w = 0; w < kAttentionWarps; ++w) top = fmaxf(top, ends[(w * NB * 8 + h) * 2]);
      for (int w = 0; w < kAttentionWarps; ++w) {
        const int at = w * NB * 8 + h;
        const float factor = exp2f(ends[at * 2] - top);  // a warp without items has -infinity, and so no weight
        sum += ends[at * 2 + 1] * factor;
        value += sums[at * E + c] * factor;
      }
      if (pieces_ == 1) {
        store(h, c, value / sum);
        continue;
      }
      float* part = parts + (split_ * group_ + h) * (E + 4);
      __stcg(part + c, value);
      if (c == 0) __stcg(reinterpret_cast<float2*>(part + E), make_float2(top, sum));
    }
    if (pieces_ > 1) merge_splits(unit, parts);
  }

  /// The last block to arrive adds all pieces, in their order. Loads do not wait for one another: the ends first, then
  /// four channels a thread over all pieces.
  __device__ void merge_splits(int unit, const float* parts) {
    __shared__ bool last;
    __threadfence();  // the parts before the arrival
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(args_.arrived + unit, pieces_ - 1) == static_cast<unsigned>(pieces_) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();                                    // the arrivals before their parts
    float2* ends = reinterpret_cast<float2*>(memory_);  // [head][piece]: factor and sum
    for (int i = threadIdx.x; i < group_ * pieces_; i += kAttentionThreads) {
      ends[i] = __ldcg(reinterpret_cast<const float2*>(parts + (i % pieces_ * group_ + i / pieces_) * (E + 4) + E));
    }
    __syncthreads();  // closes: ends read before they are there
    for (int i = threadIdx.x; i < group_ * E / 4; i += kAttentionThreads) {
      const int h = i / (E / 4), c = i % (E / 4) * 4;
      const float2* end = ends + h * pieces_;
      float top = -INFINITY, sum = 0.0f;
      for (int s = 0; s < pieces_; ++s) top = fmaxf(top, end[s].x);
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
      for (int s = 0; s < pieces_; ++s) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(parts + (s * group_ + h) * (E + 4) + c));
        const float factor = exp2f(end[s].x - top);
        sum += end[s].y * factor;
        value.x += v.x * factor, value.y += v.y * factor, value.z += v.z * factor, value.w += v.w * factor;
      }
      const float inverse = 1.0f / sum;
      store(h, c, value.x * inverse), store(h, c + 1, value.y * inverse);
      store(h, c + 2, value.z * inverse), store(h, c + 3, value.w * inverse);
    }
  }

  __device__ void store(int h, int c, float value) const {
    const int64_t at = (int64_t{row_} * args_.heads + head_ * group_ + h) * E + c;
    if (args_.out_type == Dtype::f32) {
      static_cast<float*>(args_.out)[at] = value;
    } else if (args_.out_type == Dtype::bf16) {
      static_cast<Bf16*>(args_.out)[at] = to_bf16(value);
    } else {
      const float scaled = value / args_.out_scale;
      static_cast<Half*>(args_.out)[at] = to_half_saturated(scaled);
      if (args_.saturated && fabsf(scaled) > kHalfMax) atomicAdd(args_.saturated, 1ull);
    }
  }

  const AttentionLaunch& args_;
  int warp_, lane_, split_, head_, row_, group_;
  int pieces_ = 0, own_tiles_ = 0, tiles_ = 0, items_ = 0;
  int64_t sequence_ = 0, position_ = 0, first_ = 0;
  uint8_t* memory_;
  uint32_t slots_, landed_;
  uint32_t q_[Shape::kInt4 || Shape::kE4m3 ? kSteps : 1][NB][2];
  float up_[NB][2];
  float* starts_;  // INT4: [group][head], -7.5 * 2^-24 * sum of the group's queries
  Running<Shape> state_;
};

template <class Shape>
__global__ void __launch_bounds__(kAttentionThreads, Shape::NB == 1 ? 3 : 2)
    attention_kernel(const __grid_constant__ AttentionLaunch args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t landed[kAttentionWarps * kItemSlots];
  __shared__ __align__(8) float starts[Shape::E / kKvGroup * Shape::NB * 8];
  release_next_kernel();
  AttentionBlock<Shape> block(args, memory, landed, starts);
  wait_for_previous_kernel();
  copy_engine_fence();  // rows that the previous kernel wrote, the copy engine reads
  block.run();
}

template <Dtype kDtype, int E>
void launch_attention(const char* op, const AttentionLaunch& args, cudaStream_t stream) {
  const int64_t blocks = int64_t{args.rows} * args.cache.kv_heads * args.splits;
  FUT_CHECK(blocks < 1ll << 31, op, ": ", args.rows, " rows in one launch are too many");
  const auto run = [&](auto shape) {
    using Shape = decltype(shape);
    launch(op, attention_kernel<Shape>, dim3(static_cast<unsigned>(blocks)), dim3(kAttentionThreads),
           Shape::kSharedBytes, stream, args);
  };
  if (args.heads / args.cache.kv_heads <= 8) return run(AttentionShape<kDtype, E, 1>{});
  run(AttentionShape<kDtype, E, 2>{});
}

}  // namespace fut::cuda
