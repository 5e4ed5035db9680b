// The library's C interface: what the Python module binds. Nothing here needs Python, and nothing
// needs a CUDA driver at load time.
#ifndef JFLUX_RUNTIME_CAPI_H_
#define JFLUX_RUNTIME_CAPI_H_

#include <stdint.h>

#define JFLUX_API extern "C" __attribute__((visibility("default")))

typedef struct {
  const char* name;
  const char* platform;
  void* instantiate;
  void* execute;
} JfluxTarget;

// Every FFI target; ends with an entry whose name is null.
JFLUX_API const JfluxTarget* jflux_targets(void);

// XLA_FFI_TypeId and XLA_FFI_TypeInfo of the CPU handlers' state.
JFLUX_API void* jflux_call_site_type_id(void);
JFLUX_API void* jflux_call_site_type_info(void);

// To be called before the ops of another module are lowered.
JFLUX_API void jflux_begin_module(void);

JFLUX_API int jflux_built_with_cuda(void);

// Functions that return `const char*` return null on success, else the reason; the text lives
// until the calling thread's next call.

JFLUX_API void jflux_set_blas(void* sgemm, void* dgemm);

// The symmetric heap (runtime/heap.h), one set of functions for all back ends. `platform` is "cpu"
// or "cuda": a process has at most one heap of each. Without a heap, and on "cuda" without CUDA in
// the build, a function says so.
typedef struct {
  const int64_t* devices;  // global ids of this process's devices
  const int* ordinals;     // CUDA's number of each; null on the CPU
  int num_devices;
  int64_t heap_bytes;  // per device
  double deadline_s;
  int leads;  // see HeapConfig
} JfluxHeapConfig;
// `backend`: "cpu", "cuda_peer" or "cuda_ipc".
JFLUX_API const char* jflux_heap_create(const char* platform, const char* backend,
                                        const JfluxHeapConfig* config);
// Several processes: *handle is for the other processes, each of which attaches it. The text lives
// until the calling thread's next call.
JFLUX_API const char* jflux_heap_export(const char* platform, const char** handle);
JFLUX_API const char* jflux_heap_attach(const char* platform, const char* handle);
// After all attachments: probes the links; fails if one cannot be trusted.
JFLUX_API const char* jflux_heap_probe(const char* platform);
typedef struct {
  int64_t from, to;
  double push_gbps, pull_gbps, signal_us;
} JfluxLink;
// Fills up to `capacity` links; returns how many there are. None without a heap.
JFLUX_API int jflux_heap_links(const char* platform, JfluxLink* links, int capacity);
JFLUX_API void jflux_heap_shutdown(const char* platform);

// Back ends that reserve workspaces (cuda_*; the CPU's calls lease theirs, and both fail there).
// Find, in a single process, makes sure that there is a workspace; *found is 0 if there is no room.
JFLUX_API const char* jflux_heap_find_workspace(const char* platform, const int64_t* groups,
                                                int count, int64_t total_bytes, int* found);
// Add, in several processes: the place that they have agreed on, counted from the first workspace.
JFLUX_API const char* jflux_heap_add_workspace(const char* platform, const int64_t* groups,
                                               int count, int64_t total_bytes, int64_t place);
// Bytes of each device's segment that are leased or reserved now / that have ever been. 0 without a
// heap.
JFLUX_API void jflux_heap_usage(const char* platform, int64_t* in_use, int64_t* touched);

// Tests only, between calls: see Heap.
JFLUX_API const char* jflux_heap_test_hooks(const char* platform, int skip_waits, int max_delay_us);
JFLUX_API const char* jflux_heap_poison(const char* platform);
JFLUX_API const char* jflux_heap_set_epochs(const char* platform, uint32_t epoch);

// Kernels that handlers have enqueued.
JFLUX_API int64_t jflux_cuda_launches(void);

// The kernels' record of what they do (gpu/device_state.h); between calls only.
typedef struct {
  uint64_t begin_ns, end_ns;
  uint32_t call;
  uint16_t kind, sm;
  int32_t a, b;
} JfluxEvent;
JFLUX_API const char* jflux_cuda_timeline_start(int64_t capacity);
// Copies up to `capacity` events of a device; *count is how many there were.
JFLUX_API const char* jflux_cuda_timeline_read(int64_t id, JfluxEvent* events, int64_t capacity,
                                               int64_t* count);
JFLUX_API const char* jflux_cuda_timeline_stop(void);

// A number with a name: a field of a call or of a plan, or a constant.
typedef struct {
  const char* name;
  int64_t value;
} JfluxField;
// What the kernels of an op do for a call on a machine (runtime/op.h): fills up to `capacity`
// fields of the plan, and *count with how many there are. sm_count 0: the CPU. link_gbps 0:
// unknown. The names live until the calling thread's next call.
JFLUX_API const char* jflux_plan(const char* op, const JfluxField* call, int call_count,
                                 int32_t sm_count, double link_gbps, JfluxField* plan, int capacity,
                                 int* count);
// Numbers and names that Python shares with the kernels; ends with a null name. A name "list.item"
// is an item of a list, whose items come in their order.
JFLUX_API const JfluxField* jflux_constants(void);

// A configuration of the GPU kernels (gpu/gemm_config.h).
typedef struct {
  int tile_n, cluster_m, group_m, splits;
} JfluxChoice;
// Fills up to `capacity` of those that are compiled; returns how many there are.
JFLUX_API int jflux_choices(JfluxChoice* choices, int capacity);
// Whether kernels can do it.
JFLUX_API int jflux_is_possible(const JfluxChoice* choice);
// How many CTAs may share the k of a tile in calls of few rows; 1 for an op that is not tuned so.
JFLUX_API int jflux_most_splits(const char* op);

// Custom calls (jflux/call.h): what a workspace for so many bytes of data and signals takes.
JFLUX_API int64_t jflux_custom_workspace_bytes(int64_t data_bytes, int64_t num_signals);
// Has load(ordinal) called on every device of this process: now, if the heap on GPUs exists, and
// whenever it is made. It loads kernels, and returns null or what went wrong.
JFLUX_API const char* jflux_add_kernels(const char* (*load)(int ordinal));

#endif  // JFLUX_RUNTIME_CAPI_H_
