// The next token out of logits: filters, then a draw that depends on seed, step and logits alone.
#pragma once

#include <cstdint>

#include "futransformer/engine.h"

namespace fut {

/// At or below this temperature the best token is taken: logits / temperature would overflow or round alike.
inline constexpr float kGreedyTemperature = 1e-3f;

/// Throws unless every field is in its range.
void check_sampling(const Sampling& sampling);

/// The id of the next token. Order: temperature, top-k, top-p (the token that crosses the limit stays), min-p; then
/// argmax over the kept tokens of logit / temperature + Gumbel noise, where the noise of a token is a hash of (seed,
/// step, id): a draw from the softmax that needs no sum and does not change with the order of work. Ties: lowest id.
/// Throws if a logit is NaN or none is finite.
int32_t sample_token(const float* logits, int64_t vocabulary, const Sampling& sampling, int64_t step);

}  // namespace fut
