// Host code.
#include <algorithm>

#include "cuda/prefill_products.h"
#include "cuda/rows.h"

namespace fut::cuda {
namespace {

/// The residual as a product takes it: its codes for an e4m3 weight, itself for a bf16 one.
PrefillInput input_of(const char* op, const Residual& r, const Weight& weight, int rows) {
  const bool codes = weight.dtype == Dtype::e4m3;
  FUT_CHECK(r.dtype == Dtype::bf16 && (r.x8 || !codes), op, ": a weight placed for prefill needs a bf16 residual",
            codes ? " with an e4m3 copy" : "");
  PrefillInput in;
  in.data = codes ? static_cast<const void*>(r.x8) : r.x;
  in.row_scale = codes ? r.x8_scale : nullptr;
  in.sum_squares = r.sum_squares;
  in.eps = r.eps;
  in.rows = rows;
  return in;
}

int64_t bytes_of(int64_t elements, Dtype dtype) { return elements * bits_per_element(dtype) / 8; }

}  // namespace

void PrefillProducts::plain(const char* op, const Residual& residual, const Weight& weight, int rows, float* y,
                            cudaStream_t stream) {
  gemm_prefill(op, weight, input_of(op, residual, weight, rows), PlainOutput{y}, stream);
}

bool PrefillProducts::qkv(const char* op, const QkvArgs& args, const QkvFinish& finish, cudaStream_t stream) {
  const int E = args.cache.layout.head_dim;
  if ((E != 64 && E != 128) || args.rope.rotary_dim != E) return false;
  QkvOutput out;
  out.q = finish.q, out.k = finish.k, out.v = finish.v;
  out.heads = args.heads, out.kv_heads = args.cache.kv_heads;
  out.rotate = args.cache.layout.dtype == Dtype::int4;
  out.q_scale = query_scale(E);
  out.cos = args.rope.cos, out.sin = args.rope.sin;
  out.position = finish.map.position;
  out.key_mean = args.cache.key_mean;
  out.q_norm = args.q_norm, out.k_norm = args.k_norm;
  out.eps = args.residual.eps;
  gemm_prefill(op, args.qkv, input_of(op, args.residual, args.qkv, finish.rows), out, E, stream);
  return true;
}

void PrefillProducts::gate_up(const char* op, const GateUpArgs& args, const Operand& out, cudaStream_t stream) {
  const int rows = static_cast<int>(args.rows), F = static_cast<int>(args.gate_up.rows / 2);
  const PrefillInput in = input_of(op, args.residual, args.gate_up, rows);
  SwigluOutput h;
  if (!out.row_scale) {
    h.h = out.data;
    h.type = out.dtype;
    h.scale = out.scale;
    h.amax = out.amax;
    h.saturated = reinterpret_cast<unsigned long long*>(out.saturated);
    return gemm_prefill(op, args.gate_up, in, h, stream);
  }
  // Rows by their own largest magnitude: it is known when a row is whole. In parts, for the memory's sake.
  constexpr int kPart = 4096;
  h.type = Dtype::f32;
  h.h = h_.reserve<float>(static_cast<size_t>(std::min(rows, kPart)) * F, stream);
  for (int first = 0; first < rows; first += kPart) {
    PrefillInput part = in;
    part.rows = std::min(kPart, rows - first);
    part.data = static_cast<const uint8_t*>(in.data) + bytes_of(first * args.gate_up.cols, args.gate_up.dtype);
    if (in.row_scale) part.row_scale += first;
    part.sum_squares += first;
    gemm_prefill(op, args.gate_up, part, h, stream);
    Operand to = out;
    to.data = static_cast<uint8_t*>(out.data) + bytes_of(int64_t{first} * F, out.dtype);
    to.row_scale += first;
    store_operand(to, static_cast<float*>(h.h), false, part.rows, F, stream);
  }
}

void PrefillProducts::residual(const char* op, const ResidualGemmArgs& args, const Residual& on_device,
                               cudaStream_t stream) {
  const int rows = static_cast<int>(args.rows);
  FUT_CHECK(args.residual.dtype == Dtype::bf16 && args.a.dtype == args.weight.dtype, op,
            ": a weight placed for prefill needs a bf16 residual and an operand of its own type, not ",
            name_of(args.a.dtype));
  PrefillInput in;
  in.data = args.a.data;
  in.scale = args.a.scale;
  in.row_scale = args.a.row_scale;
  in.rows = rows;
  ResidualOutput out;
  out.residual = on_device;
  out.sums = sums_.reserve<PrefillRowSum>(rows, stream, true);
  out.arrived = bands_.reserve<unsigned>(static_cast<size_t>(rows) / kPrefillTileRows + 2, stream, true);
  gemm_prefill(op, args.weight, in, out, stream);
  if (on_device.x8 && on_device.x8_scaling == Fp8Scaling::exact)
    copy_to_e4m3(on_device, rows, static_cast<int>(args.weight.rows), stream);
}

}  // namespace fut::cuda
