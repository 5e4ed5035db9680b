// The C interface for handlers of custom calls, which are compiled out of tree (jflux/call.h).
#include <string>
#include <utility>
#include <vector>

#include "jflux/call.h"
#include "runtime/capi.h"
#include "runtime/cpu_call.h"
#include "runtime/denormals.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/reason.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#include "runtime/kernels_cuda.h"
#endif

namespace jflux {
namespace {

using shmem::CallInfo;

std::string NameOfCall(const CallInfo& info) {
  return "custom_call(" + std::string(info.name, static_cast<size_t>(info.name_size)) + ")";
}

// Why a call cannot be made; empty if it can. Looks at the version alone, if that is another.
std::string WhyNot(const CallInfo& info) {
  if (info.version != shmem::kCallVersion) {
    return "jflux: a handler of a custom call was compiled with another version's headers; compile "
           "it with those in jflux.include_dir()";
  }
  if (info.world < 1 || info.world > kMaxRanks || info.data_bytes < 0 || info.num_signals < 0) {
    return "jflux." + NameOfCall(info) + ": malformed attributes";
  }
  return "";
}

ffi::Span<const int64_t> GroupsOf(const CallInfo& info) {
  return ffi::Span<const int64_t>(info.groups, static_cast<size_t>(info.groups_size));
}

}  // namespace
}  // namespace jflux

using jflux::shmem::CallInfo;

int64_t jflux_custom_workspace_bytes(int64_t data_bytes, int64_t num_signals) {
  return jflux::shmem::WorkspaceFor(data_bytes, num_signals).TotalBytes();
}

void jflux_cpu_join_call(const CallInfo* info, void* site, int64_t run_id, int32_t device,
                         jflux::shmem::CpuBody body, jflux::shmem::CpuDone done, void* data) {
  std::string why_not = jflux::WhyNot(*info);
  std::optional<jflux::Group> group;
  if (why_not.empty()) {
    group = jflux::FindGroup(jflux::GroupsOf(*info), info->world, device);
    if (!group) why_not = std::string("jflux: ") + jflux::kNotOfTheCall;
  }
  if (!group) {
    done(data, static_cast<int32_t>(jflux::ErrorKind::kInvalidArgument), why_not.c_str());
    return;
  }
  const auto layout = jflux::shmem::WorkspaceFor(info->data_bytes, info->num_signals);
  const jflux::OpId op = jflux::CustomOp(jflux::NameOfCall(*info));
  const jflux::WorkspaceBytes workspace{layout.TotalBytes(), info->workspace_bytes};
  if (const auto refused = workspace.Refused(op)) {
    done(data, static_cast<int32_t>(jflux::ErrorKind::kInvalidArgument),
         refused->message().c_str());
    return;
  }
  jflux::CpuCall call;
  call.op = op;
  call.run_id = run_id;
  call.site = static_cast<jflux::CallSite*>(site);
  call.group = std::move(group->devices);
  call.rank = group->rank;
  call.bytes = layout.TotalBytes();
  call.body = [=, signature = info->signature](const jflux::SymmetricView& view, uint64_t epoch,
                                               const jflux::WaitContext& wait) {
    return jflux::shmem::internal::RunCall(
        view, layout, epoch, signature, wait,
        [&](const jflux::shmem::Context& ctx) { return body(data, ctx); });
  };
  call.done = [=](const jflux::CallError& error) {
    jflux::FlushDenormals flush;  // XLA goes on here
    done(data, static_cast<int32_t>(error.kind), error.empty() ? nullptr : error.text.c_str());
  };
  jflux::JoinCpuCall(std::move(call));
}

#ifdef JFLUX_WITH_CUDA

const char* jflux_cuda_begin_call(const CallInfo* info, int32_t ordinal, void* stream,
                                  int32_t blocks, jflux::shmem::CallArgs* args) {
  std::string why_not = jflux::WhyNot(*info);
  if (why_not.empty() && (blocks < 1 || blocks >= jflux::kMostIds)) {
    why_not = "jflux." + jflux::NameOfCall(*info) + ": a kernel of " + std::to_string(blocks) +
              " blocks; there may be 1 to " + std::to_string(jflux::kMostIds - 1);
  }
  if (!why_not.empty()) return jflux::Reason(why_not);
  const jflux::OpId op = jflux::CustomOp(jflux::NameOfCall(*info));
  const auto layout = jflux::shmem::WorkspaceFor(info->data_bytes, info->num_signals);
  const jflux::CallAttributes call{jflux::GroupsOf(*info), info->site, info->workspace_bytes,
                                   info->world, /*sm_count=*/0};
  const auto error = jflux::LaunchCudaCall(
      op, ordinal, call, layout.TotalBytes(),
      [&](const jflux::CudaDevice& device, const jflux::SymmetricView& view, std::string* why) {
        if (!jflux::RunAfterLastCall(static_cast<cudaStream_t>(stream), why)) return false;
        args->state = device.state;
        args->view = view;
        args->layout = layout;
        args->signature =
            jflux::SignatureBuilder().Add(info->signature).Add(info->site).Add(blocks).Get();
        args->op = static_cast<uint32_t>(op);
        return true;
      });
  return error.success() ? nullptr : jflux::Reason(error.message());
}

const char* jflux_add_kernels(const char* (*load)(int ordinal)) {
  std::string error;
  return jflux::AddKernels(load, &error) ? nullptr : jflux::Reason(error);
}

#else

const char* jflux_cuda_begin_call(const CallInfo*, int32_t, void*, int32_t,
                                  jflux::shmem::CallArgs*) {
  return jflux::Reason("jflux: this build has no CUDA kernels");
}
const char* jflux_add_kernels(const char* (*)(int)) { return nullptr; }

#endif  // JFLUX_WITH_CUDA
