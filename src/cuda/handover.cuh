// How blocks of one running kernel hand activations to one another: every 8-byte word carries 4 bytes of payload and a
// tag that names the step, layer and stage that wrote it. A reader loads the data itself until the tags are right;
// there is no flag, no fence and no barrier, because a 64-bit access is one access. Tags rise for ever, so nothing is
// ever cleared.
//
// A word may be overwritten as soon as its stage's successor is complete: whoever writes the next value has read,
// through the chain of stages, something of every block that still had to read this one.
//
// REFERENCE  data that carries its own validity: NCCL's LL protocol; measured in DESIGN section 8.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fut::cuda {

/// The earliest wait that was given up: a block that waits for one that waits gives up too, and not always after it.
struct StepFault {
  unsigned long long first = 0;  ///< 0: none; else ~tag, a one, and the block, so that the largest is the earliest

  uint32_t tag() const { return ~static_cast<uint32_t>(first >> 32); }
  uint32_t block() const { return static_cast<uint32_t>(first) & 0x7fffffff; }
};

__device__ inline void publish(uint2* word, uint32_t payload, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(uint64_t{payload} | uint64_t{tag} << 32)
               : "memory");
}

/// Two words side by side, each written as one access.
__device__ inline void publish_two(uint2* words, uint32_t first, uint32_t second, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(uint64_t{first} | uint64_t{tag} << 32),
               "l"(uint64_t{second} | uint64_t{tag} << 32)
               : "memory");
}

/// Two words, each read as one access.
__device__ inline uint4 load_words(const uint2* words) {
  uint64_t a, b;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(words) : "memory");
  return make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
                    static_cast<uint32_t>(b >> 32));
}
__device__ inline uint2 load_word(const uint2* word) {
  uint64_t a;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(word) : "memory");
  return make_uint2(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32));
}

/// Waits with an end: a step whose blocks wait for one another wrongly must become an error, not a stuck card.
class Watch {
 public:
  /// Of this block, in shared memory: 1 once one of its waits has failed.
  __device__ static volatile uint32_t& given_up() {
    __shared__ uint32_t flag;
    return flag;
  }

  /// After a failed look: false when waiting has no point any more.
  __device__ bool patient(StepFault* fault, uint32_t& looks, uint32_t expected) const {
    if (++looks < kLooks && !given_up()) return true;
    given_up() = 1;
    if (looks > kLooks / 2)  // others ended because this block has given up, and tell nothing
      atomicMax(&fault->first, static_cast<unsigned long long>(~expected) << 32 | 1u << 31 | blockIdx.x);
    return false;
  }

 private:
  static constexpr uint32_t kLooks = 1u << 22;  ///< some seconds; a look takes about a microsecond
};

/// Between a block's own words and its first look at the others': words travel for about as long, and who looks earlier
/// looks in vain and is in their way (docs/PERF.md: none 43.5 us a layer, 400 ns 42.5, 900 ns 42.1, 1400 ns 43.8).
__device__ inline void let_words_travel() { __nanosleep(900); }

/// words[i] = load(from(i)), all with `tag`; where not wanted(i), payloads mean nothing. What is there is not looked at
/// again: most words have come by the first look, and whoever polls for more than the late ones takes bandwidth from
/// them and from the weights.
template <int kCount, class Words, class Load, class Missing, class Wanted>
__device__ inline void gather_words(Words (&words)[kCount], uint32_t tag, const Watch& watch, StepFault* fault,
                                    Load load, Missing missing, Wanted wanted) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = wanted(i) ? load(i) : Words{};
  for (uint32_t looks = 0;;) {
    uint32_t off = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) off |= wanted(i) ? missing(words[i]) : 0;
    if (off == 0 || !watch.patient(fault, looks, tag)) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (wanted(i) && missing(words[i])) words[i] = load(i);
    }
  }
}
struct AllWanted {
  __device__ bool operator()(int) const { return true; }
};

template <int kCount, class From, class Wanted = AllWanted>
__device__ inline void gather(uint4 (&words)[kCount], uint32_t tag, const Watch& watch, StepFault* fault, From from,
                              Wanted wanted = {}) {
  gather_words(
      words, tag, watch, fault, [&](int i) { return load_words(from(i)); },
      [&](const uint4& w) { return (w.y ^ tag) | (w.w ^ tag); }, wanted);
}
template <int kCount, class From>
__device__ inline void gather(uint2 (&words)[kCount], uint32_t tag, const Watch& watch, StepFault* fault, From from) {
  gather_words(
      words, tag, watch, fault, [&](int i) { return load_word(from(i)); }, [&](const uint2& w) { return w.y ^ tag; },
      AllWanted{});
}

}  // namespace fut::cuda
