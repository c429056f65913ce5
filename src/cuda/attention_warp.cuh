// What one warp does in attention, whoever feeds it: queries into fragments, a running softmax over items in shared
// memory (INT4 pages, or tiles of 16 BF16 or E4M3 tokens), and its sums at the end. Kernels: attention.cuh,
// step_attention.cuh.
#pragma once

#include "cuda/attention_state.cuh"
#include "cuda/weight_tile.cuh"

namespace fut::cuda {

/// E4M3 codes without a sign, one in each half of x: as FP16, times 2^-8.
__device__ inline uint32_t scale_pair(uint32_t codes) { return codes << 7; }

/// A row's pages are cut into pieces of equal length, a multiple of kPairs pages; this is one of them, and its list of
/// items: tiles of 16 tokens first (INT4: those of the row's own page, then the sinks), then INT4 pages. The last piece
/// takes what is left. Pair i % kPairs of warps takes item i: each warp half of a page, or one warp a tile.
template <class Shape>
struct AttentionPiece {
  int position = 0;  ///< of the query
  int length = 0;    ///< pages of every piece but the last
  int pieces = 0;    ///< that are not empty
  int first = 0;     ///< page of the piece
  int own_tiles = 0, tiles = 0, items = 0;

  __device__ void locate(int64_t query_position, int splits, int split) {
    position = static_cast<int>(query_position);
    const AttentionCut cut(position / kKvPageTokens, splits);
    length = cut.length;
    pieces = cut.pieces;
    move_to(split);
  }
  /// Another piece of the same row.
  __device__ void move_to(int split) {
    const int own = position / kKvPageTokens;  // its index, and the number of pages before it
    first = split * length;
    own_tiles = tiles = items = 0;
    if (split >= pieces) return;
    const bool last = split == pieces - 1;
    if (Shape::kInt4) {
      own_tiles = last ? position % kKvPageTokens / 16 + 1 : 0;
      tiles = own_tiles + (first == 0 && own > 0);
      items = tiles + (last ? own : first + length) - first;
    } else {
      const int tokens = (last ? position + 1 : (first + length) * kKvPageTokens) - first * kKvPageTokens;
      items = tiles = own_tiles = (tokens + 15) / 16;
    }
  }

  __device__ bool is_page(int item) const { return Shape::kInt4 && item >= tiles; }
  __device__ bool is_sink(int item) const { return Shape::kInt4 && item >= own_tiles && item < tiles; }
  __device__ int page(int item) const { return first + item - tiles; }

  /// Tokens of a tile that the query sees.
  __device__ int tile_tokens(int item) const { return min(16, position + 1 - tile_start(item)); }

  /// Whether warp w of the item's pair has something to do with it.
  __device__ bool takes(int w, int item) const { return is_page(item) || (item / kPairs & 1) == (w & 1); }

  /// First token of a tile.
  __device__ int tile_start(int item) const {
    if (!Shape::kInt4) return first * kKvPageTokens + item * 16;
    return item < own_tiles ? position / kKvPageTokens * kKvPageTokens + item * 16 : 0;
  }
};

template <class Shape>
class AttentionWarp {
 public:
  static constexpr int E = Shape::E, NB = Shape::NB, kSteps = E / 16;
  static constexpr int kStartFloats = E / kKvGroup * NB * 8;

  /// queries: (group, E), in any memory; starts: kStartFloats of shared memory, this warp's own.
  __device__ void begin(const Bf16* queries, int group, float key_factor, float value_factor, float* starts) {
    lane_ = threadIdx.x & 31;
    queries_ = queries, group_ = group;
    key_factor_ = key_factor, value_factor_ = value_factor, starts_ = shared_address(starts);
    load_queries();
    state_.clear();
  }
  /// The same with queries (group, E) in FP16 too and a factor a head, as HalfQuery has it; those in shared memory.
  __device__ void begin_ready(const Bf16* queries, uint32_t half_queries, uint32_t factors, int group, float key_factor,
                              float value_factor, float* starts) {
    static_assert(Shape::kInt4 && NB == 1);
    lane_ = threadIdx.x & 31;
    queries_ = queries, group_ = group;
    key_factor_ = key_factor, value_factor_ = value_factor, starts_ = shared_address(starts);
    const uint32_t row = half_queries + min(lane_ >> 2, group - 1) * E * 2;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      for (int i = 0; i < 2; ++i) q_[s][0][i] = load_shared_4(row + channel(s, i) * 2);
    }
    for (int c = 0; c < 2; ++c) up_[0][c] = float_of(load_shared_4(factors + min(2 * (lane_ & 3) + c, group - 1) * 4));
    make_starts(0);
    __syncwarp();  // closes: starts read before they are written
    state_.clear();
  }
  /// A power of two that brings a head's largest element to [1, 2), whatever the input, from the largest exponent's
  /// bits.
  struct HalfQuery {
    float down, up;
    __device__ explicit HalfQuery(uint32_t largest) {
      const int exponent = min(max(static_cast<int>(largest >> 23), 27), 227);  // also for all zeros, or NaN
      down = float_of(static_cast<uint32_t>(254 - exponent) << 23), up = float_of(exponent << 23);
    }
  };
  __device__ void restart() { state_.clear(); }

  /// Warp w's part of an item.
  __device__ void attend(const AttentionPiece<Shape>& piece, int item, int w, uint32_t data) {
    if (!piece.is_page(item)) return tile(data, piece.tile_tokens(item));
    if constexpr (Shape::kInt4) int4_half(data, w & 1, (w & 1) == 0 && piece.page(item) == 0);
  }

  /// Tokens 32 half .. 32 half + 31 of a page of INT4 keys and values. `sinks`: the first 16 are read elsewhere,
  /// exactly.
  __device__ void int4_half(uint32_t data, int half, bool sinks) {
    constexpr KvPageLayout layout{Dtype::int4, E};
    const int g = lane_ >> 2;
    float s[2][NB][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tile = 2 * half + i;
      for (int nb = 0; nb < NB; ++nb) Running<Shape>::zero(s[i][nb]);
#pragma unroll
      for (int c = 0; c < E / 64; ++c) {
        const uint4 v = load_shared_16(data + (tile * (E / 64) + c) * kInt4TileCodeBytes + lane_ * 16);
        const uint32_t code[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int group = 2 * c + pair;
          const uint32_t scales = data + static_cast<uint32_t>(layout.key_scale_offset()) + group * 64 + 16 * tile + g;
          const uint32_t codes = scale_pair(load_shared_1(scales) | load_shared_1(scales + 8) << 16);
          const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&codes));
#pragma unroll
          for (int nb = 0; nb < NB; ++nb) {
            const float2 start = load_shared_f2(starts_ + ((group * NB + nb) * 8 + 2 * (lane_ & 3)) * 4);
            float d[4] = {start.x, start.y, 16.0f * start.x, 16.0f * start.y};
#pragma unroll
            for (int step = 2 * pair; step < 2 * pair + 2; ++step) {
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
    const float unit = key_factor_ * 4294967296.0f;  // 2^24 of the mask, 2^8 of the scale
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int nb = 0; nb < NB; ++nb) {
        for (int c = 0; c < 4; ++c) s[i][nb][c] *= up_[nb][c & 1] * (c < 2 ? unit : unit * 0.0625f);
        if (i == 0 && sinks) s[i][nb][0] = s[i][nb][1] = s[i][nb][2] = s[i][nb][3] = -INFINITY;
      }
    }
    state_.template weigh<2>(s);
    int4_values(data, half, s);
  }

  /// `tokens` of 16 tokens of BF16 or E4M3 rows, at least one; the rows behind them hold zeros.
  __device__ void tile(uint32_t data, int tokens) {
    const int g = lane_ >> 2;
    const bool valid[2] = {g < tokens, g + 8 < tokens};
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

  /// True sums of this warp, into shared memory: [slice][head][E] and [slice][head][2] (largest, sum).
  __device__ void publish(int slice, int group, float* sums, float* ends) {
    const int g = lane_ >> 2, t = lane_ & 3;
    const float unit = Shape::kInt4 ? value_factor_ * 256.0f : 1.0f;
    for (int nb = 0; nb < NB; ++nb) {
      float sum[2] = {state_.sum[nb][0], state_.sum[nb][1]};
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum[0] += __shfl_xor_sync(~0u, sum[0], step);
        sum[1] += __shfl_xor_sync(~0u, sum[1], step);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = nb * 8 + 2 * t + c;
        if (head >= group) continue;  // nobody reads it
        if (g == 0) {
          ends[(slice * NB * 8 + head) * 2] = state_.largest[nb][c];
          ends[(slice * NB * 8 + head) * 2 + 1] = sum[c];
        }
        float* to = sums + (slice * NB * 8 + head) * E;
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

 private:
  __device__ const Bf16* query(int nb) const { return queries_ + min(nb * 8 + (lane_ >> 2), group_ - 1) * E; }

  /// Channels that lane t multiplies in k-step `step`, as two pairs. E4M3 keys are read four codes at a time.
  __device__ int channel(int step, int pair) const {
    const int t = lane_ & 3;
    return step * 16 + (Shape::kE4m3 ? 4 * t + 2 * pair : 2 * t + 8 * pair);
  }

  /// FP16 queries for codes.
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
        const HalfQuery scale(largest);
        for (int s = 0; s < kSteps; ++s) {
          for (int i = 0; i < 2; ++i) {
            q_[s][nb][i] =
                half_pair(float_of(raw[s][i] << 16) * scale.down, float_of(raw[s][i] & 0xffff0000u) * scale.down);
          }
        }
        const int t = lane_ & 3;
        up_[nb][0] = __shfl_sync(~0u, scale.up, 8 * t);
        up_[nb][1] = __shfl_sync(~0u, scale.up, 8 * t + 4);
        if constexpr (Shape::kInt4) make_starts(nb);
      }
      if (Shape::kInt4) __syncwarp();  // closes: starts read before they are written
    }
  }

  __device__ void make_starts(int nb) {
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
    for (int i = 0; i < E / kKvGroup; ++i) {
      float d[4] = {};
      mma(HalfOperand{}, d, ones, q_[2 * i][nb][0], q_[2 * i][nb][1]);
      mma(HalfOperand{}, d, ones, q_[2 * i + 1][nb][0], q_[2 * i + 1][nb][1]);
      if (lane_ < 4) {
        store_shared_f2(starts_ + ((i * NB + nb) * 8 + 2 * lane_) * 4,
                        make_float2(d[0] * (-7.5f / 16777216.0f), d[1] * (-7.5f / 16777216.0f)));
      }
    }
  }

  __device__ void int4_values(uint32_t data, int half, const float (&p)[2][NB][4]) {
    constexpr KvPageLayout layout{Dtype::int4, E};
    const int t = lane_ & 3;
    uint32_t weight[2][NB][2];  // B fragments: heads g, tokens 16 i + 2t, + 1 and + 8, + 9
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int nb = 0; nb < NB; ++nb) {
        weight[i][nb][0] = transpose_8x8(weight_pair(p[i][nb][0], p[i][nb][1]));  // at most 2^15
        weight[i][nb][1] = transpose_8x8(weight_pair(p[i][nb][2], p[i][nb][3]));
      }
    }
    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
    for (int group = 0; group < E / kKvGroup; ++group) {
      const uint32_t scales =
          data + static_cast<uint32_t>(layout.value_scale_offset()) + group * 64 + 32 * half + 2 * t;
      const uint32_t tiles =
          data + static_cast<uint32_t>(layout.value_tile_offset(group * kKvGroup)) + lane_ * 16 + 8 * half;
      const float2 low = load_shared_f2(tiles), high = load_shared_f2(tiles + kInt4TileCodeBytes);
      const uint32_t code[2][2] = {{bits_of(low.x), bits_of(low.y)}, {bits_of(high.x), bits_of(high.y)}};
      float sum[NB][4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t scale[2], a[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t codes = load_shared_2(scales + 16 * i + 8 * k);
          scale[k] = scale_pair(__byte_perm(codes, 0, 0x4140));
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

  __device__ static uint32_t weight_pair(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }

  __device__ static uint32_t multiply_halves(uint32_t x, uint32_t y) {
    const __half2 z = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
    return *reinterpret_cast<const uint32_t*>(&z);
  }

  __device__ void bf16_scores(uint32_t data, float (&s)[NB][4]) {
    const uint32_t row = data + ((lane_ & 15) * Shape::kRowBytes) + (lane_ >> 4) * 16;
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
    const float unit = Shape::kInt4 ? 1.0f / (value_factor_ * 4294967296.0f) : 1.0f;
    const float upper = Shape::kInt4 ? 16.0f * unit : 1.0f;
    const uint32_t row =
        data + Shape::kValueRows + ((lane_ & 7) + (lane_ >> 4) * 8) * Shape::kRowBytes + (lane_ >> 3 & 1) * 16;
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
      const uint32_t low = load_shared_4(data + g * Shape::kRowBytes + step * 16 + 4 * t);
      const uint32_t high = load_shared_4(data + (g + 8) * Shape::kRowBytes + step * 16 + 4 * t);
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
    const uint32_t row = data + Shape::kValueRows + (lane_ & 15) * Shape::kRowBytes + (lane_ >> 4) * 16;
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

  int lane_ = 0, group_ = 0;
  const Bf16* queries_ = nullptr;
  float key_factor_ = 0.0f, value_factor_ = 0.0f;
  uint32_t starts_ = 0;  ///< INT4: [group][head], -7.5 * 2^-24 * sum of the group's queries
  uint32_t q_[Shape::kInt4 || Shape::kE4m3 ? kSteps : 1][NB][2];
  float up_[NB][2];
  Running<Shape> state_;
};

/// What eight warps published, added in their order: channels c and c + 1 of head h, relative to 2^top.
template <class Shape>
struct WarpsMerged {
  float top = -INFINITY, sum = 0.0f, x = 0.0f, y = 0.0f;

  __device__ WarpsMerged(const float* sums, const float* ends, int h, int c) {
    constexpr int kHeads = Shape::NB * 8;
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) top = fmaxf(top, ends[(w * kHeads + h) * 2]);
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      const int at = w * kHeads + h;
      const float factor = fast_exp2(ends[at * 2] - top);  // a warp without items has -infinity, and so no weight
      const float2 v = *reinterpret_cast<const float2*>(sums + at * Shape::E + c);
      sum += ends[at * 2 + 1] * factor;
      x += v.x * factor, y += v.y * factor;
    }
  }
};

}  // namespace fut::cuda
