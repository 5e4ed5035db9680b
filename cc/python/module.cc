// The Python module over the C interface: conversions only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>

#include "runtime/capi.h"

namespace nb = nanobind;

namespace {

constexpr const char* kHandlerCapsule = "xla._CUSTOM_CALL_TARGET";

void Check(const char* reason) {
  if (reason != nullptr) throw std::runtime_error(reason);
}

// For what may wait for a device's kernels, as CUDA's maps of memory do: Python's other threads run
// meanwhile.
template <typename F>
void CheckReleased(F&& call) {
  nb::gil_scoped_release release;
  Check(call());
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

nb::dict Plan(const std::string& op, const std::map<std::string, int64_t>& call, int32_t sm_count,
              double link_gbps, int32_t arch) {
  std::vector<JfluxField> fields;
  for (const auto& [name, value] : call) fields.push_back({name.c_str(), value});
  std::array<JfluxField, 64> plan;
  int count = 0;
  const char* why_not =
      jflux_plan(op.c_str(), fields.data(), static_cast<int>(fields.size()), sm_count, link_gbps,
                 arch, plan.data(), static_cast<int>(plan.size()), &count);
  if (why_not != nullptr) throw nb::value_error(why_not);
  nb::dict result;
  for (int i = 0; i < count; ++i) result[plan[i].name] = plan[i].value;
  return result;
}

// Items of lists are "list.item".
nb::dict Constants() {
  nb::dict result;
  for (const JfluxField* c = jflux_constants(); c->name != nullptr; ++c) {
    const std::string name = c->name;
    const size_t dot = name.find('.');
    if (dot == std::string::npos) {
      result[c->name] = c->value;
      continue;
    }
    const std::string list = name.substr(0, dot);
    if (!result.contains(list.c_str())) result[list.c_str()] = nb::list();
    nb::cast<nb::list>(result[list.c_str()]).append(name.substr(dot + 1));
  }
  return result;
}

// Rows of the table of formats, as dictionaries.
nb::list Formats() {
  nb::list result;
  for (const JfluxFormat* f = jflux_formats(); f->name != nullptr; ++f) {
    nb::dict row;
    row["name"] = f->name;
    row["bits"] = f->bits;
    row["accumulator"] = f->accumulator;
    row["portable"] = f->portable;
    row["portable_from"] = f->from;
    row["hopper"] = f->hopper;
    row["k_major"] = f->k_major != 0;
    row["scale_block"] = f->scale_block;
    row["stored"] = f->stored;
    result.append(row);
  }
  return result;
}

}  // namespace

NB_MODULE(_jflux, m) {
  m.def("targets", &Targets);
  // [(name, platform, {"type_id": capsule, "type_info": capsule})]
  m.def("state_types", [] {
    nb::list result;
    for (const JfluxStateType* t = jflux_state_types(); t->name != nullptr; ++t) {
      nb::dict d;
      d["type_id"] = nb::capsule(t->type_id);
      d["type_info"] = nb::capsule(t->type_info);
      result.append(nb::make_tuple(t->name, t->platform, d));
    }
    return result;
  });
  m.def("built_with_cuda", [] { return jflux_built_with_cuda() != 0; });
  m.def("set_blas", [](uintptr_t sgemm, uintptr_t dgemm) {
    jflux_set_blas(reinterpret_cast<void*>(sgemm), reinterpret_cast<void*>(dgemm));
  });
  // The symmetric heap, whatever its back end.
  m.def("heap_create", [](const std::string& platform, const std::string& backend,
                          const std::vector<int64_t>& devices, const std::vector<int>& ordinals,
                          int64_t heap_bytes, double deadline_s, double warn_s, bool leads) {
    const JfluxHeapConfig config{devices.data(),
                                 ordinals.empty() ? nullptr : ordinals.data(),
                                 static_cast<int>(devices.size()),
                                 heap_bytes,
                                 deadline_s,
                                 leads,
                                 warn_s};
    if (!ordinals.empty() && ordinals.size() != devices.size()) {
      throw nb::value_error("as many ordinals as devices");
    }
    nb::gil_scoped_release release;
    const char* reason = jflux_heap_create(platform.c_str(), backend.c_str(), &config);
    if (reason != nullptr) throw std::runtime_error(reason);
  });
  m.def("heap_export", [](const std::string& platform) {
    const char* handle = nullptr;
    Check(jflux_heap_export(platform.c_str(), &handle));
    return std::string(handle);
  });
  m.def("heap_attach", [](const std::string& platform, const std::string& handle) {
    CheckReleased([&] { return jflux_heap_attach(platform.c_str(), handle.c_str()); });
  });
  m.def("heap_close", [](const std::string& platform) {
    nb::gil_scoped_release release;
    jflux_heap_close(platform.c_str());
  });
  m.def("heap_probe", [](const std::string& platform, const std::vector<int64_t>& devices,
                         int64_t bytes, int step) {
    const JfluxWorkspace w{devices.data(), static_cast<int>(devices.size()), bytes};
    nb::gil_scoped_release release;
    const char* reason = jflux_heap_probe(platform.c_str(), &w, step);
    if (reason != nullptr) throw std::runtime_error(reason);
  });
  m.def("probe_bytes", &jflux_probe_bytes);
  // [(from, to, push GB/s, pull GB/s, signal us)]
  m.def("heap_links", [](const std::string& platform) {
    std::vector<JfluxLink> links(64 * 64);
    links.resize(jflux_heap_links(platform.c_str(), links.data(), static_cast<int>(links.size())));
    nb::list result;
    for (const JfluxLink& l : links) {
      result.append(nb::make_tuple(l.from, l.to, l.push_gbps, l.pull_gbps, l.signal_us));
    }
    return result;
  });
  m.def("heap_shutdown", [](const std::string& platform, bool keep) {
    nb::gil_scoped_release release;
    jflux_heap_shutdown(platform.c_str(), keep);
  });
  m.def("cuda_free_bytes", [](const std::vector<int>& ordinals) {
    return jflux_cuda_free_bytes(ordinals.data(), static_cast<int>(ordinals.size()));
  });
  // [(from, to, loads and stores, atomics)], by ordinals.
  m.def("cuda_peers", [] {
    std::vector<JfluxPeerAccess> peers(64 * 64);
    int count = 0;
    const char* reason = jflux_cuda_peers(peers.data(), static_cast<int>(peers.size()), &count);
    if (reason != nullptr) throw std::runtime_error(reason);
    peers.resize(count);
    nb::list result;
    for (const JfluxPeerAccess& p : peers) {
      result.append(nb::make_tuple(p.from, p.to, p.loads_and_stores != 0, p.atomics != 0));
    }
    return result;
  });
  m.def("cuda_arch", [](int ordinal) {
    int32_t arch = 0;
    nb::gil_scoped_release release;
    const char* reason = jflux_cuda_arch(ordinal, &arch);
    if (reason != nullptr) throw std::runtime_error(reason);
    return arch;
  });
  // Reserved workspaces, by their devices and size.
  m.def("heap_add_workspace",
        [](const std::string& platform, const std::vector<int64_t>& devices, int64_t bytes) {
          const JfluxWorkspace w{devices.data(), static_cast<int>(devices.size()), bytes};
          std::string handle, reason;
          {
            nb::gil_scoped_release release;
            const char* text = nullptr;
            if (const char* why = jflux_heap_add_workspace(platform.c_str(), &w, &text))
              reason = why;
            handle = text;
          }
          if (!reason.empty()) throw std::runtime_error(reason);
          return handle;
        });
  m.def("heap_attach_workspace",
        [](const std::string& platform, const std::vector<int64_t>& devices, int64_t bytes,
           const std::string& handle) {
          const JfluxWorkspace w{devices.data(), static_cast<int>(devices.size()), bytes};
          CheckReleased(
              [&] { return jflux_heap_attach_workspace(platform.c_str(), &w, handle.c_str()); });
        });
  const auto step = [&m](const char* name,
                         const char* (*function)(const char*, const JfluxWorkspace*)) {
    m.def(name, [function](const std::string& platform, const std::vector<int64_t>& devices,
                           int64_t bytes) {
      const JfluxWorkspace w{devices.data(), static_cast<int>(devices.size()), bytes};
      nb::gil_scoped_release release;
      const char* reason = function(platform.c_str(), &w);
      if (reason != nullptr) throw std::runtime_error(reason);
    });
  };
  step("heap_commit_workspace", &jflux_heap_commit_workspace);
  step("heap_close_workspace", &jflux_heap_close_workspace);
  step("heap_free_workspace", &jflux_heap_free_workspace);
  m.def("heap_has_workspace",
        [](const std::string& platform, const std::vector<int64_t>& devices, int64_t bytes) {
          const JfluxWorkspace w{devices.data(), static_cast<int>(devices.size()), bytes};
          return jflux_heap_has_workspace(platform.c_str(), &w) != 0;
        });
  m.def("heap_unused_workspaces", [](const std::string& platform) {
    return std::string(jflux_heap_unused_workspaces(platform.c_str()));
  });
  // (in use, touched)
  m.def("heap_usage", [](const std::string& platform) {
    int64_t in_use, touched;
    jflux_heap_usage(platform.c_str(), &in_use, &touched);
    return nb::make_tuple(in_use, touched);
  });
  m.def("heap_test_hooks", [](const std::string& platform, bool skip_waits, int max_delay_us) {
    CheckReleased(
        [&] { return jflux_heap_test_hooks(platform.c_str(), skip_waits, max_delay_us); });
  });
  m.def("heap_poison", [](const std::string& platform) {
    CheckReleased([&] { return jflux_heap_poison(platform.c_str()); });
  });
  m.def("heap_set_epochs", [](const std::string& platform, uint64_t epoch) {
    CheckReleased([&] { return jflux_heap_set_epochs(platform.c_str(), epoch); });
  });

  // NVSHMEM.
  m.def("nvshmem_load", [](const std::string& host_library, const std::string& plugin) {
    Check(jflux_nvshmem_load(host_library.c_str(), plugin.c_str()));
  });
  m.def("nvshmem_unique_id", [] {
    const char* id = nullptr;
    Check(jflux_nvshmem_unique_id(&id));
    return std::string(id);
  });
  m.def("nvshmem_start",
        [](const std::string& id, int rank, int world, int ordinal, int64_t bytes) {
          nb::gil_scoped_release release;
          const char* reason = jflux_nvshmem_start(id.c_str(), rank, world, ordinal, bytes);
          if (reason != nullptr) throw std::runtime_error(reason);
        });
  m.def("nvshmem_arena_bytes", &jflux_nvshmem_arena_bytes);
  // The bytes of the workspace.
  m.def("node_exchange_plan", [](int kind, int world, int steps, int64_t block_bytes) {
    int64_t workspace_bytes = 0;
    if (const char* why =
            jflux_node_exchange_plan(kind, world, steps, block_bytes, &workspace_bytes)) {
      throw nb::value_error(why);
    }
    return workspace_bytes;
  });

  m.def("cuda_timeline_start", [](int64_t capacity) {
    CheckReleased([&] { return jflux_cuda_timeline_start(capacity); });
  });
  // The events as bytes, and how many found no room.
  m.def("cuda_timeline_read", [](int64_t id, int64_t capacity) {
    std::vector<JfluxEvent> events(capacity);
    int64_t count = 0;
    CheckReleased([&] { return jflux_cuda_timeline_read(id, events.data(), capacity, &count); });
    const int64_t kept = std::min(count, capacity);
    return nb::make_tuple(nb::bytes(events.data(), kept * sizeof(JfluxEvent)), count - kept);
  });
  m.def("cuda_timeline_stop", [] { CheckReleased(&jflux_cuda_timeline_stop); });
  m.def("cuda_fail_launches", [](int ordinal) { jflux_cuda_fail_launches(ordinal); });
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
  m.def("gpus", [](const char* op) {
    const JfluxGpus gpus = jflux_gpus(op);
    return nb::make_tuple(gpus.from, gpus.to);
  });
  m.def("most_splits", &jflux_most_splits);
  m.def("plan", &Plan);
  m.def("constants", &Constants);
  m.def("formats", &Formats);
  m.def("operand_formats", &jflux_operand_formats);
  m.def("why_not_formats", [](const std::string& op, const std::string& platform,
                              const std::string& x, const std::string& w, const std::string& y) {
    const char* why =
        jflux_why_not_formats(op.c_str(), platform.c_str(), x.c_str(), w.c_str(), y.c_str());
    return std::string(why == nullptr ? "" : why);
  });
  m.def("result_format", [](const std::string& x, const std::string& w) {
    const char* y = jflux_result_format(x.c_str(), w.c_str());
    return std::string(y == nullptr ? "" : y);
  });
  m.def("custom_workspace_bytes", &jflux_custom_workspace_bytes);
  // How many blocks a multiprocessor holds at once; 0 without a heap.
  m.def("add_module", [](const std::string& key, const nb::bytes& image,
                         const std::string& function, int threads, int shared_bytes,
                         int64_t scratch_bytes) {
    const JfluxModule module{key.c_str(),      image.c_str(), static_cast<int64_t>(image.size()),
                             function.c_str(), threads,       shared_bytes,
                             scratch_bytes};
    int64_t per_sm = 0;
    nb::gil_scoped_release release;
    const char* reason = jflux_add_module(&module, &per_sm);
    if (reason != nullptr) throw std::runtime_error(reason);
    return per_sm;
  });
  m.def("heap_read", [](const std::string& platform, const std::vector<int64_t>& devices,
                        int64_t bytes, int64_t device, int64_t offset, int64_t count) {
    const JfluxWorkspace w{devices.data(), static_cast<int>(devices.size()), bytes};
    std::string data(static_cast<size_t>(count), 0);
    CheckReleased(
        [&] { return jflux_heap_read(platform.c_str(), &w, device, offset, count, data.data()); });
    return nb::bytes(data.data(), data.size());
  });
  m.def("add_kernels", [](uintptr_t load) {
    Check(jflux_add_kernels(reinterpret_cast<const char* (*)(int)>(load)));
  });
}
