// The Python module over the C interface: conversions only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "runtime/capi.h"

namespace nb = nanobind;

namespace {

constexpr const char* kHandlerCapsule = "xla._CUSTOM_CALL_TARGET";

void Check(const char* reason) {
  if (reason != nullptr) throw std::runtime_error(reason);
}

// [(name, platform, {stage: capsule})]
nb::list Targets() {
  nb::list result;
  for (const JfluxTarget* t = jflux_targets(); t->name != nullptr; ++t) {
    nb::dict stages;
    if (t->instantiate != nullptr) {
      stages["instantiate"] = nb::capsule(t->instantiate, kHandlerCapsule);
    }
    stages["execute"] = nb::capsule(t->execute, kHandlerCapsule);
    result.append(nb::make_tuple(t->name, t->platform, stages));
  }
  return result;
}

}  // namespace

NB_MODULE(_jflux, m) {
  m.def("targets", &Targets);
  m.def("call_site_type", [] {
    nb::dict d;
    d["type_id"] = nb::capsule(jflux_call_site_type_id());
    d["type_info"] = nb::capsule(jflux_call_site_type_info());
    return d;
  });
  m.def("begin_module", &jflux_begin_module);
  m.def("built_with_cuda", [] { return jflux_built_with_cuda() != 0; });
  m.def("set_blas", [](uintptr_t sgemm, uintptr_t dgemm) {
    jflux_set_blas(reinterpret_cast<void*>(sgemm), reinterpret_cast<void*>(dgemm));
  });
  m.def("cpu_heap_init", [](const std::vector<int64_t>& devices, int64_t heap_bytes,
                            double deadline_s, bool owns_table) {
    char handle[64];
    Check(jflux_cpu_heap_init(devices.data(), static_cast<int>(devices.size()), heap_bytes,
                              deadline_s, owns_table, handle, sizeof(handle)));
    return std::string(handle);
  });
  m.def("cpu_heap_attach",
        [](const std::string& handle, const std::vector<int64_t>& devices, bool has_table) {
          Check(jflux_cpu_heap_attach(handle.c_str(), devices.data(),
                                      static_cast<int>(devices.size()), has_table));
        });
  m.def("cpu_heap_shutdown", &jflux_cpu_heap_shutdown);
  m.def("cpu_heap_test_hooks", &jflux_cpu_heap_test_hooks);
  m.def("cpu_heap_poison", &jflux_cpu_heap_poison);
  m.def("cpu_heap_usage", [] {
    int64_t in_use, touched;
    jflux_cpu_heap_usage(&in_use, &touched);
    return nb::make_tuple(in_use, touched);
  });

  m.def("cuda_heap_init", [](const std::vector<int>& ordinals, const std::vector<int64_t>& ids,
                             int64_t heap_bytes, double deadline_s) {
    nb::gil_scoped_release release;
    const char* reason = jflux_cuda_heap_init(ordinals.data(), ids.data(),
                                              static_cast<int>(ids.size()), heap_bytes, deadline_s);
    if (reason != nullptr) throw std::runtime_error(reason);
  });
  m.def("cuda_heap_export", [](int64_t id) {
    char handle[256];
    Check(jflux_cuda_heap_export(id, handle, sizeof(handle)));
    return std::string(handle);
  });
  m.def("cuda_heap_attach", [](int64_t id, const std::string& handle) {
    Check(jflux_cuda_heap_attach(id, handle.c_str()));
  });
  m.def("cuda_heap_find_workspace", [](const std::vector<int64_t>& groups, int64_t total_bytes) {
    return jflux_cuda_heap_find_workspace(groups.data(), static_cast<int>(groups.size()),
                                          total_bytes) != 0;
  });
  m.def("cuda_heap_taken", &jflux_cuda_heap_taken);
  m.def("cuda_heap_add_workspace",
        [](const std::vector<int64_t>& groups, int64_t total_bytes, int64_t offset) {
          Check(jflux_cuda_heap_add_workspace(groups.data(), static_cast<int>(groups.size()),
                                              total_bytes, offset));
        });
  m.def("cuda_heap_probe", [] {
    nb::gil_scoped_release release;
    const char* reason = jflux_cuda_heap_probe();
    if (reason != nullptr) throw std::runtime_error(reason);
  });
  // [(from, to, push GB/s, pull GB/s, signal us)]
  m.def("cuda_heap_links", [] {
    std::vector<JfluxLink> links(64 * 64);
    links.resize(jflux_cuda_heap_links(links.data(), static_cast<int>(links.size())));
    nb::list result;
    for (const JfluxLink& l : links) {
      result.append(nb::make_tuple(l.from, l.to, l.push_gbps, l.pull_gbps, l.signal_us));
    }
    return result;
  });
  m.def("cuda_heap_shutdown", &jflux_cuda_heap_shutdown);
  m.def("cuda_heap_test_hooks", [](bool skip_waits, int max_delay_us) {
    Check(jflux_cuda_heap_test_hooks(skip_waits, max_delay_us));
  });
  m.def("cuda_heap_poison", [] { Check(jflux_cuda_heap_poison()); });
  m.def("cuda_heap_set_epochs", [](uint32_t epoch) { Check(jflux_cuda_heap_set_epochs(epoch)); });
  m.def("cuda_timeline_start",
        [](int64_t capacity) { Check(jflux_cuda_timeline_start(capacity)); });
  // The events as bytes, and how many found no room.
  m.def("cuda_timeline_read", [](int64_t id, int64_t capacity) {
    std::vector<JfluxEvent> events(capacity);
    int64_t count = 0;
    Check(jflux_cuda_timeline_read(id, events.data(), capacity, &count));
    const int64_t kept = std::min(count, capacity);
    return nb::make_tuple(nb::bytes(events.data(), kept * sizeof(JfluxEvent)), count - kept);
  });
  m.def("cuda_timeline_stop", [] { Check(jflux_cuda_timeline_stop()); });
  m.def("cuda_launches", [] { return jflux_cuda_launches(); });
  m.def("choices", [] {
    JfluxChoice choices[16];
    nb::list list;
    const int count = std::min(jflux_choices(choices, 16), 16);
    for (int i = 0; i < count; ++i) {
      list.append(nb::make_tuple(choices[i].tile_n, choices[i].cluster_m, choices[i].group_m,
                                 choices[i].splits));
    }
    return list;
  });
  m.def("is_possible", [](const std::array<int, 4>& choice) {
    const JfluxChoice c{choice[0], choice[1], choice[2], choice[3]};
    return jflux_is_possible(&c) != 0;
  });
  m.def("most_splits", &jflux_most_splits);
  m.def("choose", [](const std::string& op, int64_t world, int64_t outer, int64_t inner, int64_t k,
                     int64_t n, int sm_count, double link_gbps) {
    const JfluxProduct product{world, outer, inner, k, n, 0, 0, 0};
    JfluxChoice choice;
    if (!jflux_choose(op.c_str(), &product, sm_count, link_gbps, &choice)) {
      throw nb::value_error(op.c_str());
    }
    return nb::make_tuple(choice.tile_n, choice.cluster_m, choice.group_m, choice.splits);
  });
  m.def("cuda_workspace_bytes",
        [](const std::string& op, int64_t world, int64_t outer, int64_t inner, int64_t k, int64_t n,
           int dtype, int out_dtype, bool transpose_rhs, const std::array<int, 4>& choice) {
          const JfluxProduct product{world, outer, inner, k, n, dtype, out_dtype, transpose_rhs};
          const JfluxChoice with{choice[0], choice[1], choice[2], choice[3]};
          return jflux_cuda_workspace_bytes(op.c_str(), &product, &with);
        });
  m.def("all_reduce_workspace_bytes", &jflux_all_reduce_workspace_bytes);
  m.def("all_reduce_fits_norm", &jflux_all_reduce_fits_norm);
  m.def("exchange_workspace_bytes", &jflux_exchange_workspace_bytes);
  m.def("choose_all_reduce", &jflux_choose_all_reduce);
  m.def("cuda_first_workspace", &jflux_cuda_first_workspace);
  m.def("custom_workspace_bytes", &jflux_custom_workspace_bytes);
  m.def("add_kernels", [](uintptr_t load) {
    Check(jflux_add_kernels(reinterpret_cast<const char* (*)(int)>(load)));
  });
}
