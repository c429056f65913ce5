// A KV head's queries, new key and new value out of the QKV product, inside the step kernels: RoPE, key mean, rotation
// and rounding as cache.cu has them.
#pragma once

#include "cuda/attention_warp.cuh"
#include "cuda/quantise_page.cuh"
#include "cuda/step.h"
#include "layout/hadamard.h"

namespace fut::cuda {

/// The table of layers, into shared memory. All threads of the block; they meet afterwards.
__device__ inline void load_step_layers(const StepModel& args, StepLayer* layers) {
  constexpr int kWords = sizeof(StepLayer) / 8;
  static_assert(sizeof(StepLayer) % 8 == 0);
  const uint64_t* from = reinterpret_cast<const uint64_t*>(args.layers);
  uint64_t* to = reinterpret_cast<uint64_t*>(layers);
  for (int i = threadIdx.x; i < args.layer_count * kWords; i += blockDim.x) to[i] = from[i];
}

/// Where a piece of a row's attention finds its row and its pages.
template <class Shape>
struct StepUnit {
  static constexpr int E = Shape::E;
  int b, head, split, slot, tail_in;
  AttentionPiece<Shape> piece;  ///< without items where it is empty

  __device__ int slots() const { return (piece.items + kPairs - 1) / kPairs; }
  __device__ bool appends() const { return split == piece.pieces - 1; }

  __device__ Bf16* tail(const StepModel& args, const StepLayer& layer, int which) const {
    const int64_t tail = (int64_t{slot} * 2 + tail_in) * args.kv_heads + head;
    return layer.tails + (tail * 2 + which) * kKvPageTokens * E;
  }
  __device__ Bf16* sinks(const StepModel& args, const StepLayer& layer, int which) const {
    return layer.sinks + ((int64_t{slot} * args.kv_heads + head) * 2 + which) * kKvSinkTokens * E;
  }
  __device__ uint8_t* page(const StepModel& args, const StepLayer& layer, int index) const {
    return layer.pages + (args.page_table[b * args.table_width + index] * args.kv_heads + head) * Shape::kPageBytes;
  }
};

/// Rows of a tile that earlier steps wrote: all but this step's own.
template <class Shape>
__device__ inline int old_rows(const AttentionPiece<Shape>& piece, int item) {
  return piece.is_sink(item) ? 16 : min(16, piece.position - piece.tile_start(item));
}

/// hadamard.h's butterflies of channels lane + 32 part: strides below 32 across lanes, then across this lane's parts.
template <int E>
__device__ inline void rotate_channels(float (&x)[E / 32], int lane) {
  constexpr int kBlock = hadamard_block(E), kParts = E / 32;
#pragma unroll
  for (int part = 0; part < kParts; ++part) x[part] *= hadamard_sign(lane + 32 * part);
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float other = __shfl_xor_sync(~0u, x[part], stride);
      x[part] = lane & stride ? other - x[part] : x[part] + other;
    }
  }
#pragma unroll
  for (int stride = 1; stride < kBlock / 32; stride *= 2) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part & stride) continue;
      const float low = x[part], high = x[part + stride];
      x[part] = low + high;
      x[part + stride] = low - high;
    }
  }
  const float scale = 1.0f / sqrtf(static_cast<float>(kBlock));
#pragma unroll
  for (int part = 0; part < kParts; ++part) x[part] *= scale;
}

/// What eight warps leave of a unit's heads in shared memory.
template <class Shape>
struct StepHeads {
  static constexpr int E = Shape::E, kParts = E / 32;
  Bf16* queries;       // (group, E)
  Half* half_queries;  // (group, E), and a factor each
  float* query_factors;
  Bf16* fresh;  // new key and value (2, E)

  /// Queries 0 .. group - 1 of the unit, then, where it appends, the new key and the new value, which also go to tail
  /// and sinks. load(head, x): channels lane + 32 part of a head of the product, heads numbered queries, keys, values.
  template <class Load>
  __device__ void finish(const StepModel& args, const StepLayer& layer, const StepUnit<Shape>& unit, int warp, int lane,
                         Load load) const {
    constexpr int kHalf = kParts / 2;
    const int H = args.heads, J = args.kv_heads, group = H / J, position = unit.piece.position;
    float cos[kHalf], sin[kHalf];  // before the wait: they come from far
#pragma unroll
    for (int part = 0; part < kHalf; ++part) {
      const int64_t at = int64_t{position} * (E / 2) + lane + 32 * part;
      cos[part] = args.rope.cos[at], sin[part] = args.rope.sin[at];
    }
#pragma unroll 1
    for (int i = warp; i < group + (unit.appends() ? 2 : 0); i += kAttentionWarps) {
      const int which = i - group;  // 0 key, 1 value
      float mean[kParts] = {};
      if (which == 0 && layer.key_mean) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) mean[part] = layer.key_mean[unit.head * E + lane + 32 * part];
      }
      float x[kParts];
      load(which < 0 ? unit.head * group + i : H + which * J + unit.head, x);
      if (which < 1) {
#pragma unroll
        for (int part = 0; part < kHalf; ++part) {
          const float low = x[part], high = x[part + kHalf];
          x[part] = low * cos[part] - high * sin[part];
          x[part + kHalf] = high * cos[part] + low * sin[part];
        }
        if (which == 0 && layer.key_mean) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) x[part] -= mean[part];
        }
        rotate_channels<E>(x, lane);
      }
      which < 0 ? keep_query(i, x, args.q_scale, lane) : keep_row(args, layer, unit, which, x, lane);
    }
  }

 private:
  /// A query in BF16, and that in FP16.
  __device__ void keep_query(int i, const float (&x)[kParts], float q_scale, int lane) const {
    float rounded[kParts];
    uint32_t largest = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Bf16 query = to_bf16(x[part] * q_scale);
      queries[i * E + lane + 32 * part] = query;
      rounded[part] = to_f32(query);
      largest = max(largest, bits_of(rounded[part]) & 0x7f800000u);
    }
    const typename AttentionWarp<Shape>::HalfQuery scale(__reduce_max_sync(~0u, largest));
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      half_queries[i * E + lane + 32 * part] = half_saturated(rounded[part] * scale.down);
    if (lane == 0) query_factors[i] = scale.up;
  }

  /// A new key or value: for this step's tile, into the tail, and into the sinks.
  __device__ void keep_row(const StepModel& args, const StepLayer& layer, const StepUnit<Shape>& unit, int which,
                           const float (&x)[kParts], int lane) const {
    const int position = unit.piece.position;
    Bf16* tail = unit.tail(args, layer, which) + position % kKvPageTokens * E;
    Bf16* sink = position >= kKvSinkTokens ? nullptr : unit.sinks(args, layer, which) + position * E;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Bf16 rounded = to_bf16(x[part]);
      const int channel = lane + 32 * part;
      fresh[which * E + channel] = rounded;
      tail[channel] = rounded;
      if (sink) sink[channel] = rounded;
    }
  }
};

/// This step's own row of a tile in shared memory, and zeros behind it. All lanes of a warp.
template <class Shape>
__device__ inline void complete_tile(uint32_t data, int old, uint32_t fresh, int lane) {
  const int which = lane >> 4, row = lane & 15;
  if (row >= old) {
    const uint32_t to = data + which * Shape::kValueRows + row * Shape::kRowBytes,
                   from = fresh + which * Shape::kRowBytes;
    for (int i = 0; i < Shape::kRowBytes; i += 16) {
      uint32_t v[4] = {};
      if (row == old) {
        const uint4 x = load_shared_16(from + i);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
      }
      store_shared_16(to + i, v);
    }
    copy_engine_fence();  // the slot's next contents come by the copy engine
  }
  __syncwarp();  // closes: rows read before they are written
}

/// Items first .. first + kPairs - 1 of a unit into a slot whose barrier expects them; all lanes of a warp.
/// slot_bytes(): what they are.
template <class Shape>
struct StepItems {
  const StepModel& args;
  const StepLayer& layer;
  const StepUnit<Shape>& unit;
  int first;

  __device__ int count() const { return min(kPairs, unit.piece.items - first); }
  __device__ uint32_t bytes() const {
    uint32_t sum = 0;
    for (int i = first; i < first + count(); ++i)
      sum += unit.piece.is_page(i) ? Shape::kPageBytes : 2 * old_rows(unit.piece, i) * Shape::kRowBytes;
    return sum;
  }
  /// Before the slot is free: a page's id comes from far.
  __device__ const uint8_t* page(int lane) const {
    return lane < count() && unit.piece.is_page(first + lane) ? unit.page(args, layer, unit.piece.page(first + lane))
                                                              : nullptr;
  }
  __device__ void send(const uint8_t* page, uint32_t data, uint32_t full, int lane) const {
    if (page) bulk_copy_once(data + lane * Shape::kSlotBytes, page, Shape::kPageBytes, full);
    const int which = lane & 1, item = first + lane / 2;  // a tile's keys, or its values
    if (lane >= 2 * count() || unit.piece.is_page(item) || old_rows(unit.piece, item) <= 0) return;
    const Bf16* rows = unit.piece.is_sink(item) ? unit.sinks(args, layer, which) : unit.tail(args, layer, which);
    bulk_copy(data + lane / 2 * Shape::kSlotBytes + which * Shape::kValueRows,
              rows + unit.piece.tile_start(item) % kKvPageTokens * Shape::E,
              old_rows(unit.piece, item) * Shape::kRowBytes, full);
  }
};

/// The page that this step filled, if it did: the tail of a unit that appends as codes. `codes`: (64, E) of shared
/// memory; `threads` threads from 0, which meet at sync().
template <class Shape, class Sync>
__device__ inline void fill_page(const StepModel& args, const StepLayer& layer, const StepUnit<Shape>& unit,
                                 uint8_t* codes, int thread, int threads, Sync sync) {
  if (unit.piece.position % kKvPageTokens != kKvPageTokens - 1) return;
  const KvPageLayout layout{Dtype::int4, Shape::E};
  uint8_t* page = unit.page(args, layer, unit.piece.position / kKvPageTokens);
  sync();  // closes: what `codes` held overwritten while read; the tail read before its last row is written
  for (int which = 0; which < 2; ++which) {
    const Bf16* tail = unit.tail(args, layer, which);
    quantise_page(
        page, layout, which, (which ? layer.value_factor : layer.key_factor)[unit.head], codes, thread, threads,
        [&](int row) { return tail + row * Shape::E; }, sync);
  }
}

}  // namespace fut::cuda
