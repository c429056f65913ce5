// What a model is made of and what running it will take, from headers alone: nothing large is read.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "futransformer/engine.h"
#include "io/tokenizer.h"
#include "model/config.h"

namespace fut {

/// The tensors of one kind, over all layers.
struct WeightGroup {
  std::string name;
  std::vector<const char*> parts;  ///< what a tensor's name contains to be one of them
  int64_t rows, cols, count;
  bool table = false;  ///< embedding or head: one copy serves both phases
  std::set<std::string> stored_types = {};
  int64_t stored_bytes = 0, prefill_bytes = 0, decode_bytes = 0;
};

struct Inspection {
  LlamaConfig config;
  std::vector<WeightGroup> groups;
  std::map<std::string, int64_t> files = {};
  bool shared = false;  ///< one copy serves both phases
  int64_t parameters = 0, prefill_bytes = 0, decode_bytes = 0, table_bytes = 0;
  int64_t kv_token_bytes = 0, kv_sequence_bytes = 0, free_bytes = 0;
  std::unique_ptr<Tokenizer> tokenizer = nullptr;
  std::string tokenizer_error = {};

  int64_t total_bytes() const { return prefill_bytes + decode_bytes + table_bytes; }
  /// Tokens of cache that fit beside the weights.
  int64_t cache_tokens() const {
    return std::max<int64_t>(0, free_bytes - total_bytes() - kv_sequence_bytes) / std::max<int64_t>(1, kv_token_bytes);
  }
};

/// Opens the model, checks every tensor's shape, and adds up what the given precisions would take.
Inspection inspect_model(const std::string& path, const EngineOptions& options);

}  // namespace fut
