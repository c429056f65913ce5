// Hugging Face folders: config.json with model.safetensors, or with shards and their index.
#pragma once

#include <memory>
#include <string>

#include "io/checkpoint.h"

namespace fut {

/// model.safetensors is read if it is there; otherwise model.safetensors.index.json says which shards to read. Several
/// safetensors files without an index are refused: nobody could tell whether all are there.
///
/// Quantised tensors are read as numbers too:
///   float-quantized  X stored as F8_E4M3 beside X_scale or X_scale_inv: X = code * scale. One scale, one a row, or
///                    one a block of config.json's weight_block_size (128 x 128);
///   4-bit codes      of compressed-tensors, GPTQ and AWQ (packed_int4.h). find(X) tells their shape and layout; the
///                    parts are ordinary tensors as well.
std::unique_ptr<Checkpoint> open_hf_folder(const std::string& folder);

}  // namespace fut
