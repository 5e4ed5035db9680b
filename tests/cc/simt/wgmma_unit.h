// The tensor cores of a warpgroup: wgmma.mma_async in order, each executed at some step between its
// issue by all 128 threads and the wait for it.
#ifndef JFLUX_TESTS_CC_SIMT_WGMMA_UNIT_H_
#define JFLUX_TESTS_CC_SIMT_WGMMA_UNIT_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace jflux::simt {

struct Thread;

// Of A and B; of kE5m2 B is kE4m3. D is float, of kS8 int32_t.
enum class WgmmaType { kBfloat16, kHalf, kE4m3, kE5m2, kS8 };

// One instruction: D[64, n] += A[64, k] @ B[k, n], with 32 bytes of k. All threads give the same,
// but for `adds` of registers.
struct WgmmaShape {
  int n;
  WgmmaType type;
  bool trans_a, trans_b;  // MN-major
  bool a_in_registers;
  bool adds;
  uint64_t a, b;  // matrix descriptors

  int ElementBytes() const {
    return type == WgmmaType::kBfloat16 || type == WgmmaType::kHalf ? 2 : 1;
  }
  int K() const { return 32 / ElementBytes(); }
  bool operator==(const WgmmaShape& o) const {
    return n == o.n && type == o.type && trans_a == o.trans_a && trans_b == o.trans_b &&
           a_in_registers == o.a_in_registers && adds == o.adds && a == o.a && b == o.b;
  }
};

struct WgmmaOp {
  WgmmaShape shape;
  int issued = 0;  // threads
  void* d[128];
  uint32_t a[128][4];
};

struct WgmmaUnit {
  std::deque<std::unique_ptr<WgmmaOp>> ops;  // issued by some thread, not executed
  uint64_t executed = 0;                     // ops before
  std::vector<Thread*> waiters;
};

struct WgmmaThread {
  uint64_t issued = 0, committed = 0;
  std::vector<uint64_t> groups;  // of each commit, the ops before it
  bool fenced = false;           // since the last wait
};

void WgmmaFence();
void WgmmaCommit();
void WgmmaWait(int pending);
// d has shape.n / 2 numbers. `a`: four words, if a_in_registers.
void WgmmaIssue(const WgmmaShape& shape, void* d, const uint32_t* a);

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_WGMMA_UNIT_H_
