// Threads for loops whose iterations do not depend on one another. How the range is cut never changes a result:
// every output element is computed by one thread, in one order.
#pragma once

#include <cstdint>
#include <functional>

namespace fut {

/// Number of worker threads used from now on by parallel_for; 0 means one a hardware core.
void set_thread_count(int count);
int thread_count();

/// Calls body(begin, end) on disjoint pieces of [0, count), each a multiple of `grain` long but the last.
/// The first exception that a piece throws is thrown again here. Nested calls run in the calling thread.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

}  // namespace fut
