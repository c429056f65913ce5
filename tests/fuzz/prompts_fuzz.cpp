// Files of prompts: JSON lines that come from users.
#include "../../apps/fut/prompts.h"
#include "../../apps/fut/ranges.h"
#include "mutate.h"

namespace fut::fuzz {
namespace {

constexpr char kFile[] = "prompts.jsonl";
const std::vector<std::string> kWords = {"prompt", "max_tokens", "temperature", "top_k", "top_p",
                                         "min_p",  "seed",       "stop",        "Once",  "x"};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

class PromptsTarget final : public Target {
 public:
  std::vector<std::string> files() const override { return {kFile}; }

  void mutate(Input& input, Random& random, const std::vector<Input>& seeds) const override {
    std::string& file = input.at(kFile);
    if (random.chance(10)) return mutate_bytes(file, random, random.pick(seeds).at(kFile));
    std::vector<std::string> lines = lines_of(file);
    for (size_t count = 1 + random.below(3); count > 0; --count) {
      std::string& line = lines[random.below(lines.size())];
      if (random.chance(15)) {
        lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(random.below(lines.size() + 1)),
                     odd_text(random, kWords));
      } else {
        line = random.chance(95) ? mutated_json(line, random, kWords) : line + random.pick(lines);
      }
    }
    file.clear();
    for (const std::string& line : lines) file += line + (random.chance(5) ? "\r\n" : "\n");
    if (random.chance(20)) file.pop_back();
  }

  void run(const Input& input, const std::string& folder) const override {
    const auto requests = app::parse_prompts(input.at(kFile), folder + "/" + kFile, Request{});
    require(!requests.empty(), "no requests");
    for (const Request& request : requests) {
      const Sampling& sampling = request.sampling;
      require(app::contains(app::kMaxTokensRange, request.max_tokens), "max_tokens out of range");
      require(app::contains(app::kTemperatureRange, sampling.temperature), "temperature out of range");
      require(app::contains(app::kTopKRange, sampling.top_k), "top_k out of range");
      require(app::contains(app::kFractionRange, sampling.top_p), "top_p out of range");
      require(app::contains(app::kFractionRange, sampling.min_p), "min_p out of range");
      for (const std::string& stop : request.stop) require(!stop.empty(), "an empty stop string");
    }
  }
};

}  // namespace

std::unique_ptr<Target> prompts_target() { return std::make_unique<PromptsTarget>(); }

}  // namespace fut::fuzz
