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

// Operands x [..., rows, columns][, scale], or what a QuantizeSource is computed from: x; gate, x;
// dy, x; dy, gate, x; x, x. Results values and scale[, those of each transpose][, losses int32
// [2]][, maxima uint32 [blocks], which nobody reads]. Without `copy` the first two are not there.
// With `again` the operands are x [rows, columns] and its scale. With `grouped` the last operand is
// int32 [groups]. dy of kGradients, and the values in its place, are uint16.
struct Attributes {
  Int64s block;
  bool copy = false;
  bool transpose = false;
  bool power_of_two = false;
  bool losses = false;  // are a result
  bool again = false;
  bool grouped = false;    // rows belong to groups
  bool fill = false;       // QuantizeParams::fill
  int64_t source = 0;      // number of a QuantizeSource
  int64_t activation = 0;  // number of an Activation

  void Read(AttributeReader& read) {
    read("block", &block)("copy", &copy)("transpose", &transpose)("power_of_two", &power_of_two);
    read("losses", &losses)("again", &again)("source", &source)("activation", &activation);
    read("grouped", &grouped)("fill", &fill);
  }
};

struct Call {
  QuantizeParams params{};
  QuantizeArrays arrays{};
};

bool IsBlockSize(int64_t size) { return size == -1 || size == 1 || size == kQuantizeTile; }

// The operands of a source that is computed. Whether they fit.
bool ReadSource(const Attributes& a, ffi::RemainingArgs operands, QuantizeParams* p,
                QuantizeArrays* arrays) {
  p->source = static_cast<QuantizeSource>(a.source);
  p->activation = static_cast<Activation>(a.activation);
  const bool is_three = p->source == QuantizeSource::kGradients;
  const bool may_be_one = p->source == QuantizeSource::kActivated;
  const size_t count = operands.size();
  if (count != (is_three ? 3 : 2) && !(may_be_one && count == 1)) return false;
  if ((p->source == QuantizeSource::kPair) != (p->activation == Activation::kNone)) return false;
  const auto last = *operands.get<ffi::AnyBuffer>(count - 1);
  for (size_t i = 0; i < count; ++i) {
    const auto one = *operands.get<ffi::AnyBuffer>(i);
    const bool is_dy = is_three && i == 0;
    if (one.element_type() != (is_dy ? ffi::U16 : last.element_type()) ||
        one.element_count() != last.element_count()) {
      return false;
    }
  }
  const auto data = [&](size_t i) { return operands.get<ffi::AnyBuffer>(i)->untyped_data(); };
  const size_t of_x = is_three || p->source == QuantizeSource::kGradient ? 1 : 0;
  arrays->x = data(of_x);
  if (is_three) arrays->dy = data(0);
  if (count > 1) arrays->factor = is_three ? data(2) : data(1 - of_x);
  return p->stack == 1;
}

// The parameters of the call; empty if operands and results do not fit together.
std::optional<Call> CallOf(const Attributes& a, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  const bool is_given = a.source == 0;
  const size_t sizes_at = a.grouped ? operands.size() - 1 : operands.size();
  if (operands.size() < 1 || sizes_at < 1 || sizes_at > (is_given ? 2 : 3) ||
      (a.grouped && !is_given) || results.size() < 2 || a.block.size() != 2 ||
      !IsBlockSize(a.block[0]) || !IsBlockSize(a.block[1]) || !IsQuantizeSource(a.source) ||
      !IsActivation(a.activation) || !(a.copy || a.transpose)) {
    return std::nullopt;
  }
  // Results of 8 bits are found at the transpose, if there is one: a copy may be in dy's place.
  const bool in_place = static_cast<QuantizeSource>(a.source) == QuantizeSource::kGradients;
  if (in_place && (!a.copy || !a.transpose || results.size() < 4)) return std::nullopt;
  const auto x = *operands.get<ffi::AnyBuffer>(is_given ? 0 : operands.size() - 1);
  auto values = *results.get<ffi::AnyBuffer>(in_place ? 2 : 0);
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
  p.copy = a.copy;
  p.transpose = a.transpose;
  p.power_of_two = a.power_of_two;
  p.dtype = *dtype;
  p.values_dtype = *values_dtype;
  p.again = a.again;
  p.fill = a.fill;
  if (a.grouped) {
    const auto sizes = *operands.get<ffi::AnyBuffer>(sizes_at);
    p.groups = sizes.dimensions().size() == 1 ? sizes.dimensions()[0] : 0;
    if (p.groups == 0 || p.stack != 1 || !a.transpose || !Is(sizes, ffi::S32, {p.groups})) {
      return std::nullopt;
    }
    call.arrays.group_sizes = static_cast<const int32_t*>(sizes.untyped_data());
  }

  size_t next = 0;
  const auto result = [&](ffi::DataType type, int64_t elements) -> void* {
    if (next >= results.size()) return nullptr;
    auto buffer = *results.get<ffi::AnyBuffer>(next++);
    const bool fits =
        buffer->element_type() == type && static_cast<int64_t>(buffer->element_count()) == elements;
    return fits ? buffer->untyped_data() : nullptr;
  };
  QuantizeArrays& arrays = call.arrays;
  if (!is_given && !ReadSource(a, operands, &p, &arrays)) return std::nullopt;
  const auto elements = static_cast<int64_t>(x.element_count());
  const int64_t of_transpose = p.stack * p.columns * p.TransposedColumns();
  for (const int i : {0, 1, 2}) {
    if (i == 0 ? !p.copy : !p.transpose || (i == 2 && !in_place)) continue;
    Quantized& one = arrays.results[i];
    const bool is_dy = i == 0 && in_place;
    one.values = static_cast<uint8_t*>(
        result(is_dy ? ffi::U16 : values->element_type(), i != 0                 ? of_transpose
                                                          : p.IsPair() && !is_dy ? 2 * elements
                                                                                 : elements));
    one.scale = static_cast<float*>(result(ffi::F32, i == 0 ? p.Scales() : p.TransposedScales()));
    if (one.values == nullptr || one.scale == nullptr) return std::nullopt;
    if (is_dy && one.values != arrays.dy) return std::nullopt;
  }
  if (a.losses) {
    arrays.losses = static_cast<QuantizeLosses*>(result(ffi::S32, 2));
    if (arrays.losses == nullptr) return std::nullopt;
  }
  if (p.HasMaxima()) {
    auto* maxima = static_cast<uint32_t*>(result(ffi::U32, p.Maxima()));
    if (maxima == nullptr) return std::nullopt;
    arrays.results[0].maxima = maxima;
    arrays.results[1].maxima = maxima + (p.copy ? p.Scales() : 0);
  }
  if (next != results.size()) return std::nullopt;
  if (!is_given) return call;
  arrays.x = x.untyped_data();
  if (p.again) {
    if (sizes_at != 2) return std::nullopt;
    const auto scale = *operands.get<ffi::AnyBuffer>(1);
    const auto counts = scale.dimensions();
    const int64_t across = CeilDiv<int64_t>(p.columns, kQuantizeTile);
    if (scale.element_type() != ffi::F32 || counts.size() != 2 ||
        (counts[0] != 1 && counts[0] != p.rows) || (counts[1] != 1 && counts[1] != across)) {
      return std::nullopt;
    }
    arrays.x_scale = {static_cast<const float*>(scale.untyped_data()),
                      counts[0] == 1 ? 0 : static_cast<int32_t>(counts[1]), counts[1] == 1 ? 0 : 1};
  } else if (sizes_at > 1) {
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
