// The GPU part of the C interface.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gpu/gemm_config.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/exchange/exchange.h"
#include "ops/matmul_all_reduce/matmul_all_reduce_config.h"
#include "ops/matmul_all_to_all/matmul_all_to_all_config.h"
#include "runtime/capi.h"

namespace {

const char* Reason(const std::string& text) {
  thread_local std::string kept;
  kept = text;
  return kept.c_str();
}

constexpr char kAllGatherMatmul[] = "all_gather_matmul";
constexpr char kMatmulReduceScatter[] = "matmul_reduce_scatter";
constexpr char kMatmulAllReduce[] = "matmul_all_reduce";
constexpr char kMatmulAllToAll[] = "matmul_all_to_all";  // p->n: columns of a shard

}  // namespace

int jflux_choices(JfluxChoice* choices, int capacity) {
  int count = 0;
  for (const jflux::GemmChoice& c : jflux::kCompiled) {
    if (count < capacity) choices[count] = JfluxChoice{c.tile_n, c.cluster_m, c.group_m, c.splits};
    ++count;
  }
  return count;
}

int jflux_is_possible(const JfluxChoice* c) {
  return jflux::IsPossible({c->tile_n, c->cluster_m, c->group_m, c->splits});
}

int jflux_most_splits(const char* op) {
  if (std::strcmp(op, kAllGatherMatmul) == 0) return jflux::kGatherSplits;
  return std::strcmp(op, kMatmulReduceScatter) == 0 ? jflux::kReduceSplits : 1;
}

int jflux_choose(const char* op, const JfluxProduct* p, int sm_count, double link_gbps,
                 JfluxChoice* choice) {
  const auto world = static_cast<int>(p->world);
  const int64_t rows = p->outer * p->inner;
  jflux::GemmChoice c;
  if (std::strcmp(op, kAllGatherMatmul) == 0) {
    c = jflux::ChooseAllGather(world, rows, p->n, p->k, sm_count, jflux::LinksOf(link_gbps));
  } else if (std::strcmp(op, kMatmulReduceScatter) == 0) {
    c = jflux::ChooseReduceScatter(world, rows, p->n, p->k, sm_count);
  } else if (std::strcmp(op, kMatmulAllToAll) == 0) {
    c = jflux::ChooseAllToAll(world, rows, p->n, p->k, sm_count);
  } else if (std::strcmp(op, kMatmulAllReduce) == 0) {
    c = jflux::ChooseAllReduce(world, rows, p->n, p->k, sm_count);
  } else {
    return 0;
  }
  *choice = JfluxChoice{c.tile_n, c.cluster_m, c.group_m, c.splits};
  return 1;
}

static jflux::AllReduceParams RowsOf(int64_t count, int dtype, int64_t width) {
  jflux::AllReduceParams p{};
  p.count = count;
  p.dtype = static_cast<jflux::DType>(dtype);
  p.width = width;
  p.norm = width == 0 ? jflux::Norm::kNone : jflux::Norm::kRms;
  return p;
}

int64_t jflux_all_reduce_workspace_bytes(int64_t world, int64_t count, int dtype, int algorithm,
                                         int64_t width) {
  jflux::AllReduceParams p = RowsOf(count, dtype, width);
  p.world = static_cast<int32_t>(world);
  p.algorithm = static_cast<jflux::AllReduceAlgorithm>(algorithm);
  return p.WorkspaceBytes();
}

int jflux_all_reduce_fits_norm(int64_t count, int dtype, int64_t width) {
  return RowsOf(count, dtype, width).FitsNorm();
}

int64_t jflux_exchange_workspace_bytes(int64_t world, int64_t shard_bytes, int chunked) {
  jflux::ExchangeParams p{};
  p.world = static_cast<int32_t>(world);
  p.x = jflux::Shards{1, 1, shard_bytes};
  p.chunked = chunked != 0;
  return p.WorkspaceBytes();
}

int jflux_choose_all_reduce(int64_t world, int64_t bytes) {
  const int ranks = static_cast<int>(world);
  if (bytes > jflux::MostAllReduceBytes(ranks)) return -1;
  return static_cast<int>(jflux::ChooseAllReduce(ranks, bytes));
}

#ifdef JFLUX_WITH_CUDA

#include "ops/all_gather_matmul/all_gather_matmul_cuda.h"
#include "ops/matmul_all_reduce/matmul_all_reduce_cuda.h"
#include "ops/matmul_all_to_all/matmul_all_to_all_cuda.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_cuda.h"
#include "runtime/cuda_call.h"
#include "runtime/heap_cuda.h"

using jflux::CurrentHeapCuda;

const char* jflux_cuda_heap_init(const int* ordinals, const int64_t* ids, int num_devices,
                                 int64_t heap_bytes, double deadline_s) {
  std::string error;
  auto heap = jflux::HeapCuda::Create(std::vector<int>(ordinals, ordinals + num_devices),
                                      std::vector<int64_t>(ids, ids + num_devices), heap_bytes,
                                      deadline_s, &error);
  if (heap == nullptr) return Reason(error);
  jflux::SetCurrentHeapCuda(std::move(heap));
  return nullptr;
}

const char* jflux_cuda_heap_export(int64_t id, char* handle, int handle_size) {
  std::string text, error;
  if (!CurrentHeapCuda()->Export(id, &text, &error)) return Reason(error);
  std::strncpy(handle, text.c_str(), handle_size - 1);
  handle[handle_size - 1] = 0;
  return nullptr;
}

const char* jflux_cuda_heap_attach(int64_t id, const char* handle) {
  std::string error;
  return CurrentHeapCuda()->Attach(id, handle, &error) ? nullptr : Reason(error);
}

int jflux_cuda_heap_find_workspace(const int64_t* groups, int count, int64_t total_bytes) {
  return CurrentHeapCuda()->FindWorkspace(groups, count, total_bytes).has_value();
}

int64_t jflux_cuda_heap_taken(void) {
  const auto heap = CurrentHeapCuda();
  return heap == nullptr ? 0 : heap->BytesTaken();
}

const char* jflux_cuda_heap_add_workspace(const int64_t* groups, int count, int64_t total_bytes,
                                          int64_t offset) {
  std::string error;
  return CurrentHeapCuda()->AddWorkspace(std::vector<int64_t>(groups, groups + count), total_bytes,
                                         offset, &error)
             ? nullptr
             : Reason(error);
}

const char* jflux_cuda_heap_probe(void) {
  std::string error;
  return CurrentHeapCuda()->Probe(&error) ? nullptr : Reason(error);
}

int jflux_cuda_heap_links(JfluxLink* links, int capacity) {
  const auto heap = CurrentHeapCuda();
  if (heap == nullptr) return 0;
  int count = 0;
  for (const jflux::Link& l : heap->links()) {
    if (count < capacity) {
      links[count] = JfluxLink{l.from, l.to, l.push_gbps, l.pull_gbps, l.signal_us};
    }
    ++count;
  }
  return count;
}

void jflux_cuda_heap_shutdown(void) { jflux::SetCurrentHeapCuda(nullptr); }

const char* jflux_cuda_heap_test_hooks(int skip_waits, int max_delay_us) {
  std::string error;
  return CurrentHeapCuda()->SetHooks(jflux::TestHooks{static_cast<uint32_t>(skip_waits),
                                                      static_cast<uint32_t>(max_delay_us)},
                                     &error)
             ? nullptr
             : Reason(error);
}

const char* jflux_cuda_heap_poison(void) {
  std::string error;
  return CurrentHeapCuda()->Poison(&error) ? nullptr : Reason(error);
}

const char* jflux_cuda_heap_set_epochs(uint32_t epoch) {
  std::string error;
  return CurrentHeapCuda()->SetEpochs(epoch, &error) ? nullptr : Reason(error);
}

int64_t jflux_cuda_launches(void) { return jflux::CudaLaunches(); }

const char* jflux_cuda_timeline_start(int64_t capacity) {
  std::string error;
  const auto heap = CurrentHeapCuda();
  return heap->StartTimeline(static_cast<uint32_t>(capacity), &error) ? nullptr : Reason(error);
}

const char* jflux_cuda_timeline_read(int64_t id, JfluxEvent* events, int64_t capacity,
                                     int64_t* count) {
  static_assert(sizeof(JfluxEvent) == sizeof(jflux::TimelineEvent));
  std::vector<jflux::TimelineEvent> recorded;
  uint32_t missed = 0;
  std::string error;
  if (!CurrentHeapCuda()->ReadTimeline(id, &recorded, &missed, &error)) return Reason(error);
  *count = static_cast<int64_t>(recorded.size()) + missed;
  const auto copied = std::min<size_t>(recorded.size(), capacity);
  std::memcpy(events, recorded.data(), copied * sizeof(JfluxEvent));
  return nullptr;
}

const char* jflux_cuda_timeline_stop(void) {
  std::string error;
  return CurrentHeapCuda()->StopTimeline(&error) ? nullptr : Reason(error);
}

int64_t jflux_cuda_workspace_bytes(const char* op, const JfluxProduct* c,
                                   const JfluxChoice* choice) {
  const jflux::Rows rows{static_cast<int32_t>(c->world), c->outer, c->inner};
  const auto dtype = static_cast<jflux::DType>(c->dtype);
  const auto out_dtype = static_cast<jflux::DType>(c->out_dtype);
  const bool transpose_rhs = c->transpose_rhs != 0;
  const jflux::GemmChoice with{choice->tile_n, choice->cluster_m, choice->group_m, choice->splits};
  if (!jflux::IsPossible(with)) return -1;
  if (std::strcmp(op, kAllGatherMatmul) == 0) {
    const jflux::AllGatherMatmulParams p{rows, c->k, c->n, dtype, out_dtype, transpose_rhs, false};
    return jflux::CudaLayoutOf(p).Workspace().TotalBytes();
  }
  if (std::strcmp(op, kMatmulReduceScatter) == 0) {
    const jflux::MatmulReduceScatterParams p{rows, c->k, c->n, dtype, out_dtype, transpose_rhs};
    // (A call of several terms is fitted to the first one's k; the workspace is as large.)
    const auto possible = jflux::FitSplits(with, rows.Total(), c->k, jflux::kReduceSplits);
    return jflux::MatmulReduceScatterWorkspace(p, possible).TotalBytes();
  }
  if (std::strcmp(op, kMatmulAllReduce) == 0) {
    const jflux::MatmulReduceScatterParams p{rows, c->k, c->n, dtype, out_dtype, transpose_rhs};
    return jflux::MatmulAllReduceWorkspace({p}, jflux::Possible({p}, with)).TotalBytes();
  }
  if (std::strcmp(op, kMatmulAllToAll) == 0) {  // whichever way the shards lie
    const jflux::MatmulAllToAllParams p{rows,      c->k,          c->n,  dtype,
                                        out_dtype, transpose_rhs, false, false};
    return jflux::MatmulAllToAllWorkspace(p, with).TotalBytes();
  }
  return -1;
}

int64_t jflux_cuda_first_workspace(void) { return jflux::kDeviceStateBytes; }

#else

namespace {
const char* NotBuilt() { return Reason("this build has no CUDA kernels"); }
}  // namespace

const char* jflux_cuda_heap_init(const int*, const int64_t*, int, int64_t, double) {
  return NotBuilt();
}
const char* jflux_cuda_heap_export(int64_t, char*, int) { return NotBuilt(); }
const char* jflux_cuda_heap_attach(int64_t, const char*) { return NotBuilt(); }
int jflux_cuda_heap_find_workspace(const int64_t*, int, int64_t) { return 0; }
int64_t jflux_cuda_heap_taken(void) { return 0; }
const char* jflux_cuda_heap_add_workspace(const int64_t*, int, int64_t, int64_t) {
  return NotBuilt();
}
const char* jflux_cuda_heap_probe(void) { return NotBuilt(); }
int jflux_cuda_heap_links(JfluxLink*, int) { return 0; }
void jflux_cuda_heap_shutdown(void) {}
const char* jflux_cuda_heap_test_hooks(int, int) { return NotBuilt(); }
const char* jflux_cuda_heap_poison(void) { return NotBuilt(); }
const char* jflux_cuda_heap_set_epochs(uint32_t) { return NotBuilt(); }
int64_t jflux_cuda_launches(void) { return 0; }
const char* jflux_cuda_timeline_start(int64_t) { return NotBuilt(); }
const char* jflux_cuda_timeline_read(int64_t, JfluxEvent*, int64_t, int64_t*) { return NotBuilt(); }
const char* jflux_cuda_timeline_stop(void) { return NotBuilt(); }
int64_t jflux_cuda_workspace_bytes(const char*, const JfluxProduct*, const JfluxChoice*) {
  return -1;
}
int64_t jflux_cuda_first_workspace(void) { return 0; }

#endif  // JFLUX_WITH_CUDA
