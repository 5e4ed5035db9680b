// wgmma: D[64, N] += A[64, K] @ B[K, N] by one warpgroup, with K elements of 32 bytes. B is in
// shared memory, A there or in registers.
//
// Operand tiles have the layouts that TMA writes with a 128-byte swizzle:
//
//   K-major   [rows][128 bytes of k]: groups of 8 rows are 1024 bytes apart. 8-bit types have no
//             other layout.
//   MN-major  [64 k][64 mn] atoms, of 16-bit types alone: a k row is 128 bytes; groups of 8 k are
//             1024 bytes apart, and atoms of 64 mn are 8192 bytes apart.
//
// Accumulator fragment: thread t of the warpgroup holds, for row r = 16 * (t / 32) + t % 32 / 4,
//
//   d[4 j], d[4 j + 1]      row r,     columns 8 j + 2 (t % 4) and the next
//   d[4 j + 2], d[4 j + 3]  row r + 8, the same columns
//
// An operand A in registers has the same layout, with two columns in a register: a[0] and a[1] are
// d[0..3] of j = 0, a[2] and a[3] are d[4..7] of j = 1. So 16 columns of accumulators, packed into
// 16-bit types, are an operand.
#ifndef JFLUX_GPU_WGMMA_CUH_
#define JFLUX_GPU_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace jflux::wgmma {

// Matrix descriptor (PTX ISA, "Matrix Descriptor Format"): address, leading and stride byte offsets
// in units of 16 bytes, 128-byte swizzle.
__device__ __forceinline__ uint64_t Descriptor(uint32_t smem, uint32_t leading_bytes,
                                               uint32_t stride_bytes) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) |
         (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ void Fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void Commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kGroups>
__device__ __forceinline__ void Wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving accesses to the accumulators across an asynchronous wgmma.
template <int kCount>
__device__ __forceinline__ void Pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The accumulator registers of 64 x 64, 128, 160, 192, 224 and 256: in the instruction, and as
// operands.
// clang-format off
#define JFLUX_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JFLUX_D64 \
  JFLUX_D32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JFLUX_D80 \
  JFLUX_D64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JFLUX_D96 \
  JFLUX_D80 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JFLUX_D112 \
  JFLUX_D96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define JFLUX_D128 \
  JFLUX_D112 ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JFLUX_D32_OPERANDS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
  "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
  "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
  "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define JFLUX_D64_OPERANDS \
  JFLUX_D32_OPERANDS, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
  "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
  "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
  "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
  "+f"(d[63])
#define JFLUX_D80_OPERANDS \
  JFLUX_D64_OPERANDS, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), \
  "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), \
  "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define JFLUX_D96_OPERANDS \
  JFLUX_D80_OPERANDS, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), \
  "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), \
  "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define JFLUX_D112_OPERANDS \
  JFLUX_D96_OPERANDS, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), \
  "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), \
  "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define JFLUX_D128_OPERANDS \
  JFLUX_D112_OPERANDS, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), \
  "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), \
  "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// clang-format on

// d += a @ b if `adds`, else d = a @ b. kTransA or kTransB = 1: a or b is MN-major. One overload
// for each type and N. TYPE: its name in PTX; K: its elements in 32 bytes.
#define JFLUX_MULTIPLY(T, TYPE, K, N, D, OPERANDS, A, B, ADDS, TRANS_A, TRANS_B)                 \
  template <int kTransA, int kTransB>                                                            \
  __device__ __forceinline__ void Multiply(const T*, float (&d)[N / 2], uint64_t a, uint64_t b,  \
                                           bool adds) {                                          \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                                  \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" D      \
                 "}, " A ", " B ", adds, 1, 1, " TRANS_A ", " TRANS_B ";\n}\n"                   \
                 : OPERANDS                                                                      \
                 : "l"(a), "l"(b), "r"(static_cast<int32_t>(adds)), "n"(kTransA), "n"(kTransB)); \
  }

// The same with a in registers, which must not change before the wgmma is complete.
#define JFLUX_MULTIPLY_REGISTERS(T, TYPE, K, N, D, OPERANDS, A, B, ADDS, TRANS_B)               \
  template <int kTransB>                                                                        \
  __device__ __forceinline__ void Multiply(const T*, float (&d)[N / 2], const uint32_t (&a)[4], \
                                           uint64_t b, bool adds) {                             \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                                 \
                 ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" D     \
                 "}, {" A "}, " B ", adds, 1, 1, " TRANS_B ";\n}\n"                             \
                 : OPERANDS                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                   "r"(static_cast<int32_t>(adds)), "n"(kTransB));                              \
  }

// All N of a type, by their accumulator registers.
#define JFLUX_MULTIPLY_TYPE(T, TYPE, K)                                                            \
  JFLUX_MULTIPLY(T, TYPE, K, 64, JFLUX_D32, JFLUX_D32_OPERANDS, "%32", "%33", "%34", "%35", "%36") \
  JFLUX_MULTIPLY(T, TYPE, K, 128, JFLUX_D64, JFLUX_D64_OPERANDS, "%64", "%65", "%66", "%67",       \
                 "%68")                                                                            \
  JFLUX_MULTIPLY(T, TYPE, K, 160, JFLUX_D80, JFLUX_D80_OPERANDS, "%80", "%81", "%82", "%83",       \
                 "%84")                                                                            \
  JFLUX_MULTIPLY(T, TYPE, K, 192, JFLUX_D96, JFLUX_D96_OPERANDS, "%96", "%97", "%98", "%99",       \
                 "%100")                                                                           \
  JFLUX_MULTIPLY(T, TYPE, K, 224, JFLUX_D112, JFLUX_D112_OPERANDS, "%112", "%113", "%114", "%115", \
                 "%116")                                                                           \
  JFLUX_MULTIPLY(T, TYPE, K, 256, JFLUX_D128, JFLUX_D128_OPERANDS, "%128", "%129", "%130", "%131", \
                 "%132")                                                                           \
  JFLUX_MULTIPLY_REGISTERS(T, TYPE, K, 64, JFLUX_D32, JFLUX_D32_OPERANDS, "%32, %33, %34, %35",    \
                           "%36", "%37", "%38")                                                    \
  JFLUX_MULTIPLY_REGISTERS(T, TYPE, K, 128, JFLUX_D64, JFLUX_D64_OPERANDS, "%64, %65, %66, %67",   \
                           "%68", "%69", "%70")                                                    \
  JFLUX_MULTIPLY_REGISTERS(T, TYPE, K, 256, JFLUX_D128, JFLUX_D128_OPERANDS,                       \
                           "%128, %129, %130, %131", "%132", "%133", "%134")

// The same for 8-bit types, whose operands are K-major. TYPES: of A and B.
#define JFLUX_MULTIPLY_8(T, TYPES, N, D, OPERANDS, A, B, ADDS)                                  \
  template <int kTransA, int kTransB>                                                           \
  __device__ __forceinline__ void Multiply(const T*, float (&d)[N / 2], uint64_t a, uint64_t b, \
                                           bool adds) {                                         \
    static_assert(kTransA == 0 && kTransB == 0);                                                \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                                 \
                 ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" D "}, " A ", " B  \
                 ", adds, 1, 1;\n}\n"                                                           \
                 : OPERANDS                                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int32_t>(adds)));                            \
  }
#define JFLUX_MULTIPLY_TYPE_8(T, TYPES)                                                    \
  JFLUX_MULTIPLY_8(T, TYPES, 128, JFLUX_D64, JFLUX_D64_OPERANDS, "%64", "%65", "%66")      \
  JFLUX_MULTIPLY_8(T, TYPES, 160, JFLUX_D80, JFLUX_D80_OPERANDS, "%80", "%81", "%82")      \
  JFLUX_MULTIPLY_8(T, TYPES, 192, JFLUX_D96, JFLUX_D96_OPERANDS, "%96", "%97", "%98")      \
  JFLUX_MULTIPLY_8(T, TYPES, 224, JFLUX_D112, JFLUX_D112_OPERANDS, "%112", "%113", "%114") \
  JFLUX_MULTIPLY_8(T, TYPES, 256, JFLUX_D128, JFLUX_D128_OPERANDS, "%128", "%129", "%130")

// The instruction of each format with a `hopper` (core/format.h).
JFLUX_MULTIPLY_TYPE(__nv_bfloat16, "bf16", 16)
JFLUX_MULTIPLY_TYPE(__half, "f16", 16)
JFLUX_MULTIPLY_TYPE_8(__nv_fp8_e4m3, "e4m3.e4m3")
JFLUX_MULTIPLY_TYPE_8(__nv_fp8_e5m2, "e5m2.e4m3")

#undef JFLUX_MULTIPLY_TYPE
#undef JFLUX_MULTIPLY_TYPE_8
#undef JFLUX_MULTIPLY_8
#undef JFLUX_MULTIPLY_REGISTERS
#undef JFLUX_MULTIPLY
#undef JFLUX_D32
#undef JFLUX_D32_OPERANDS
#undef JFLUX_D64
#undef JFLUX_D64_OPERANDS
#undef JFLUX_D80
#undef JFLUX_D80_OPERANDS
#undef JFLUX_D96
#undef JFLUX_D112
#undef JFLUX_D128
#undef JFLUX_D96_OPERANDS
#undef JFLUX_D112_OPERANDS
#undef JFLUX_D128_OPERANDS

}  // namespace jflux::wgmma

#endif  // JFLUX_GPU_WGMMA_CUH_
