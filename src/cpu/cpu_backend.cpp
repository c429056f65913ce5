#include "cpu/cpu_backend.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numbers>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/operand.h"
#include "layout/hadamard.h"
#include "layout/int4_fragment.h"

namespace fut {
namespace cpu {
namespace {

/// y = input W^T with the row factors applied, and the bias: (T, N).
std::vector<float> multiply(const GemmInput& input, const Weight& weight) {
  const int64_t rows = static_cast<int64_t>(input.row_factor.size());
  std::vector<float> y(rows * weight.rows);
  gemm(y.data(), input.values.data(), rows, weight);
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = y.data() + t * weight.rows;
      const float factor = input.row_factor[t];
      for (int64_t n = 0; factor != 1.0f && n < weight.rows; ++n) row[n] *= factor;
      for (int64_t n = 0; weight.bias && n < weight.rows; ++n) row[n] += weight.bias[n];
    }
  });
  return y;
}

void normalise_head(float* head, const float* gain, int width, float eps) {
  double sum = 0;
  for (int i = 0; i < width; ++i) sum += double{head[i]} * head[i];
  const float rstd = static_cast<float>(1.0 / std::sqrt(sum / width + eps));
  for (int i = 0; i < width; ++i) head[i] = head[i] * rstd * gain[i];
}

void apply_rope(float* head, const Rope& rope, int64_t position) {
  const int half = rope.rotary_dim / 2;
  const float *cos = rope.cos + position * half, *sin = rope.sin + position * half;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

/// The epilogue of one row: y = [q | k | v] of one token, changed in place, then rounded into q, k, v.
void finish_qkv_row(const QkvArgs& args, int64_t t, int64_t position, float* y) {
  const KvCache& cache = args.cache;
  const int E = cache.layout.head_dim, H = args.heads, J = cache.kv_heads;
  const bool rotate = cache.layout.dtype == Dtype::int4;
  const Dtype type = exact_type(cache);
  const float q_scale = static_cast<float>(std::numbers::log2e / std::sqrt(static_cast<double>(E)));
  for (int h = 0; h < H + J; ++h) {
    float* head = y + int64_t{h} * E;
    if (args.q_norm) normalise_head(head, h < H ? args.q_norm : args.k_norm, E, args.residual.eps);
    apply_rope(head, args.rope, position);
    if (h >= H && cache.key_mean) {
      for (int i = 0; i < E; ++i) head[i] -= cache.key_mean[(h - H) * E + i];
    }
    if (rotate) hadamard_rotate(head, E);
  }
  for (int64_t i = 0; i < int64_t{H} * E; ++i) store_element(args.q, type, t * H * E + i, y[i] * q_scale);
  for (int64_t i = 0; i < int64_t{J} * E; ++i) {
    store_element(args.k, type, t * J * E + i, y[H * E + i]);
    store_element(args.v, type, t * J * E + i, y[(H + J) * E + i]);
  }
}

void qkv(const QkvArgs& args, bool decode) {
  validate_qkv(args, decode);
  const Batch& batch = args.batch;
  if (batch.rows == 0) return;
  std::vector<float> y = multiply(gemm_input(args.residual, args.qkv, nullptr, batch.rows), args.qkv);
  std::vector<int64_t> position(batch.rows);
  for (int64_t b = 0; b < batch.sequences; ++b) {
    for (int64_t t = batch.start[b]; t < batch.start[b + 1]; ++t) position[t] = batch.past[b] + t - batch.start[b];
  }
  parallel_for(batch.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) finish_qkv_row(args, t, position[t], y.data() + t * args.qkv.rows);
  });
  write_cache(args.cache, batch, args.k, args.v);
}

void residual_gemm(const ResidualGemmArgs& args, const char* op) {
  validate_residual_gemm(args, op);
  const int64_t width = args.weight.rows;
  const std::vector<float> y = multiply(gemm_input(args.a, args.rows, args.weight.cols), args.weight);
  parallel_for(args.rows, 4, [&](int64_t begin, int64_t end) {
    std::vector<float> x(width);
    for (int64_t t = begin; t < end; ++t) {
      load_residual_row(args.residual, t, x.data(), width);
      for (int64_t i = 0; i < width; ++i) x[i] += y[t * width + i];
      store_residual_row(args.residual, t, x.data(), width, false);
    }
  });
}

class CpuBackend final : public Backend {
 public:
  std::string name() const override {
    const int threads = thread_count();
    return cat("cpu (", simd().name, ", ", threads, threads == 1 ? " thread)" : " threads)");
  }

  void* allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    FUT_CHECK(data || bytes == 0, "out of memory: ", bytes >> 20, " MiB could not be allocated, ", free_bytes() >> 20,
              " MiB are free", memory_limit_note());
    return data;
  }
  void release(void* data, size_t) override { std::free(data); }
  void upload(void* to, const void* from, size_t bytes) override {
    if (bytes) memcpy(to, from, bytes);  // nothing may come from nowhere
  }
  void download(void* to, const void* from, size_t bytes) override { upload(to, from, bytes); }

  size_t free_bytes() const override { return available_memory(); }

  bool takes_input_scale() const override { return true; }
  PlacedWeight place(const HostWeight& host, Phase phase) override { return take(host, phase); }
  PlacedWeight take(HostWeight host, Phase) override {
    PlacedWeight placed;
    Weight& w = placed.weight;
    w.dtype = host.dtype;
    w.rows = host.rows;
    w.cols = host.cols;
    w.group = host.group;
    if (host.dtype == Dtype::int4) {
      placed.storage = Buffer(*this, int4_matrix_bytes(host.rows, host.cols, host.group));
      pack_int4(placed.storage.as<uint8_t>(), reinterpret_cast<const uint32_t*>(host.data.data()),
                host.group_scale.data(), host.rows, host.cols, host.group);
    } else {
      placed.kept = std::move(host.data);  // no second copy, not even for a moment
    }
    if (host.dtype == Dtype::e4m3) {
      placed.scale_storage = Buffer(*this, host.scale.size() * sizeof(float));
      upload(placed.scale_storage.as<void>(), host.scale.data(), host.scale.size() * sizeof(float));
    }
    if (!host.input_scale.empty()) {
      placed.input_scale_storage = Buffer(*this, host.input_scale.size() * sizeof(float));
      upload(placed.input_scale_storage.as<void>(), host.input_scale.data(), host.input_scale.size() * sizeof(float));
      w.input_scale = placed.input_scale_storage.as<float>();
    }
    if (!host.bias.empty()) {
      placed.bias_storage = Buffer(*this, host.bias.size() * sizeof(float));
      upload(placed.bias_storage.as<void>(), host.bias.data(), host.bias.size() * sizeof(float));
    }
    w.bias = placed.bias_storage.as<float>();
    w.data = placed.data();
    w.scale = placed.scale_storage.as<float>();
    w.bytes = static_cast<int64_t>(placed.storage.bytes() + placed.kept.size() + placed.scale_storage.bytes());
    return placed;
  }

  void embed(const EmbedArgs& args) override {
    validate(args);
    parallel_for(args.rows, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> x(args.width);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t token = args.tokens[t];
        FUT_CHECK(token >= 0 && token < args.embedding.rows, "token id ", token,
                  " is outside the model's vocabulary of ", args.embedding.rows);
        for (int64_t i = 0; i < args.width; ++i) {
          x[i] = load_element(args.embedding.data, args.embedding.dtype, token * args.width + i);
        }
        store_residual_row(args.residual, t, x.data(), args.width, true);
      }
    });
  }

  void qkv_rope_cache(const QkvArgs& args) override { qkv(args, false); }
  void qkv_rope_append(const QkvArgs& args) override { qkv(args, true); }

  void attention_prefill(const AttentionArgs& args) override {
    validate_attention(args, false);
    attention(args, false);
  }
  void attention_decode(const AttentionArgs& args) override {
    validate_attention(args, true);
    attention(args, true);
  }

  void o_proj_residual(const ResidualGemmArgs& args) override { residual_gemm(args, "o_proj_residual"); }
  void down_residual(const ResidualGemmArgs& args) override { residual_gemm(args, "down_residual"); }

  void gate_up_swiglu(const GateUpArgs& args) override {
    validate(args);
    const int64_t F = args.gate_up.rows / 2;
    const std::vector<float> y = multiply(gemm_input(args.residual, args.gate_up, nullptr, args.rows), args.gate_up);
    parallel_for(args.rows, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> h(F);
      for (int64_t t = begin; t < end; ++t) {
        const float *g = y.data() + t * 2 * F, *u = g + F;
        for (int64_t i = 0; i < F; ++i) h[i] = g[i] / (1.0f + std::exp(-g[i])) * u[i];
        store_operand_row(args.out, t, h.data(), F);
      }
    });
  }

  void lm_head(const LmHeadArgs& args) override {
    validate(args);
    if (args.rows == 0) return;
    const std::vector<float> y = multiply(gemm_input(args.residual, args.head, args.row, args.rows), args.head);
    std::copy(y.begin(), y.end(), args.logits);
  }
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend() { return std::make_unique<cpu::CpuBackend>(); }

}  // namespace fut
