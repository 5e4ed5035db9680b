// The library's C interface: what the Python module binds. Nothing here needs Python, and nothing
// needs a CUDA driver at load time.
#ifndef JFLUX_RUNTIME_CAPI_H_
#define JFLUX_RUNTIME_CAPI_H_

#include <stdint.h>

#define JFLUX_API extern "C" __attribute__((visibility("default")))

typedef struct {
  const char* name;
  const char* platform;
  void* instantiate;  // null: the handler keeps no state (local ops)
  void* execute;
} JfluxTarget;

// Every FFI target; ends with an entry whose name is null.
JFLUX_API const JfluxTarget* jflux_targets(void);

// The state that handlers of a platform ("cpu", "CUDA") keep for each call of an executable: its
// XLA_FFI_TypeId and XLA_FFI_TypeInfo. Ends with an entry whose name is null.
typedef struct {
  const char* name;
  const char* platform;
  void* type_id;
  void* type_info;
} JfluxStateType;
JFLUX_API const JfluxStateType* jflux_state_types(void);

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
  int64_t heap_bytes;  // the most, per device
  double deadline_s;
  int leads;  // see HeapConfig
  double warn_s;
} JfluxHeapConfig;
// `backend`: "cpu", "cuda", or "nvshmem" after jflux_nvshmem_start.
JFLUX_API const char* jflux_heap_create(const char* platform, const char* backend,
                                        const JfluxHeapConfig* config);
// Several processes of a node: *handle is for the others, each of which attaches it. The text lives
// until the calling thread's next call.
JFLUX_API const char* jflux_heap_export(const char* platform, const char** handle);
JFLUX_API const char* jflux_heap_attach(const char* platform, const char* handle);
// Waits for running calls, and unmaps other processes' memory. All processes of a node call it
// before any of them frees its part.
JFLUX_API void jflux_heap_close(const char* platform);
// `keep`: other processes may still use this one's memory, which is never freed then.
JFLUX_API void jflux_heap_shutdown(const char* platform, int keep);

// Reserved workspaces ("cuda" alone; the CPU's calls lease theirs): runtime/workspaces_cuda.h.
typedef struct {
  const int64_t* devices;
  int num_devices;
  int64_t bytes;
} JfluxWorkspace;
JFLUX_API const char* jflux_heap_add_workspace(const char* platform, const JfluxWorkspace* w,
                                               const char** handle);
JFLUX_API const char* jflux_heap_attach_workspace(const char* platform, const JfluxWorkspace* w,
                                                  const char* handle);
JFLUX_API const char* jflux_heap_commit_workspace(const char* platform, const JfluxWorkspace* w);
JFLUX_API int jflux_heap_has_workspace(const char* platform, const JfluxWorkspace* w);
JFLUX_API const char* jflux_heap_close_workspace(const char* platform, const JfluxWorkspace* w);
JFLUX_API const char* jflux_heap_free_workspace(const char* platform, const JfluxWorkspace* w);
// The workspaces that no executable uses: "bytes:device,device,...;bytes:...". The text lives until
// the calling thread's next call.
JFLUX_API const char* jflux_heap_unused_workspaces(const char* platform);

// One step of the probe of the links (0, 1, 2; ProbeStep of runtime/link_probe.h), in a committed
// workspace of all devices of the node, of jflux_probe_bytes. Fails if a link cannot be trusted.
JFLUX_API const char* jflux_heap_probe(const char* platform, const JfluxWorkspace* w, int step);
JFLUX_API int64_t jflux_probe_bytes(int num_devices);
typedef struct {
  int64_t from, to;
  double push_gbps, pull_gbps, signal_us;
} JfluxLink;
// Fills up to `capacity` links; returns how many there are. None without a heap.
JFLUX_API int jflux_heap_links(const char* platform, JfluxLink* links, int capacity);

// Bytes of each device that are leased or reserved now / that have ever been. 0 without a
// heap.
JFLUX_API void jflux_heap_usage(const char* platform, int64_t* in_use, int64_t* touched);

// The least free memory of these devices, in bytes; 0 without CUDA in the build.
JFLUX_API int64_t jflux_cuda_free_bytes(const int* ordinals, int count);

typedef struct {
  int from, to;  // ordinals
  int loads_and_stores, atomics;
} JfluxPeerAccess;
// What the GPUs that this process sees may do with each other's memory (runtime/peers.h). Fills up
// to `capacity` entries; *count is how many there are.
JFLUX_API const char* jflux_cuda_peers(JfluxPeerAccess* peers, int capacity, int* count);

// The architecture of the kernels' code that this GPU runs (gpu/machine.h). Fails where it runs
// none.
JFLUX_API const char* jflux_cuda_arch(int ordinal, int32_t* arch);

// Tests only, between calls: see Heap.
JFLUX_API const char* jflux_heap_test_hooks(const char* platform, int skip_waits, int max_delay_us);
JFLUX_API const char* jflux_heap_poison(const char* platform);
JFLUX_API const char* jflux_heap_set_epochs(const char* platform, uint64_t epoch);

// Tests only: launches on this device of the process fail from now on; -1: on none.
JFLUX_API void jflux_cuda_fail_launches(int ordinal);

// NVSHMEM (runtime/nvshmem.h), behind a plugin library: load, then start once, in all processes.
JFLUX_API const char* jflux_nvshmem_load(const char* host_library, const char* plugin);
// *id is text for all processes' start; it lives until the calling thread's next call.
JFLUX_API const char* jflux_nvshmem_unique_id(const char** id);
// Collective; blocks until all processes have come. `bytes`: of the arena that workspaces lie in.
JFLUX_API const char* jflux_nvshmem_start(const char* id, int rank, int world, int ordinal,
                                          int64_t bytes);
// The size of the arena; 0 before the start.
JFLUX_API int64_t jflux_nvshmem_arena_bytes(void);
// The workspace bytes of an exchange between nodes (nvshmem/node_exchange.h).
JFLUX_API const char* jflux_node_exchange_plan(int kind, int world, int steps, int64_t block_bytes,
                                               int64_t* workspace_bytes);

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
// The plan of an op for a call on a machine (Op::plan, runtime/op.h): writes up to `capacity`
// fields of the plan, and their number to *count. sm_count 0: the CPU. link_gbps 0: unknown. arch:
// of the kernels' code (gpu/machine.h). The names live until the calling thread's next call.
JFLUX_API const char* jflux_plan(const char* op, const JfluxField* call, int call_count,
                                 int32_t sm_count, double link_gbps, int32_t arch, JfluxField* plan,
                                 int capacity, int* count);
// Numbers and names that Python shares with the kernels; ends with a null name. A name "list.item"
// is an item of a list, whose items come in their order.
JFLUX_API const JfluxField* jflux_constants(void);

// A row of the table of formats (core/format.h).
typedef struct {
  const char* name;
  int32_t bits;
  const char* accumulator;  // its name
  const char* portable;     // instructions; null: none
  int32_t from;             // the least architecture of the portable one; 0: none
  const char* hopper;
  int32_t k_major;
  int32_t scale_block;
  uint32_t stored;  // 1 as an operand, 2 as a result, 4 on the wire
} JfluxFormat;
// The table, in the order of DType; ends with a null name.
JFLUX_API const JfluxFormat* jflux_formats(void);
// The formats that an op takes on "cpu" or "cuda", a bit for each row.
JFLUX_API uint32_t jflux_operand_formats(const char* op, const char* platform);
// Why it does not take x and w and give y of types with these names; null if it does. An op with
// one operand takes it as x and w.
JFLUX_API const char* jflux_why_not_formats(const char* op, const char* platform, const char* x,
                                            const char* w, const char* y);
// The type of y for x and w of types with these names, unless the call names another; null if no
// kernels multiply them.
JFLUX_API const char* jflux_result_format(const char* x, const char* w);

// A configuration of the GPU kernels (gpu/gemm_config.h).
typedef struct {
  int tile_n, cluster_m, group_m, splits;
} JfluxChoice;
// Fills up to `capacity` of the compiled configurations; returns how many there are.
JFLUX_API int jflux_choices(JfluxChoice* choices, int capacity);
// Whether there are kernels for the configuration.
JFLUX_API int jflux_is_possible(const JfluxChoice* choice);
// The GPUs that an op's kernels are for: architectures from one to another (gpu/machine.h). Another
// op's kernels are compiled by its user, for any.
typedef struct {
  int32_t from, to;
} JfluxGpus;
JFLUX_API JfluxGpus jflux_gpus(const char* op);
// How many CTAs may share the k of a tile in calls of few rows; 1 for an op that is not tuned so.
JFLUX_API int jflux_most_splits(const char* op);

// Custom calls (jflux/call.h): what a workspace for so many bytes of data and signals takes.
JFLUX_API int64_t jflux_custom_workspace_bytes(int64_t data_bytes, int64_t num_signals);
// Has load(ordinal) called on every device of this process: now, if the heap on GPUs exists, and
// whenever it is made. It loads kernels, and returns null or what went wrong.
JFLUX_API const char* jflux_add_kernels(const char* (*load)(int ordinal));

// A module for a call of a kernel (runtime/module_table.h). The memory is the caller's.
typedef struct {
  const char* key;
  const char* image;  // a cubin
  int64_t image_bytes;
  const char* function;
  int32_t threads, shared_bytes;  // of a block
  int64_t scratch_bytes;          // of global memory, of a block
} JfluxModule;
// Loads it on the devices of the heap on GPUs. *per_sm: how many blocks a multiprocessor of each of
// them holds at once; 0 without a heap.
JFLUX_API const char* jflux_add_module(const JfluxModule* m, int64_t* per_sm);
// Tests only, between calls, on GPUs: copies `bytes` bytes at `offset` of a device's copy of a
// workspace to `to`.
JFLUX_API const char* jflux_heap_read(const char* platform, const JfluxWorkspace* w, int64_t device,
                                      int64_t offset, int64_t bytes, char* to);

#endif  // JFLUX_RUNTIME_CAPI_H_
