// The C interface to the ops: their FFI targets, plans and constants.
#include <cstring>
#include <string>
#include <vector>

#include "core/activation.h"
#include "core/format.h"
#include "core/layout.h"
#include "gpu/gemm_config.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/capi.h"
#include "runtime/ffi.h"
#include "runtime/op.h"
#include "runtime/reason.h"

namespace jflux {
extern XLA_FFI_Handler* const kInRangeCpu;  // in_range_ffi.cc
}  // namespace jflux

#ifdef JFLUX_WITH_CUDA
#include "runtime/workspace_use.h"

namespace jflux {
extern XLA_FFI_Handler* const kNodeExchangeCuda;  // node_exchange_ffi.cc
extern XLA_FFI_Handler* const kModuleCallCuda;    // module_call_ffi.cc
}  // namespace jflux
#endif

namespace {

using jflux::Reason;

const char* KeptForever(const std::string& text) { return strdup(text.c_str()); }

// Empty if there is no such op.
jflux::OpFormats FormatsOf(const std::string& op, const std::string& platform) {
  if (const jflux::Op* found = jflux::FindOp(op)) {
    return platform == "cpu" ? found->cpu_formats : found->cuda_formats;
  }
  return {};
}

}  // namespace

const JfluxTarget* jflux_targets(void) {
  static const auto* targets = [] {
    auto* list = new std::vector<JfluxTarget>;
    for (const jflux::Op* op : jflux::AllOps()) {
      const char* name = KeptForever(std::string("jflux_") + op->name);
      const auto add = [&](const char* platform, auto* instantiate, XLA_FFI_Handler* handler) {
        if (handler == nullptr) return;
        void* state = op->IsLocal() ? nullptr : reinterpret_cast<void*>(instantiate);
        list->push_back({name, platform, state, reinterpret_cast<void*>(handler)});
      };
      add("cpu", jflux::InstantiateCallSite, op->cpu);
#ifdef JFLUX_WITH_CUDA
      add("CUDA", jflux::InstantiateWorkspaceUse, op->cuda);
#endif
    }
    // No op: a check of values, which GPUs do not make.
    list->push_back(
        {"jflux_in_range", "cpu", nullptr, reinterpret_cast<void*>(jflux::kInRangeCpu)});
#ifdef JFLUX_WITH_CUDA
    // No Op: on the CPU, and without NVSHMEM, it is XLA's collective.
    list->push_back({"jflux_node_exchange", "CUDA",
                     reinterpret_cast<void*>(jflux::InstantiateWorkspaceUse),
                     reinterpret_cast<void*>(jflux::kNodeExchangeCuda)});
    // Nor here: on the CPU it is the caller's reference.
    list->push_back({"jflux_module_call", "CUDA",
                     reinterpret_cast<void*>(jflux::InstantiateWorkspaceUse),
                     reinterpret_cast<void*>(jflux::kModuleCallCuda)});
#endif
    list->push_back({nullptr, nullptr, nullptr, nullptr});
    return list;
  }();
  return targets->data();
}

const char* jflux_plan(const char* op, const JfluxField* call, int call_count, int32_t sm_count,
                       double link_gbps, int32_t arch, JfluxField* plan, int capacity, int* count) {
  thread_local jflux::Fields kept;  // holds the names
  const jflux::Op* found = jflux::FindOp(op);
  if (found == nullptr || found->IsLocal()) return Reason(std::string("jflux has no op ") + op);
  if (sm_count < 0 || !(link_gbps >= 0)) return Reason("a machine has no negative numbers");
  jflux::Fields fields;
  for (int i = 0; i < call_count; ++i) fields[call[i].name] = call[i].value;
  std::string why_not;
  kept.clear();
  jflux::CallReader reader(fields);
  if (!found->plan(reader, jflux::Machine{sm_count, link_gbps, arch}, &kept, &why_not)) {
    return Reason(std::string("jflux.") + op + ": " + why_not);
  }
  *count = 0;
  for (const auto& [name, value] : kept) {
    if (*count < capacity) plan[*count] = {name.c_str(), value};
    ++*count;
  }
  return nullptr;
}

const JfluxField* jflux_constants(void) {
  static const auto* constants = [] {
    auto* list = new std::vector<JfluxField>{
        {"max_ranks", jflux::kMaxRanks},         {"max_weights", jflux::kMaxWeights},
        {"tile_rows", jflux::kGemmTileM},        {"vector_bytes", jflux::kVectorBytes},
        {"portable_arch", jflux::kPortableArch}, {"float8_arch", jflux::kFloat8Arch},
        {"hopper_arch", jflux::kHopperArch},
    };
    auto number = static_cast<int64_t>(jflux::Activation::kNone);
    for (const char* name : jflux::kActivationNames) {
      list->push_back({KeptForever(std::string("activations.") + name), ++number});
    }
    const auto list_tiles = [&](const std::string& name, jflux::Scales scales) {
      number = 0;
      for (const jflux::GemmChoice& c : jflux::GroupedChoicesOf(scales)) {
        const std::string tile = std::to_string(c.tile_n) + "/" + std::to_string(c.cluster_m);
        list->push_back({KeptForever(name + "." + tile), number++});
      }
    };
    list_tiles("grouped_tiles", jflux::Scales::kNone);
    list_tiles("grouped_tiles_of_sums", jflux::Scales::kOfSums);
    list_tiles("grouped_tiles_of_blocks", jflux::Scales::kOfBlocks);
    list_tiles("grouped_tiles_of_vectors", jflux::Scales::kOfVectors);
    for (const jflux::Op* op : jflux::AllOps()) {
      for (const jflux::Constant* c = op->constants; c != nullptr && c->name != nullptr; ++c) {
        list->push_back({c->name, c->value});
      }
    }
    list->push_back({nullptr, 0});
    return list;
  }();
  return constants->data();
}

const JfluxFormat* jflux_formats(void) {
  static const auto* formats = [] {
    auto* list = new std::vector<JfluxFormat>;
    for (const jflux::Format& f : jflux::kFormats) {
      list->push_back({f.name, f.bits, jflux::FormatOf(f.accumulator).name, f.portable, f.from,
                       f.hopper, f.k_major, f.scale_block, f.stored});
    }
    list->push_back({});
    return list;
  }();
  return formats->data();
}

uint32_t jflux_operand_formats(const char* op, const char* platform) {
  return static_cast<uint32_t>(FormatsOf(op, platform).operands);
}

const char* jflux_why_not_formats(const char* op, const char* platform, const char* x,
                                  const char* w, const char* y) {
  const std::string why =
      jflux::WhyNotFormats(FormatsOf(op, platform), jflux::kAllFormats, x, w, y);
  return why.empty() ? nullptr : Reason(why);
}

const char* jflux_result_format(const char* x, const char* w) {
  for (const jflux::ProductFormats& p : jflux::kProducts) {
    if (jflux::FormatOf(p.x).name == std::string(x) && jflux::FormatOf(p.w).name == std::string(w))
      return jflux::FormatOf(p.y).name;
  }
  return nullptr;
}

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

JfluxGpus jflux_gpus(const char* op) {
  for (const jflux::OpFolder& folder : jflux::AllFolders()) {
    for (const jflux::Op* known : folder.ops) {
      if (std::strcmp(op, known->name) == 0) return {folder.gpus.from, folder.gpus.to};
    }
  }
  return {0, INT32_MAX};
}

int jflux_most_splits(const char* op) {
  const jflux::Op* found = jflux::FindOp(op);
  return found == nullptr ? 1 : found->most_splits;
}
