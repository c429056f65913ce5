// Picks the step kernel for a plan (step.cuh), and raises its tags.
#include "cuda/step.cuh"

namespace fut::cuda {

template <int kGroups, int E>
using Int4Types = StepTypes<Int4Tile<kGroups>, AttentionShape<Dtype::int4, E, 1>>;
extern template bool fit_step<Int4Types<1, 128>>(StepArgs&);
extern template void launch_step<Int4Types<1, 128>>(const StepArgs&, cudaStream_t);
extern template bool fit_step<Int4Types<1, 64>>(StepArgs&);
extern template void launch_step<Int4Types<1, 64>>(const StepArgs&, cudaStream_t);
extern template bool fit_step<Int4Types<2, 128>>(StepArgs&);
extern template void launch_step<Int4Types<2, 128>>(const StepArgs&, cudaStream_t);
extern template bool fit_step<Int4Types<2, 64>>(StepArgs&);
extern template void launch_step<Int4Types<2, 64>>(const StepArgs&, cudaStream_t);

namespace {

/// Calls use(Types{}) for the plan's kernel; false where there is none.
template <int kGroups, class Use>
bool with_heads(const StepPlan& plan, Use use) {
  if (plan.head_dim == 128) return use(Int4Types<kGroups, 128>{}), true;
  if (plan.head_dim == 64) return use(Int4Types<kGroups, 64>{}), true;
  return false;
}
template <class Use>
bool with_types(const StepPlan& plan, Use use) {
  if (plan.weights != Dtype::int4 || plan.kv != Dtype::int4) return false;
  return plan.group == 32 ? with_heads<2>(plan, use) : with_heads<1>(plan, use);
}

StepShape shape_of(int rows, int cols, bool swiglu, int runs) {
  StepShape s;
  s.rows = rows;
  s.cols = cols;
  s.col_tiles = cols / 64;
  s.row_units = swiglu ? rows / 32 : (rows + 15) / 16;
  s.each = s.row_units / runs;
  s.extra = s.row_units % runs;
  return s;
}

__global__ void raise_tags(uint32_t* tag_base, uint32_t by) { *tag_base += by; }

}  // namespace

const char* name_of(Stage stage) {
  constexpr const char* kNames[kStages] = {"x_in", "y", "partial", "a", "x_mid", "h"};
  return kNames[static_cast<int>(stage)];
}

bool head_inside(const DecodeStepArgs& args) {
  const Weight& like = args.layers[0].qkv;
  return args.head.dtype == like.dtype && args.head.group == like.group;
}

bool step_model(const DecodeStepArgs& args, StepModel& a) {
  if (args.embedding.dtype != Dtype::bf16) return false;
  const Weight& weight = args.layers[0].qkv;
  const KvCache& like = args.layers[0].cache;
  for (int64_t l = 0; l < args.layer_count; ++l) {
    const DecodeLayer& layer = args.layers[l];
    const KvCache& c = layer.cache;
    for (const Weight* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
      if (w->dtype != weight.dtype || w->group != weight.group || w->bias) return false;
    }
    if (layer.q_norm) return false;
    const bool same_pages = c.page_table == like.page_table && c.table_width == like.table_width &&
                            c.page_count == like.page_count && c.slot == like.slot && c.tail_in == like.tail_in;
    if (!same_pages || c.layout.dtype != like.layout.dtype || c.layout.head_dim != like.layout.head_dim ||
        c.kv_heads != like.kv_heads)
      return false;
  }
  a.layer_count = static_cast<int>(args.layer_count);
  a.batch = static_cast<int>(args.batch.rows);
  a.width = static_cast<int>(args.width);
  a.feed_forward = static_cast<int>(args.feed_forward);
  a.heads = args.heads;
  a.kv_heads = like.kv_heads;
  a.rope = args.rope;
  a.shape[static_cast<int>(Product::head)].rows = head_inside(args) ? static_cast<int>(args.head.rows) : 0;
  return true;
}

std::vector<StepLayer> step_layers(const DecodeStepArgs& args) {
  std::vector<StepLayer> layers(args.layer_count);
  for (int64_t l = 0; l < args.layer_count; ++l) {
    const DecodeLayer& from = args.layers[l];
    StepLayer& to = layers[l];
    int i = 0;
    for (const Weight* w : {&from.qkv, &from.o, &from.gate_up, &from.down})
      to.matrix[i++] = {static_cast<const uint8_t*>(w->data), w->scale};
    to.input_scale[0] = from.qkv.input_scale;
    to.input_scale[1] = from.gate_up.input_scale;
    to.attention_scale = from.attention_guard;
    to.swiglu_scale = from.swiglu_guard;
    to.pages = from.cache.pages;
    to.tails = from.cache.tails;
    to.sinks = from.cache.sinks;
    to.key_factor = from.cache.key_factor;
    to.value_factor = from.cache.value_factor;
    to.key_mean = from.cache.key_mean;
  }
  return layers;
}

void deal_out(StepModel& a, int head_dim, int runs) {
  const int queries = a.heads * head_dim, D = a.width, F = a.feed_forward;
  const auto deal = [&](Product product, int rows, int cols) {
    a.shape[static_cast<int>(product)] = shape_of(rows, cols, product == Product::gate_up, runs);
  };
  deal(Product::qkv, queries + 2 * a.kv_heads * head_dim, D);
  deal(Product::o, D, queries);
  deal(Product::gate_up, 2 * F, D);
  deal(Product::down, D, F);
  deal(Product::head, a.shape[static_cast<int>(Product::head)].rows, D);
}

std::string plan_step(StepPlan& plan) {
  StepArgs& a = plan.args;
  const int E = plan.head_dim, H = a.heads, J = a.kv_heads, F = a.feed_forward;
  if (a.batch != 1) return cat("a batch of ", a.batch, ", expected one sequence");
  if (H / J > kStepMaxHeads) return cat(H / J, " query heads a KV head, the limit is ", kStepMaxHeads);
  if (a.rope.rotary_dim != E) return cat("a rotary width of ", a.rope.rotary_dim, " of ", E);
  if (J > multiprocessors()) return cat(J, " KV heads on ", multiprocessors(), " multiprocessors");
  if (F % 16 != 0) return cat("a feed-forward width of ", F, ", no multiple of 16");
  deal_out(a, E, multiprocessors());
  bool fits = false;
  if (!with_types(plan, [&]<class Types>(Types) { fits = fit_step<Types>(a); }))
    return cat(name_of(plan.weights), " weights with a ", name_of(plan.kv), " cache and heads of ", E);
  return fits ? "" : "the activations leave no room for weights in shared memory";
}

void step_words(const StepPlan& plan, size_t (&words)[kStages]) {
  const StepArgs& a = plan.args;
  const size_t E = plan.head_dim, H = a.heads;
  words[static_cast<int>(Stage::x_in)] = words[static_cast<int>(Stage::x_mid)] = row_words(a.width, 8);
  words[static_cast<int>(Stage::y)] = (H + 2 * a.kv_heads) * E;
  words[static_cast<int>(Stage::partial)] = H * a.splits * (E + 2);
  words[static_cast<int>(Stage::a)] = row_words(static_cast<int>(H * E), 4);
  words[static_cast<int>(Stage::h)] = row_words(a.feed_forward, 4);
}

void decode_step(const StepPlan& plan, cudaStream_t stream) {
  const bool known = with_types(plan, [&]<class Types>(Types) { launch_step<Types>(plan.args, stream); });
  FUT_CHECK(known, "decode_step: no kernel for this plan");
  raise_tags<<<1, 1, 0, stream>>>(plan.args.tag_base, (plan.args.layer_count + 1) * kStages);
  FUT_CUDA(cudaGetLastError());
}

}  // namespace fut::cuda
