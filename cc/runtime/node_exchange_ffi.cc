// The FFI handler of exchanges between nodes, on GPUs alone: the kernel is in the NVSHMEM plugin.
#include <algorithm>
#include <string>

#include "nvshmem/node_exchange.h"
#include "runtime/capi.h"
#include "runtime/ffi.h"
#include "runtime/reason.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#include "runtime/kernels_cuda.h"
#include "runtime/nvshmem.h"
#endif

namespace jflux {
namespace {

// Why there is no such exchange; empty if there is.
std::string WhyNot(int64_t kind, int64_t world, int64_t steps, int64_t block_bytes) {
  const bool shifts = kind == static_cast<int64_t>(NodeExchangeKind::kShift);
  if (kind < 0 || kind > static_cast<int64_t>(NodeExchangeKind::kShift)) return "unknown kind";
  if (world < 2 || world > kMaxRanks) {
    return std::to_string(world) + " nodes, the kernel takes 2 to " + std::to_string(kMaxRanks);
  }
  if (shifts ? steps < 1 || steps >= world : steps != 0) return "steps out of range";
  if (block_bytes < 1 || block_bytes > int64_t{1} << 32) return "0 bytes, or more than 4 GiB";
  return "";
}

}  // namespace
}  // namespace jflux

const char* jflux_node_exchange_plan(int kind, int world, int steps, int64_t block_bytes,
                                     int64_t* workspace_bytes) {
  const std::string why = jflux::WhyNot(kind, world, steps, block_bytes);
  if (!why.empty()) return jflux::Reason(why);
  *workspace_bytes = jflux::NodeExchange::For(static_cast<jflux::NodeExchangeKind>(kind), world,
                                              steps, block_bytes)
                         .Layout()
                         .TotalBytes();
  return nullptr;
}

#ifdef JFLUX_WITH_CUDA

namespace jflux {
namespace {

struct Attributes {
  CallAttributes call;
  int64_t block_bytes = 0, kind = 0, steps = 0;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("block_bytes", &block_bytes);
    read("kind", &kind);
    read("steps", &steps);
  }
};

ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary dictionary, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kNodeExchangeId, dictionary, &a)) return *refused;
  const std::string why = WhyNot(a.kind, a.call.world, a.steps, a.block_bytes);
  if (!why.empty()) return InvalidArgument("node_exchange: " + why);
  const auto e =
      NodeExchange::For(static_cast<NodeExchangeKind>(a.kind), static_cast<int32_t>(a.call.world),
                        static_cast<int32_t>(a.steps), a.block_bytes);
  if (e.BytesOfX() != static_cast<int64_t>(x.size_bytes()) ||
      e.BytesOfY() != static_cast<int64_t>(y->size_bytes())) {
    return InvalidArgument("node_exchange: operands do not fit");
  }
  const NvshmemPlugin* plugin = Nvshmem::Get().plugin();
  if (plugin == nullptr) return InvalidArgument("node_exchange: NVSHMEM is not loaded");
  const auto launch = [&](const CudaDevice& device, const SymmetricView& view,
                          const shmem::RemoteRef* remote, std::string* error) {
    NodeExchangeArgs args{};
    args.exchange = e;
    args.x = static_cast<const char*>(x.untyped_data());
    args.y = static_cast<char*>(y->untyped_data());
    args.state = device.state;
    args.layout = e.Layout();
    args.view = view;
    std::copy_n(remote, view.world, args.copies);
    args.signature = SignatureBuilder()
                         .Add(static_cast<int64_t>(kNodeExchangeId))
                         .Add(a.kind)
                         .Add(a.call.world)
                         .Add(a.steps)
                         .Add(a.block_bytes)
                         .Add(a.call.site)
                         .Get();
    args.op = static_cast<uint32_t>(kNodeExchangeId);
    const auto enqueue = [&](std::string* why) {
      const char* failed = plugin->exchange(&args, stream);
      if (failed != nullptr) *why = failed;
      return failed == nullptr;
    };
    return LaunchAfterLastCall(stream, enqueue, error);
  };
  return LaunchCudaCallAcrossNodes(kNodeExchangeId, ordinal, a.call, e.Layout().TotalBytes(),
                                   launch);
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindCuda().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

// Listed in runtime/capi_ops.cc.
extern XLA_FFI_Handler* const kNodeExchangeCuda;
XLA_FFI_Handler* const kNodeExchangeCuda = kCuda;

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
