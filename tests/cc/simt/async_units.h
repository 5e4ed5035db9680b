// The copies that threads start and do not perform: bulk copies, TMA, cp.async, st.async. Each
// reads its source and writes its destination at later steps of its own.
#ifndef JFLUX_TESTS_CC_SIMT_ASYNC_UNITS_H_
#define JFLUX_TESTS_CC_SIMT_ASYNC_UNITS_H_

#include <cuda.h>

#include <cstdint>

namespace jflux::simt {

// Innermost first.
struct Coordinates {
  int32_t at[5];
  int rank;
};

// `ctas`: a bit for each CTA of the cluster that gets the box, and the bytes on its barrier.
// 0: the running thread's own.
void TmaLoad(uint32_t smem, const CUtensorMap* map, uint32_t bar, const Coordinates& at,
             uint32_t ctas = 0);
void TmaStore(const CUtensorMap* map, uint32_t smem, const Coordinates& at);
void BulkLoad(uint32_t smem, const void* global, uint32_t bytes, uint32_t bar);
void BulkStore(void* global, uint32_t smem, uint32_t bytes);
void BulkCommit();
// Until all groups but the last `pending` have been read, or also written.
void BulkWait(int pending, bool until_written);

void CopyAsync4(uint32_t smem, const void* global);
void CopyAsync16(uint32_t smem, const void* global, uint32_t bytes);
void CopyAsyncArrive(uint32_t bar);
void CopyAsyncCommit();
void CopyAsyncWait(int pending);

void SendRemote(uint32_t remote, const void* bytes16, uint32_t remote_bar);

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_ASYNC_UNITS_H_
