// Sharded folders: the index, its shards, and the quantised layouts whose parts must fit one another.
#include <cstring>

#include "mutate.h"
#include "use_tensor.h"

namespace fut::fuzz {
namespace {

constexpr char kIndex[] = "model.safetensors.index.json";
const std::vector<std::string> kShards = {"a.safetensors", "b.safetensors"};
const std::vector<std::string> kWords = {"metadata",
                                         "total_size",
                                         "weight_map",
                                         "a.safetensors",
                                         "b.safetensors",
                                         "w",
                                         "w_scale",
                                         "w_scale_inv",
                                         "p.weight_packed",
                                         "p.weight_scale",
                                         "p.weight_shape",
                                         "p.weight_g_idx",
                                         "p.weight_zero_point",
                                         "p.weight",
                                         "q.qweight",
                                         "q.qzeros",
                                         "q.scales",
                                         "q.g_idx",
                                         "q.weight",
                                         "../a.safetensors",
                                         "config.json",
                                         ".",
                                         "..",
                                         "n"};
const std::vector<std::string> kConfigWords = {
    "quantization_config", "quant_method", "gptq", "awq",  "bits",    "w_bit",   "group_size",      "q_group_size",
    "checkpoint_format",   "gptq_v2",      "sym",  "gemm", "version", "dynamic", "is_marlin_format"};

/// Moves a name from one of the two files that know it.
void rename_in_shard(std::string& shard, Random& random) {
  const std::string &from = random.pick(kWords), &to = random.pick(kWords);
  uint64_t length = 0;
  memcpy(&length, shard.data(), sizeof length);
  std::string header = shard.substr(8, length);
  const size_t at = header.find(quoted(from) + ":{");
  if (at == std::string::npos) return;
  header.replace(at, from.size() + 2, quoted(to));
  const std::string data = shard.substr(8 + length);
  length = header.size();
  memcpy(shard.data(), &length, sizeof length);
  shard = shard.substr(0, 8) + header + data;
}

class IndexTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {"config.json", kIndex, kShards[0], kShards[1]}; }

  void mutate(Input& input, Random& random, const std::vector<Input>&) const override {
    if (random.chance(60)) input[kIndex] = mutated_json(input[kIndex], random, kWords);
    for (const std::string& shard : kShards) {
      if (random.chance(20)) rename_in_shard(input[shard], random);
      if (random.chance(40)) input[shard] = mutated_safetensors(input[shard], random);
      if (random.chance(3)) input.erase(shard);
    }
    if (random.chance(15)) input["config.json"] = mutated_json(input["config.json"], random, kConfigWords);
    if (random.chance(3)) mutate_bytes(input["config.json"], random, "\xff[]{}\"");
    if (random.chance(2)) input.erase(random.pick(files()));
  }

  void run(const Input&, const std::string& folder) const override {
    const auto checkpoint = Checkpoint::open(folder);
    for (const TensorInfo& tensor : checkpoint->tensors()) {
      require(checkpoint->find(tensor.name) != nullptr, "a listed tensor is not found");
      may_refuse(folder, [&] {
        use_tensor(*checkpoint, tensor);
        if (checkpoint->int4_group(tensor.name)) checkpoint->int4_codes(tensor.name);
      });
      if (is_packed_int4(tensor)) continue;  // has no bytes of its own
      int64_t size = -1;
      const uint8_t* const bytes = checkpoint->raw(tensor.name, &size);
      require(size >= 0 && (size == 0 || bytes[0] + bytes[size - 1] >= 0), "raw bytes that cannot be read");
    }
    require(!checkpoint->find("no such tensor"), "a tensor that is not there is found");
  }
};

}  // namespace

std::unique_ptr<Target> index_target() { return std::make_unique<IndexTarget>(); }

}  // namespace fut::fuzz
