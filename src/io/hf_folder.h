// Hugging Face folders: config.json with model.safetensors, or with shards and their index.
#pragma once

#include <memory>
#include <string>

#include "io/checkpoint.h"

namespace fut {

/// model.safetensors is read if it is there; otherwise model.safetensors.index.json says which shards to read. Several
/// safetensors files without an index are refused: nobody could tell whether all are there.
///
/// Two quantised layouts of compressed-tensors are read as numbers too:
///   float-quantized  X stored as F8_E4M3 beside X_scale or X_scale_inv: X = code * scale. One scale, one a row, or
///                    one a block of config.json's weight_block_size (128 x 128);
///   pack-quantized   X_packed (N, ceil(K/8)) I32, X_scale (N, K/G), X_shape = [N, K]: X = scale * (q - 8), where q is
///                    a nibble, the lowest bits first along K. find(X) tells N, K and the type "pack-quantized"; the
///                    three parts are ordinary tensors as well. G follows from the shapes and is a power of two or K.
///                    With X_zero_point (ceil(N/8), K/G) I32, whose nibbles lie along N, 8 becomes its nibble.
std::unique_ptr<Checkpoint> open_hf_folder(const std::string& folder);

}  // namespace fut
