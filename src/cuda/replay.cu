#include <algorithm>
#include <chrono>
#include <memory>

#include "cuda/cuda_backend.h"
#include "cuda/launch.cuh"
#include "cuda/replay.h"

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

int card_clock_mhz() {
  int khz = 0;
  FUT_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  return khz / 1000;
}

}  // namespace fut
