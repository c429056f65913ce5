// The decode products on the card against double loops over the same packed weights and the same rounded operands:
// o_proj_residual, down_residual, gate_up_swiglu, lm_head, for all weight formats, odd N, and every kind of batch.
#include "base/parallel.h"
#include "support.h"

using namespace fut;
using namespace fut::test;

namespace {

struct Format {
  const char* name;
  Dtype dtype;
  int group;
};
constexpr Format kFormats[] = {{"int4 g64", Dtype::int4, 64},
                               {"int4 g32", Dtype::int4, 32},
                               {"int4 g128", Dtype::int4, 128},
                               {"e4m3", Dtype::e4m3, 0},
                               {"bf16", Dtype::bf16, 0}};

Dtype operand_type(const Format& f) { return f.dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f16; }

uint16_t round16(Dtype type, float x) { return type == Dtype::bf16 ? to_bf16(x).bits : to_half_saturated(x).bits; }
float widen16(Dtype type, uint16_t bits) { return type == Dtype::bf16 ? to_f32(Bf16{bits}) : to_f32(Half{bits}); }

/// y (B, N) in double, and for every element a bound on what FP32 accumulation may be off: the largest partial sums are
/// those of the codes, up to 15 / 8 of the largest weight, and a tensor core cuts off below 2^-23 of them five times a
/// tile: 2^-20 of sum |a| max |w|.
struct Reference {
  std::vector<double> y, bound;

  Reference(const HostWeight& w, const std::vector<float>& a, int64_t B, double operand_error)
      : y(B * w.rows), bound(B * w.rows) {
    parallel_for(w.rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> row(w.cols);
      for (int64_t n = begin; n < end; ++n) {
        decode_weight_row(w, n, row.data());
        double largest = 0;
        for (float v : row) largest = std::max(largest, double{std::fabs(v)});
        for (int64_t b = 0; b < B; ++b) {
          double sum = 0, magnitude = 0, top = 0;
          for (int64_t k = 0; k < w.cols; ++k) {
            const double v = a[b * w.cols + k];
            sum += v * row[k];
            magnitude += std::fabs(v);
            top = std::max(top, std::fabs(v));
          }
          const double bias = w.bias.empty() ? 0.0 : w.bias[n];
          y[b * w.rows + n] = sum + bias;
          bound[b * w.rows + n] =
              largest * (magnitude * 0x1p-20 + top * operand_error) + std::fabs(bias) * 0x1p-23 + 1e-9;
        }
      }
    });
  }
};

/// Rows normalised as the kernels do it, in double up to the one rounding. A rounding may go the other way where FP32
/// sums of squares differ in the last bits: of K elements a few do, each by one unit.
std::vector<float> normalised(const std::vector<float>& x, int64_t B, int64_t K, float eps, Dtype type,
                              const std::vector<float>& input_scale = {}) {
  std::vector<float> a(B * K);
  for (int64_t b = 0; b < B; ++b) {
    double sum = 0;
    for (int64_t k = 0; k < K; ++k) sum += double{x[b * K + k]} * x[b * K + k];
    const float rstd =
        static_cast<float>(1.0 / std::sqrt(double{static_cast<float>(sum)} / static_cast<double>(K) + eps));
    for (int64_t k = 0; k < K; ++k) {
      const float c = input_scale.empty() ? 1.0f : input_scale[k];
      a[b * K + k] = widen16(type, round16(type, x[b * K + k] * rstd * c));
    }
  }
  return a;
}
double operand_error(Dtype type) { return type == Dtype::bf16 ? 4 * 0x1p-8 : 4 * 0x1p-11; }

HostWeight random_weight(const Format& f, int64_t N, int64_t K) {
  return encode_weight(f.dtype, f.group, normals(N * K, 0.02f).data(), N, K, "random");
}

/// The same with a factor for every column of the operand, where the format has them.
HostWeight with_input_scale(HostWeight weight) {
  if (weight.dtype != Dtype::int4) return weight;
  for (float x : normals(weight.cols)) weight.input_scale.push_back(std::exp2(x));
  return weight;
}

HostWeight with_bias(HostWeight weight) {
  weight.bias = normals(weight.rows);
  return weight;
}

std::string label(const char* op, const Format& f, int64_t N, int64_t K, int64_t B) {
  return cat(op, " ", f.name, " N=", N, " K=", K, " B=", B);
}

Residual residual_of(Twin<float>& x) {
  Residual r;
  r.x = x.gpu();
  r.sum_squares = reinterpret_cast<float*>(x.gpu());  // neither read nor written by this backend
  return r;
}

void residual_gemm(Backend& gpu, const Format& f, const HostWeight& host, const PlacedWeight& w, int64_t B) {
  const int64_t N = host.rows, K = host.cols;
  const Dtype type = operand_type(f);
  const float guard = type == Dtype::f16 ? 4.0f : 1.0f;
  std::vector<uint16_t> bits(B * K);
  std::vector<float> a(B * K);
  for (int64_t i = 0; i < B * K; ++i) {
    bits[i] = round16(type, normal());
    a[i] = widen16(type, bits[i]) * guard;
  }
  Twin<uint16_t> operand(gpu, bits);
  Twin<float> x(gpu, normals(B * N));
  ResidualGemmArgs args;
  args.residual = residual_of(x);
  args.a.dtype = type;
  args.a.data = operand.gpu();
  args.a.scale = guard;
  args.weight = w.weight;
  args.rows = B;
  gpu.down_residual(args);
  const std::vector<float> got = x.fetch("down_residual");
  const Reference want(host, a, B, 0.0);
  compare(
      label("down_residual", f, N, K, B), B * N, N, [&](int64_t i) { return got[i]; },
      [&](int64_t i) { return x.host[i] + want.y[i]; },
      [&](int64_t i) { return want.bound[i] + std::fabs(x.host[i]) * 0x1p-23; });
  x.send();
  gpu.o_proj_residual(args);
  const std::vector<float> again = x.fetch("o_proj_residual");
  expect(memcmp(again.data(), got.data(), x.bytes()) == 0, label("the same bits again:", f, N, K, B));
}

void lm_head(Backend& gpu, const Format& f, const HostWeight& host, const PlacedWeight& w, int64_t B) {
  const int64_t N = host.rows, K = host.cols;
  Twin<float> x(gpu, normals((B + 3) * K, 3.0f)), logits(gpu, B * N, 0xff);
  std::vector<int64_t> row(B);
  std::vector<float> picked(B * K);
  for (int64_t b = 0; b < B; ++b) {
    row[b] = below(B + 3);
    std::copy_n(x.host.begin() + row[b] * K, K, picked.begin() + b * K);
  }
  LmHeadArgs args;
  args.residual = residual_of(x);
  args.head = w.weight;
  args.logits = logits.gpu();
  args.row = row.data();
  args.rows = B;
  gpu.lm_head(args);
  const std::vector<float> got = logits.fetch("lm_head");
  const Reference want(host, normalised(picked, B, K, args.residual.eps, operand_type(f)), B,
                       operand_error(operand_type(f)));
  compare(
      label("lm_head", f, N, K, B), B * N, N, [&](int64_t i) { return got[i]; }, [&](int64_t i) { return want.y[i]; },
      [&](int64_t i) { return want.bound[i]; });
}

void gate_up(Backend& gpu, const Format& f, const HostWeight& host, const PlacedWeight& w, int64_t B) {
  const int64_t F = host.rows / 2, K = host.cols;
  const Dtype type = operand_type(f);
  Twin<float> x(gpu, normals(B * K, 3.0f));
  Twin<uint16_t> h(gpu, B * F, 0xff);
  GateUpArgs args;
  args.residual = residual_of(x);
  args.gate_up = w.weight;
  args.out.dtype = type;
  args.out.data = h.gpu();
  args.out.scale = type == Dtype::f16 ? 2.0f : 1.0f;
  args.rows = B;
  gpu.gate_up_swiglu(args);
  const std::vector<uint16_t> got = h.fetch("gate_up_swiglu");
  const Reference y(host, normalised(x.host, B, K, args.residual.eps, type, host.input_scale), B, operand_error(type));
  const auto part = [&](int64_t i, int64_t up) { return i / F * 2 * F + up * F + i % F; };
  const auto silu = [](double g) { return g / (1 + std::exp(-g)); };
  const double unit = type == Dtype::bf16 ? 0x1p-8 : 0x1p-11;
  compare(
      label("gate_up_swiglu", f, 2 * F, K, B), B * F, F,
      [&](int64_t i) { return widen16(type, got[i]) * args.out.scale; },
      [&](int64_t i) { return silu(y.y[part(i, 0)]) * y.y[part(i, 1)]; },
      [&](int64_t i) {
        const double g = y.y[part(i, 0)], u = y.y[part(i, 1)], dg = y.bound[part(i, 0)], du = y.bound[part(i, 1)];
        return std::fabs(silu(g) * u) * unit + 1.1 * dg * std::fabs(u) + std::fabs(silu(g)) * du + dg * du + 1e-6;
      });
}

/// Every row of a batch has the bits that it has alone: kernels for one row and for many agree.
void alone_and_together(Backend& gpu, const Format& f, const PlacedWeight& w) {
  const int64_t B = 33, N = w.weight.rows, K = w.weight.cols;
  Twin<float> x(gpu, normals(B * K)), logits(gpu, B * N, 0xff), one(gpu, N, 0xff);
  LmHeadArgs args;
  args.residual = residual_of(x);
  args.head = w.weight;
  args.logits = logits.gpu();
  args.rows = B;
  gpu.lm_head(args);
  const std::vector<float> together = logits.fetch("together");
  args.logits = one.gpu();
  args.rows = 1;
  for (int64_t b = 0; b < B; b += 8) {
    args.row = &b;
    gpu.lm_head(args);
    expect(memcmp(one.fetch("alone").data(), together.data() + b * N, one.bytes()) == 0,
           label("row alone differs from the batch:", f, N, K, b));
  }
}

}  // namespace

int main() {
  return run_on_card([](Backend& gpu) {
    struct Case {
      int64_t N, K;
      std::vector<int64_t> B;
    };
    const Case cases[] = {{16, 64, {1, 2, 3, 5, 8, 9, 16, 33, 64}},
                          {49, 128, {1, 3, 9}},
                          {1000, 576, {1, 2, 8, 17}},
                          {333, 1536, {1, 5, 33}},
                          {512, 4096, {1, 2, 8, 9, 16, 33, 64}},
                          {301, 14336, {1, 2, 3, 5, 16, 64}},
                          {2112, 2048, {1, 16, 32}}};
    for (const Format& f : kFormats) {
      for (const Case& c : cases) {
        const HostWeight host = random_weight(f, c.N, c.K), scaled = with_input_scale(host), biased = with_bias(host),
                         both = with_bias(scaled);
        const PlacedWeight w = gpu.place(host), scaled_w = gpu.place(scaled), biased_w = gpu.place(biased),
                           both_w = gpu.place(both);
        if (c.K != 64) alone_and_together(gpu, f, scaled_w);
        for (int64_t B : c.B) {
          residual_gemm(gpu, f, biased, biased_w, B);
          lm_head(gpu, f, host, w, B);
          if (c.N % 2 == 0) gate_up(gpu, f, both, both_w, B);
        }
      }
    }
  });
}
