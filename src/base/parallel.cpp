#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/memory.h"

namespace fut {
namespace {

thread_local bool inside_parallel_for = false;

/// One loop in flight: workers draw pieces from `next` until none is left.
struct Job {
  const std::function<void(int64_t, int64_t)>* body;
  int64_t count, piece;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;

  void work() {
    const bool outer = std::exchange(inside_parallel_for, true);
    for (;;) {
      const int64_t begin = next.fetch_add(piece);
      if (begin >= count) break;
      try {
        (*body)(begin, std::min(begin + piece, count));
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        next = count;
      }
    }
    inside_parallel_for = outer;
  }
};

/// Loops follow one another within microseconds while a model runs, and a sleeping thread takes tens of them to wake:
/// watch for a moment before going to sleep.
template <class Condition>
bool watch(const Condition& condition) {
  constexpr int kLooks = 2000;  // some 20 us
  for (int i = 0; i < kLooks; ++i) {
    if (condition()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

/// Workers that are woken once a loop. The caller works too, so `count` threads are count - 1 workers.
class Pool {
 public:
  explicit Pool(int count) {
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this] { run(); });
    } catch (const std::system_error& error) {
      const size_t started = workers_.size() + 1;
      stop();  // or their destructors would end the program
      fail("cannot start thread ", started + 1, " of ", count, ": ", error.code().message(), memory_limit_note(),
           " (--threads sets how many are wanted)");
    }
  }

  ~Pool() { stop(); }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  void execute(Job& job) {
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      busy_ = static_cast<int>(workers_.size());
      ++round_;
    }
    wake_.notify_all();
    job.work();
    watch([this] { return busy_ == 0; });
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    job_ = nullptr;
  }

 private:
  void run() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      lock.unlock();
      watch([&] { return round_ != seen || stopping_; });
      lock.lock();
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::atomic<int> busy_{0};  // written under the mutex, watched without it
  std::atomic<uint64_t> round_{0};
  std::atomic<bool> stopping_{false};
};

std::mutex pool_mutex;  // one loop at a time: a second caller waits its turn
std::unique_ptr<Pool> pool;
int wanted_threads = 0;

int resolved_threads() {
  return wanted_threads > 0 ? wanted_threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

void set_thread_count(int count) {
  std::lock_guard lock(pool_mutex);
  wanted_threads = std::max(0, count);
}

int thread_count() {
  std::lock_guard lock(pool_mutex);
  return resolved_threads();
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  if (inside_parallel_for || count <= grain) return body(0, count);
  std::lock_guard lock(pool_mutex);
  const int threads = resolved_threads();
  if (threads == 1) return body(0, count);
  if (!pool || pool->count() != threads) {
    pool.reset();  // join the old workers first, so that never more threads live than were asked for
    pool = std::make_unique<Pool>(threads);
  }
  // About four pieces a thread even out unequal speeds; a piece stays a multiple of the grain.
  const int64_t pieces = std::min<int64_t>(4 * threads, (count + grain - 1) / grain);
  const int64_t grains = (count + grain * pieces - 1) / (grain * pieces);
  Job job{&body, count, grains * grain, {}, {}, {}};
  pool->execute(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace fut
