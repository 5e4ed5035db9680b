// A simulated Hopper GPU: threads, warps, CTAs and clusters of kernels that run on a CPU, compiled
// from their own source. docs/internals/simulator.md is the introduction.
//
// Every CUDA thread is a fiber. One loop (machine.cc) resumes fibers and completes asynchronous
// operations, in an order that a seed decides: the same seed gives the same run. A thread can be
// interrupted where it synchronises: at each function of shadow/gpu/ptx.cuh and shadow/gpu/
// wgmma.cuh, each atomic operation, each collective of a warp. Between those it runs alone.
//
// Memory is sequentially consistent: a store is visible at once. What that cannot show: a missing
// fence or a weak order between threads or ranks; a missing fence.proxy.async on global memory, or
// after generic reads. Only the asynchronous units are late.
#ifndef JFLUX_TESTS_CC_SIMT_MACHINE_H_
#define JFLUX_TESTS_CC_SIMT_MACHINE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/fiber.h"
#include "simt/wgmma_unit.h"

namespace jflux::simt {

struct Cta;
struct Cluster;
struct Grid;
struct Thread;
struct Warp;

// A group of a thread's bulk copies, or of its copies of 16 bytes: how many have not read their
// source, or have not written their destination.
struct CopyGroup {
  int unread = 0, unwritten = 0;
  Thread* waiter = nullptr;
};

struct Thread {
  Fiber fiber;
  Cta* cta;
  Warp* warp;
  int index;  // threadIdx.x
  int lane;
  bool ended = false, blocked = false;
  // What the thread waits for, for the report of a deadlock.
  const char* wait = nullptr;
  uint32_t wait_at = 0, wait_for = 0;

  uint64_t fenced = 0;  // when it last called fence.proxy.async for shared memory
  std::vector<std::shared_ptr<CopyGroup>> bulk_groups, copy_groups;  // the last one is open
  uint64_t copies_begun = 0;                                         // of 16 bytes
  std::vector<uint64_t> copies;                                      // those not complete
  WgmmaThread wgmma;
};

struct Mbarrier {
  uint32_t count = 0;
  uint32_t pending = 0;  // arrivals
  int64_t bytes = 0;     // transaction bytes that are missing; below 0: they came before they were
                         // expected
  uint32_t phase = 0;
  std::vector<Thread*> waiters;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::vector<Thread*> waiters;
  std::vector<uint32_t> values;  // of __syncthreads_and and the like
  uint32_t result = 0;
};

// Lanes that wait for each other.
struct Meeting {
  const char* what;
  uint32_t mask, arrived;
};

struct Warp {
  Thread* lanes[32]{};
  void* offers[32]{};  // what each waiting lane brings to its meeting
  uint32_t ended = 0;
  std::vector<Meeting> meetings;
  bool slow = false;  // rarely scheduled, for a while
};

inline constexpr uint32_t kSmemBytes = 256 << 10;  // of addresses
inline constexpr uint32_t kDynamicAt = 24 << 10;   // dynamic shared memory follows static
inline constexpr uint32_t kMostDynamicBytes = 232448;

// Who has written 16 bytes of shared memory by the generic proxy, and when; null: nobody since the
// async proxy wrote them.
struct LastWrite {
  const Thread* thread = nullptr;
  uint64_t at = 0;
};

struct Cta {
  Cluster* cluster;
  uint32_t rank;  // in the cluster
  uint3 block;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::deque<WgmmaUnit> warpgroups;
  int live = 0;
  bool ended = false;
  char* smem = nullptr;  // kSmemBytes
  uint32_t dynamic_bytes;
  std::vector<LastWrite> writes;
  uint32_t static_end = 1024;
  std::map<const void*, uint32_t> variables;  // JFLUX_SHARED: by its key, the offset
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier named[16];

  ~Cta();
};

struct Cluster {
  Grid* grid;
  std::vector<std::unique_ptr<Cta>> ctas;
  int live = 0;  // CTAs
  NamedBarrier barrier;
};

// ---- What the device headers call -----------------------------------------------------------

// The running thread; null on the host.
extern Thread* current;

// Ends the run: simt::Run returns the message, with the place of the running thread.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Another thread may run, or an asynchronous operation complete.
void Point();
// The thread reads what another one may write.
void Look();
// The thread has looked for something in vain. If all that happens are such looks, for long, the
// run has failed.
void Poll();
// The thread waits until another one, or an asynchronous operation, calls Unblock or Resume. Lanes
// that meet resume: they may meet in a loop that looks for something in vain.
void Block(const char* wait, uint32_t at, uint32_t wait_for);
void Unblock(Thread* thread);
void Resume(Thread* thread);
uint64_t Now();  // steps that have been taken
// For polls of the time: 100 ns a step, and a microsecond each time that somebody looks.
uint64_t ClockNs();
uint64_t Random(uint64_t below);

// An asynchronous operation. It is called at random steps, until it returns kDone.
enum class Step { kDone, kAgain, kNotReady };
void Defer(std::function<Step()> step);

// Returns when all lanes of `mask` have called it. The last one calls complete(offers), which has
// each lane's `mine`.
void Meet(const char* what, uint32_t mask, void* mine, void (*complete)(void* const* offers));

// Memory of a CTA for a variable. `key` stands for the declaration.
void* SharedVariable(const void* key, uint32_t bytes, uint32_t align);
void* DynamicShared(uint32_t align);

// A shared address: an offset below kSmemBytes in the running thread's CTA or, from mapa, in
// another CTA of its cluster.
struct SmemPlace {
  Cta* cta;
  uint32_t offset;
  char* data() const { return cta->smem + offset; }
};
SmemPlace PlaceOf(uint32_t address, uint32_t bytes, uint32_t align);
uint32_t AddressOf(const void* p);
inline uint32_t AddressIn(uint32_t rank, uint32_t offset) { return (rank + 1) << 24 | offset; }

// A write of the generic proxy, or of the async one.
void NoteWrite(const SmemPlace& place, uint32_t bytes, const Thread* writer);
// A read of the async proxy. `fenced`: when the reader last fenced.
void CheckRead(const SmemPlace& place, uint32_t bytes, uint64_t fenced, const char* reader);

void Arrive(const SmemPlace& bar, uint32_t arrivals, int64_t expected_bytes);
void CompleteBytes(const SmemPlace& bar, uint32_t bytes);
bool TestPhase(const SmemPlace& bar, uint32_t parity, bool suspends);
void InitMbarrier(const SmemPlace& bar, uint32_t count);
// Named barrier `id` of the CTA, or the cluster's. Returns what `combine` makes of the values.
enum class Combine { kNone, kAnd, kOr, kCount };
uint32_t SyncNamed(int id, int threads, bool waits = true, Combine combine = Combine::kNone,
                   uint32_t value = 0);
uint32_t SyncThreads(Combine combine = Combine::kNone, uint32_t value = 0);
void SyncCluster();

// ---- What tests call ------------------------------------------------------------------------

// The current device of the fake CUDA runtime, and how many SMs each device has.
void SetDevice(int ordinal);
void SetSmCount(int count);
// Clusters of a kernel that a device runs at once, if more would fit. 0: no limit.
void SetMostResident(int clusters);
int CurrentDevice();
int SmCount();

// Runs all kernels that have been launched: those of one stream after each other, those of
// different streams and devices at the same time. Empty, or why it failed.
std::string Run(uint64_t seed);

// A launch, for Run. `parameters`: the kernel's one parameter, a struct of more than 16 bytes.
struct Launch {
  const void* kernel;
  int device;
  const void* stream;
  int ctas, cluster, threads, smem_bytes;
  const void* parameters;
};
void Enqueue(const Launch& launch);

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_MACHINE_H_
