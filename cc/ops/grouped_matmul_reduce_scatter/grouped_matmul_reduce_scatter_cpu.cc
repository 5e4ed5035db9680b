// The CPU back end of grouped_matmul_reduce_scatter: one rank's part of the protocol, in host
// memory.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/wire.h"
#include "ops/grouped_matmul/group_rows_cpu.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "runtime/rank_call.h"

namespace jflux {
namespace {

constexpr int32_t kTileRows = 128;

// This rank's part of a call. Wide: what sums are in.
template <typename Wide>
struct Body
    : RankCall<GroupedMatmulReduceScatterParams, GroupedMatmulReduceScatterArrays, SumLayout> {
  static constexpr DType kWide = sizeof(Wide) == 8 ? DType::kF64 : DType::kF32;

  SumItems items;
  std::vector<Wide> row, sum, total;  // [n]

  Signal* SignalAt(int dst, int src, int32_t item) const {
    return view.At<Signal>(dst, signals + layout.SignalOffset(dst, src, item));
  }
  char* SlotAt(int dst, int src, int64_t token) const {
    return view.At(dst, data + layout.RowOffset(dst, src, token));
  }
  // Of the sum's blocks, with a wire.
  float* ScalesAt(int dst, int src, int64_t token) const {
    return view.At<float>(dst, data + layout.ScaleOffset(dst, src, token));
  }

  // Makes this rank's part of a token's sum, of all ranks' tokens.
  void SumChoices(int64_t token) {
    std::fill(sum.begin(), sum.end(), Wide{0});
    const int32_t end = arrays.offsets[p.product.groups];
    for (int32_t j = 0; j < p.choices; ++j) {
      const int64_t slot = token * p.choices + j;
      const int32_t r = arrays.destination[slot];
      if (r < 0 || r >= end) continue;
      const Wide weight = static_cast<const Wide*>(arrays.weights)[slot];
      Convert(static_cast<const char*>(arrays.y) + r * layout.row_bytes, p.product.out_dtype,
              row.data(), kWide, p.product.n);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * row[i];
    }
  }
  // `sum` as it travels, and from what has come.
  void StoreSum(int dst, int64_t t) const {
    char* slot = SlotAt(dst, view.rank, t);
    if (!p.wire) return Convert(sum.data(), kWide, slot, p.product.out_dtype, p.product.n);
    float* scales = ScalesAt(dst, view.rank, t);
    ForBlocks([&](int64_t block, int64_t first) {
      float x[kWireBlock];
      uint32_t words[kWireBlock / 4];
      std::copy_n(sum.data() + first, kWireBlock, x);
      scales[block] = QuantizeForWire<OneLane, false>(x, *p.wire, words);
      std::memcpy(slot + first, words, kWireBlock);
    });
  }
  void LoadSum(int src, int64_t t) {
    const char* slot = SlotAt(view.rank, src, t);
    if (!p.wire) return Convert(slot, p.product.out_dtype, sum.data(), kWide, p.product.n);
    const float* scales = ScalesAt(view.rank, src, t);
    ForBlocks([&](int64_t block, int64_t first) {
      float x[kWireBlock];
      uint32_t words[kWireBlock / 4];
      std::memcpy(words, slot + first, kWireBlock);
      OneLane::Dequantize(words, scales[block], *p.wire, x);
      std::copy_n(x, kWireBlock, sum.data() + first);
    });
  }
  // visit(block, its first column)
  template <typename Visit>
  void ForBlocks(Visit&& visit) const {
    for (int64_t b = 0; b < p.product.n / kWireBlock; ++b) visit(b, b * kWireBlock);
  }

  void Send(const SumItems::Item& item) {
    for (int32_t t = item.first; t < item.first + item.count; ++t) {
      SumChoices(item.owner * p.tokens + t);
      StoreSum(item.owner, t);
    }
    StoreRelease(SignalAt(item.owner, view.rank, item.place), signal);
  }

  // Adds up an own item, over all ranks.
  bool Finish(const SumItems::Item& item) {
    for (int src = 0; src < view.world; ++src) {
      if (src != view.rank &&
          !WaitSignal(SignalAt(view.rank, src, item.place), signal, src, item.place, ctx)) {
        return false;
      }
    }
    std::vector<char> own(layout.row_bytes);
    for (int32_t t = item.first; t < item.first + item.count; ++t) {
      std::fill(total.begin(), total.end(), Wide{0});
      for (int src = 0; src < view.world; ++src) {
        if (src != view.rank) {
          LoadSum(src, t);
        } else {
          SumChoices(view.rank * p.tokens + t);
          if (!p.wire) {  // rounded, as the others' are
            Convert(sum.data(), kWide, own.data(), p.product.out_dtype, p.product.n);
            Convert(own.data(), p.product.out_dtype, sum.data(), kWide, p.product.n);
          }
        }
        for (size_t i = 0; i < sum.size(); ++i) total[i] += sum[i];
      }
      Convert(total.data(), kWide, static_cast<char*>(arrays.out) + t * layout.row_bytes,
              p.product.out_dtype, p.product.n);
    }
    return true;
  }

  bool Run() {
    const GroupedMatmulParams& product = p.product;
    const ScatteredTiles order{
        {{kTileRows, /*tiles_n=*/1, /*group_m=*/1}, view.world, view.rank, p.parts}};
    const void* const w[2] = {arrays.w, nullptr};
    void* const no_sums[2] = {nullptr, nullptr};
    const int64_t h_bytes = product.k * SizeOf(product.dtype);
    FillRowsCpu(product, arrays.offsets[product.groups], arrays.y, no_sums);
    std::vector<std::unique_ptr<GroupRowsCpu>> groups(product.groups);
    int32_t next = 0;  // item
    for (int32_t c = 0; c < order.Classes(); ++c) {
      for (int64_t e = 0; e < product.groups; ++e) {
        const int32_t begin = arrays.offsets[e], end = arrays.offsets[e + 1];
        const TileRows tiles = order.RowsOfClass(c, [&](int32_t segment) {
          return RowsBefore(order, segment, begin, end, p.tokens, p.choices, arrays.source);
        });
        const int32_t first = begin + tiles.begin * kTileRows;
        const int32_t count = std::min(begin + tiles.end * kTileRows, end) - first;
        if (count <= 0) continue;
        if (groups[e] == nullptr) groups[e] = std::make_unique<GroupRowsCpu>(product, w, e);
        groups[e]->Multiply(static_cast<const char*>(arrays.h) + first * h_bytes, first, count,
                            nullptr, arrays.y, no_sums);
      }
      for (; next < items.Count() && items.At(next).cls == c; ++next) {
        const SumItems::Item item = items.At(next);
        if (item.owner == view.rank) break;  // for the end
        if (item.count > 0) Send(item);
      }
    }
    for (; next < items.Count(); ++next) {
      const SumItems::Item item = items.At(next);
      if (item.count > 0 && !Finish(item)) return false;
    }
    return true;
  }
};

template <typename Wide>
bool RunRank(const GroupedMatmulReduceScatterParams& p,
             const GroupedMatmulReduceScatterArrays& arrays, const SymmetricView& view,
             uint64_t epoch, const WaitContext& ctx) {
  Body<Wide> call{{p, arrays, SumLayout::Make(p), view, epoch, ctx},
                  p.Items(view.rank),
                  std::vector<Wide>(p.product.n),
                  std::vector<Wide>(p.product.n),
                  std::vector<Wide>(p.product.n)};
  return call.Run();
}

}  // namespace

bool GroupedMatmulReduceScatterCpu(const GroupedMatmulReduceScatterParams& p,
                                   const GroupedMatmulReduceScatterArrays& arrays,
                                   const SymmetricView& view, uint64_t epoch,
                                   const WaitContext& ctx) {
  if (!OffsetsAreRight(p.product, arrays.offsets, ctx)) return false;
  return p.product.out_dtype == DType::kF64 ? RunRank<double>(p, arrays, view, epoch, ctx)
                                            : RunRank<float>(p, arrays, view, epoch, ctx);
}

}  // namespace jflux
