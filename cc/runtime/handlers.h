// The handlers of an op with peers, made of what the op says of a call:
//
//   struct Call : CallOf<kFooBarId, FooBarCpu, LaunchFooBar> {
//     // Reads operands and results, sets p and arrays. Why they do not fit; "" if they do.
//     std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y);
//     int64_t WorkspaceBytes() const;  // of the call's layout
//   };
//
// The op's handlers are OnCpu<Call> and OnCuda<Call>. `Attributes` has `call`, the CallAttributes.
// An op whose calls differ by platform, or whose bodies take more than params and arrays, has
// structs of its own with what CallOf has.
#ifndef JFLUX_RUNTIME_HANDLERS_H_
#define JFLUX_RUNTIME_HANDLERS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "runtime/cuda_device.h"
#include "runtime/ffi.h"
#include "runtime/op.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {

inline constexpr char kDoNotFit[] = "operands do not fit", kNoKernel[] = "no kernel for this plan",
                      kMalformed[] = "malformed plan";

// kRun is the CPU back end's body for one rank, kLaunch enqueues the call on a GPU.
template <OpId kOp, auto kRun, auto kLaunch, typename Body = decltype(kRun)>
struct CallOf;

template <OpId kOp, auto kRun, auto kLaunch, typename Params, typename Arrays>
struct CallOf<kOp, kRun, kLaunch,
              bool (*)(const Params&, const Arrays&, const SymmetricView&, uint64_t,
                       const WaitContext&)> {
  static constexpr OpId kId = kOp;
  Params p{};
  Arrays arrays{};

  // False if a wait failed.
  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    return kRun(p, arrays, view, epoch, ctx);
  }
  bool Launch(int64_t site, const CudaDevice& device, const SymmetricView& view,
              cudaStream_t stream, std::string* error) const {
    return kLaunch(p, arrays, site, device, view, stream, error);
  }
};

// Of a product on the CPU, which computes tiles of a size of its own.
template <OpId kOp, auto kRun, typename Body = decltype(kRun)>
struct TiledCall;

template <OpId kOp, auto kRun, typename Params, typename Tiling, typename Arrays>
struct TiledCall<kOp, kRun,
                 bool (*)(const Params&, const Tiling&, const Arrays&, const SymmetricView&,
                          uint64_t, const WaitContext&)> {
  static constexpr OpId kId = kOp;
  Params p{};
  Tiling tiling;
  Arrays arrays{};

  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    return kRun(p, tiling, arrays, view, epoch, ctx);
  }
};

// Of a product on a GPU.
template <OpId kOp, auto kLaunch, typename Launcher = decltype(kLaunch)>
struct PlannedCall;

template <OpId kOp, auto kLaunch, typename Params, typename Arrays>
struct PlannedCall<kOp, kLaunch,
                   bool (*)(const Params&, const Arrays&, const ProductPlan&, int64_t,
                            const CudaDevice&, const SymmetricView&, cudaStream_t, std::string*)> {
  static constexpr OpId kId = kOp;
  Params p{};
  Arrays arrays{};
  ProductPlan plan{};

  // Reads the plan. False if none is meant.
  bool ReadPlan(const ProductAttributes& a) {
    const auto planned = CudaPlanOf(a.choice, a.senders, a.call.workspace_bytes);
    if (planned) plan = *planned;
    return planned.has_value();
  }
  bool Launch(int64_t site, const CudaDevice& device, const SymmetricView& view,
              cudaStream_t stream, std::string* error) const {
    return kLaunch(p, arrays, plan, site, device, view, stream, error);
  }
};

inline int64_t CountOf(const ffi::AnyBuffer& b) { return static_cast<int64_t>(b.element_count()); }

// The numbers of a float32 array of this size; null: it is none.
inline const float* FloatsOf(const ffi::AnyBuffer& b, int64_t size) {
  const bool fits = b.element_type() == ffi::F32 && CountOf(b) == size;
  return fits ? static_cast<const float*>(b.untyped_data()) : nullptr;
}

// The fields that the params of all products have, from x [..., k], w [k, n] or [n, k], and y.
// Empty if there is no such product. w is of x's format, or *w_dtype is set to its own, and 8 bits
// are taken too.
template <typename Params>
std::optional<Params> ProductOf(const ProductAttributes& a, const ffi::AnyBuffer& x,
                                const ffi::AnyBuffer& w, const ffi::AnyBuffer& y,
                                DType* w_dtype = nullptr) {
  const FormatSet formats = w_dtype == nullptr ? kWideFormats : kAllFormats;
  const auto dtype = DTypeOf(x.element_type(), formats);
  const auto other = DTypeOf(w.element_type(), formats);
  const auto out_dtype = DTypeOf(y.element_type(), formats);
  if (!dtype || !other || !out_dtype) return std::nullopt;
  if (w_dtype == nullptr && *other != *dtype) return std::nullopt;
  if (w_dtype != nullptr) *w_dtype = *other;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  Params p{};
  p.rows = Rows{static_cast<int32_t>(a.call.world), a.outer, a.inner};
  p.k = x.dimensions().back();
  p.n = w.dimensions()[a.transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = a.transpose_rhs;
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  return p;
}

// Whether x and w are what the CPU back end multiplies.
template <typename Params>
bool AreForCpu(const Params& p) {
  return Has(kWideFormats, p.dtype) && p.DTypeOfW() == p.dtype;
}

// The scales of a product of 8 bits, from args[first] on: those of x's rows, and those of w's
// columns; kOfBlocks has so many entries of k, for each row and each block of columns. Why they do
// not fit, or "".
template <typename Arrays>
std::string ReadScales(int64_t number, const ffi::RemainingArgs& args, size_t first, int64_t rows,
                       int64_t columns, int64_t entries, DType dtype, Arrays* arrays) {
  if (!IsScales(number)) return kDoNotFit;
  arrays->scales = static_cast<Scales>(number);
  if (arrays->scales == Scales::kNone) return "";
  const bool of_blocks = arrays->scales == Scales::kOfBlocks;
  if (SizeOf(dtype) != 1) return kDoNotFit;
  if (HasEntriesOfK(arrays->scales) && !(of_blocks && HasBlockScales(dtype))) return kNoKernel;
  const int64_t of_columns = of_blocks ? CeilDiv<int64_t>(columns, kScaleBlock) * entries : columns;
  arrays->x_scale = FloatsOf(*args.get<ffi::AnyBuffer>(first), of_blocks ? rows * entries : rows);
  arrays->w_scale = FloatsOf(*args.get<ffi::AnyBuffer>(first + 1), of_columns);
  return arrays->x_scale != nullptr && arrays->w_scale != nullptr ? "" : "a scale does not fit";
}

// The arguments of a handler follow from those of Call::Read.
template <typename Call, typename Read = decltype(&Call::Read)>
struct OpHandlers;

template <typename Call, typename Attributes, typename... Buffers>
struct OpHandlers<Call, std::string (Call::*)(const Attributes&, Buffers...)> {
  using Traits = std::initializer_list<ffi::Traits>;

  // Null if attributes, operands and results are those of a call.
  static std::optional<ffi::Error> Refused(const ffi::Dictionary& attributes, Attributes* a,
                                           Call* call, Buffers... buffers) {
    if (auto refused = ReadAttributes(Call::kId, attributes, a)) return refused;
    const std::string why = call->Read(*a, buffers...);
    if (why.empty()) return std::nullopt;
    return InvalidArgument(std::string(NameOf(Call::kId)) + ": " + why);
  }

  static ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device,
                         ffi::Dictionary attributes, Buffers... buffers) {
    Attributes a;
    Call call{};
    if (auto refused = Refused(attributes, &a, &call, buffers...)) {
      return FailedFuture(*std::move(refused));
    }
    return JoinFfiCall(Call::kId, site, run_id, device, a.call, call.WorkspaceBytes(),
                       [call](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
                         return call.Run(view, epoch, ctx);
                       });
  }

#ifdef JFLUX_WITH_CUDA
  static ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                         Buffers... buffers) {
    Attributes a;
    Call call{};
    if (auto refused = Refused(attributes, &a, &call, buffers...)) return *std::move(refused);
    return LaunchCudaCall(
        Call::kId, ordinal, a.call, call.WorkspaceBytes(),
        [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
          return call.Launch(a.call.site, device, view, stream, error);
        });
  }
#endif

  // `binding`, which no one may copy or move, with the buffers: a handler that calls f.
  template <typename F, typename Binding>
  static auto Bind(F f, Traits traits, Binding&& binding) {
    return BindEach<F, Buffers...>(f, traits, std::forward<Binding>(binding));
  }

 private:
  template <typename F, typename First = void, typename... Rest, typename Binding>
  static auto BindEach(F f, Traits traits, Binding&& binding) {
    if constexpr (std::is_void_v<First>) {
      return std::move(binding).To(f, traits);
    } else if constexpr (std::is_same_v<First, ffi::AnyBuffer>) {
      return BindEach<F, Rest...>(f, traits, std::move(binding).template Arg<ffi::AnyBuffer>());
    } else if constexpr (std::is_same_v<First, ffi::Result<ffi::AnyBuffer>>) {
      return BindEach<F, Rest...>(f, traits, std::move(binding).template Ret<ffi::AnyBuffer>());
    } else if constexpr (std::is_same_v<First, ffi::RemainingArgs>) {
      return BindEach<F, Rest...>(f, traits, std::move(binding).RemainingArgs());
    } else {
      static_assert(std::is_same_v<First, ffi::RemainingRets>);
      return BindEach<F, Rest...>(f, traits, std::move(binding).RemainingRets());
    }
  }
};

template <typename Call>
XLA_FFI_Error* OnCpu(XLA_FFI_CallFrame* frame) {
  using Handlers = OpHandlers<Call>;
  static auto* handler = Handlers::Bind(Handlers::Cpu, {}, BindCpu()).release();
  return handler->Call(frame);
}

#ifdef JFLUX_WITH_CUDA
template <typename Call>
XLA_FFI_Error* OnCuda(XLA_FFI_CallFrame* frame) {
  using Handlers = OpHandlers<Call>;
  static auto* handler =
      Handlers::Bind(Handlers::Cuda, {ffi::Traits::kCmdBufferCompatible}, BindCuda()).release();
  return handler->Call(frame);
}
#endif

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HANDLERS_H_
