#include "engine/backends.h"

#include <algorithm>

#include "base/error.h"
#include "cpu/cpu_backend.h"
#ifdef FUT_HAS_CUDA
#include "cuda/cuda_backend.h"
#include "cuda/replay.h"
#endif

namespace fut {

/// Said here, because an operation would only say it after minutes of loading.
std::string without_kernel(const LlamaConfig& c, const std::vector<Dtype>& formats) {
  if (std::find(formats.begin(), formats.end(), Dtype::f32) != formats.end())
    return "weights and caches in f32 run on the CPU alone (choose int4, fp8 or bf16)";
  if (c.head_dim != 64 && c.head_dim != 128) return cat("heads are ", c.head_dim, " wide, it knows 64 and 128");
  if (c.heads > 16 * c.kv_heads)
    return cat(c.heads, " heads share ", c.kv_heads, " KV heads, the limit is 16 query heads each");
  for (const auto& [what, size] : {std::pair{"width", c.width}, std::pair{"feed-forward width", c.feed_forward}}) {
    if (size % 64 != 0) return cat("the ", what, " is ", size, ", no multiple of 64");
  }
  return "";
}

namespace {

#ifdef FUT_HAS_CUDA

/// Why this model cannot run on a card here; empty: it can.
std::string obstacle_on_card(const LlamaConfig& config, const std::vector<Dtype>& formats) {
  const std::string machine = cuda_obstacle();
  return machine.empty() ? without_kernel(config, formats) : machine;
}

std::unique_ptr<Backend> make_on_card() { return make_cuda_backend(); }

CardClock clock_of_card(Backend& backend) {
  return {card_clock_mhz(),
          [&backend](const std::function<void()>& work, int samples, double warm_up_seconds) {
            return time_on_card(backend, work, samples, warm_up_seconds);
          },
          [&backend](const std::function<void()>& step) {
            std::vector<StepStage> stages;
            for (const StageCycles& s : trace_step(backend, step))
              stages.push_back({s.op, s.count, s.cycles, s.longest, s.input_cycles, s.memory_cycles});
            return stages;
          }};
}

#else

std::string obstacle_on_card(const LlamaConfig&, const std::vector<Dtype>&) {
  return "this program was built without it (nvcc was not found, or FUT_CUDA was off)";
}

std::unique_ptr<Backend> make_on_card() { return nullptr; }

CardClock clock_of_card(Backend&) { return {}; }

#endif

}  // namespace

std::unique_ptr<Backend> make_backend(const std::string& name, const LlamaConfig& config,
                                      const std::vector<Dtype>& formats, std::vector<std::string>* warnings) {
  FUT_CHECK(name == "cpu" || name == "cuda" || name == "auto", "backend \"", name,
            "\" is unknown (auto, cpu and cuda are known)");
  if (name == "cpu") return make_cpu_backend();
  const std::string obstacle = obstacle_on_card(config, formats);
  FUT_CHECK(obstacle.empty() || name == "auto", "backend cuda: ", obstacle, "; --backend cpu would run");
  if (obstacle.empty()) return make_on_card();
  if (warnings) warnings->push_back(cat("backend auto: cuda cannot be used: ", obstacle, "; the CPU runs it"));
  return make_cpu_backend();
}

std::optional<CardClock> card_clock(Backend& backend) {
  if (backend.name().rfind("cuda", 0) != 0) return std::nullopt;
  return clock_of_card(backend);
}

}  // namespace fut
