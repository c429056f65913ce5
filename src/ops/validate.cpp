// What every backend refuses before it touches memory: one line with the op, the argument and the values.
#include "base/error.h"
#include "ops/ops.h"

namespace fut {
namespace {

void check_weight(const char* op, const char* name, const Weight& w, int64_t rows, int64_t cols) {
  FUT_CHECK(w.data, op, ": ", name, " has no data");
  FUT_CHECK(w.rows == rows && w.cols == cols, op, ": ", name, " is (", w.rows, ", ", w.cols, "), expected (", rows,
            ", ", cols, ")");
  FUT_CHECK(w.dtype != Dtype::f16, op, ": ", name, " is f16; weights are f32, bf16, e4m3 or int4");
  FUT_CHECK(w.dtype != Dtype::e4m3 || w.scale, op, ": ", name, " is e4m3 and has no scales");
  FUT_CHECK(w.dtype != Dtype::int4 || int4_group_size_ok(w.group), op, ": ", name, " has INT4 group size ", w.group,
            ", expected 32, 64 or 128");
  FUT_CHECK(w.dtype == Dtype::int4 || !w.input_scale, op, ": ", name, " is ", name_of(w.dtype),
            " and has an input scale, which is for int4");
}

/// Operands that an operation before rounded already.
void check_no_input_scale(const char* op, const char* name, const Weight& w) {
  FUT_CHECK(!w.input_scale, op, ": ", name, " has an input scale, its operand is no normalised row");
}

void check_no_bias(const char* op, const char* name, const Weight& w) {
  FUT_CHECK(!w.bias, op, ": ", name, " has a bias; only a layer's products take one");
}

void check_head_norm(const char* op, const float* q_norm, const float* k_norm) {
  FUT_CHECK(!q_norm == !k_norm, op, ": gains of the heads' norm for ", q_norm ? "q" : "k", " alone");
}

void check_residual(const char* op, const Residual& r) {
  FUT_CHECK(r.x && r.sum_squares, op, ": the residual has no data");
  FUT_CHECK(r.dtype == Dtype::f32 || r.dtype == Dtype::bf16, op, ": the residual is ", name_of(r.dtype),
            ", expected f32 or bf16");
  FUT_CHECK(!r.x8 || r.x8_scale, op, ": the residual's e4m3 copy has no scales");
}

void check_operand(const char* op, const char* name, const Operand& a) {
  FUT_CHECK(a.data, op, ": ", name, " has no data");
  FUT_CHECK(a.dtype != Dtype::int4, op, ": ", name, " is int4; operands are f32, bf16, f16 or e4m3");
  FUT_CHECK(a.scale > 0.0f, op, ": ", name, " has scale ", a.scale);
}

/// Every sequence's tokens, this call's with them, lie within the rotary table.
void check_positions(const char* op, const Rope& rope, const Batch& b) {
  for (int64_t i = 0; i < b.sequences; ++i) {
    const int64_t tokens = b.past[i] + b.start[i + 1] - b.start[i];
    FUT_CHECK(tokens <= rope.positions, op, ": sequence ", i, " reaches ", tokens, " tokens, the limit is ",
              rope.positions);
  }
}

/// e4m3 weights meet e4m3 operands in prefill; bf16 in both phases meets bf16; and so on (table in ops.h).
void check_pair(const char* op, const Weight& w, Dtype operand) {
  const bool fits = w.dtype == Dtype::f32    ? operand == Dtype::f32
                    : w.dtype == Dtype::bf16 ? operand == Dtype::bf16
                    : w.dtype == Dtype::e4m3 ? operand == Dtype::e4m3 || operand == Dtype::f16
                                             : operand == Dtype::f16;
  FUT_CHECK(fits, op, ": a weight in ", name_of(w.dtype), " cannot meet an operand in ", name_of(operand));
}

void check_batch(const char* op, const Batch& b, bool decode) {
  FUT_CHECK(b.sequences >= 0 && b.rows >= 0, op, ": ", b.sequences, " sequences, ", b.rows, " rows");
  if (b.sequences == 0) return;
  FUT_CHECK(b.start && b.past, op, ": the batch has no starts or lengths");
  FUT_CHECK(b.start[0] == 0 && b.start[b.sequences] == b.rows, op, ": starts run from ", b.start[0], " to ",
            b.start[b.sequences], ", expected 0 to ", b.rows);
  for (int64_t i = 0; i < b.sequences; ++i) {
    const int64_t rows = b.start[i + 1] - b.start[i];
    FUT_CHECK(rows >= 0, op, ": sequence ", i, " starts at row ", b.start[i], " and ends at ", b.start[i + 1]);
    FUT_CHECK(!decode || rows <= 1, op, ": sequence ", i, " has ", rows, " rows in a decode step");
    FUT_CHECK(b.past[i] >= 0, op, ": sequence ", i, " has ", b.past[i], " cached tokens");
  }
}

void check_cache_shape(const char* op, const KvCache& c) {
  FUT_CHECK(c.layout.dtype != Dtype::f16, op, ": the cache is f16; it can be f32, bf16, e4m3 or int4");
  FUT_CHECK(c.kv_heads > 0 && c.layout.head_dim > 0, op, ": ", c.kv_heads, " KV heads of width ", c.layout.head_dim);
}

void check_cache_arrays(const char* op, const KvCache& c) {
  const Dtype type = c.layout.dtype;
  FUT_CHECK(c.pages && c.page_table, op, ": the cache has no pages");
  FUT_CHECK(type != Dtype::int4 || (c.tails && c.sinks && c.slot && c.tail_in && c.tail_out), op,
            ": an INT4 cache needs tails and sinks");
  FUT_CHECK(type != Dtype::int4 || (c.key_factor && c.value_factor), op, ": an INT4 cache needs its scale factors");
}

void check_cache(const char* op, const KvCache& c, const Batch& b) {
  check_cache_shape(op, c);
  if (b.sequences == 0) return;
  check_cache_arrays(op, c);
  for (int64_t i = 0; i < b.sequences; ++i) {
    const int64_t tokens = b.past[i] + b.start[i + 1] - b.start[i];
    const int64_t pages = (tokens + kKvPageTokens - 1) / kKvPageTokens;
    FUT_CHECK(pages <= c.table_width, op, ": sequence ", i, " needs ", pages, " pages, its table holds ",
              c.table_width);
    for (int64_t p = 0; p < pages; ++p) {
      const int64_t page = c.page_table[i * c.table_width + p];
      FUT_CHECK(page >= 0 && page < c.page_count, op, ": sequence ", i, " names page ", page, " of ", c.page_count);
    }
  }
}

}  // namespace

void validate(const EmbedArgs& args) {
  const char* op = "embed";
  check_residual(op, args.residual);
  check_weight(op, "embedding", args.embedding, args.embedding.rows, args.width);
  FUT_CHECK(args.embedding.dtype == Dtype::f32 || args.embedding.dtype == Dtype::bf16, op, ": embedding is ",
            name_of(args.embedding.dtype), ", expected f32 or bf16");
  check_no_bias(op, "embedding", args.embedding);
  FUT_CHECK(args.rows == 0 || args.tokens, op, ": no tokens");
}

void validate_qkv(const QkvArgs& args, bool decode) {
  const char* op = decode ? "qkv_rope_append" : "qkv_rope_cache";
  const int E = args.cache.layout.head_dim, J = args.cache.kv_heads;
  check_residual(op, args.residual);
  check_batch(op, args.batch, decode);
  check_cache(op, args.cache, args.batch);
  FUT_CHECK(args.heads > 0 && args.heads % J == 0, op, ": ", args.heads, " query heads do not divide over ", J,
            " KV heads");
  check_weight(op, "qkv", args.qkv, int64_t{args.heads + 2 * J} * E, args.width);
  FUT_CHECK(args.rope.rotary_dim >= 0 && args.rope.rotary_dim <= E && args.rope.rotary_dim % 2 == 0, op,
            ": rotary width ", args.rope.rotary_dim, " of a head of ", E);
  FUT_CHECK(decode || args.qkv.dtype != Dtype::int4, op, ": INT4 weights are for decode");
  FUT_CHECK(decode || args.qkv.dtype != Dtype::e4m3 || args.residual.x8, op, ": e4m3 weights need the e4m3 residual");
  check_positions(op, args.rope, args.batch);
  check_head_norm(op, args.q_norm, args.k_norm);
}

void validate_attention(const AttentionArgs& args, bool decode) {
  const char* op = decode ? "attention_decode" : "attention_prefill";
  check_batch(op, args.batch, decode);
  check_cache(op, args.cache, args.batch);
  check_operand(op, "out", args.out);
  FUT_CHECK(args.heads > 0 && args.heads % args.cache.kv_heads == 0, op, ": ", args.heads,
            " query heads do not divide over ", args.cache.kv_heads, " KV heads");
  FUT_CHECK(args.batch.rows == 0 || args.q, op, ": q has no data");
  FUT_CHECK(args.batch.rows == 0 || decode || (args.k && args.v), op, ": k or v has no data");
}

void validate_residual_gemm(const ResidualGemmArgs& args, const char* op) {
  check_residual(op, args.residual);
  check_operand(op, "a", args.a);
  check_weight(op, "weight", args.weight, args.weight.rows, args.weight.cols);
  check_no_input_scale(op, "weight", args.weight);
  check_pair(op, args.weight, args.a.dtype);
}

void validate(const GateUpArgs& args) {
  const char* op = "gate_up_swiglu";
  check_residual(op, args.residual);
  check_operand(op, "out", args.out);
  check_weight(op, "gate_up", args.gate_up, args.gate_up.rows, args.gate_up.cols);
  FUT_CHECK(args.gate_up.rows % 2 == 0, op, ": gate_up has ", args.gate_up.rows, " rows, expected F gates and F ups");
}

void validate(const LmHeadArgs& args) {
  const char* op = "lm_head";
  check_residual(op, args.residual);
  check_weight(op, "head", args.head, args.head.rows, args.head.cols);
  check_no_bias(op, "head", args.head);
  FUT_CHECK(args.rows == 0 || args.logits, op, ": no room for logits");
}

/// Page tables are checked once: layers share them.
void validate(const DecodeStepArgs& args) {
  const char* op = "decode_step";
  const int64_t D = args.width, F = args.feed_forward;
  FUT_CHECK(args.layers || args.layer_count == 0, op, ": no layers");
  FUT_CHECK(args.batch.rows == 0 || (args.tokens && args.logits), op, ": no tokens, or no room for logits");
  check_weight(op, "embedding", args.embedding, args.embedding.rows, D);
  check_weight(op, "head", args.head, args.head.rows, D);
  check_no_bias(op, "embedding", args.embedding);
  check_no_bias(op, "head", args.head);
  check_batch(op, args.batch, true);
  check_positions(op, args.rope, args.batch);
  for (int64_t l = 0; l < args.layer_count; ++l) {
    const DecodeLayer& layer = args.layers[l];
    const KvCache& c = layer.cache;
    check_cache_shape(op, c);
    check_cache_arrays(op, c);
    if (l == 0) check_cache(op, c, args.batch);
    FUT_CHECK(args.heads > 0 && args.heads % c.kv_heads == 0, op, ": ", args.heads, " query heads do not divide over ",
              c.kv_heads, " KV heads");
    const int64_t E = c.layout.head_dim;
    check_weight(op, "qkv", layer.qkv, (args.heads + 2 * c.kv_heads) * E, D);
    check_weight(op, "o", layer.o, D, args.heads * E);
    check_weight(op, "gate_up", layer.gate_up, 2 * F, D);
    check_weight(op, "down", layer.down, D, F);
    check_no_input_scale(op, "o", layer.o);
    check_no_input_scale(op, "down", layer.down);
    check_head_norm(op, layer.q_norm, layer.k_norm);
    FUT_CHECK(layer.attention_guard > 0.0f && layer.swiglu_guard > 0.0f, op, ": layer ", l, " has guards ",
              layer.attention_guard, " and ", layer.swiglu_guard);
  }
}

}  // namespace fut
