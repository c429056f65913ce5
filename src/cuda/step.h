// A whole decode step in one kernel: stages, arguments, and what the host must keep for it. Kernel: step.cuh.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/handover.cuh"
#include "ops/ops.h"

namespace fut::cuda {

/// What is handed over, in the order of a layer. Tags are base + layer * kStages + stage + 1; layer L has x_in for the
/// head.
enum class Stage { x_in, y, partial, a, x_mid, h };
inline constexpr int kStages = 6;
const char* name_of(Stage stage);
FUT_HD uint32_t step_tag(uint32_t base, int layer, Stage stage) {
  return base + layer * kStages + static_cast<uint32_t>(stage) + 1;
}

/// The products of a layer, and the head.
enum class Product { qkv, o, gate_up, down, head };
inline constexpr int kProducts = 5;

/// A product's shape. Its row tiles (SwiGLU: pairs of a gate tile and its up tile) are dealt out in runs: `each` to
/// every block (batch: every two blocks), and one more to the first `extra`.
struct StepShape {
  int rows = 0, cols = 0, col_tiles = 0, row_units = 0, each = 0, extra = 0;
  int piece = 0;  ///< k-tiles whose activations are in shared memory at a time
};

struct StepMatrix {
  const uint8_t* tiles = nullptr;
  const float* scale = nullptr;  // (N), e4m3
};

struct StepLayer {
  StepMatrix matrix[4];                              ///< by Product
  const float* input_scale[2] = {nullptr, nullptr};  ///< (D) or null: of qkv, of gate_up
  float attention_scale = 1.0f, swiglu_scale = 1.0f;
  uint8_t* pages = nullptr;
  Bf16* tails = nullptr;
  Bf16* sinks = nullptr;
  const float* key_factor = nullptr;
  const float* value_factor = nullptr;
  const float* key_mean = nullptr;
};

/// What one block's first consumer warp did in one stage, in cycles of its multiprocessor.
struct StepTrace {
  uint32_t begin = 0;     ///< when it came
  uint32_t gathered = 0;  ///< until it had what other blocks made (attention: until its queries were ready)
  uint32_t ready = 0;     ///< until it could multiply (attention: until its partial sums were published)
  uint32_t starved = 0;   ///< of the whole, waiting for the ring
  uint32_t end = 0;       ///< until it was through
};

/// Words of a row of activations that is handed over: `each` a unit of 8 columns, units padded to whole warps.
FUT_HD int row_words(int cols, int each) { return (cols / 8 + 31) / 32 * 32 * each; }

/// What both step kernels are told: the model and the batch.
struct StepModel {
  StepShape shape[kProducts];
  StepMatrix head;
  const StepLayer* layers = nullptr;  // (L)
  int layer_count = 0, batch = 0;
  int width = 0, feed_forward = 0, heads = 0, kv_heads = 0;
  float eps = 0.0f, q_scale = 0.0f;
  Weight embedding;
  Rope rope;
  // The batch, on the device.
  const int32_t* tokens = nullptr;      // (B)
  const int64_t* position = nullptr;    // (B)
  const int64_t* page_table = nullptr;  // (B, table_width)
  const int64_t* slot = nullptr;        // (B)
  const int8_t* tail_in = nullptr;      // (B)
  int64_t table_width = 0;
  int splits = 1;
  float* x = nullptr;            // (B, D) the residual; an element belongs to one thread
  float* logits = nullptr;       // (B, V)
  uint32_t* tag_base = nullptr;  ///< raised behind the step
  StepFault* fault = nullptr;
  StepTrace* trace = nullptr;  // (blocks, 5 L + 1) or null
  unsigned long long* saturated = nullptr;
  int stages = 0;  ///< ring slots
};

struct StepArgs : StepModel {
  // Handed over; words.
  uint2* x_in = nullptr;     // (row_words(D, 8)) f32, units of fragment_column()
  uint2* x_mid = nullptr;    // the same
  uint2* y = nullptr;        // (H E + 2 J E) f32
  uint2* partial = nullptr;  // (J, splits, group, E + 2) f32
  uint2* a = nullptr;        // (row_words(H E, 4)) pairs of f16, units
  uint2* h = nullptr;        // (row_words(F, 4))
  int window = 0;            ///< slots in flight
  int staged_bytes = 0;      ///< of activations in shared memory
};

/// Fills in the shapes of all products, dealt out in `runs`; the head's rows are known.
void deal_out(StepModel& model, int head_dim, int runs);

/// Whether the step's kernel makes the logits too.
bool head_inside(const DecodeStepArgs& args);

/// Sizes of the step; false where its layers differ in what the kernels take to be one thing.
bool step_model(const DecodeStepArgs& args, StepModel& model);

/// The table of layers, as host memory has it.
std::vector<StepLayer> step_layers(const DecodeStepArgs& args);

/// One layer and one step, as the host states them.
struct StepPlan {
  StepArgs args;
  Dtype weights = Dtype::int4;
  int group = 64;
  Dtype kv = Dtype::int4;
  int head_dim = 128;
};

/// Fills in shapes, ring and shared memory; empty, or why this kernel cannot run the plan.
std::string plan_step(StepPlan& plan);

/// Words of every hand-over, in the order of Stage.
void step_words(const StepPlan& plan, size_t (&words)[kStages]);

void decode_step(const StepPlan& plan, cudaStream_t stream);

}  // namespace fut::cuda
