// The handler that launches a kernel of the module table (module_table.h). There are two kinds:
//
//   jflux.symm.call             compiled by Triton; arguments begin with those of jflux/triton.py
//   jflux.custom_call(source=)  compiled by NVRTC; arguments begin with jflux::shmem::CallArgs
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "jflux/call.h"
#include "jflux/shmem.h"
#include "runtime/capi.h"
#include "runtime/ffi.h"
#include "runtime/reason.h"

#ifdef JFLUX_WITH_CUDA
#include "gpu/device_state.h"
#include "runtime/cuda_call.h"
#include "runtime/module_table.h"

namespace jflux {
namespace {

// jflux/triton.py has these offsets and sizes as numbers.
static_assert(offsetof(WorkspaceHeader, epoch_and_id) == 0 && kIdBits == 24);
static_assert(offsetof(WorkspaceHeader, stop) == 16 && offsetof(WorkspaceHeader, inside) == 24);
static_assert(kHeapAlign == 1024 && kMaxRanks == 8 && kSignatureBits == 24 && kEpochBits == 40);
static_assert(offsetof(DeviceState, hooks) == 0 && offsetof(TestHooks, skip_waits) == 0 &&
              offsetof(TestHooks, max_delay_us) == 4);
static_assert(offsetof(DeviceState, limits) == 32 && offsetof(WaitLimits, timeout_ns) == 0 &&
              offsetof(WaitLimits, warn_left_ns) == 8 && offsetof(WaitLimits, warned) == 16 &&
              offsetof(WaitLimits, fault) == 24 && offsetof(WaitLimits, warning) == 32 &&
              offsetof(WaitLimits, abort) == 40);
static_assert(offsetof(Fault, kind) == 0 && offsetof(Fault, op) == 8 &&
              offsetof(Fault, rank) == 12 && offsetof(Fault, peer) == 16 &&
              offsetof(Fault, argument) == 20 && offsetof(Fault, tile) == 24 &&
              offsetof(Fault, expected) == 32 && offsetof(Fault, seen) == 40);
static_assert(static_cast<int>(FaultKind::kTimeout) == 1 &&
              static_cast<int>(FaultKind::kMismatch) == 2 &&
              static_cast<int>(FaultKind::kOverlap) == 4 &&
              static_cast<int>(FaultKind::kAborted) == 5);

// The compiler of a kernel, which decides with which arguments it is launched.
enum class Compiler : int64_t { kTriton = 0, kNvrtc = 1 };

struct Attributes {
  CallAttributes call;
  std::string_view module, name;
  Int64s values;  // a Compiler, then the bits of what follows the arrays
  int64_t blocks = 0, data_bytes = 0, num_signals = 0, signature = 0;
};

// Null, or the name of the first attribute that is missing or has another type.
const char* Read(const ffi::Dictionary& attributes, Attributes* a) {
  const char* wrong = nullptr;
  const auto read = [&](const char* name, auto* value) {
    const auto found = attributes.get<std::decay_t<decltype(*value)>>(name);
    if (found.has_value()) {
      *value = *found;
    } else if (wrong == nullptr) {
      wrong = name;
    }
  };
  read("groups", &a->call.groups);
  read("site", &a->call.site);
  read("workspace_bytes", &a->call.workspace_bytes);
  read("world", &a->call.world);
  read("module", &a->module);
  read("name", &a->name);
  read("blocks", &a->blocks);
  read("data_bytes", &a->data_bytes);
  read("num_signals", &a->num_signals);
  read("signature", &a->signature);
  read("values", &a->values);
  return wrong;
}

ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary dictionary,
                ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Attributes a;
  if (const char* wrong = Read(dictionary, &a)) {
    return InvalidArgument(std::string("module call: attribute `") + wrong +
                           "` is missing or has another type");
  }
  const std::string name(a.name);
  if (a.call.world < 1 || a.call.world > kMaxRanks || a.blocks < 1 || a.blocks >= kMostIds ||
      a.data_bytes < 0 || a.num_signals < 0 || a.values.size() == 0) {
    return InvalidArgument(name + ": malformed attributes");
  }
  // The kernel was compiled for pointers to 16 bytes. XLA may hand over a slice of a buffer.
  std::vector<void*> arrays;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    arrays.push_back(buffer->untyped_data());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    arrays.push_back((*buffer)->untyped_data());
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (reinterpret_cast<uintptr_t>(arrays[i]) % 16 != 0) {
      return InvalidArgument(name + ": array " + std::to_string(i) +
                             " does not begin at a multiple of 16 bytes");
    }
  }
  const OpId op = CustomOp(name);
  const auto layout = shmem::WorkspaceFor(a.data_bytes, a.num_signals);
  return LaunchCudaCall(
      op, ordinal, a.call, layout.TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        const uint32_t signature =
            SignatureBuilder().Add(a.signature).Add(a.call.site).Add(a.blocks).Get();
        ModuleArguments arguments;
        std::vector<uint64_t>& values = arguments.values;
        shmem::CallArgs args;
        if (static_cast<Compiler>(*a.values.begin()) == Compiler::kTriton) {  // `raw`
          values = {reinterpret_cast<uintptr_t>(device.state),
                    view.launch,
                    static_cast<uint32_t>(op),
                    signature,
                    static_cast<uint64_t>(layout.SignalBytes()),
                    static_cast<uint64_t>(view.rank),
                    static_cast<uint64_t>(layout.data_bytes)};
          for (int32_t r = 0; r < view.world; ++r) {
            values.push_back(reinterpret_cast<uintptr_t>(view.base[r]));
          }
        } else {
          args = {device.state, view, layout, signature, static_cast<uint32_t>(op)};
          arguments.first = &args;
        }
        for (void* array : arrays) values.push_back(reinterpret_cast<uintptr_t>(array));
        for (size_t i = 1; i < a.values.size(); ++i) {
          values.push_back(static_cast<uint64_t>(a.values.begin()[i]));
        }
        return LaunchModule(std::string(a.module), ordinal, static_cast<int>(a.blocks),
                            std::move(arguments), stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

// Listed in runtime/capi_ops.cc.
extern XLA_FFI_Handler* const kModuleCallCuda;
XLA_FFI_Handler* const kModuleCallCuda = kCuda;

}  // namespace jflux

const char* jflux_add_module(const JfluxModule* m, int64_t* per_sm) {
  const auto heap = jflux::CurrentHeapCuda();
  const jflux::ModuleSpec spec{std::string(m->image, static_cast<size_t>(m->image_bytes)),
                               m->function, m->threads, m->shared_bytes, m->scratch_bytes};
  std::string error;
  const bool ok = jflux::AddModule(
      m->key, spec, heap == nullptr ? std::vector<int>{} : heap->ordinals(), per_sm, &error);
  return ok ? nullptr : jflux::Reason(error);
}

#else

const char* jflux_add_module(const JfluxModule*, int64_t* per_sm) {
  *per_sm = 0;
  return jflux::Reason("jflux: this build has no CUDA kernels");
}

#endif  // JFLUX_WITH_CUDA
