// What the handlers of all_gather_matmul and matmul read alike: several weights, their biases,
// scales and results.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_WEIGHTS_FFI_H_
#define JFLUX_OPS_ALL_GATHER_MATMUL_WEIGHTS_FFI_H_

#include <algorithm>
#include <string>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/handlers.h"

namespace jflux {

struct WeightsAttributes {
  int64_t activation = 0;  // number of an Activation
  Int64s biased;           // for each weight, 1 if it has a bias
  bool gated = false;
  int64_t scales = 0;    // number of a Scales
  int64_t quantize = 0;  // number of a Quantizing
  bool sums = false;

  void Read(AttributeReader& read) {
    read("activation", &activation)("biased", &biased)("gated", &gated)("quantize", &quantize)(
        "scales", &scales)("sums", &sums);
  }
  // Whether there is nothing but one weight.
  bool IsPlain() const {
    return activation == 0 && !gated && !sums && scales == 0 && quantize == 0 &&
           std::count(biased.begin(), biased.end(), 1) == 0;
  }
};

// Entries of x's scale for each row.
inline int64_t KEntries(const AllGatherMatmulParams& p, Scales scales) {
  return HasEntriesOfK(scales) ? CeilDiv<int64_t>(p.k, kScaleBlock) : 1;
}

// Reads w_0 .. w_p-1, a bias for each of them that is `biased`, and, if there are `scales`, that of
// x's rows and one of the columns of each w. Results: all y (of which there is one if they are
// gated), each followed by its scale if they are quantised, p sums if there are `sums`, and perhaps
// the gathered x, with its scale if there is one.
//
// params_of(w, y, gathered) -> optional<AllGatherMatmulParams>. Sets *p, whose n is the columns of
// all weights, and *operands but for x. Why they do not fit; "" if they do.
template <typename ParamsOf>
std::string ReadWeights(const WeightsAttributes& a, const ffi::RemainingArgs& rest,
                        const ffi::RemainingRets& results, ParamsOf&& params_of,
                        AllGatherMatmulParams* p, AllGatherMatmulOperands* operands) {
  const size_t count = a.biased.size(), products = a.gated ? 1 : count;
  const size_t biases = std::count(a.biased.begin(), a.biased.end(), 1);
  const bool quantizes = a.quantize != 0;
  const size_t each = quantizes ? 2 : 1;  // results of a y
  const size_t computed = products * each + (a.sums ? count : 0);
  const bool gathered = results.size() > computed;
  if (count < 1 || count > kMaxWeights || !IsScales(a.scales) || !IsQuantizing(a.quantize) ||
      (quantizes && (a.sums || a.scales == 0)) ||
      rest.size() != count + biases + (a.scales != 0 ? 1 + count : 0) ||
      (gathered && results.size() != computed + (a.scales != 0 ? 2 : 1)) ||
      results.size() < computed || (a.gated && count != 2) || !IsActivation(a.activation)) {
    return kDoNotFit;
  }
  operands->weights = static_cast<int32_t>(count);
  operands->activation = static_cast<Activation>(a.activation);
  operands->gated = a.gated;
  operands->scales = static_cast<Scales>(a.scales);
  operands->quantize = static_cast<Quantizing>(a.quantize);
  const auto floats = [&](size_t i, int64_t size) {
    return FloatsOf(*rest.get<ffi::AnyBuffer>(i), size);
  };
  size_t next_bias = count;
  int64_t columns = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto w = *rest.get<ffi::AnyBuffer>(i);
    const size_t at = a.gated ? 0 : i * each;
    auto y = *results.get<ffi::AnyBuffer>(at);
    auto params = params_of(w, *y, gathered);
    if (params && quantizes) {
      if (params->out_dtype != kQuantized) return kDoNotFit;
      params->out_dtype = DType::kF32;
    }
    if (!params ||
        (i > 0 && (params->out_dtype != p->out_dtype || params->DTypeOfW() != p->DTypeOfW()))) {
      return kDoNotFit;
    }
    *p = *params;
    if (!WhyNoKernel(*p, kMmaFormats | kWgmmaFormats).empty()) return kNoKernel;
    if (a.scales != 0 && SizeOf(p->dtype) != 1) return kDoNotFit;
    if (quantizes && (p->dtype != kQuantized || p->DTypeOfW() != kQuantized ||
                      !CanQuantize(operands->scales, kQuantizingTile))) {
      return kNoKernel;
    }
    if (operands->scales == Scales::kOfVectors
            ? !HasVectorScales(p->dtype)
            : HasEntriesOfK(operands->scales) && !HasBlockScales(p->dtype)) {
      return kNoKernel;
    }
    auto& product = operands->products[i];
    product.w = w.untyped_data();
    product.y = y->untyped_data();
    product.n = p->n;
    if (quantizes) {
      auto scale = *results.get<ffi::AnyBuffer>(at + 1);
      const int64_t blocks = CeilDiv<int64_t>(p->n, kScaleBlock);
      product.y_scale = FloatsOf(*scale, p->rows.Total() * blocks) == nullptr
                            ? nullptr
                            : static_cast<float*>(scale->untyped_data());
      if (product.y_scale == nullptr) return "a scale of y does not fit";
    }
    if (a.sums) {
      auto sums = *results.get<ffi::AnyBuffer>(products + i);
      if (sums->element_type() != y->element_type() || CountOf(*sums) != CountOf(*y)) {
        return kDoNotFit;
      }
      product.sums = sums->untyped_data();
    }
    if (a.biased[i] == 1) {
      product.bias = floats(next_bias++, p->n);
      if (product.bias == nullptr) return "a bias does not fit";
    }
    if (a.scales != 0) {
      const bool of_blocks = operands->scales == Scales::kOfBlocks;
      const int64_t k_entries = KEntries(*p, operands->scales);
      const int64_t n_entries = of_blocks ? CeilDiv<int64_t>(p->n, kScaleBlock) : p->n;
      operands->x_scale = floats(count + biases, p->rows.PerRank() * k_entries);
      product.scale = floats(count + biases + 1 + i, n_entries * k_entries);
      if (operands->x_scale == nullptr || product.scale == nullptr) return "a scale does not fit";
    }
    columns += p->n;
  }
  p->n = columns;
  if (!gathered) return "";
  auto whole = *results.get<ffi::AnyBuffer>(computed);
  const bool fits = DTypeOf(whole->element_type(), kAllFormats) == p->dtype &&
                    CountOf(*whole) == p->rows.Total() * p->k;
  operands->gathered = whole->untyped_data();
  if (!fits) return "the gathered x does not fit";
  if (a.scales == 0) return "";
  auto scale = *results.get<ffi::AnyBuffer>(computed + 1);
  if (FloatsOf(*scale, p->rows.Total() * KEntries(*p, operands->scales)) == nullptr) {
    return "the gathered scale does not fit";
  }
  operands->gathered_scale = static_cast<float*>(scale->untyped_data());
  return "";
}

// Whether the kernels can compute these weights by this choice. A gate needs tiles of two halves
// whose k one CTA computes.
inline bool CanTake(const GemmChoice& c, const AllGatherMatmulParams& p,
                    const AllGatherMatmulOperands& operands) {
  if (c.portable) {
    return !HasEntriesOfK(operands.scales) && operands.quantize == Quantizing::kNone;
  }
  if (operands.quantize != Quantizing::kNone) return ForQuantizing(c) == c;
  const bool gate = c.tile_n % 128 == 0 && c.splits == 1;
  return SharesK(c, p.rows.Total(), p.k * SizeOf(p.dtype), kGatherSplits) &&
         (!operands.gated || gate) && (operands.scales != Scales::kOfVectors || !operands.gated) &&
         ForScales(c, operands.scales, /*gates=*/true, kGatherSplits) == c;
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_WEIGHTS_FFI_H_
