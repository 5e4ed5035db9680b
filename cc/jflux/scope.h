// Scopes: the threads that execute an operation together, a thread, a warp or a block (CTA). All
// threads of a scope call with the same arguments, and every warp of a block is full. On a host, a
// warp and a block are one thread.
//
// Among the headers for kernel authors, only this one tests which compiler runs.
#ifndef JFLUX_SCOPE_H_
#define JFLUX_SCOPE_H_

#include <cstdint>

#include "../core/atomic.h"
#include "../core/platform.h"

namespace jflux::shmem {

struct Thread {
  static JFLUX_HD int rank() { return 0; }
  static JFLUX_HD int size() { return 1; }
  static JFLUX_HD void sync() {}
  static JFLUX_HD bool all(bool ok) { return ok; }
};

struct Warp {
  static JFLUX_HD int rank() {
#if defined(__CUDA_ARCH__)
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
#else
    return 0;
#endif
  }
  static JFLUX_HD int size() {
#if defined(__CUDA_ARCH__)
    return 32;
#else
    return 1;
#endif
  }
  // Stores of the warp's threads before it are visible to all of them after it.
  static JFLUX_HD void sync() {
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
  }
  // sync(), and whether `ok` is true on all threads.
  static JFLUX_HD bool all(bool ok) {
#if defined(__CUDA_ARCH__)
    ok = __all_sync(0xffffffff, ok);
    __syncwarp();  // a vote does not order memory
#endif
    return ok;
  }
};

struct Block {
  static JFLUX_HD int rank() {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
#else
    return 0;
#endif
  }
  static JFLUX_HD int size() {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
#else
    return 1;
#endif
  }
  static JFLUX_HD void sync() {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
  static JFLUX_HD bool all(bool ok) {
#if defined(__CUDA_ARCH__)
    ok = __syncthreads_and(ok);
#endif
    return ok;
  }
};

namespace internal {

struct alignas(16) [[gnu::may_alias]] Vector {
  uint32_t word[4];
};
using Word [[gnu::may_alias]] = uint32_t;

// Loads 16 bytes from an address that is a multiple of kAlign.
template <int kAlign>
JFLUX_HD Vector LoadVector(const char* from) {
  if constexpr (kAlign == 16) {
    return *reinterpret_cast<const Vector*>(from);
  } else {
    Vector v;
    JFLUX_UNROLL
    for (int w = 0; w < 4; ++w) {
      if constexpr (kAlign == 4) {
        v.word[w] = reinterpret_cast<const Word*>(from)[w];
      } else {
        v.word[w] = 0;
        JFLUX_UNROLL
        for (int b = 0; b < 4; ++b) {
          v.word[w] |= static_cast<uint32_t>(static_cast<uint8_t>(from[4 * w + b])) << (8 * b);
        }
      }
    }
    return v;
  }
}

template <typename Scope, int kAlign>
JFLUX_HD void CopyVectors(char* to, const char* from, int64_t vectors) {
  constexpr int kInFlight = kAlign == 16 ? 4 : 1;  // loads in flight
  const int64_t step = Scope::size();
  JFLUX_NO_UNROLL
  for (int64_t v = Scope::rank(); v < vectors; v += kInFlight * step) {
    Vector loaded[kInFlight];
    JFLUX_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (v + i * step < vectors) loaded[i] = LoadVector<kAlign>(from + 16 * (v + i * step));
    }
    JFLUX_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (v + i * step < vectors) *reinterpret_cast<Vector*>(to + 16 * (v + i * step)) = loaded[i];
    }
  }
}

template <typename Scope>
JFLUX_HD void CopyBytes(char* to, const char* from, int64_t bytes) {
  JFLUX_NO_UNROLL
  for (int64_t i = Scope::rank(); i < bytes; i += Scope::size()) to[i] = from[i];
}

// Copies any number of bytes between any addresses that do not overlap. Stores are 16-byte wherever
// `dest` allows, since they may cross a link. Loads are 16-byte if `source` has the same
// misalignment as `dest`.
template <typename Scope>
JFLUX_HD void Copy(void* dest, const void* source, int64_t bytes) {
  auto* to = static_cast<char*>(dest);
  const auto* from = static_cast<const char*>(source);
  const auto misplaced = static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(to)) & 15);
  const int64_t head = Min(misplaced, bytes), vectors = (bytes - head) / 16;
  CopyBytes<Scope>(to, from, head);
  to += head;
  from += head;
  const auto place = reinterpret_cast<uintptr_t>(from);
  if (place % 16 == 0) {
    CopyVectors<Scope, 16>(to, from, vectors);
  } else if (place % 4 == 0) {
    CopyVectors<Scope, 4>(to, from, vectors);
  } else {
    CopyVectors<Scope, 1>(to, from, vectors);
  }
  CopyBytes<Scope>(to + 16 * vectors, from + 16 * vectors, bytes - head - 16 * vectors);
}

// Stores a hello: this rank has started the call, so it has finished the previous one, and what it
// read there may be overwritten. On a GPU the end of the previous kernel already orders those
// reads, and a release would only cost time. A host thread may come straight from the previous
// call, so it needs the release.
JFLUX_HD void StoreHello(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  StoreRelaxed(word, value);
#else
  StoreRelease(word, value);
#endif
}

}  // namespace internal
}  // namespace jflux::shmem

#endif  // JFLUX_SCOPE_H_
