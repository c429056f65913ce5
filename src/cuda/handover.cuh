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

/// words[i] = load(i), all with `tag`. Of many words, after a failed look only the first missing one is looked at until
/// it is there: what polls in vain takes bandwidth from the weights. Of few, all are: one trip less once they are
/// there.
inline constexpr int kFewBytes = 128;  ///< of a thread
template <int kCount, class Words, class Load, class Missing>
__device__ inline void gather_words(Words (&words)[kCount], uint32_t tag, const Watch& watch, StepFault* fault,
                                    Load load, Missing missing) {
  for (uint32_t looks = 0;;) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = load(i);
    uint32_t off = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) off |= missing(words[i]);
    if (off == 0) return;
    if constexpr (kCount * sizeof(words[0]) <= kFewBytes) {
      if (!watch.patient(fault, looks, tag)) return;
      continue;
    }
    int first = 0;
#pragma unroll
    for (int i = kCount - 1; i >= 0; --i) first = missing(words[i]) ? i : first;
    do {
      if (!watch.patient(fault, looks, tag)) return;
    } while (missing(load(first)));
  }
}
template <int kCount, class From>
__device__ inline void gather(uint4 (&words)[kCount], uint32_t tag, const Watch& watch, StepFault* fault, From from) {
  gather_words(
      words, tag, watch, fault, [&](int i) { return load_words(from(i)); },
      [&](const uint4& w) { return (w.y ^ tag) | (w.w ^ tag); });
}
template <int kCount, class From>
__device__ inline void gather(uint2 (&words)[kCount], uint32_t tag, const Watch& watch, StepFault* fault, From from) {
  gather_words(
      words, tag, watch, fault, [&](int i) { return load_word(from(i)); }, [&](const uint2& w) { return w.y ^ tag; });
}

}  // namespace fut::cuda
