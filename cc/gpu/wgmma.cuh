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
template <int kCount>
__device__ __forceinline__ void Pin(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// The accumulator registers of 64 x 32, 64, 128, 160, 192, 224 and 256: in the instruction, and as
// operands. R: the constraint of one, "+f" or "+r".
// clang-format off
#define JFLUX_D16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JFLUX_D32 \
  JFLUX_D16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
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
#define JFLUX_D16_OPERANDS(R) \
  R(d[0]), R(d[1]), R(d[2]), R(d[3]), R(d[4]), R(d[5]), R(d[6]), R(d[7]), R(d[8]), R(d[9]), \
  R(d[10]), R(d[11]), R(d[12]), R(d[13]), R(d[14]), R(d[15])
#define JFLUX_D32_OPERANDS(R) \
  JFLUX_D16_OPERANDS(R), R(d[16]), R(d[17]), R(d[18]), R(d[19]), R(d[20]), R(d[21]), R(d[22]), \
  R(d[23]), R(d[24]), R(d[25]), R(d[26]), R(d[27]), R(d[28]), R(d[29]), R(d[30]), R(d[31])
#define JFLUX_D64_OPERANDS(R) \
  JFLUX_D32_OPERANDS(R), R(d[32]), R(d[33]), R(d[34]), R(d[35]), R(d[36]), R(d[37]), R(d[38]), \
  R(d[39]), R(d[40]), R(d[41]), R(d[42]), R(d[43]), R(d[44]), R(d[45]), R(d[46]), R(d[47]), \
  R(d[48]), R(d[49]), R(d[50]), R(d[51]), R(d[52]), R(d[53]), R(d[54]), R(d[55]), R(d[56]), \
  R(d[57]), R(d[58]), R(d[59]), R(d[60]), R(d[61]), R(d[62]), R(d[63])
#define JFLUX_D80_OPERANDS(R) \
  JFLUX_D64_OPERANDS(R), R(d[64]), R(d[65]), R(d[66]), R(d[67]), R(d[68]), R(d[69]), R(d[70]), \
  R(d[71]), R(d[72]), R(d[73]), R(d[74]), R(d[75]), R(d[76]), R(d[77]), R(d[78]), R(d[79])
#define JFLUX_D96_OPERANDS(R) \
  JFLUX_D80_OPERANDS(R), R(d[80]), R(d[81]), R(d[82]), R(d[83]), R(d[84]), R(d[85]), R(d[86]), \
  R(d[87]), R(d[88]), R(d[89]), R(d[90]), R(d[91]), R(d[92]), R(d[93]), R(d[94]), R(d[95])
#define JFLUX_D112_OPERANDS(R) \
  JFLUX_D96_OPERANDS(R), R(d[96]), R(d[97]), R(d[98]), R(d[99]), R(d[100]), R(d[101]), \
  R(d[102]), R(d[103]), R(d[104]), R(d[105]), R(d[106]), R(d[107]), R(d[108]), R(d[109]), \
  R(d[110]), R(d[111])
#define JFLUX_D128_OPERANDS(R) \
  JFLUX_D112_OPERANDS(R), R(d[112]), R(d[113]), R(d[114]), R(d[115]), R(d[116]), R(d[117]), \
  R(d[118]), R(d[119]), R(d[120]), R(d[121]), R(d[122]), R(d[123]), R(d[124]), R(d[125]), \
  R(d[126]), R(d[127])
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
                 : OPERANDS("+f")                                                                \
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
                 : OPERANDS("+f")                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                   "r"(static_cast<int32_t>(adds)), "n"(kTransB));                              \
  }

// All N of a type, by their accumulator registers.
#define JFLUX_MULTIPLY_TYPE(T, TYPE, K)                                                            \
  JFLUX_MULTIPLY(T, TYPE, K, 32, JFLUX_D16, JFLUX_D16_OPERANDS, "%16", "%17", "%18", "%19", "%20") \
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

// The same for 8-bit types, whose operands are K-major, and sums SUM of registers R. TYPES: of D, A
// and B; SIGNS: those of A and B, of floats alone.
#define JFLUX_MULTIPLY_8(T, SUM, R, TYPES, SIGNS, N, D, OPERANDS, A, B, ADDS)                \
  template <int kTransA, int kTransB>                                                        \
  __device__ __forceinline__ void Multiply(const T*, SUM(&d)[N / 2], uint64_t a, uint64_t b, \
                                           bool adds) {                                      \
    static_assert(kTransA == 0 && kTransB == 0);                                             \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS                              \
                 ", 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" D "}, " A ", " B   \
                 ", adds" SIGNS ";\n}\n"                                                     \
                 : OPERANDS(R)                                                               \
                 : "l"(a), "l"(b), "r"(static_cast<int32_t>(adds)));                         \
  }
#define JFLUX_MULTIPLY_TYPE_8(T, ...)                                                            \
  JFLUX_MULTIPLY_8(T, __VA_ARGS__, 128, JFLUX_D64, JFLUX_D64_OPERANDS, "%64", "%65", "%66")      \
  JFLUX_MULTIPLY_8(T, __VA_ARGS__, 160, JFLUX_D80, JFLUX_D80_OPERANDS, "%80", "%81", "%82")      \
  JFLUX_MULTIPLY_8(T, __VA_ARGS__, 192, JFLUX_D96, JFLUX_D96_OPERANDS, "%96", "%97", "%98")      \
  JFLUX_MULTIPLY_8(T, __VA_ARGS__, 224, JFLUX_D112, JFLUX_D112_OPERANDS, "%112", "%113", "%114") \
  JFLUX_MULTIPLY_8(T, __VA_ARGS__, 256, JFLUX_D128, JFLUX_D128_OPERANDS, "%128", "%129", "%130")

// The instruction of each format with a `hopper` (core/format.h).
JFLUX_MULTIPLY_TYPE(__nv_bfloat16, "bf16", 16)
JFLUX_MULTIPLY_TYPE(__half, "f16", 16)
JFLUX_MULTIPLY_TYPE_8(__nv_fp8_e4m3, float, "+f", "f32.e4m3.e4m3", ", 1, 1")
JFLUX_MULTIPLY_TYPE_8(__nv_fp8_e5m2, float, "+f", "f32.e5m2.e4m3", ", 1, 1")
JFLUX_MULTIPLY_TYPE_8(int8_t, int32_t, "+r", "s32.s8.s8", "")

#undef JFLUX_MULTIPLY_TYPE
#undef JFLUX_MULTIPLY_TYPE_8
#undef JFLUX_MULTIPLY_8
#undef JFLUX_MULTIPLY_REGISTERS
#undef JFLUX_MULTIPLY
#undef JFLUX_D16
#undef JFLUX_D16_OPERANDS
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
