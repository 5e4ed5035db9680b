// The FFI handlers of flash_decode.
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

#include "ops/flash_decode/flash_decode.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

// Operand and result: the bounds, if they are right.
struct CheckAttributes {
  int64_t capacity = 0;   // positions of all ranks
  int64_t positions = 0;  // of a rank

  void Read(AttributeReader& read) {
    read("capacity", &capacity)("positions", &positions);
    if (positions < 1) read.Refuse("attribute `positions` is less than 1");
  }
};

ffi::Error CheckOnCpu(ffi::Dictionary attributes, ffi::AnyBuffer bounds,
                      ffi::Result<ffi::AnyBuffer> same) {
  CheckAttributes a;
  if (auto refused = ReadAttributes(kFlashDecodeId, attributes, &a)) return *refused;
  const int64_t batch = bounds.dimensions().size() == 2 ? bounds.dimensions()[0] : 0;
  if (!Is(bounds, ffi::S32, {batch, 4}) || !Is(*same, ffi::S32, {batch, 4})) {
    return InvalidArgument("flash_decode: operands do not fit");
  }
  const auto* of = static_cast<const DecodeBounds*>(bounds.untyped_data());
  for (int64_t b = 0; b < batch; ++b) {
    if (of[b].HasLength(a.capacity)) continue;
    WaitContext context{};
    context.op = static_cast<uint32_t>(kFlashDecodeId);
    context.rank = of[b].Rank(a.positions);
    Fault fault{};
    WriteRecord(&fault, context, FaultKind::kLength, /*peer=*/0, b, static_cast<Signal>(a.capacity),
                static_cast<Signal>(int64_t{of[b].end}));
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, Describe(fault, /*deadline_s=*/0));
  }
  std::copy(of, of + batch, static_cast<DecodeBounds*>(same->untyped_data()));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kCheckOnCpu, CheckOnCpu,
                       ffi::Ffi::Bind().Attrs().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

#ifdef JFLUX_WITH_CUDA

// Operands q, k, v, bounds[, scales of k, of v][, block_table]. Results out[, parts].
struct Attributes {
  int64_t capacity = 0;
  double scale = 0;
  double softcap = 0;
  int64_t splits = 0;
  bool paged = false;

  void Read(AttributeReader& read) {
    read("capacity", &capacity)("scale", &scale)("softcap", &softcap)("splits", &splits);
    read("paged", &paged);
  }
};

struct Call {
  FlashDecodeParams params{};
  FlashDecodeArrays arrays{};
};

// The parameters of the call; empty if operands and results do not fit together.
std::optional<Call> CallOf(const Attributes& a, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  const bool scaled = operands.size() == (a.paged ? 7 : 6);
  if ((!scaled && operands.size() != (a.paged ? 5 : 4)) || a.splits < 1 ||
      results.size() != (a.splits > 1 ? 2 : 1)) {
    return std::nullopt;
  }
  const auto q = *operands.get<ffi::AnyBuffer>(0), k = *operands.get<ffi::AnyBuffer>(1),
             v = *operands.get<ffi::AnyBuffer>(2), bounds = *operands.get<ffi::AnyBuffer>(3);
  const auto dtype = DTypeOf(q.element_type());
  if (!dtype || q.dimensions().size() != 4 || k.dimensions().size() != 4) return std::nullopt;
  Call call;
  FlashDecodeParams& p = call.params;
  p.batch = q.dimensions()[0];
  p.tokens = q.dimensions()[1];
  p.heads = q.dimensions()[2];
  p.width = q.dimensions()[3];
  p.groups = k.dimensions()[2];
  p.splits = a.splits;
  p.capacity = a.capacity;
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.dtype = *dtype;
  FlashDecodeArrays& arrays = call.arrays;
  const int64_t first = k.dimensions()[0], second = k.dimensions()[1];
  if (a.paged) {
    const auto table = *operands.get<ffi::AnyBuffer>(operands.size() - 1);
    if (table.dimensions().size() != 2) return std::nullopt;
    const int64_t entries = table.dimensions()[1];
    if (!Is(table, ffi::S32, {p.batch, entries})) return std::nullopt;
    p.pages = first;
    p.page_size = second;
    p.positions = entries * second;
    arrays.block_table = static_cast<const int32_t*>(table.untyped_data());
  } else {
    if (first != p.batch) return std::nullopt;
    p.positions = second;
  }
  if (p.batch < 1 || p.tokens < 1 || p.heads < 1 || p.groups < 1 || p.width < 1 ||
      p.heads % p.groups != 0 || p.positions < 1 || p.positions > INT32_MAX / 2 ||
      p.capacity < p.positions || p.capacity > INT32_MAX || p.capacity % p.positions != 0) {
    return std::nullopt;
  }
  auto out = *results.get<ffi::AnyBuffer>(0);
  for (const ffi::AnyBuffer* cache : {&k, &v}) {
    const auto type = scaled ? ffi::F8E4M3FN : q.element_type();
    if (!Is(*cache, type, {first, second, p.groups, p.width})) return std::nullopt;
  }
  if (scaled) {
    const auto of_k = *operands.get<ffi::AnyBuffer>(4), of_v = *operands.get<ffi::AnyBuffer>(5);
    const bool of_rows = Is(of_k, ffi::F32, {first, second, p.groups, 1});
    const std::initializer_list<int64_t> rows = {first, second, p.groups, 1};
    const std::initializer_list<int64_t> heads = {1, 1, p.groups, 1};
    for (const ffi::AnyBuffer* scale : {&of_k, &of_v}) {
      if (!Is(*scale, ffi::F32, of_rows ? rows : heads)) return std::nullopt;
    }
    p.scales = of_rows ? CacheScales::kOfRows : CacheScales::kOfHeads;
    arrays.k_scale = static_cast<const float*>(of_k.untyped_data());
    arrays.v_scale = static_cast<const float*>(of_v.untyped_data());
  }
  if (!Is(bounds, ffi::S32, {p.batch, 4}) ||
      !Is(*out, ffi::F32, {p.batch, p.tokens, p.heads, p.width + 1})) {
    return std::nullopt;
  }
  if (p.splits > 1) {
    auto parts = *results.get<ffi::AnyBuffer>(1);
    if (!Is(*parts, ffi::F32, {p.splits, p.batch, p.tokens, p.heads, p.width + 1}))
      return std::nullopt;
    arrays.parts = static_cast<float*>(parts->untyped_data());
  }
  arrays.q = q.untyped_data();
  arrays.k = k.untyped_data();
  arrays.v = v.untyped_data();
  arrays.bounds = static_cast<const DecodeBounds*>(bounds.untyped_data());
  arrays.out = static_cast<float*>(out->untyped_data());
  return call;
}

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kFlashDecodeId, attributes, &a)) return *refused;
  const auto call = CallOf(a, operands, results);
  if (!call) return InvalidArgument("flash_decode: operands do not fit");
  // A fault that a kernel before has left, and which did not end it.
  const LocalState device = StateOfThisDevice();
  if (device.fault) return ffi::Error(ffi::ErrorCode::kInternal, *device.fault);
  return LaunchLocalCuda(kFlashDecodeId, [&](std::string* error) {
    return LaunchFlashDecode(call->params, call->arrays, device.state, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kFlashDecodeOp;
const Op kFlashDecodeOp = {kFlashDecodeId,       "flash_decode", kCheckOnCpu,
                           JFLUX_IF_CUDA(kCuda), OpFormats{},    kFlashDecodeFormats};

}  // namespace jflux
