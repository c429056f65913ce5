// The row-wise side of prefill on the card against the CPU's operations: embedding, e4m3 operands and copies under the
// three scaling rules, and the fused operations on e4m3 and bf16 residuals.
#include "layout/fp8.h"
#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

/// A residual on both sides, with its e4m3 copy.
struct Stream {
  Stream(Backend& gpu, Dtype type, int64_t rows, int64_t width)
      : dtype(type),
        T(rows),
        D(width),
        x(gpu, T * D * (type == Dtype::f32 ? 4 : 2), 0xff),
        squares(gpu, T, 0),
        x8(gpu, T * D, 0xff),
        scale(gpu, T, 0xff) {}

  Residual on(bool card, Fp8Scaling scaling) {
    Residual r;
    r.dtype = dtype;
    r.x = card ? x.gpu() : x.host.data();
    r.sum_squares = card ? squares.gpu() : squares.host.data();
    if (dtype == Dtype::bf16) {
      r.x8 = card ? x8.gpu() : x8.host.data();
      r.x8_scale = card ? scale.gpu() : scale.host.data();
      r.x8_scaling = scaling;
      r.requantised = card ? &requantised_card : &requantised_host;
    }
    return r;
  }
  float at(const std::vector<uint8_t>& bytes, int64_t i) const {
    return dtype == Dtype::f32 ? reinterpret_cast<const float*>(bytes.data())[i]
                               : to_f32(reinterpret_cast<const Bf16*>(bytes.data())[i]);
  }
  /// `product_error`: what e4m3 products may be off by.
  void compare_with_cpu(const std::string& name, float product_error = 0.0f) {
    const std::vector<uint8_t> got = x.fetch("x");
    compare(
        name + " x", T * D, D, [&](int64_t i) { return at(got, i); }, [&](int64_t i) { return at(x.host, i); },
        [&](int64_t i) {
          return std::fabs(at(x.host, i)) * (dtype == Dtype::bf16 ? 0x1.1p-7 : 0x1p-20) + 1e-4 + product_error;
        });
    if (dtype != Dtype::bf16) return;
    const std::vector<E4m3> codes = x8.fetch("x8");
    const std::vector<float> scales = scale.fetch("x8_scale");
    compare(
        name + " x8", T * D, D, [&](int64_t i) { return to_f32(codes[i]) * scales[i / D]; },
        [&](int64_t i) { return to_f32(x8.host[i]) * scale.host[i / D]; },
        [&](int64_t i) {
          return std::fabs(to_f32(x8.host[i]) * scale.host[i / D]) * 0x1.2p-3 + scale.host[i / D] * 0x1p-6 +
                 product_error;
        });
    expect(requantised_card == requantised_host,
           cat(name, ": ", requantised_card, " rows scaled exactly, the CPU ", requantised_host));
  }

  Dtype dtype;
  int64_t T, D;
  Twin<uint8_t> x;
  Twin<float> squares;
  Twin<E4m3> x8;
  Twin<float> scale;
  int64_t requantised_card = 0, requantised_host = 0;
};

/// An e4m3 wgmma aligns its products and sums to the largest of them and keeps 14 bits: of a sum of K products of
/// deviations a and w it loses about this much at worst.
float e4m3_product_error(int64_t K, float a, float w) { return 0x1.8p-13f * static_cast<float>(K) * a * w; }

/// embed, gate_up_swiglu and down_residual in a row, as a prefill runs them.
/// `massive`: one channel of the residual grows beyond what the norm of before allows for.
void chain(Backend& gpu, Backend& cpu, Dtype weight, Fp8Scaling scaling, int64_t T, int64_t D, int64_t F,
           bool massive = false) {
  const std::string name = cat(name_of(weight), " scaling ", static_cast<int>(scaling), " T=", T, " D=", D, " F=", F);
  const int64_t V = 97;
  const HostWeight table = encode_weight(Dtype::bf16, 0, normals(V * D).data(), V, D, "embedding");
  const HostWeight up = encode_weight(weight, 0, normals(2 * F * D, 0.1f).data(), 2 * F, D, "gate_up");
  std::vector<float> down_rows = normals(D * F, 0.3f);
  for (int64_t i = 0; massive && i < F; ++i) down_rows[i] *= 200.0f;
  const HostWeight down = encode_weight(weight, 0, down_rows.data(), D, F, "down");
  const PlacedWeight table_card = gpu.place(table), table_host = cpu.place(table),
                     up_card = gpu.place(up, Phase::prefill), up_host = cpu.place(up, Phase::prefill),
                     down_card = gpu.place(down, Phase::prefill), down_host = cpu.place(down, Phase::prefill);
  std::vector<int32_t> tokens(T);
  for (int32_t& t : tokens) t = static_cast<int32_t>(below(V));
  Stream r(gpu, Dtype::bf16, T, D);
  gpu.embed({r.on(true, scaling), table_card.weight, tokens.data(), T, D});
  cpu.embed({r.on(false, scaling), table_host.weight, tokens.data(), T, D});
  r.compare_with_cpu(name + " embed");

  const Dtype operand = weight == Dtype::bf16 ? Dtype::bf16 : Dtype::e4m3;
  Twin<uint8_t> h(gpu, T * F * 2, 0xff);
  Twin<float> row_scale(gpu, T, 0xff);
  float amax[2] = {0, 0};
  int64_t saturated[2] = {0, 0};
  const auto out = [&](bool card) {
    Operand o;
    o.dtype = operand;
    o.data = card ? h.gpu() : h.host.data();
    if (operand == Dtype::e4m3 && scaling == Fp8Scaling::exact)
      o.row_scale = card ? row_scale.gpu() : row_scale.host.data();
    if (operand == Dtype::e4m3 && scaling != Fp8Scaling::exact) o.scale = 0.004f;
    o.amax = &amax[card];
    o.saturated = &saturated[card];
    return o;
  };
  gpu.gate_up_swiglu({out(true), r.on(true, scaling), up_card.weight, T});
  cpu.gate_up_swiglu({out(false), r.on(false, scaling), up_host.weight, T});
  const bool codes = operand == Dtype::e4m3;
  // Gates and ups have this deviation; a gate's error is multiplied by its up, and the other way round.
  const float spread = 0.1f * std::sqrt(static_cast<float>(D)), up_error = codes ? e4m3_product_error(D, 1, 0.1f) : 0;
  const std::vector<uint8_t> got = h.fetch("h");
  const std::vector<float> got_scale = row_scale.fetch("row_scale");
  const auto value = [&](const std::vector<uint8_t>& bytes, const std::vector<float>& scales, int64_t i) {
    if (operand == Dtype::bf16) return to_f32(reinterpret_cast<const Bf16*>(bytes.data())[i]);
    return to_f32(E4m3{bytes[i]}) * (scaling == Fp8Scaling::exact ? scales[i / F] : 0.004f);
  };
  compare(
      name + " gate_up_swiglu", T * F, F, [&](int64_t i) { return value(got, got_scale, i); },
      [&](int64_t i) { return value(h.host, row_scale.host, i); },
      [&](int64_t i) {
        return std::fabs(value(h.host, row_scale.host, i)) * (operand == Dtype::bf16 ? 0x1.1p-7 : 0x1.2p-3) + 5e-4 +
               spread * up_error;
      });
  expect(std::fabs(amax[1] - amax[0]) <= amax[0] * 5e-3, cat(name, ": amax ", amax[1], ", the CPU ", amax[0]));
  expect(std::abs(saturated[1] - saturated[0]) <= saturated[0] / 100 + 2,
         cat(name, ": ", saturated[1], " saturated, the CPU ", saturated[0]));

  h.host = got, row_scale.host = got_scale;
  gpu.down_residual({r.on(true, scaling), out(true), down_card.weight, T});
  cpu.down_residual({r.on(false, scaling), out(false), down_host.weight, T});
  r.compare_with_cpu(name + " down_residual",
                     codes ? e4m3_product_error(F, 0.5f * spread * spread, massive ? 60.0f : 0.3f) : 0);
  if (massive) expect(r.requantised_card > 0, name + ": no row has outgrown its norm, the test is too mild");
}

}  // namespace

int main() {
  return run_on_card([](Backend& gpu) {
    const std::unique_ptr<Backend> cpu = make_cpu_backend();
    for (int64_t T : {1, 33, 130}) {
      chain(gpu, *cpu, Dtype::bf16, Fp8Scaling::exact, T, 192, 320);
      chain(gpu, *cpu, Dtype::bf16, Fp8Scaling::exact, T, 64, 64);
      for (Fp8Scaling s : {Fp8Scaling::exact, Fp8Scaling::frozen, Fp8Scaling::delayed})
        chain(gpu, *cpu, Dtype::e4m3, s, T, 576, 1536);
      chain(gpu, *cpu, Dtype::e4m3, Fp8Scaling::frozen, T, 576, 1536, true);
    }
    for (int64_t T : {2, 63, 64, 65, 127, 128, 129, 255, 257, 1000}) {
      chain(gpu, *cpu, Dtype::e4m3, Fp8Scaling::frozen, T, 320, 160);
      chain(gpu, *cpu, Dtype::bf16, Fp8Scaling::exact, T, 192, 96);
    }
    chain(gpu, *cpu, Dtype::e4m3, Fp8Scaling::frozen, 700, 2048, 8192);
  });
}
