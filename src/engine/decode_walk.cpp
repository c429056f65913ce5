#include "engine/decode_walk.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/parallel.h"
#include "engine/kv_cache.h"

namespace fut {
namespace {

constexpr int64_t kChunkRows = 128;  // rows of one operation, and sequences that step together

Buffer upload_floats(Backend& backend, const std::vector<float>& values) {
  Buffer buffer(backend, values.size() * sizeof(float));
  backend.upload(buffer.as<void>(), values.data(), values.size() * sizeof(float));
  return buffer;
}

void normalise_head(double* head, const std::vector<float>& gain, double eps) {
  double sum = 0;
  for (size_t i = 0; i < gain.size(); ++i) sum += head[i] * head[i];
  const double rms = std::sqrt(sum / static_cast<double>(gain.size()) + eps);
  for (size_t i = 0; i < gain.size(); ++i) head[i] *= gain[i] / rms;
}

/// The keys and values of one layer, for as many sequences as step together.
class LayerCache {
 public:
  LayerCache(Backend& backend, LlamaConfig config, Dtype type, int64_t sequences, int64_t length)
      : pool_(backend, one_layer(config), type, sequences * pages(length) * kKvPageTokens, sequences),
        sequences_(sequences) {
    for (CachedSequence& s : sequences_) FUT_CHECK(pool_.admit(s, length), "the calibration's KV cache is full");
    for (CachedSequence& s : sequences_) members_.push_back(&s);
  }

  /// The next token of every sequence.
  ForwardPass next() {
    if (started_) {
      for (CachedSequence& s : sequences_) KvPool::advance(s, 1);
    }
    started_ = true;
    return pool_.make_pass(members_, std::vector<int64_t>(members_.size(), 1), std::vector<int32_t>(members_.size()));
  }

 private:
  static int64_t pages(int64_t tokens) { return (tokens + kKvPageTokens - 1) / kKvPageTokens; }
  static const LlamaConfig& one_layer(LlamaConfig& config) {
    config.layers = 1;
    return config;
  }

  KvPool pool_;
  std::vector<CachedSequence> sequences_;
  std::vector<CachedSequence*> members_;
  bool started_ = false;
};

}  // namespace

DecodeWalk::DecodeWalk(Backend& backend, const LlamaConfig& config, Dtype weights,
                       const std::vector<std::vector<int32_t>>& pieces, const std::vector<float>& embedding,
                       std::function<void()> tick)
    : backend_(backend),
      config_(config),
      weights_(weights),
      tick_(std::move(tick)),
      length_(static_cast<int64_t>(pieces.at(0).size())),
      rows_(length_ * static_cast<int64_t>(pieces.size())) {
  const int64_t D = config.width, E = config.head_dim, widest = std::max(config.heads * E, config.feed_forward);
  x_chunk_ = Buffer(backend, kChunkRows * D * sizeof(float));
  sum_squares_chunk_ = Buffer(backend, kChunkRows * sizeof(float));
  q_ = Buffer(backend, kChunkRows * config.heads * E * sizeof(float));
  k_ = Buffer(backend, kChunkRows * config.kv_heads * E * sizeof(float));
  v_ = Buffer(backend, kChunkRows * config.kv_heads * E * sizeof(float));
  operand_ = Buffer(backend, kChunkRows * widest * sizeof(uint16_t));
  rope_ = rope_tables(config, length_);
  rope_cos_ = upload_floats(backend, rope_.cos);
  rope_sin_ = upload_floats(backend, rope_.sin);
  x_.resize(rows_ * D);
  sum_squares_.resize(rows_);
  o_.resize(rows_ * config.heads * E);
  h_.resize(rows_ * config.feed_forward);

  const PlacedWeight table =
      backend.place(encode_weight(Dtype::bf16, 0, embedding.data(), config.vocabulary, D, "model.embed_tokens.weight"));
  std::vector<int32_t> tokens(kChunkRows);
  for (size_t first = 0; first < pieces.size(); first += kChunkRows) {
    const auto count = static_cast<int64_t>(std::min(pieces.size() - first, size_t{kChunkRows}));
    sides_.push_back({static_cast<int64_t>(first) * length_, count});
    for (int64_t t = 0; t < length_; ++t) {
      for (int64_t i = 0; i < count; ++i) tokens[i] = pieces[first + i].at(t);
      backend.embed({residual(), table.weight, tokens.data(), count, D});
      store_residual(sides_.back().first_row + t * count, count);
    }
  }
}

Residual DecodeWalk::residual() const {
  Residual r;
  r.x = x_chunk_.as<void>();
  r.sum_squares = sum_squares_chunk_.as<float>();
  r.eps = static_cast<float>(config_.norm_eps);
  return r;
}

void DecodeWalk::load_residual(int64_t first_row, int64_t rows) {
  backend_.upload(x_chunk_.as<void>(), x_.data() + first_row * config_.width, rows * config_.width * sizeof(float));
  backend_.upload(sum_squares_chunk_.as<void>(), sum_squares_.data() + first_row, rows * sizeof(float));
}

void DecodeWalk::store_residual(int64_t first_row, int64_t rows) {
  backend_.download(x_.data() + first_row * config_.width, x_chunk_.as<void>(), rows * config_.width * sizeof(float));
  backend_.download(sum_squares_.data() + first_row, sum_squares_chunk_.as<void>(), rows * sizeof(float));
}

/// As docs/NUMERICS.md says of decode with INT4 weights, FP16 of x / rms; the input scale is yet to be chosen.
void DecodeWalk::normalise(int64_t row, float* out) const {
  const int64_t D = config_.width;
  const double mean = double{sum_squares_[row]} / static_cast<double>(D);
  const float rstd = static_cast<float>(1.0 / std::sqrt(mean + static_cast<float>(config_.norm_eps)));
  for (int64_t i = 0; i < D; ++i) out[i] = to_f32(to_half_saturated(x_[row * D + i] * rstd));
}

void DecodeWalk::see_normalised(const See& see) const {
  const int64_t D = config_.width;
  std::vector<float> normalised(kChunkRows * D);
  for (int64_t first = 0; first < rows_; first += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows_ - first);
    parallel_for(count, 8, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) normalise(first + t, normalised.data() + t * D);
    });
    see(normalised.data(), count);
    tick_();
  }
}

/// The mean of all keys after RoPE, (J * E). A turn is linear, and without a norm over the heads so is what comes
/// before it: at each position the mean input then gives the mean key.
std::vector<float> DecodeWalk::mean_key(const HostWeight& qkv, const HeadNorm& norm) const {
  const int64_t D = config_.width, E = config_.head_dim, width = config_.kv_heads * E, half = config_.rotary_dim / 2;
  const bool linear = norm.k.empty();
  std::vector<float> weight(width * D);
  for (int64_t n = 0; n < width; ++n) {
    decode_weight_row(qkv, config_.heads * E + n, weight.data() + n * D);
    for (int64_t k = 0; k < D && !qkv.input_scale.empty(); ++k) weight[n * D + k] *= qkv.input_scale[k];
  }
  /// Adds the key, before RoPE, of so many inputs, given their sum.
  const auto add_key = [&](const std::vector<double>& input, double count, std::vector<double>& sum) {
    std::vector<double> key(width);
    for (int64_t n = 0; n < width; ++n) {
      if (!qkv.bias.empty()) key[n] = count * qkv.bias[config_.heads * E + n];
      for (int64_t k = 0; k < D; ++k) key[n] += weight[n * D + k] * input[k];
    }
    for (int64_t n = 0; n < width && !linear; n += E) normalise_head(key.data() + n, norm.k, config_.norm_eps);
    for (int64_t n = 0; n < width; ++n) sum[n] += key[n];
  };
  std::vector<double> key(length_ * width);  // summed over the sequences
  parallel_for(length_, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(D);
    for (int64_t t = begin; t < end; ++t) {
      std::vector<double> input(D), flat(width);
      double count = 0;
      for (const Side& side : sides_) {
        for (int64_t i = 0; i < side.count; ++i) {
          normalise(side.first_row + t * side.count + i, row.data());
          if (!linear) input.assign(D, 0.0), count = 0;
          for (int64_t k = 0; k < D; ++k) input[k] += double{row[k]};
          ++count;
          if (!linear) add_key(input, count, flat);
        }
      }
      if (linear) add_key(input, count, flat);
      for (int64_t n = 0; n < width; ++n) {
        double turned = flat[n];
        if (n % E < 2 * half) {
          const int64_t i = n % E % half, other = n % E < half ? n + half : n - half;
          const double sign = n % E < half ? -1.0 : 1.0;
          turned = flat[n] * rope_.cos[t * half + i] + sign * flat[other] * rope_.sin[t * half + i];
        }
        key[t * width + n] = turned;
      }
    }
  });
  std::vector<float> mean(width);
  for (int64_t n = 0; n < width; ++n) {
    double sum = 0;
    for (int64_t t = 0; t < length_; ++t) sum += key[t * width + n];
    mean[n] = static_cast<float>(sum / static_cast<double>(rows_));
  }
  return mean;
}

void DecodeWalk::widen(const std::vector<uint16_t>& values, int64_t first_row, int64_t rows, int64_t cols, float guard,
                       float* x) const {
  const uint16_t* from = values.data() + first_row * cols;
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * cols; i < end * cols; ++i)
      x[i] = weights_ == Dtype::int4 ? to_f32(Half{from[i]}) * guard : to_f32(Bf16{from[i]});
  });
}

void DecodeWalk::see_halves(const std::vector<uint16_t>& values, int64_t first_row, int64_t rows, int64_t cols,
                            float guard, const See& see) const {
  std::vector<float> floats(rows * cols);
  widen(values, first_row, rows, cols, guard, floats.data());
  see(floats.data(), rows);
  tick_();
}

void DecodeWalk::inputs(int64_t first_row, int64_t rows, float* x) const {
  switch (shown_) {
    case Shown::normalised:
      return parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) normalise(first_row + t, x + t * config_.width);
      });
    case Shown::o: return widen(o_, first_row, rows, config_.heads * config_.head_dim, o_guard_, x);
    case Shown::h: return widen(h_, first_row, rows, config_.feed_forward, h_guard_, x);
  }
}

/// What attention and SwiGLU leave and o and down take.
Operand DecodeWalk::operand(float guard) const {
  Operand a;
  a.dtype = weights_ == Dtype::int4 ? Dtype::f16 : weights_;
  a.data = operand_.as<void>();
  a.scale = weights_ == Dtype::int4 ? guard : 1.0f;
  return a;
}

void DecodeWalk::start_layer(const See& see_qkv) {
  shown_ = Shown::normalised;
  see_normalised(see_qkv);
}

void DecodeWalk::attention(const HostWeight& host, const HeadNorm& norm, const See& see_o) {
  const PlacedWeight qkv = backend_.place(host);
  shown_ = Shown::o;
  const LayerConstants constants = attention_constants(host, norm, config_);
  o_guard_ = constants.attention_guard;
  const Buffer key_factor = upload_floats(backend_, constants.key_factor);
  const Buffer value_factor = upload_floats(backend_, constants.value_factor);
  if (weights_ == Dtype::int4) calibration_.key_mean.push_back(mean_key(host, norm));
  calibration_.attention_amax.push_back(0.0f);
  Buffer key_mean;
  if (weights_ == Dtype::int4) key_mean = upload_floats(backend_, calibration_.key_mean.back());
  const Rope rope{rope_cos_.as<float>(), rope_sin_.as<float>(), static_cast<int>(config_.rotary_dim), length_};
  Buffer q_norm, k_norm;
  if (config_.head_norm) q_norm = upload_floats(backend_, norm.q), k_norm = upload_floats(backend_, norm.k);
  const int heads = static_cast<int>(config_.heads);
  const int64_t o_width = config_.heads * config_.head_dim;
  Operand out = operand(o_guard_);
  out.amax = &calibration_.attention_amax.back();
  for (const Side& side : sides_) {
    LayerCache cache(backend_, config_, weights_, side.count, length_);
    for (int64_t t = 0; t < length_; ++t) {
      const int64_t row = side.first_row + t * side.count;
      ForwardPass pass = cache.next();
      KvCache& c = pass.cache.first;
      c.key_factor = key_factor.as<float>();
      c.value_factor = value_factor.as<float>();
      c.key_mean = key_mean.as<float>();
      load_residual(row, side.count);
      backend_.qkv_rope_append({q_.as<void>(), k_.as<void>(), v_.as<void>(), c, residual(), qkv.weight, rope,
                                pass.batch, heads, config_.width, q_norm.as<float>(), k_norm.as<float>()});
      backend_.attention_decode({out, q_.as<void>(), k_.as<void>(), v_.as<void>(), c, pass.batch, heads});
      backend_.download(o_.data() + row * o_width, out.data, side.count * o_width * sizeof(uint16_t));
      see_halves(o_, row, side.count, o_width, o_guard_, see_o);
    }
  }
}

void DecodeWalk::product_into_residual(const HostWeight& host, const std::vector<uint16_t>& inputs, float guard,
                                       bool is_down) {
  const PlacedWeight weight = backend_.place(host);
  const Operand a = operand(guard);
  for (int64_t first = 0; first < rows_; first += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows_ - first);
    load_residual(first, count);
    backend_.upload(a.data, inputs.data() + first * host.cols, count * host.cols * sizeof(uint16_t));
    const ResidualGemmArgs args{residual(), a, weight.weight, count};
    if (is_down) {
      backend_.down_residual(args);
    } else {
      backend_.o_proj_residual(args);
    }
    store_residual(first, count);
    tick_();
  }
}

void DecodeWalk::o_proj(const HostWeight& o, const See& see_gate_up) {
  product_into_residual(o, o_, o_guard_, false);
  shown_ = Shown::normalised;
  see_normalised(see_gate_up);
}

void DecodeWalk::gate_up(const HostWeight& host, const See& see_down) {
  const PlacedWeight weight = backend_.place(host);
  shown_ = Shown::h;
  h_guard_ = swiglu_guard(host, config_);
  const int64_t F = config_.feed_forward;
  Operand out = operand(h_guard_);
  calibration_.swiglu_amax.push_back(0.0f);
  out.amax = &calibration_.swiglu_amax.back();
  for (int64_t first = 0; first < rows_; first += kChunkRows) {
    const int64_t count = std::min(kChunkRows, rows_ - first);
    load_residual(first, count);
    backend_.gate_up_swiglu({out, residual(), weight.weight, count});
    backend_.download(h_.data() + first * F, out.data, count * F * sizeof(uint16_t));
    see_halves(h_, first, count, F, h_guard_, see_down);
  }
}

void DecodeWalk::down(const HostWeight& down) { product_into_residual(down, h_, h_guard_, true); }

}  // namespace fut
