// The warpgroup's tensor-core products (wgmma): 64 rows of A by 128 or 256 columns of B, both in shared memory,
// K-major, rows of 128 bytes under the 128-byte swizzle, 32 bytes of K at a time; FP32 accumulators.
//
// Lane 4 g + t of warp w holds rows 16 w + g (d[4 j], d[4 j + 1]) and 16 w + g + 8 (d[4 j + 2], d[4 j + 3]) in columns
// 8 j + 2 t and 8 j + 2 t + 1.
//
// Between multiply() and wait_products() nobody may touch the accumulators, or the compiler waits after every product.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace fut::cuda {

/// Names an operand: rows of 128 bytes, 8 rows behind one another, the next 8 1024 bytes further. Counts in 16 bytes.
__device__ inline uint64_t operand_at(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32, kIgnored = 1 << 16;
  return kSwizzle128 | kEightRows | kIgnored | (shared_address & 0x3ffff) >> 4;
}

/// The same, for B with its columns in the rows: row k holds 64 columns of B, the next 64 are `next_columns` bytes on.
__device__ inline uint64_t column_operand_at(uint32_t shared_address, int next_columns) {
  return (operand_at(shared_address) & ~(uint64_t{0xffff} << 16)) | uint64_t(next_columns / 16) << 16;
}

/// Orders earlier accesses to the accumulators with the products that follow.
__device__ inline void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `kPending` committed groups are still at work.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// The finished accumulators come into being here: nothing that uses them moves up.
template <int kCount>
__device__ inline void settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define FUT_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FUT_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FUT_NAMES_128 FUT_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, " \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
  "%123, %124, %125, %126, %127"
#define FUT_INOUT_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FUT_INOUT_32(d, i) FUT_INOUT_8(d, i), FUT_INOUT_8(d, i + 8), FUT_INOUT_8(d, i + 16), FUT_INOUT_8(d, i + 24)
#define FUT_INOUT_64(d, i)                                                                                            \
  FUT_INOUT_8(d, i), FUT_INOUT_8(d, i + 8), FUT_INOUT_8(d, i + 16), FUT_INOUT_8(d, i + 24), FUT_INOUT_8(d, i + 32), \
      FUT_INOUT_8(d, i + 40), FUT_INOUT_8(d, i + 48), FUT_INOUT_8(d, i + 56)
// clang-format on

/// d = a b, or d += a b: (64, columns) of 32 bytes of K.
__device__ inline void multiply(E4m3, float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" FUT_NAMES_32 "}, %32, %33, add, 1, 1;\n}"
      : FUT_INOUT_32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ inline void multiply(E4m3, float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" FUT_NAMES_64 "}, %64, %65, add, 1, 1;\n}"
      : FUT_INOUT_64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ inline void multiply(E4m3, float (&d)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" FUT_NAMES_128 "}, %128, %129, add, 1, 1;\n}"
      : FUT_INOUT_64(d, 0), FUT_INOUT_64(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ inline void multiply(Bf16, float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FUT_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
      : FUT_INOUT_64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ inline void multiply(Bf16, float (&d)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" FUT_NAMES_128 "}, %128, %129, add, 1, 1, 0, 0;\n}"
      : FUT_INOUT_64(d, 0), FUT_INOUT_64(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

/// 64 columns: d[kFirst .. kFirst + 31].
template <int kFirst, int kCount>
__device__ inline void multiply_64_columns(Bf16, float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
  static_assert(kFirst + 32 <= kCount);
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FUT_NAMES_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
      : FUT_INOUT_32(d, kFirst)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

__device__ inline void multiply(Bf16, float (&d)[32], uint64_t a, uint64_t b, bool add) {
  multiply_64_columns<0>(Bf16{}, d, a, b, add);
}

/// A in registers: for columns 2 t, 2 t + 1 of its 16 the rows g and g + 8, then the same for columns 2 t + 8, 2 t + 9:
/// a[0], a[1] and a[2], a[3]. b: column_operand_at().
__device__ inline void multiply_rows(Bf16, float (&d)[32], const uint32_t* a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FUT_NAMES_32
      "}, {%32, %33, %34, %35}, %36, add, "
      "1, 1, 1;\n}"
      : FUT_INOUT_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ inline void multiply_rows(Bf16, float (&d)[64], const uint32_t* a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FUT_NAMES_64
      "}, {%64, %65, %66, %67}, %68, add, "
      "1, 1, 1;\n}"
      : FUT_INOUT_64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef FUT_NAMES_32
#undef FUT_INOUT_32
#undef FUT_NAMES_64
#undef FUT_NAMES_128
#undef FUT_INOUT_8
#undef FUT_INOUT_64

}  // namespace fut::cuda
