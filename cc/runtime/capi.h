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

JFLUX_API const char* jflux_cpu_heap_init(const int64_t* devices, int num_devices,
                                          int64_t heap_bytes, double deadline_s, int owns_table,
                                          char* handle, int handle_size);
JFLUX_API const char* jflux_cpu_heap_attach(const char* handle, const int64_t* devices,
                                            int num_devices, int has_table);
JFLUX_API void jflux_cpu_heap_shutdown(void);
// Tests only: see TestHooks and HeapCpu::PoisonFree.
JFLUX_API void jflux_cpu_heap_test_hooks(int skip_waits, int max_delay_us);
JFLUX_API void jflux_cpu_heap_poison(void);
// Bytes of each rank's heap that calls hold now / that some call has ever held.
JFLUX_API void jflux_cpu_heap_usage(int64_t* in_use, int64_t* touched);

// The heap on GPUs. Without CUDA in the build, each of these only says so.
JFLUX_API const char* jflux_cuda_heap_init(const int* ordinals, const int64_t* ids, int num_devices,
                                           int64_t heap_bytes, double deadline_s);
JFLUX_API const char* jflux_cuda_heap_export(int64_t id, char* handle, int handle_size);
JFLUX_API const char* jflux_cuda_heap_attach(int64_t id, const char* handle);
// A single process: makes sure that there is a workspace; 0 if the heap has no room.
JFLUX_API int jflux_cuda_heap_find_workspace(const int64_t* groups, int count, int64_t total_bytes);
JFLUX_API int64_t jflux_cuda_heap_taken(void);
// Several processes: the place that they agreed on.
JFLUX_API const char* jflux_cuda_heap_add_workspace(const int64_t* groups, int count,
                                                    int64_t total_bytes, int64_t offset);
// After all attachments: probes the links; fails if one cannot be trusted.
JFLUX_API const char* jflux_cuda_heap_probe(void);
typedef struct {
  int64_t from, to;
  double push_gbps, pull_gbps, signal_us;
} JfluxLink;
// Fills up to `capacity` links; returns how many there are.
JFLUX_API int jflux_cuda_heap_links(JfluxLink* links, int capacity);
JFLUX_API void jflux_cuda_heap_shutdown(void);
JFLUX_API const char* jflux_cuda_heap_test_hooks(int skip_waits, int max_delay_us);
JFLUX_API const char* jflux_cuda_heap_poison(void);
JFLUX_API const char* jflux_cuda_heap_set_epochs(uint32_t epoch);
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

// What a call needs of the heap: the size of its workspace in bytes, or -1 for an unknown op or
// a configuration that is not compiled.
typedef struct {
  int64_t world, outer, inner, k, n;
  int dtype, out_dtype;  // core/dtype.h
  int transpose_rhs;
} JfluxProduct;
JFLUX_API int64_t jflux_cuda_workspace_bytes(const char* op, const JfluxProduct* product,
                                             const JfluxChoice* choice);
// The heuristic's configuration, for GPUs with so many SMs whose links carry so much (0: unknown);
// false for an unknown op.
JFLUX_API int jflux_choose(const char* op, const JfluxProduct* product, int sm_count,
                           double link_gbps, JfluxChoice* choice);
// all_reduce: what its workspace takes (width: of rows that are normalised, else 0), whether such
// rows can be, and which algorithm suits so many bytes (-1: XLA's own).
JFLUX_API int64_t jflux_all_reduce_workspace_bytes(int64_t world, int64_t count, int dtype,
                                                   int algorithm, int64_t width);
JFLUX_API int jflux_all_reduce_fits_norm(int64_t count, int dtype, int64_t width);
JFLUX_API int jflux_choose_all_reduce(int64_t world, int64_t bytes);
// What the workspace of an exchange of shards of so many bytes takes, in packets or in chunks.
JFLUX_API int64_t jflux_exchange_workspace_bytes(int64_t world, int64_t shard_bytes, int chunked);
// Custom calls (jflux/call.h): what a workspace for so many bytes of data and signals takes.
JFLUX_API int64_t jflux_custom_workspace_bytes(int64_t data_bytes, int64_t num_signals);
// Has load(ordinal) called on every device of this process: now, if the heap on GPUs exists, and
// whenever it is made. It loads kernels, and returns null or what went wrong.
JFLUX_API const char* jflux_add_kernels(const char* (*load)(int ordinal));
// Where workspaces start in the heap.
JFLUX_API int64_t jflux_cuda_first_workspace(void);

#endif  // JFLUX_RUNTIME_CAPI_H_
