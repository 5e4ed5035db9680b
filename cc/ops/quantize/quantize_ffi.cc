// The FFI handler of quantize.
#include <optional>
#include <string>

#include "ops/quantize/quantize.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

// Operands x [..., rows, columns][, scale]. Results values, scale[, those of the transpose][,
// losses int32 [2]][, maxima uint32 [blocks], which nobody reads]. With `again` the operands are x
// [rows, columns] and its scale, and the results are those of the transpose.
struct Attributes {
  Int64s block;
  bool transpose = false;
  bool power_of_two = false;
  bool losses = false;  // are a result
  bool again = false;

  void Read(AttributeReader& read) {
    read("block", &block)("transpose", &transpose)("power_of_two", &power_of_two);
    read("losses", &losses)("again", &again);
  }
};

struct Call {
  QuantizeParams params{};
  QuantizeArrays arrays{};
};

bool IsBlockSize(int64_t size) { return size == -1 || size == 1 || size == kQuantizeTile; }

// The parameters of the call; empty if operands and results do not fit together.
std::optional<Call> CallOf(const Attributes& a, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  if (operands.size() < 1 || operands.size() > 2 || results.size() < 2 || a.block.size() != 2 ||
      !IsBlockSize(a.block[0]) || !IsBlockSize(a.block[1])) {
    return std::nullopt;
  }
  const auto x = *operands.get<ffi::AnyBuffer>(0);
  auto values = *results.get<ffi::AnyBuffer>(0);
  const auto dtype =
      DTypeOf(x.element_type(), a.again ? SetOf(kQuantizedAgain) : kQuantizeFormats.operands);
  const auto values_dtype = DTypeOf(values->element_type(), kQuantizeFormats.results);
  const auto shape = x.dimensions();
  if (!dtype || !values_dtype || shape.size() < 2 || x.element_count() == 0) return std::nullopt;
  Call call;
  QuantizeParams& p = call.params;
  p.rows = shape[shape.size() - 2];
  p.columns = shape[shape.size() - 1];
  p.stack = static_cast<int64_t>(x.element_count()) / (p.rows * p.columns);
  p.block = {static_cast<int32_t>(a.block[0]), static_cast<int32_t>(a.block[1])};
  p.transpose = a.transpose;
  p.power_of_two = a.power_of_two;
  p.dtype = *dtype;
  p.values_dtype = *values_dtype;
  p.again = a.again;

  size_t next = 0;
  const auto result = [&](ffi::DataType type, int64_t elements) -> void* {
    if (next >= results.size()) return nullptr;
    auto buffer = *results.get<ffi::AnyBuffer>(next++);
    const bool fits =
        buffer->element_type() == type && static_cast<int64_t>(buffer->element_count()) == elements;
    return fits ? buffer->untyped_data() : nullptr;
  };
  QuantizeArrays& arrays = call.arrays;
  for (const bool transposed : {false, true}) {
    if (transposed ? !p.transpose : p.again) continue;
    Quantized& one = arrays.results[transposed];
    one.values = static_cast<uint8_t*>(
        result(values->element_type(), static_cast<int64_t>(x.element_count())));
    one.scale =
        static_cast<float*>(result(ffi::F32, transposed ? p.TransposedScales() : p.Scales()));
    if (one.values == nullptr || one.scale == nullptr) return std::nullopt;
  }
  if (a.losses) {
    arrays.losses = static_cast<QuantizeLosses*>(result(ffi::S32, 2));
    if (arrays.losses == nullptr) return std::nullopt;
  }
  if (p.HasMaxima()) {
    auto* maxima = static_cast<uint32_t*>(result(ffi::U32, p.Maxima()));
    if (maxima == nullptr) return std::nullopt;
    arrays.results[0].maxima = maxima;
    arrays.results[1].maxima = maxima + p.Scales();
  }
  if (next != results.size()) return std::nullopt;
  arrays.x = x.untyped_data();
  if (p.again) {
    if (operands.size() != 2) return std::nullopt;
    const auto scale = *operands.get<ffi::AnyBuffer>(1);
    const auto counts = scale.dimensions();
    const int64_t across = CeilDiv<int64_t>(p.columns, kQuantizeTile);
    if (scale.element_type() != ffi::F32 || counts.size() != 2 ||
        (counts[0] != 1 && counts[0] != p.rows) || (counts[1] != 1 && counts[1] != across)) {
      return std::nullopt;
    }
    arrays.source = {static_cast<const float*>(scale.untyped_data()),
                     counts[0] == 1 ? 0 : static_cast<int32_t>(counts[1]), counts[1] == 1 ? 0 : 1};
  } else if (operands.size() > 1) {
    const auto scale = *operands.get<ffi::AnyBuffer>(1);
    if (scale.element_type() != ffi::F32 ||
        static_cast<int64_t>(scale.element_count()) != p.Scales()) {
      return std::nullopt;
    }
    arrays.scale = static_cast<const float*>(scale.untyped_data());
  }
  return call;
}

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kQuantizeId, attributes, &a)) return *refused;
  const auto call = CallOf(a, operands, results);
  if (!call) return InvalidArgument("quantize: operands do not fit");
  return LaunchLocalCuda(kQuantizeId, [&](std::string* error) {
    return LaunchQuantize(call->params, call->arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kQuantizeOp;
const Op kQuantizeOp = {kQuantizeId,          "quantize",  /*cpu=*/nullptr,
                        JFLUX_IF_CUDA(kCuda), OpFormats{}, kQuantizeFormats};

}  // namespace jflux
