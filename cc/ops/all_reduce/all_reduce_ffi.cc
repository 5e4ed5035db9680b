// The plan and the FFI handlers of all_reduce.
#include "core/layout.h"
#include "core/quantize.h"
#include "ops/all_reduce/all_reduce.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

// With a quantised wire.
bool PlanWire(AllReduceParams p, int64_t asked, Fields* plan, std::string* why_not) {
  const bool is_chosen = asked < 0;
  if (!Has(kWireFormats, p.wire) || !Has(kWireSums, p.dtype)) {
    *why_not = "no kernel has such a wire";
    return false;
  }
  p.has_wire = true;
  p.algorithm = AllReduceAlgorithm::kChunked;
  if (!p.FitsWire()) {
    *why_not = "shards of a wire must be whole vectors of 16 bytes";
    return false;
  }
  const bool small = is_chosen && p.Bytes() < kLeastWireBytes;
  const bool taken = !small && (!is_chosen || p.Bytes() <= kMostWireBytes);
  *plan = Fields{{"algorithm", taken ? static_cast<int64_t>(p.algorithm) : -1},
                 {"workspace_bytes", taken ? p.WorkspaceBytes() : 0},
                 {"fits_norm", 0},
                 {"exact", small}};
  return true;
}

// Fields of a call: world, count, dtype, width (elements of a row that is to be normalised; 0: no
// norm), algorithm (-1: to be chosen), and perhaps wire, the format of what travels, and part, a
// WirePart. Fields of the plan: algorithm (-1: XLA's own is faster), workspace_bytes (0 then), and
// fits_norm: whether that algorithm can normalise such rows. If it cannot, the plan is for the sum
// alone. With a wire it is chunked, or -1, and there is exact: whether a sum without a wire is
// better, of x so small.
bool PlanAllReduce(CallReader& call, const Machine& machine, Fields* plan, std::string* why_not) {
  AllReduceParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.count = call.Get("count", 1, int64_t{1} << 40);
  p.dtype = call.GetFormat("dtype");
  p.width = call.Get("width", 0, p.count);
  const int64_t asked = call.Get("algorithm", -1, kAllReduceAlgorithms - 1);
  const int64_t wire = call.GetOr("wire", -1, -1, kFormatCount - 1);
  p.part = static_cast<WirePart>(call.GetOr("part", 0, 0, wire < 0 ? 0 : kWireParts - 1));
  if (!call.Check(why_not)) return false;
  if (wire >= 0) {
    p.wire = static_cast<DType>(wire);
    return PlanWire(p, asked, plan, why_not);
  }
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
  int64_t quantize_block = 0;  // QuantizedRows::block; 0: rows are not quantised
  bool power_of_two = false;
  int64_t wire = -1;  // number of the format of what travels; -1: x's own
  int64_t part = 0;   // with a wire: number of a WirePart

  void Read(AttributeReader& read) {
    call.Read(read);
    read("algorithm", &algorithm)("epsilon", &epsilon)("norm", &norm)("residual", &residual);
    read("quantize_block", &quantize_block)("power_of_two", &power_of_two);
    read("wire", &wire)("part", &part);
  }
};

struct Call : CallOf<kAllReduceId, AllReduceCpu, LaunchAllReduce> {
  // Operands x, residual if there is one, and with a norm scale and perhaps bias; results y and,
  // with a norm, the normalised, which have a scale if they are quantised.
  std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets results) {
    const auto dtype = DTypeOf(x.element_type());
    const auto count = static_cast<int64_t>(x.element_count());
    if (!dtype || count == 0) return kDoNotFit;
    if (a.algorithm < 0 || a.algorithm >= kAllReduceAlgorithms || a.norm < 0 || a.norm >= kNorms) {
      return kDoNotFit;
    }
    p = AllReduceParams{
        static_cast<int32_t>(a.call.world),           count,      *dtype,
        static_cast<AllReduceAlgorithm>(a.algorithm), a.residual, static_cast<Norm>(a.norm)};
    if (a.wire >= 0) {
      p.has_wire = true;
      p.wire = static_cast<DType>(a.wire);
      if (p.algorithm != AllReduceAlgorithm::kChunked || p.norm != Norm::kNone ||
          a.wire >= kFormatCount || !Has(kWireFormats, p.wire) || !Has(kWireSums, p.dtype)) {
        return kDoNotFit;
      }
    }
    if (a.part != 0) return ReadHalf(a, x, rest, y, results);
    const auto like_x = [&](const ffi::AnyBuffer& b) {
      return b.element_type() == x.element_type() && b.element_count() == x.element_count();
    };
    arrays.x = x.untyped_data();
    arrays.y = y->untyped_data();
    size_t next = 0;
    if (!like_x(*y) || rest.size() < next + a.residual) return kDoNotFit;
    if (a.residual) {
      const auto r = *rest.get<ffi::AnyBuffer>(next++);
      if (!like_x(r)) return kDoNotFit;
      arrays.residual = r.untyped_data();
    }
    const bool quantizes = a.quantize_block != 0;
    if (p.norm == Norm::kNone) {
      if (quantizes || rest.size() != next || results.size() != 0) return kDoNotFit;
      return "";
    }
    if (x.dimensions().size() == 0 || !TakesNorm(p.algorithm)) return kDoNotFit;
    p.width = x.dimensions().back();
    p.epsilon = a.epsilon;
    if (!p.FitsNorm() || rest.size() <= next || rest.size() > next + 2 ||
        results.size() != size_t{1} + quantizes) {
      return kDoNotFit;
    }
    auto normalised = *results.get<ffi::AnyBuffer>(0);
    if (quantizes ? !ReadQuantized(a, *normalised, **results.get<ffi::AnyBuffer>(1))
                  : !like_x(*normalised)) {
      return kDoNotFit;
    }
    arrays.normalised = normalised->untyped_data();
    const auto scale = *rest.get<ffi::AnyBuffer>(next);
    arrays.wide_scale = scale.element_type() != x.element_type();
    if (arrays.wide_scale && scale.element_type() != ffi::F32) return kDoNotFit;
    for (size_t i = next; i < rest.size(); ++i) {
      const auto factors = *rest.get<ffi::AnyBuffer>(i);
      if (factors.element_type() != scale.element_type() ||
          static_cast<int64_t>(factors.element_count()) != p.width) {
        return kDoNotFit;
      }
      (i == next ? arrays.scale : arrays.bias) = factors.untyped_data();
    }
    return "";
  }
  // One half of a sum with a wire.
  std::string ReadHalf(const Attributes& a, const ffi::AnyBuffer& x, const ffi::RemainingArgs& rest,
                       ffi::Result<ffi::AnyBuffer> y, const ffi::RemainingRets& results) {
    if (a.part < 0 || a.part >= kWireParts || !p.has_wire || p.residual || rest.size() != 0 ||
        results.size() != 0 || y->element_type() != x.element_type()) {
      return kDoNotFit;
    }
    p.part = static_cast<WirePart>(a.part);
    const bool gathers = p.part == WirePart::kGather;
    const auto of_x = static_cast<int64_t>(x.element_count());
    const auto of_y = static_cast<int64_t>(y->element_count());
    p.count = gathers ? of_y : of_x;
    if ((gathers ? of_x : of_y) * p.world != p.count || !p.FitsWire()) return kDoNotFit;
    arrays.x = x.untyped_data();
    arrays.y = y->untyped_data();
    return "";
  }
  // Whether the results are values and scales of the rows.
  bool ReadQuantized(const Attributes& a, const ffi::AnyBuffer& values,
                     const ffi::AnyBuffer& scale) {
    const auto dtype = DTypeOf(values.element_type(), kQuantizedFormats);
    if (!dtype || p.ElementBytes() != 2 ||
        (a.quantize_block != -1 && a.quantize_block != kQuantizedBlock)) {
      return false;
    }
    QuantizedRows& q = arrays.quantized;
    q.values = *dtype;
    q.block = static_cast<int32_t>(a.quantize_block);
    q.power_of_two = a.power_of_two;
    if (static_cast<int64_t>(values.element_count()) != p.count ||
        scale.element_type() != ffi::F32 ||
        static_cast<int64_t>(scale.element_count()) != p.RowCount() * q.Blocks(p.width)) {
      return false;
    }
    q.scale = static_cast<float*>(scale.untyped_data());
    return true;
  }
  int64_t WorkspaceBytes() const { return p.WorkspaceBytes(); }
};

constexpr Constant kConstants[] = {
    {"all_reduce_algorithms.one_shot", static_cast<int64_t>(AllReduceAlgorithm::kOneShot)},
    {"all_reduce_algorithms.two_shot", static_cast<int64_t>(AllReduceAlgorithm::kTwoShot)},
    {"all_reduce_algorithms.half_butterfly",
     static_cast<int64_t>(AllReduceAlgorithm::kHalfButterfly)},
    {"all_reduce_algorithms.butterfly", static_cast<int64_t>(AllReduceAlgorithm::kButterfly)},
    {"all_reduce_algorithms.chunked", static_cast<int64_t>(AllReduceAlgorithm::kChunked)},
    {"wire_parts.sum", static_cast<int64_t>(WirePart::kSum)},
    {"wire_parts.scatter", static_cast<int64_t>(WirePart::kScatter)},
    {"wire_parts.gather", static_cast<int64_t>(WirePart::kGather)},
    {"norms.rms", static_cast<int64_t>(Norm::kRms)},
    {"norms.layer", static_cast<int64_t>(Norm::kLayer)},
    {nullptr, 0},
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllReduceOp;
const Op kAllReduceOp = {
    kAllReduceId,      "all_reduce",      OnCpu<Call>,   JFLUX_IF_CUDA(OnCuda<Call>),
    kAllReduceFormats, kAllReduceFormats, PlanAllReduce, /*most_splits=*/1,
    kConstants};

}  // namespace jflux
