#include <algorithm>
#include <chrono>
#include <memory>

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/replay.h"
#include "cuda/step_trace.h"

namespace fut {
namespace cuda {
namespace {

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraph_st, DestroyGraph>;
using ExecutableGraph = std::unique_ptr<CUgraphExec_st, DestroyGraph>;

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;

Event make_event() {
  cudaEvent_t event;
  FUT_CUDA(cudaEventCreate(&event));
  return Event(event);
}

/// A replay would read host memory that has other contents by then, or none.
bool kernels_alone(cudaGraph_t graph) {
  size_t count = 0;
  FUT_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  FUT_CUDA(cudaGraphGetNodes(graph, nodes.data(), &count));
  return std::all_of(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
    cudaGraphNodeType type;
    FUT_CUDA(cudaGraphNodeGetType(node, &type));
    return type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset;
  });
}

/// Null where the work cannot be replayed.
ExecutableGraph record(cudaStream_t stream, const std::function<void()>& work) {
  FUT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  bool recorded = true;
  try {
    work();
  } catch (const Error&) {  // it ran a moment ago: what failed is the recording
    recorded = false;
  }
  cudaGraph_t captured = nullptr;
  recorded = cudaStreamEndCapture(stream, &captured) == cudaSuccess && recorded;
  const Graph graph(captured);
  cudaGetLastError();  // a recording that failed leaves its error behind
  if (!recorded || !kernels_alone(captured)) return nullptr;
  cudaGraphExec_t executable;
  FUT_CUDA(cudaGraphInstantiate(&executable, captured, 0));
  return ExecutableGraph(executable);
}

}  // namespace
}  // namespace cuda

std::vector<double> time_on_card(Backend& backend, const std::function<void()>& work, int samples,
                                 double warm_up_seconds) {
  using Clock = std::chrono::steady_clock;
  const cudaStream_t stream = cuda_stream(backend);
  work();  // for the arrays that operations keep
  FUT_CUDA(cudaStreamSynchronize(stream));
  const cuda::ExecutableGraph graph = cuda::record(stream, work);
  const auto run = [&] {
    if (!graph) return work();
    FUT_CUDA(cudaGraphLaunch(graph.get(), stream));
  };
  const auto start = Clock::now();
  do {
    run();
    FUT_CUDA(cudaStreamSynchronize(stream));
  } while (std::chrono::duration<double>(Clock::now() - start).count() < warm_up_seconds);

  // One run ahead of the first event: the card is busy while the host gets ahead.
  std::vector<cuda::Event> events;
  for (int i = 0; i <= samples; ++i) events.push_back(cuda::make_event());
  for (const cuda::Event& event : events) {
    run();
    FUT_CUDA(cudaEventRecord(event.get(), stream));
  }
  FUT_CUDA(cudaStreamSynchronize(stream));
  std::vector<double> seconds;
  for (int i = 0; i < samples; ++i) {
    float ms = 0;
    FUT_CUDA(cudaEventElapsedTime(&ms, events[i].get(), events[i + 1].get()));
    seconds.push_back(double{ms} * 1e-3);
  }
  return seconds;
}

std::vector<StageCycles> trace_step(Backend& backend, const std::function<void()>& step) {
  step();
  const cuda::TracedStep traced = cuda::traced_step(backend, step);
  if (traced.stages.empty()) return {};
  constexpr int kKinds = 6;
  const char* names[kKinds] = {"qkv_rope_append", "attention_decode", "o_proj_residual",
                               "gate_up_swiglu",  "down_residual",    "lm_head"};
  std::vector<StageCycles> kinds(kKinds);
  const int stages = 5 * traced.layers + 1;
  for (int s = 0; s < stages; ++s) {
    StageCycles& kind = kinds[s == stages - 1 ? kKinds - 1 : s % 5];
    ++kind.count;
    for (int block = 0; block < traced.blocks; ++block) {
      const cuda::StepTrace& t = traced.stages[block * stages + s];
      kind.cycles += t.end;
      kind.longest = std::max(kind.longest, static_cast<double>(t.end));
      kind.input_cycles +=
          s % 5 == 1 && s != stages - 1 ? t.gathered : t.ready;  // attention is ready when it is through
      kind.memory_cycles += t.starved;
    }
  }
  for (int k = 0; k < kKinds; ++k) {
    StageCycles& kind = kinds[k];
    const double runs = static_cast<double>(kind.count) * traced.blocks;
    kind.op = names[k];
    kind.cycles /= runs, kind.input_cycles /= runs, kind.memory_cycles /= runs;
  }
  if (!traced.head) kinds.pop_back();
  return kinds;
}

int card_clock_mhz() {
  int khz = 0;
  FUT_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  return khz / 1000;
}

}  // namespace fut
