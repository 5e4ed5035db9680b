// gpu/ptx.cuh, in the simulator: the same functions. A function that gpu/ptx.cuh gains needs one
// here.
#ifndef JFLUX_GPU_PTX_CUH_
#define JFLUX_GPU_PTX_CUH_

#include <cuda.h>

#include <cfloat>
#include <cstdint>

#include "simt/async_units.h"
#include "simt/collectives.h"
#include "simt/machine.h"
#include "simt/warp_matrix.h"

namespace jflux::ptx {

inline uint32_t SmemAddress(const void* p) { return simt::AddressOf(p); }
inline uint32_t ClusterCtaRank() { return simt::current->cta->rank; }
inline uint32_t MapToCta(uint32_t smem, uint32_t cta) { return simt::AddressIn(cta, smem); }
inline void ClusterSyncRelaxed() { simt::SyncCluster(); }

// ---- mbarriers --------------------------------------------------------------------------------

inline void MbarrierInit(uint32_t bar, uint32_t count) {
  simt::InitMbarrier(simt::PlaceOf(bar, 8, 8), count);
}
inline void FenceMbarrierInit() {}
inline void MbarrierArriveRemote(uint32_t bar, int arrivals = 1) {
  simt::Point();
  simt::Arrive(simt::PlaceOf(bar, 8, 8), static_cast<uint32_t>(arrivals), 0);
}
inline void MbarrierArrive(uint32_t bar) { MbarrierArriveRemote(bar); }
inline void MbarrierArriveExpectTxRemote(uint32_t bar, uint32_t bytes) {
  simt::Point();
  simt::Arrive(simt::PlaceOf(bar, 8, 8), 1, bytes);
}
inline void MbarrierArriveExpectTx(uint32_t bar, uint32_t bytes) {
  MbarrierArriveExpectTxRemote(bar, bytes);
}
inline void SendRemote(uint32_t remote, int4 v, uint32_t remote_bar) {
  simt::SendRemote(remote, &v, remote_bar);
}
inline bool MbarrierTryWait(uint32_t bar, uint32_t parity) {
  simt::Look();
  return simt::TestPhase(simt::PlaceOf(bar, 8, 8), parity, /*suspends=*/true);
}
inline bool MbarrierTest(uint32_t bar, uint32_t parity) {
  simt::Poll();
  return simt::TestPhase(simt::PlaceOf(bar, 8, 8), parity, /*suspends=*/false);
}
inline void MbarrierWait(uint32_t bar, uint32_t parity) {
  while (!MbarrierTryWait(bar, parity)) {
  }
}

// ---- shared and global memory -------------------------------------------------------------------

template <typename T>
void StoreTo(uint32_t smem, const T& v) {
  const simt::SmemPlace place = simt::PlaceOf(smem, sizeof(T), sizeof(T));
  std::memcpy(place.data(), &v, sizeof(T));
  simt::NoteWrite(place, sizeof(T), simt::current);
}
template <typename T>
T LoadFrom(uint32_t smem) {
  T v;
  std::memcpy(&v, simt::PlaceOf(smem, sizeof(T), sizeof(T)).data(), sizeof(T));
  return v;
}
template <typename T>
T LoadGlobal(const void* p) {
  simt::Look();
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

inline void StoreSharedRelease(uint32_t smem, uint32_t v) {
  simt::Point();
  StoreTo(smem, v);
}
inline uint32_t LoadSharedAcquire(uint32_t smem) {
  simt::Poll();
  return LoadFrom<uint32_t>(smem);
}
inline int32_t LoadShared4(uint32_t smem) { return LoadFrom<int32_t>(smem); }
inline float LoadSharedFloat(uint32_t smem) { return LoadFrom<float>(smem); }
inline void StoreShared4(uint32_t smem, int32_t v) { StoreTo(smem, v); }
inline uint64_t LoadShared8(uint32_t smem) { return LoadFrom<uint64_t>(smem); }
inline void StoreShared8(uint32_t smem, uint64_t v) { StoreTo(smem, v); }
inline uint4 LoadShared16(uint32_t smem) { return LoadFrom<uint4>(smem); }
inline void StoreShared16(uint32_t smem, uint4 v) { StoreTo(smem, v); }
inline uint32_t LoadGlobal4(const void* p) { return LoadGlobal<uint32_t>(p); }
inline uint2 LoadGlobal8(const void* p) { return LoadGlobal<uint2>(p); }
inline uint4 LoadGlobal16(const void* p) { return LoadGlobal<uint4>(p); }
inline uint32_t MaxHalves(uint32_t a, uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline void StoreGlobal16(void* p, uint4 v) { std::memcpy(p, &v, sizeof(v)); }

// ---- bulk copies ------------------------------------------------------------------------------

inline void PrefetchTensorMap(const CUtensorMap*) {}
inline void BulkPrefetch(const void*, uint32_t) {}
inline void TmaLoad2d(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t x, int32_t y) {
  simt::TmaLoad(smem, map, bar, {{x, y}, 2});
}
inline void TmaLoad2dMulticast(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t x,
                               int32_t y, uint16_t mask) {
  simt::TmaLoad(smem, map, bar, {{x, y}, 2}, mask);
}
inline void TmaLoad3d(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t x, int32_t y,
                      int32_t z) {
  simt::TmaLoad(smem, map, bar, {{x, y, z}, 3});
}
inline void TmaLoad3dMulticast(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t x,
                               int32_t y, int32_t z, uint16_t mask) {
  simt::TmaLoad(smem, map, bar, {{x, y, z}, 3}, mask);
}
inline void TmaLoad4d(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t x, int32_t y,
                      int32_t z, int32_t w) {
  simt::TmaLoad(smem, map, bar, {{x, y, z, w}, 4});
}
inline void TmaStore2d(const CUtensorMap* map, uint32_t smem, int32_t x, int32_t y) {
  simt::TmaStore(map, smem, {{x, y}, 2});
}
inline void TmaStore3d(const CUtensorMap* map, uint32_t smem, int32_t x, int32_t y, int32_t z) {
  simt::TmaStore(map, smem, {{x, y, z}, 3});
}
inline void TmaStore4d(const CUtensorMap* map, uint32_t smem, int32_t x, int32_t y, int32_t z,
                       int32_t w) {
  simt::TmaStore(map, smem, {{x, y, z, w}, 4});
}
inline void BulkLoad(uint32_t smem, const void* global, uint32_t bytes, uint32_t bar) {
  simt::BulkLoad(smem, global, bytes, bar);
}
inline void BulkStore(void* global, uint32_t smem, uint32_t bytes) {
  simt::BulkStore(global, smem, bytes);
}
inline void BulkCommit() { simt::BulkCommit(); }
template <int kPending>
void BulkWait() {
  simt::BulkWait(kPending, /*until_written=*/true);
}
template <int kPending>
void BulkWaitRead() {
  simt::BulkWait(kPending, /*until_written=*/false);
}
inline void FenceProxyAsyncGlobal() {}
inline void FenceProxyAsyncShared() { simt::current->fenced = simt::Now(); }

// ---- copies by single threads -----------------------------------------------------------------

inline void CopyAsync16Or0(uint32_t smem, const void* global, bool is_zero) {
  simt::CopyAsync16(smem, global, is_zero ? 0 : 16);
}
inline void CopyAsync4(uint32_t smem, const void* global) { simt::CopyAsync4(smem, global); }
inline void CopyAsync16(uint32_t smem, const void* global, uint32_t bytes) {
  simt::CopyAsync16(smem, global, bytes);
}
inline void CopyAsyncArrive(uint32_t bar) { simt::CopyAsyncArrive(bar); }
inline void CopyAsyncCommit() { simt::CopyAsyncCommit(); }
template <int kPending>
void CopyAsyncWait() {
  simt::CopyAsyncWait(kPending);
}

// ---- warps and warpgroups ---------------------------------------------------------------------

inline bool ElectOne() {
  simt::Meet("elect.sync", 0xffffffff, nullptr, nullptr);
  return simt::Lane() == 0;
}
inline float Exp2(float x) {
  const float y = exp2f(x);
  return y < FLT_MIN ? 0 : y;  // flushed
}
inline uint32_t SmId() { return blockIdx.x; }
inline void BarrierSync(int id, int threads) { simt::SyncNamed(id, threads); }
inline void BarrierArrive(int id, int threads) { simt::SyncNamed(id, threads, /*waits=*/false); }
template <int kRegisters>
void RegistersDown() {}
template <int kRegisters>
void RegistersUp() {}

inline void StoreMatrix4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  simt::StoreMatrix4(smem, {a, b, c, d});
}
inline void LoadMatrix4(uint32_t (&r)[4], uint32_t smem) {
  simt::LoadMatrix4(r, smem, /*transposed=*/false);
}
inline void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t smem) {
  simt::LoadMatrix4(r, smem, /*transposed=*/true);
}
inline uint32_t RoundToTf32(uint32_t bits) {
  return (bits + 0x1000) & ~0x1fffu;  // ties away from zero
}
inline uint32_t TransposeMatrix(uint32_t two) { return simt::TransposeMatrix(two); }
template <typename T>
void Multiply16x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  simt::Multiply16x8<T>(c, a, b0, b1);
}

}  // namespace jflux::ptx

#endif  // JFLUX_GPU_PTX_CUH_
