// The backend for NVIDIA Hopper cards (compute capability 9.0).
//
// Differences from the CPU's, all of them beside the results: Residual::sum_squares of an f32 residual is neither read
// nor written (whoever needs the norm reads the whole row anyway, and adds its squares on the way), each phase has its
// own order of weights, those in f32 and caches in f32 are refused, and counters of saturation reach the host with the
// next download().
#pragma once

#include <memory>
#include <string>

#include "ops/backend.h"

namespace fut {

/// Why there is no usable card: no driver, no device, another compute capability. Empty: there is one.
std::string cuda_obstacle();

/// Throws with cuda_obstacle() where there is no usable card. The environment variable FUT_STEP_ROWS says up to how
/// many rows decode_step() makes the whole step in one kernel (0: never; by itself 1; 32 at most). From 2 rows on the
/// operations one by one are faster still (docs/PERF.md).
std::unique_ptr<Backend> make_cuda_backend();

/// For tests of what becomes of a step whose blocks wait in vain: in the next decode_step() the last row of every
/// layer's QKV product, or down product, never arrives; of more than one row, word of one block's part of layer 0's QKV
/// product, or of what goes into its down product. The download() behind it throws after some seconds.
enum class LostRow { none, qkv, down };
void lose_row(Backend& backend, LostRow row);

/// The stream on which a backend of make_cuda_backend() works: for graphs and timers of benchmarks. An operation that
/// has run once with the same batch launches kernels alone, so that it can be captured.
struct CUstream_st* cuda_stream(Backend& backend);

}  // namespace fut
