// What a machine must offer to run a model: memory, and the operations of ops.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "layout/host_weight.h"
#include "ops/ops.h"

namespace fut {

class Backend;

/// Owned memory of a backend. Contents start undefined.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend& backend, size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// A weight together with the memory it lives in.
struct PlacedWeight {
  Weight weight;
  Buffer storage, scale_storage, input_scale_storage = {}, bias_storage = {};
  HostBytes kept = {};  ///< instead of `storage`, where the backend reads the host's order

  const void* data() const { return kept.empty() ? storage.as<void>() : kept.data(); }
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;  ///< "cpu (AVX2, 2 threads)"

  virtual void* allocate(size_t bytes) = 0;  ///< aligned to 64 bytes; Error with the size when there is none left
  virtual void release(void* data, size_t bytes) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  virtual size_t free_bytes() const = 0;  ///< what may still be allocated, as far as the system tells

  /// Brings a weight into the order in which this backend's GEMMs of a phase read it. Embedding and head: decode.
  virtual PlacedWeight place(const HostWeight& weight, Phase phase) = 0;
  PlacedWeight place(const HostWeight& weight) { return place(weight, Phase::decode); }

  /// The same for a weight that nobody needs afterwards: a backend that reads the host's order keeps it as it is.
  virtual PlacedWeight take(HostWeight weight, Phase phase) { return place(weight, phase); }

  /// Whether both phases read one order, so that a model in one format needs one copy.
  virtual bool one_order() const { return true; }

  /// Whether its products heed Weight::input_scale; where they do not, no weight with one is placed.
  virtual bool takes_input_scale() const { return false; }

  virtual void embed(const EmbedArgs& args) = 0;

  virtual void qkv_rope_cache(const QkvArgs& args) = 0;
  virtual void attention_prefill(const AttentionArgs& args) = 0;

  virtual void qkv_rope_append(const QkvArgs& args) = 0;
  virtual void attention_decode(const AttentionArgs& args) = 0;

  virtual void o_proj_residual(const ResidualGemmArgs& args) = 0;
  virtual void gate_up_swiglu(const GateUpArgs& args) = 0;
  virtual void down_residual(const ResidualGemmArgs& args) = 0;

  virtual void lm_head(const LmHeadArgs& args) = 0;

  /// A whole step at once, bit for bit what the operations give one by one, where the backend has something faster than
  /// these for it. False: nothing was done.
  virtual bool decode_step(const DecodeStepArgs&) { return false; }
};

}  // namespace fut
