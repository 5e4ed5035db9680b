#include "runtime/capi.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/cpu_matmul.h"
#include "runtime/ffi.h"
#include "runtime/heap_cpu.h"
#include "runtime/targets.h"

namespace {

const char* Reason(const std::string& text) {
  thread_local std::string kept;
  kept = text;
  return kept.c_str();
}

// The heap under construction: calls see it once all processes are attached.
std::shared_ptr<jflux::HeapCpu> g_heap;

}  // namespace

const JfluxTarget* jflux_targets(void) {
  static const auto* targets = [] {
    auto* list = new std::vector<JfluxTarget>;
    for (const jflux::Target* t = jflux::Targets(); t->name != nullptr; ++t) {
      list->push_back({t->name, t->platform, reinterpret_cast<void*>(t->instantiate),
                       reinterpret_cast<void*>(t->execute)});
    }
    list->push_back({nullptr, nullptr, nullptr, nullptr});
    return list;
  }();
  return targets->data();
}

void* jflux_call_site_type_id(void) { return &jflux::CallSite::id; }
void* jflux_call_site_type_info(void) { return &jflux::CallSite::info; }

void jflux_begin_module(void) { jflux::BeginModule(); }

int jflux_built_with_cuda(void) {
#ifdef JFLUX_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

void jflux_set_blas(void* sgemm, void* dgemm) { jflux::SetBlas(sgemm, dgemm); }

const char* jflux_cpu_heap_init(const int64_t* devices, int num_devices, int64_t heap_bytes,
                                double deadline_s, int owns_table, char* handle, int handle_size) {
  std::string error;
  std::shared_ptr<jflux::HeapCpu> heap =
      jflux::HeapCpu::Create(std::vector<int64_t>(devices, devices + num_devices), heap_bytes,
                             deadline_s, owns_table != 0, &error);
  if (heap == nullptr) return Reason(error);
  std::strncpy(handle, heap->Handle().c_str(), handle_size - 1);
  handle[handle_size - 1] = 0;
  g_heap = heap;
  jflux::SetCurrentHeapCpu(heap);
  return nullptr;
}

const char* jflux_cpu_heap_attach(const char* handle, const int64_t* devices, int num_devices,
                                  int has_table) {
  std::string error;
  if (!g_heap->Attach(handle, std::vector<int64_t>(devices, devices + num_devices), has_table != 0,
                      &error)) {
    return Reason(error);
  }
  return nullptr;
}

void jflux_cpu_heap_shutdown(void) {
  jflux::SetCurrentHeapCpu(nullptr);
  g_heap = nullptr;
}

void jflux_cpu_heap_usage(int64_t* in_use, int64_t* touched) {
  *in_use = *touched = 0;
  if (g_heap == nullptr || g_heap->table() == nullptr) return;
  *in_use = g_heap->table()->BytesInUse();
  *touched = g_heap->table()->BytesTouched();
}

void jflux_cpu_heap_test_hooks(int skip_waits, int max_delay_us) {
  if (g_heap == nullptr) return;
  g_heap->hooks() =
      jflux::TestHooks{static_cast<uint32_t>(skip_waits), static_cast<uint32_t>(max_delay_us)};
}

void jflux_cpu_heap_poison(void) {
  if (g_heap != nullptr) g_heap->PoisonFree();
}
