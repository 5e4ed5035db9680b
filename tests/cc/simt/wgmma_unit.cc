#include "simt/wgmma_unit.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstring>

#include "simt/machine.h"

namespace jflux::simt {
namespace {

// Offsets of an operand's elements in shared memory (gpu/wgmma.cuh has the layouts).
struct Operand {
  uint32_t start, leading, stride;
  bool mn_major;
  int bytes;  // of an element

  Operand(uint64_t descriptor, bool mn_major_, int bytes_)
      : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        mn_major(mn_major_),
        bytes(bytes_) {
    if (descriptor >> 62 != 1) Fail("wgmma: the simulator has 128-byte swizzles only");
    if ((descriptor >> 49 & 7) != 0) Fail("wgmma: the simulator has no base offset");
  }
  uint32_t At(int mn, int k) const {
    const uint32_t at = mn_major
                            ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                            : start + mn / 8 * stride + mn % 8 * 128 + k * bytes;
    return Swizzled128(at);
  }
  static uint32_t Swizzled128(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }
};

float ToFloat(uint16_t bits, WgmmaType type) {
  if (type == WgmmaType::kS8) return static_cast<int8_t>(bits);
  if (type == WgmmaType::kE4m3 || type == WgmmaType::kE5m2) {
    const auto byte = static_cast<__nv_fp8_storage_t>(bits);
    const auto format = type == WgmmaType::kE4m3 ? __NV_E4M3 : __NV_E5M2;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, format)));
  }
  if (type == WgmmaType::kHalf) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
  }
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Of thread t's i-th accumulator, or pair of A's elements.
int RowOf(int thread, int i) { return 16 * (thread / 32) + thread % 32 / 4 + 8 * (i / 2 % 2); }
int ColumnOf(int thread, int i) { return 8 * (i / 4) + 2 * (thread % 4) + i % 2; }

template <typename Sum>
void Execute(const Cta& cta, const WgmmaOp& op) {
  const WgmmaShape& s = op.shape;
  static Sum a[64][32], b[32][256], d[64][256];
  const int bytes = s.ElementBytes();
  const auto load = [&](uint32_t at, WgmmaType type) {
    if (at + bytes > kSmemBytes) Fail("wgmma reads outside of shared memory");
    uint16_t bits = 0;
    std::memcpy(&bits, cta.smem + at, bytes);
    return static_cast<Sum>(ToFloat(bits, type));
  };
  if (s.a_in_registers) {
    for (int t = 0; t < 128; ++t) {
      for (int i = 0; i < 8; ++i) {  // as the accumulators of 16 columns
        const auto bits = static_cast<uint16_t>(op.a[t][i / 2] >> 16 * (i % 2));
        a[RowOf(t, i)][ColumnOf(t, i)] = static_cast<Sum>(ToFloat(bits, s.type));
      }
    }
  } else {
    const Operand operand(s.a, s.trans_a, bytes);
    for (int m = 0; m < 64; ++m) {
      for (int k = 0; k < s.K(); ++k) a[m][k] = load(operand.At(m, k), s.type);
    }
  }
  const Operand operand(s.b, s.trans_b, bytes);
  const WgmmaType b_type = s.type == WgmmaType::kE5m2 ? WgmmaType::kE4m3 : s.type;
  for (int k = 0; k < s.K(); ++k) {
    for (int n = 0; n < s.n; ++n) b[k][n] = load(operand.At(n, k), b_type);
  }
  for (int t = 0; t < 128; ++t) {
    const auto* sums = static_cast<const Sum*>(op.d[t]);
    for (int i = 0; i < s.n / 2; ++i) d[RowOf(t, i)][ColumnOf(t, i)] = s.adds ? sums[i] : 0;
  }
  for (int m = 0; m < 64; ++m) {
    for (int k = 0; k < s.K(); ++k) {
      for (int n = 0; n < s.n; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int t = 0; t < 128; ++t) {
    auto* sums = static_cast<Sum*>(op.d[t]);
    for (int i = 0; i < s.n / 2; ++i) sums[i] = d[RowOf(t, i)][ColumnOf(t, i)];
  }
}

// What wgmma reads must have been fenced, by who wrote it or by all threads that multiply.
void CheckOperands(Cta* cta, const WgmmaOp& op, uint64_t fenced) {
  const WgmmaShape& s = op.shape;
  const int bytes = s.ElementBytes(), vector = 16 / bytes;
  const auto check = [&](const Operand& operand, int mns) {
    const int mn_step = operand.mn_major ? vector : 1, k_step = operand.mn_major ? 1 : vector;
    for (int mn = 0; mn < mns; mn += mn_step) {
      for (int k = 0; k < s.K(); k += k_step) {
        CheckRead({cta, operand.At(mn, k)}, 16, fenced, "wgmma");
      }
    }
  };
  if (!s.a_in_registers) check(Operand(s.a, s.trans_a, bytes), 64);
  check(Operand(s.b, s.trans_b, bytes), s.n);
}

WgmmaUnit& UnitOf(const Thread& thread) { return thread.cta->warpgroups[thread.index / 128]; }

}  // namespace

// These are .sync.aligned: the lanes of a warp go on together.
void WgmmaFence() {
  Meet("wgmma.fence", 0xffffffff, nullptr, nullptr);
  current->wgmma.fenced = true;
}

void WgmmaCommit() {
  Meet("wgmma.commit_group", 0xffffffff, nullptr, nullptr);
  current->wgmma.groups.push_back(current->wgmma.issued);
  Point();
}

void WgmmaIssue(const WgmmaShape& shape, void* d, const uint32_t* a) {
  Thread* thread = current;
  Cta* cta = thread->cta;
  WgmmaUnit& unit = UnitOf(*thread);
  if (!thread->wgmma.fenced) {
    Fail("wgmma.mma_async without wgmma.fence since the last wait, or since the thread began");
  }
  const uint64_t number = thread->wgmma.issued++;
  if (number == unit.executed + unit.ops.size()) {
    unit.ops.push_back(std::make_unique<WgmmaOp>());
    unit.ops.back()->shape = shape;
  }
  WgmmaOp* op = unit.ops[number - unit.executed].get();
  if (!(op->shape == shape)) Fail("wgmma.mma_async differs between the threads of a warpgroup");
  const int t = thread->index % 128;
  op->d[t] = d;
  if (shape.a_in_registers) std::memcpy(op->a[t], a, sizeof(op->a[t]));
  if (++op->issued < 128) return;
  uint64_t fenced = ~uint64_t{0};
  for (int i = 0; i < 128; ++i) {
    fenced = std::min(fenced, cta->threads[thread->index / 128 * 128 + i]->fenced);
  }
  CheckOperands(cta, *op, fenced);
  Defer([cta, &unit, number] {
    while (unit.executed <= number) {  // in order
      if (cta->ended) Fail("a CTA has ended before its wgmma.mma_async");
      const WgmmaOp& first = *unit.ops.front();
      first.shape.type == WgmmaType::kS8 ? Execute<int32_t>(*cta, first)
                                         : Execute<float>(*cta, first);
      unit.ops.pop_front();
      ++unit.executed;
    }
    for (Thread* waiter : unit.waiters) Unblock(waiter);
    unit.waiters.clear();
    return Step::kDone;
  });
}

void WgmmaWait(int pending) {
  Meet("wgmma.wait_group", 0xffffffff, nullptr, nullptr);
  Thread* thread = current;
  WgmmaUnit& unit = UnitOf(*thread);
  auto& groups = thread->wgmma.groups;
  const auto done = static_cast<int>(groups.size()) - pending;
  thread->wgmma.fenced = false;
  if (done <= 0) return;
  const uint64_t until = groups[done - 1];
  groups.erase(groups.begin(), groups.begin() + done);
  while (unit.executed < until) {
    unit.waiters.push_back(thread);
    Block("wgmma.wait_group", 0, pending);
  }
}

}  // namespace jflux::simt
