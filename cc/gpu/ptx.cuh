// Thin wrappers over PTX: one function per instruction, named after it. Shared-memory addresses are
// 32-bit (shared window). A "remote" address belongs to another CTA of the cluster.
#ifndef JFLUX_GPU_PTX_CUH_
#define JFLUX_GPU_PTX_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jflux::ptx {

__device__ __forceinline__ uint32_t SmemAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t ClusterCtaRank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// The address of the same shared variable in CTA `cta` of the cluster.
__device__ __forceinline__ uint32_t MapToCta(uint32_t smem, uint32_t cta) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem), "r"(cta));
  return r;
}

// Orders nothing except inits made visible by FenceMbarrierInit. With .release it compiles to a
// fence of the whole GPU, 0.5 us.
__device__ __forceinline__ void ClusterSyncRelaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;\n" ::
          : "memory");
}

// ---- mbarriers --------------------------------------------------------------------------------

__device__ __forceinline__ void MbarrierInit(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// Makes inits visible to the other CTAs of the cluster and to the async proxy.
__device__ __forceinline__ void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Relaxed: orders only the barrier. That is enough to tell TMA that a buffer may be overwritten,
// after it was read, or written and fenced (FenceProxyAsyncShared). With .release.cluster it
// compiles to a fence of the whole GPU, which slows the main loop by a third
// (docs/internals/gemm.md).
__device__ __forceinline__ void MbarrierArriveRemote(uint32_t remote_bar, int arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(remote_bar), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void MbarrierArriveExpectTxRemote(uint32_t remote_bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(remote_bar),
               "r"(bytes)
               : "memory");
}

// Stores 16 bytes to another CTA's shared memory and completes 16 transaction bytes on its barrier.
__device__ __forceinline__ void SendRemote(uint32_t remote, int4 v, uint32_t remote_bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_bar)
      : "memory");
}

__device__ __forceinline__ void MbarrierArriveExpectTx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool MbarrierTryWait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Tests once, without suspending the thread.
__device__ __forceinline__ bool MbarrierTest(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for work of this GPU only, so it needs no timeout. Waits for peers have one
// (core/signal.h).
__device__ __forceinline__ void MbarrierWait(uint32_t bar, uint32_t parity) {
  while (!MbarrierTryWait(bar, parity)) {
  }
}

// Release and acquire within the CTA.
__device__ __forceinline__ void StoreSharedRelease(uint32_t smem, uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t LoadSharedAcquire(uint32_t smem) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
  return v;
}

// ---- bulk copies ------------------------------------------------------------------------------

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void TmaLoad2d(uint32_t smem, const CUtensorMap* map, uint32_t bar,
                                          int32_t x, int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}

// Writes to the same offset in every CTA of `mask`, and completes transaction bytes on each one's
// barrier.
__device__ __forceinline__ void TmaLoad2dMulticast(uint32_t smem, const CUtensorMap* map,
                                                   uint32_t bar, int32_t x, int32_t y,
                                                   uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void TmaLoad3d(uint32_t smem, const CUtensorMap* map, uint32_t bar,
                                          int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void TmaLoad3dMulticast(uint32_t smem, const CUtensorMap* map,
                                                   uint32_t bar, int32_t x, int32_t y, int32_t z,
                                                   uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void TmaLoad4d(uint32_t smem, const CUtensorMap* map, uint32_t bar,
                                          int32_t x, int32_t y, int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void BulkLoad(uint32_t smem, const void* global, uint32_t bytes,
                                         uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(global), "r"(bytes), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void BulkStore(void* global, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(smem), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups of this thread's bulk stores have been written.
template <int kPending>
__device__ __forceinline__ void BulkWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until the shared memory of those groups has been read and may be overwritten.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Writes a box. Elements outside the tensor are not written.
__device__ __forceinline__ void TmaStore2d(const CUtensorMap* map, uint32_t smem, int32_t x,
                                           int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void TmaStore3d(const CUtensorMap* map, uint32_t smem, int32_t x,
                                           int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void TmaStore4d(const CUtensorMap* map, uint32_t smem, int32_t x,
                                           int32_t y, int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(smem), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Prefetches into L2. `bytes` is a multiple of 16.
__device__ __forceinline__ void BulkPrefetch(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Orders this thread's generic accesses against accesses through the async proxy (TMA, bulk copies,
// wgmma).
__device__ __forceinline__ void FenceProxyAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- copies by single threads -----------------------------------------------------------------

// Copies `bytes` bytes, at most 16, and writes zeros to the rest of the 16. With 0 bytes it reads
// nothing. Bypasses L1. The copy is a write of the generic proxy: a thread that has waited for it
// must call FenceProxyAsyncShared before TMA or wgmma reads the data.
__device__ __forceinline__ void CopyAsync16(uint32_t smem, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes)
               : "memory");
}

// Copies 16 bytes, or writes zeros in their place and reads nothing.
__device__ __forceinline__ void CopyAsync16Or0(uint32_t smem, const void* global, bool is_zero) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, p;\n"
      "}\n" ::"r"(smem),
      "l"(global), "r"(static_cast<uint32_t>(is_zero))
      : "memory");
}

// Copies 4 bytes, through L1.
__device__ __forceinline__ void CopyAsync4(uint32_t smem, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

// This thread arrives when all of its copies so far are complete: one of the arrivals that the
// barrier was initialised with.
__device__ __forceinline__ void CopyAsyncArrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups of this thread's copies are complete.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- warps and warpgroups ---------------------------------------------------------------------

// True for one lane of a full warp, always the same lane. With elect.sync ptxas knows that a single
// lane continues, so it emits no loop over lanes for TMA's uniform operands.
__device__ __forceinline__ bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ uint32_t SmId() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

__device__ __forceinline__ void BarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting. `threads` counts all threads of the barrier, also those that wait.
__device__ __forceinline__ void BarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void RegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void RegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 2 to the power of x, off by 2 ulp; 0 for minus infinity. Not for results that are denormal.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void StoreMatrix4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The reverse.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// An 8x8 matrix of 16-bit elements, of which lane i has two neighbours of row i / 4, transposed.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t two) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(two));
  return r;
}

// A float32 as TF32, rounded to the nearest.
__device__ __forceinline__ uint32_t RoundToTf32(uint32_t v) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// c [16, 8] += a @ b over kMultiplyBytes of k, by one warp. T: float stands for TF32.
template <typename T>
__device__ __forceinline__ void Multiply16x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ float LoadSharedFloat(uint32_t smem) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem) : "memory");
  return v;
}

__device__ __forceinline__ int32_t LoadShared4(uint32_t smem) {
  int32_t v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
  return v;
}
__device__ __forceinline__ void StoreShared4(uint32_t smem, int32_t v) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}

__device__ __forceinline__ uint64_t LoadShared8(uint32_t smem) {
  uint64_t v;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(smem) : "memory");
  return v;
}
__device__ __forceinline__ void StoreShared8(uint32_t smem, uint64_t v) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(smem), "l"(v) : "memory");
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}

// Of each half, as a whole number without a sign.
__device__ __forceinline__ uint32_t MaxHalves(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("max.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

// Relaxed at GPU scope: bypasses L1, since another SM or GPU may just have written the data. ptxas
// keeps these loads in program order, which bounds the registers that loads in flight take.
__device__ __forceinline__ uint32_t LoadGlobal4(const void* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint2 LoadGlobal8(const void* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 LoadGlobal16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void StoreGlobal16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void StoreShared16(uint32_t smem, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

}  // namespace jflux::ptx

#endif  // JFLUX_GPU_PTX_CUH_
