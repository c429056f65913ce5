// Every fused operation: its mathematics, shapes and arguments. A backend implements them (backend.h); validate() is
// shared, so that all backends refuse the same things with the same words.
//
// Shape letters
//   T  packed token rows of a prefill: all prompts behind one another, no padding
//   B  sequences (of a prefill batch, or rows of a decode step)
//   D  model width      F  feed-forward width     V  vocabulary     L  layers
//   H  query heads      J  KV heads               E  head width     C  context length
//   G  quantisation group along K
// A decode step is the case T = B, one row a sequence.
//
// Numbers. A GEMM multiplies operand values that were rounded once, to the operand's type, and accumulates in FP32 or
// better. Which type that is follows from the weight:
//   weight   prefill operand                                  decode operand
//   e4m3     e4m3 codes with a scale a row or a tensor         FP16
//   int4     -                                                FP16, times the weight's input scale if it has one
//   bf16     bf16                                             bf16
//   f32      f32                                              f32
// docs/NUMERICS.md lists every rounding point.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "layout/fp8.h"
#include "layout/kv_page.h"

namespace fut {

/// What a weight is for: the phases' kernels may want different orders of the same elements.
enum class Phase { prefill, decode };

/// A weight matrix as a backend holds it: y[t, n] = sum_k a[t, k] * w[n, k] + bias[n]. `data` is in the backend's own
/// order, which only Backend::place() and the backend's GEMMs know.
struct Weight {
  Dtype dtype = Dtype::f32;
  int64_t rows = 0, cols = 0;  ///< N, K
  int group = 0;               ///< int4: G
  Phase phase = Phase::decode;
  const void* data = nullptr;
  const float* scale = nullptr;  ///< e4m3: (N)
  int64_t bytes = 0;             ///< all of it, scales included
  /// int4: (K) or null: the normalised row is multiplied by it before it is rounded, fp16((x * rstd) * input_scale).
  /// Only where the operand is the residual: qkv, gate_up.
  const float* input_scale = nullptr;
  const float* bias = nullptr;  ///< (N) added in FP32 to the finished product, or null; embedding and head have none
};

/// A GEMM operand (T, K) that an earlier op left: true value = element * scale (* row_scale[t], if there is one).
struct Operand {
  Dtype dtype = Dtype::f32;      ///< f32, bf16, f16 or e4m3
  void* data = nullptr;          // (T, K) row-major
  float* row_scale = nullptr;    // (T), e4m3 under exact scaling
  float scale = 1.0f;            ///< e4m3: the frozen or delayed scale; f16: the guard, a power of two
  float* amax = nullptr;         // (1) raised to the largest magnitude written, where a history or calibration wants it
  int64_t* saturated = nullptr;  // (1) raised by the number of values that were clamped
};

/// The residual stream and what the next GEMM needs of it.
struct Residual {
  Dtype dtype = Dtype::f32;      ///< bf16 in e4m3 and bf16 prefill, f32 in decode and f32 prefill
  void* x = nullptr;             // (T, D) row-major
  float* sum_squares = nullptr;  // (T) of x as stored: rstd = 1 / sqrt(sum / D + eps)
  float eps = 1e-5f;
  E4m3* x8 = nullptr;         // (T, D) e4m3 copy for the next GEMM, or null: x ~ x8 * x8_scale[t]
  float* x8_scale = nullptr;  // (T)
  Fp8Scaling x8_scaling = Fp8Scaling::exact;
  int64_t* requantised = nullptr;  // (1) raised by the number of rows whose previous norm was no fit (see below)
};
// The e4m3 copy. exact: scale = amax(x[t]) / 448. Otherwise: the row is divided by its root mean square from before
// this op, which is known when the op starts, so that a massive activation never crushes other rows; kResidualHeadroom
// is the code that one root mean square gets. A row that has grown too much for that (it would saturate) is scaled
// exactly.
inline constexpr float kResidualHeadroom = 8.0f;

/// Where rows come from and go to: the ragged batch of one op call.
struct Batch {
  int64_t sequences = 0;           ///< B
  int64_t rows = 0;                ///< T
  const int64_t* start = nullptr;  // (B + 1) first row of every sequence; start[B] = T
  const int64_t* past = nullptr;   // (B) tokens of the sequence already in the cache
};

/// One layer's part of the paged cache, and how sequences find their pages.
struct KvCache {
  KvPageLayout layout;
  int kv_heads = 0;          ///< J
  uint8_t* pages = nullptr;  ///< page p of head j at ((p * J) + j) * layout.page_bytes()
  int64_t page_count = 0;
  const int64_t* page_table = nullptr;  // (B, table_width) page ids, in order of position
  int64_t table_width = 0;
  // INT4 only. Rows are by sequence slot: a slot has two tails, so that a prefill can read the page that it found
  // half-full while it leaves another one half-full.
  Bf16* tails = nullptr;                // (slots, 2, J, 2 (K, V), 64, E)
  Bf16* sinks = nullptr;                // (slots, J, 2 (K, V), kKvSinkTokens, E)
  const int64_t* slot = nullptr;        // (B)
  const int8_t* tail_in = nullptr;      // (B) which tail holds the page at `past`
  const int8_t* tail_out = nullptr;     // (B) which tail takes the page at `past + new rows`; differs if the page does
  const float* key_factor = nullptr;    // (J) powers of two
  const float* value_factor = nullptr;  // (J)
  const float* key_mean = nullptr;      // (J, E) or null: static mean of keys after RoPE
};

/// Rotary embedding: pair (i, i + R / 2) of a head turns by position * inv_freq[i], i < R / 2.
struct Rope {
  const float* cos = nullptr;  // (positions, R / 2)
  const float* sin = nullptr;  // (positions, R / 2)
  int rotary_dim = 0;          ///< R <= E
  int64_t positions = 0;
};

/// x[t] = embedding[token[t]], rounded to the residual's type; sum of squares and e4m3 copy (always exact) with it.
struct EmbedArgs {
  Residual residual;
  Weight embedding;                 // (V, D) bf16 or f32 row-major
  const int32_t* tokens = nullptr;  // (T)
  int64_t rows = 0, width = 0;      ///< T, D
};

/// y = (x * rstd) W_qkv^T + bias; q, k of each head normalised (q_norm); q, k turned by RoPE; k minus its mean; q and k
/// rotated where the cache is INT4; q times log2(e) / sqrt(E), so that the softmax is a power of two. q, k, v rounded
/// to bf16 (f32 where the cache is f32). k and v go to the cache: every token into its page, or, INT4, into sinks and
/// tail, and whole pages as codes. `qkv_rope_cache` in prefill, `qkv_rope_append` in decode.
struct QkvArgs {
  void* q = nullptr;  // (T, H, E) bf16 | f32
  void* k = nullptr;  // (T, J, E) bf16 | f32, this call's keys as the tail stores them (prefill attention reads them)
  void* v = nullptr;  // (T, J, E) bf16 | f32
  KvCache cache;
  Residual residual;
  Weight qkv;  // (H E + 2 J E, D): rows q, then k, then v
  Rope rope;
  Batch batch;
  int heads = 0;      ///< H
  int64_t width = 0;  ///< D
  // Both or none: a head h of q or k becomes h / sqrt(mean(h^2) + residual.eps) * gain, in FP32, before RoPE.
  const float* q_norm = nullptr;  // (E)
  const float* k_norm = nullptr;  // (E)
};

/// o[t, h] = softmax(q[t, h] . K) V over the sequence's tokens 0 .. position(t), causal; query head h reads KV head
/// h / (H / J). What of a token a query sees is told in kv_page.h. No tokens: o = 0.
/// `attention_prefill` and `attention_decode`.
struct AttentionArgs {
  Operand out;              // (T, H E)
  const void* q = nullptr;  // (T, H, E)
  const void* k = nullptr;  // (T, J, E) of this call (prefill)
  const void* v = nullptr;  // (T, J, E)
  KvCache cache;
  Batch batch;
  int heads = 0;  ///< H
};

/// x += a W^T + bias, then the sum of squares and the e4m3 copy of the new x. `o_proj_residual`, `down_residual`.
struct ResidualGemmArgs {
  Residual residual;  // (T, N)
  Operand a;          // (T, K)
  Weight weight;      // (N, K)
  int64_t rows = 0;   ///< T
};

/// h = silu(g) * u with (g, u) = (x * rstd) W_gate_up^T + bias. `gate_up_swiglu`.
struct GateUpArgs {
  Operand out;        // (T, F)
  Residual residual;  // (T, D)
  Weight gate_up;     // (2 F, D): F gate rows, then F up rows
  int64_t rows = 0;   ///< T
};

/// logits[i] = (x[row[i]] * rstd) W_head^T.
struct LmHeadArgs {
  float* logits = nullptr;       // (rows, V) f32
  Residual residual;             // (T, D)
  Weight head;                   // (V, D)
  const int64_t* row = nullptr;  // (rows) which residual rows; null: 0 .. rows - 1
  int64_t rows = 0;
};

/// One layer of a decode step; o and h are FP16 operands divided by their guards, or BF16 ones.
struct DecodeLayer {
  Weight qkv, o, gate_up, down;
  KvCache cache;
  float attention_guard = 1.0f, swiglu_guard = 1.0f;
  const float *q_norm = nullptr, *k_norm = nullptr;  ///< as in QkvArgs
};

/// A whole decode step, tokens to logits: embed, every layer's five operations, lm_head.
struct DecodeStepArgs {
  float* logits = nullptr;          // (B, V) f32
  const int32_t* tokens = nullptr;  // (B)
  Weight embedding, head;
  const DecodeLayer* layers = nullptr;  // (L)
  int64_t layer_count = 0;              ///< L
  Rope rope;
  Batch batch;
  int heads = 0;                        ///< H
  int64_t width = 0, feed_forward = 0;  ///< D, F
  float eps = 1e-5f;
  int64_t* saturated = nullptr;
};

void validate(const EmbedArgs& args);
void validate_qkv(const QkvArgs& args, bool decode);
void validate_attention(const AttentionArgs& args, bool decode);
void validate_residual_gemm(const ResidualGemmArgs& args, const char* op);
void validate(const GateUpArgs& args);
void validate(const LmHeadArgs& args);
void validate(const DecodeStepArgs& args);

}  // namespace fut
