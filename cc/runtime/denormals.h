// XLA's CPU threads flush subnormal numbers to zero. The operations that XLA runs after a jflux op
// run on jflux's thread, which must flush too: otherwise results would depend on the thread.
#ifndef JFLUX_RUNTIME_DENORMALS_H_
#define JFLUX_RUNTIME_DENORMALS_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jflux {

// While an object of this class exists, its thread flushes subnormal operands and results.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(Get()) { Set(saved_ | kFlush); }
  ~FlushDenormals() { Set(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // MXCSR: flush to zero, denormals are zero
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = 1 << 24;  // FPCR: FZ
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif

  uint64_t saved_;
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_DENORMALS_H_
