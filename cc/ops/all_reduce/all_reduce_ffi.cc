// The plan and the FFI handlers of all_reduce.
#include "core/layout.h"
#include "ops/all_reduce/all_reduce.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// Fields of a call: world, count, dtype, width (elements of a row that is to be normalised; 0: no
// norm) and algorithm (-1: to be chosen). Fields of the plan: algorithm (-1: XLA's own is faster),
// workspace_bytes (0 then), and fits_norm: whether that algorithm can normalise such rows. If it
// cannot, the plan is for the sum alone.
bool PlanAllReduce(const Fields& fields, const Machine& machine, Fields* plan,
                   std::string* why_not) {
  CallReader call(fields);
  AllReduceParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.count = call.Get("count", 1, int64_t{1} << 40);
  p.dtype = call.GetFormat("dtype");
  p.width = call.Get("width", 0, p.count);
  const int64_t asked = call.Get("algorithm", -1, kAllReduceAlgorithms - 1);
  if (!call.Check(why_not)) return false;
  if (asked < 0 && p.Bytes() > MostAllReduceBytes(p.world)) {
    *plan = Fields{{"algorithm", -1}, {"workspace_bytes", 0}, {"fits_norm", 0}};
    return true;
  }
  p.algorithm =
      asked < 0 ? ChooseAllReduce(p.world, p.Bytes()) : static_cast<AllReduceAlgorithm>(asked);
  // A row is normalised by a cluster.
  const bool has_clusters = machine.IsCpu() || machine.arch >= kHopperArch;
  const bool fits_norm = has_clusters && p.FitsNorm() && TakesNorm(p.algorithm);
  p.norm = fits_norm ? Norm::kRms : Norm::kNone;  // any norm takes as much
  *plan = Fields{{"algorithm", static_cast<int64_t>(p.algorithm)},
                 {"workspace_bytes", p.WorkspaceBytes()},
                 {"fits_norm", fits_norm}};
  return true;
}

struct Attributes {
  CallAttributes call;
  int64_t algorithm = 0, norm = 0;  // numbers of AllReduceAlgorithm and Norm
  double epsilon = 0;
  bool residual = false;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("algorithm", &algorithm);
    read("epsilon", &epsilon);
    read("norm", &norm);
    read("residual", &residual);
  }
};

struct Call {
  AllReduceParams params;
  AllReduceArrays arrays;
};

// Operands x, residual if there is one, and with a norm scale and perhaps bias; results y and, with
// a norm, the normalised. Empty if they do not fit together.
std::optional<Call> CallOf(const Attributes& a, const ffi::AnyBuffer& x,
                           const ffi::RemainingArgs& rest, ffi::Result<ffi::AnyBuffer>& y,
                           const ffi::RemainingRets& results) {
  const auto dtype = DTypeOf(x.element_type());
  const auto count = static_cast<int64_t>(x.element_count());
  if (!dtype || count == 0) return std::nullopt;
  if (a.algorithm < 0 || a.algorithm >= kAllReduceAlgorithms || a.norm < 0 || a.norm >= kNorms) {
    return std::nullopt;
  }
  Call call{};
  call.params = AllReduceParams{
      static_cast<int32_t>(a.call.world),           count,      *dtype,
      static_cast<AllReduceAlgorithm>(a.algorithm), a.residual, static_cast<Norm>(a.norm)};
  AllReduceParams& p = call.params;
  AllReduceArrays& arrays = call.arrays;
  const auto like_x = [&](const ffi::AnyBuffer& b) {
    return b.element_type() == x.element_type() && b.element_count() == x.element_count();
  };
  arrays.x = x.untyped_data();
  arrays.y = y->untyped_data();
  size_t next = 0;
  if (!like_x(*y) || rest.size() < next + a.residual) return std::nullopt;
  if (a.residual) {
    const auto r = *rest.get<ffi::AnyBuffer>(next++);
    if (!like_x(r)) return std::nullopt;
    arrays.residual = r.untyped_data();
  }
  if (p.norm == Norm::kNone) {
    if (rest.size() != next || results.size() != 0) return std::nullopt;
    return call;
  }
  if (x.dimensions().size() == 0 || !TakesNorm(p.algorithm)) return std::nullopt;
  p.width = x.dimensions().back();
  p.epsilon = a.epsilon;
  if (!p.FitsNorm() || rest.size() <= next || rest.size() > next + 2 || results.size() != 1) {
    return std::nullopt;
  }
  auto normalised = *results.get<ffi::AnyBuffer>(0);
  if (!like_x(*normalised)) return std::nullopt;
  arrays.normalised = normalised->untyped_data();
  const auto scale = *rest.get<ffi::AnyBuffer>(next);
  arrays.wide_scale = scale.element_type() != x.element_type();
  if (arrays.wide_scale && scale.element_type() != ffi::F32) return std::nullopt;
  for (size_t i = next; i < rest.size(); ++i) {
    const auto factors = *rest.get<ffi::AnyBuffer>(i);
    if (factors.element_type() != scale.element_type() ||
        static_cast<int64_t>(factors.element_count()) != p.width) {
      return std::nullopt;
    }
    (i == next ? arrays.scale : arrays.bias) = factors.untyped_data();
  }
  return call;
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllReduceId, attributes, &a)) return FailedFuture(*refused);
  const auto call = CallOf(a, x, rest, y, results);
  if (!call) return FailedFuture(InvalidArgument("all_reduce: operands do not fit"));
  return JoinFfiCall(
      kAllReduceId, site, run_id, device, a.call, call->params.WorkspaceBytes(),
      [call = *call](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return AllReduceCpu(call.params, call.arrays, view, epoch, ctx);
      });
}

// Operands and results.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .RemainingRets();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllReduceId, attributes, &a)) return *refused;
  const auto call = CallOf(a, x, rest, y, results);
  if (!call) return InvalidArgument("all_reduce: operands do not fit");
  return LaunchCudaCall(
      kAllReduceId, ordinal, a.call, call->params.WorkspaceBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllReduce(call->params, call->arrays, a.call.site, device, view, stream,
                               error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

constexpr Constant kConstants[] = {
    {"all_reduce_algorithms.one_shot", static_cast<int64_t>(AllReduceAlgorithm::kOneShot)},
    {"all_reduce_algorithms.two_shot", static_cast<int64_t>(AllReduceAlgorithm::kTwoShot)},
    {"all_reduce_algorithms.half_butterfly",
     static_cast<int64_t>(AllReduceAlgorithm::kHalfButterfly)},
    {"all_reduce_algorithms.butterfly", static_cast<int64_t>(AllReduceAlgorithm::kButterfly)},
    {"all_reduce_algorithms.chunked", static_cast<int64_t>(AllReduceAlgorithm::kChunked)},
    {"norms.rms", static_cast<int64_t>(Norm::kRms)},
    {"norms.layer", static_cast<int64_t>(Norm::kLayer)},
    {nullptr, 0},
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllReduceOp;
const Op kAllReduceOp = {kAllReduceId,         "all_reduce",      kCpu,
                         JFLUX_IF_CUDA(kCuda), kAllReduceFormats, kAllReduceFormats,
                         PlanAllReduce,        /*most_splits=*/1, kConstants};

}  // namespace jflux
