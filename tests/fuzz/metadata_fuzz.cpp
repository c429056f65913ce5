// futransformer.json, which makes a folder one of ours: what is in it multiplies activations and turns weights.
#include <cmath>

#include "model/source.h"
#include "mutate.h"

namespace fut::fuzz {
namespace {

const std::vector<std::string> kWords = {"version",  "source",    "group_size", "rotations", "value",
                                         "residual", "attention", "swiglu",     "key_mean",  "activation_amax"};

class MetadataTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kMetadataFile}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string& file = input.at(kMetadataFile);
    if (random.chance(5)) return mutate_bytes(file, random, random.pick(seeds).at(kMetadataFile));
    file = mutated_json(file, random, kWords);
  }

  void run(const Input&, const std::string& folder) const override {
    ModelSource source;
    source.config.layers = 2;
    source.config.kv_heads = 1;
    source.config.head_dim = 4;
    read_metadata(folder + "/" + kMetadataFile, source);
    const Calibration& found = source.calibration;
    require(found.attention_amax.size() == found.swiglu_amax.size(), "one of two lists of scales");
    require(found.swiglu_amax.empty() || found.swiglu_amax.size() == 2, "scales that are not one a layer");
    require(found.key_mean.empty() || found.key_mean.size() == 2, "means that are not one a layer");
    for (const std::vector<float>& amax : {found.attention_amax, found.swiglu_amax}) {
      for (const float x : amax) require(std::isfinite(x) && x >= 0, "a magnitude that is none");
    }
    for (const std::vector<float>& mean : found.key_mean) {
      require(mean.size() == 4, "a mean of another width");
      for (const float x : mean) require(std::isfinite(x), "a mean that is no number");
    }
  }
};

}  // namespace

std::unique_ptr<Target> metadata_target() { return std::make_unique<MetadataTarget>(); }

}  // namespace fut::fuzz
