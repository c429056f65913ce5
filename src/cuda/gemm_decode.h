// y = a W^T for a decode step's 1 to 32 rows, launched with what follows it. Kernels: gemm_decode.cuh, gemm_wide.cuh.
#pragma once

#include <cuda_runtime.h>

#include "ops/ops.h"

namespace fut::cuda {

inline constexpr int kGemmMaxRows = 32;  ///< rows of one launch; larger batches are cut

/// What becomes of y (B, N).
enum class Finish {
  plain,     ///< out (B, N) f32 = y
  residual,  ///< out (B, N) f32 += y
  swiglu,    ///< out (B, N / 2) f16 | bf16 = silu(y[:, :N / 2]) * y[:, N / 2:]; N / 2 a multiple of 16
};

struct GemmArgs {
  const uint8_t* weight = nullptr;      // tiles [ceil(N / 16)][K / 64]
  const float* weight_scale = nullptr;  // (N), e4m3
  const float* bias = nullptr;          // (N) or null: the last that is added to y
  int rows = 0, cols = 0;               ///< N, K
  const void* a = nullptr;              // (B, K) row-major: f32 to be normalised, else f16 or bf16; or packed
  const float* starts = nullptr;        // packed and INT4: (K / 64, groups of a k-tile, padded_rows(B))
  bool normalise = false;               ///< a[b] / rms(a[b]), rounded to the operand's type
  float eps = 0.0f;
  const float* input_scale = nullptr;  // (K) or null; only with normalise
  const int64_t* row = nullptr;        // (B) or null: which rows of a; only with normalise
  float a_scale = 1.0f;                ///< y *= a_scale
  const float* row_factor = nullptr;   // (B) or null: y[b] *= row_factor[b]
  int batch = 0;                       ///< B
  Finish finish = Finish::plain;
  void* out = nullptr;
  Dtype out_type = Dtype::f32;
  float out_scale = 1.0f;                   ///< f16: out = value / out_scale, saturated
  unsigned long long* saturated = nullptr;  // (1) or null: raised by the number of clamped values
  // The launcher's: ring slots, slots that may be in flight, buffers of sums.
  int stages = 0, window = 0, sums = 0;
};

/// True if a launch normalises f32 rows by itself; otherwise normalise_rows() must make f16 or bf16 rows first.
bool gemm_normalises(const Weight& weight, int batch);

/// Fills in the weight's part of `args` and launches. B <= kGemmMaxRows.
void gemm_decode(const char* op, const Weight& weight, GemmArgs args, cudaStream_t stream);

/// The largest activations that gemm_decode.cuh keeps in shared memory, in bytes: with them the ring still holds four
/// chunks of weights.
inline constexpr int kStagedBytes = 64 * 1024;

/// Whether a launch reads packed rows (gemm_wide.cuh), or row-major ones (gemm_decode.cuh): one row, and up to eight of
/// SwiGLU, which are slower there (docs/PERF.md: 27 us of llama-3.1-8b's gate_up against 21 to 24).
///
/// Packed rows lie block by block of 256 columns: [ceil(K / 256)][B][256], and in every row's 128 bytes the 16-byte
/// unit u at u ^ (b % 8). One copy then brings all rows of a block, and eight rows meet no bank twice. Behind them, for
/// an INT4 weight, are the start values of its accumulators (weight_tile.cuh): (K / 64, groups, rows padded).
inline bool gemm_packs(Finish finish, int batch, int64_t cols) {
  return batch > (finish == Finish::swiglu ? 8 : 1) || batch * cols * 2 > kStagedBytes;
}
inline constexpr int kGemmPackedColumns = 256;
FUT_HD int padded_rows(int rows) { return (rows + 7) / 8 * 8; }
/// Where columns k and k + 1 (k even) of a packed row are, in elements.
FUT_HD int64_t packed_place(int rows, int n, int k) {
  const int first = k / kGemmPackedColumns * kGemmPackedColumns, unit = (k - first) / 8 ^ (n & 7);
  return int64_t{first} * rows + n * kGemmPackedColumns + unit * 8 + k % 8;
}
FUT_HD int64_t packed_bytes(int rows, int64_t cols) {
  return (cols + kGemmPackedColumns - 1) / kGemmPackedColumns * kGemmPackedColumns * 2 * rows;
}

/// Where packed rows lie, and how many groups of a weight a k-tile holds: 0 for weights without.
struct PackedRows {
  void* a = nullptr;
  float* starts = nullptr;
  int groups = 0;

  PackedRows() = default;
  /// `memory`: bytes() of it.
  PackedRows(const Weight& weight, void* memory, int rows);
  static size_t bytes(const Weight& weight, int rows);
};

/// packed = a (rows, cols) of 16-bit elements; rows <= kGemmMaxRows.
void pack_rows(const void* a, int rows, int cols, const PackedRows& packed, cudaStream_t stream);

/// The operand of a launch of `rows` rows: rows row[i] (null: i) of x (.., K) f32, divided by their root mean
/// square, times the weight's input scale, and rounded as the weight takes them. Packed, or where `packed` is null
/// row-major into `a`.
void normalise_rows(const float* x, const int64_t* row, int rows, float eps, const Weight& weight,
                    const PackedRows* packed, void* a, cudaStream_t stream);

/// Bytes of a tile of 16 x 64 weights.
int weight_tile_bytes(Dtype dtype, int group);

}  // namespace fut::cuda
