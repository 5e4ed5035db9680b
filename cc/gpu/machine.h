// The numbers of a GPU and its links that configurations depend on.
//
// Choosers (gpu/gemm_choice.h, the ops' headers, gpu/senders.h) were fitted to measurements on
// one reference machine. They take another machine's numbers as shares of the reference's.
#ifndef JFLUX_GPU_MACHINE_H_
#define JFLUX_GPU_MACHINE_H_

#include <cmath>
#include <cstdint>

#include "core/format.h"
#include "core/platform.h"

namespace jflux {

// The reference: H200s, all joined by NVLink.
inline constexpr int32_t kReferenceSms = 132;
inline constexpr double kReferenceLinkGbps = 320;  // of copies as long as the probe's (1e9 bytes/s)
inline constexpr double kBusyLinkShare = 220 / kReferenceLinkGbps;  // while both GPUs multiply
// The rate of a product while its rows arrive, in 1e12 operations per second. 650 was read on
// 4 x H200. With 660 a row of kReferenceColumns columns is computed in the time in which it
// arrives.
inline constexpr double kReferenceTflops = 660;
// Columns n for which a row of k elements of 16 bits arrives (2 k bytes) as fast as it is
// multiplied (2 k n operations): 3000. Elements of 8 bits arrive, and are multiplied, in half of
// the time.
inline constexpr double kReferenceColumns =
    kReferenceTflops * 1e3 / (kBusyLinkShare * kReferenceLinkGbps);
static_assert(kReferenceColumns == 3000);

// SMs that a GPU of compute capability 9.0 can have.
inline constexpr int32_t kMostSms = 144;

// Kernels are compiled for two architectures (CMakeLists.txt): sm_90a, and sm_80 with its PTX. GPUs
// of compute capability 8.x run the machine code of sm_80; for later GPUs other than Hopper the
// driver compiles the PTX. The portable code has no clusters (gpu/cluster.cuh). The products' main
// loop (gpu/gemm_sm90.cuh) exists for sm_90a alone.
//
// Portable kernels that multiply float8 are compiled for sm_89, with its PTX, in place of sm_80. A
// GPU that runs them, and the other portable code, has kFloat8Arch.
inline constexpr int32_t kPortableArch = 80, kFloat8Arch = 89, kHopperArch = 90;

// The GPUs that kernels are for, by the architecture of the code that they run.
struct Gpus {
  int32_t from, to;
  int32_t smem_bytes;  // shared memory that a CTA may have on all of them

  bool Has(int32_t arch) const { return from <= arch && arch <= to; }
};
inline constexpr Gpus kHopper{kHopperArch, kHopperArch, 227 << 10};
inline constexpr Gpus kPortable{kPortableArch, INT32_MAX, 99 << 10};

struct Machine {
  int32_t sm_count;      // 0: the CPU back end
  double link_gbps = 0;  // of the slowest link, as the probe found it; 0: unknown, as the reference

  int32_t arch = kHopperArch;  // of the kernels' code that it runs

  constexpr bool IsCpu() const { return sm_count == 0; }
  // 1, 1/2, 1/4, ... Readings of the probe differ from run to run; choices must not.
  double LinkShare() const {
    if (link_gbps <= 0) return 1;
    return Min(1.0, std::exp2(std::round(std::log2(link_gbps / kReferenceLinkGbps))));
  }
};

// What the tensor cores of the machine multiply; on a CPU, all formats.
inline constexpr FormatSet FormatsOf(const Machine& machine) {
  return machine.IsCpu()              ? kAllFormats
         : machine.arch < kHopperArch ? MmaFormats(machine.arch)
                                      : kWgmmaFormats;
}

}  // namespace jflux

#endif  // JFLUX_GPU_MACHINE_H_
