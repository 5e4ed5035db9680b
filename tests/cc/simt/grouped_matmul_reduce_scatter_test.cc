// The kernel of grouped_matmul_reduce_scatter in the simulator: two to eight ranks that meet in
// the workspace, several calls with other routings one after the other, late ranks.
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "simt/device_calls.h"
#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"
#include "wires.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

constexpr int kSms = 3;

struct Case {
  int32_t world;
  int64_t tokens;
  int32_t choices, parts, item_tokens;
  int64_t k, n, groups;
  bool transpose_rhs;
  GemmChoice choice;
  TestHooks hooks = {};
  std::optional<DType> wire = {};
};

// All ranks' operands and results of one call. A fourth of the slots, or of the tokens, have no
// expert.
template <typename T, typename Out>
struct Call {
  struct Routing {
    std::vector<int32_t> offsets{0}, destination, source;
  };
  std::vector<Routing> routings;
  Array<float> weights;
  std::vector<Array<T>> h, w;
  std::vector<Array<Out>> out, y;

  // own: each rank has another routing, as of experts that are split over ranks.
  Call(const Case& c, std::mt19937& random, int kind, bool own)
      : weights(RandomArray<float>(random, c.world * c.tokens * c.choices)) {
    const int64_t slots = c.world * c.tokens * c.choices;
    for (int rank = 0; rank < c.world; ++rank) {
      routings.push_back(rank == 0 || own ? Draw(c, random, (kind + rank) % 4) : routings[0]);
      h.push_back(RandomArray<T>(random, slots * c.k));
      w.push_back(RandomArray<T>(random, c.groups * c.k * c.n));
      out.emplace_back(c.tokens * c.n);
      y.emplace_back(slots * c.n);
    }
  }

  static Routing Draw(const Case& c, std::mt19937& random, int kind) {
    const int64_t slots = c.world * c.tokens * c.choices;
    std::vector<std::vector<int32_t>> chosen(c.groups);
    for (int32_t slot = 0; slot < slots; ++slot) {
      const bool drops = kind == 1   ? random() % 4 == 0
                         : kind == 2 ? slot / c.choices % 4 == 3
                                     : false;
      const size_t e = kind == 3 ? 0 : random() % c.groups;
      if (!drops) chosen[e].push_back(slot);
    }
    Routing r;
    r.destination.resize(slots, -1);
    for (const auto& group : chosen) {
      for (int32_t slot : group) {
        r.destination[slot] = static_cast<int32_t>(r.source.size());
        r.source.push_back(slot);
      }
      r.offsets.push_back(static_cast<int32_t>(r.source.size()));
    }
    r.source.resize(slots, -1);
    return r;
  }

  GroupedMatmulReduceScatterArrays Arrays(int rank) {
    const Routing& r = routings[rank];
    return {h[rank].get(),        w[rank].get(),   weights.get(),   r.offsets.data(),
            r.destination.data(), r.source.data(), out[rank].get(), y[rank].get()};
  }

  // y is compared with sums in double, and the sums with those of the y that there is.
  int64_t Wrong(const Case& c, int rank) const {
    int64_t wrong = 0;
    const std::vector<int32_t>& offsets = routings[rank].offsets;
    std::vector<int> group(routings[rank].source.size(), -1);
    for (int64_t e = 0; e < c.groups; ++e) {
      for (int32_t row = offsets[e]; row < offsets[e + 1]; ++row) group[row] = static_cast<int>(e);
    }
    wrong += simt::CountWrong(y[rank], [&](int64_t i) {
      const int64_t row = i / c.n, column = i % c.n;
      simt::Sum sum;
      for (int64_t l = 0; l < c.k && group[row] >= 0; ++l) {
        const int64_t at = c.transpose_rhs ? column * c.k + l : l * c.n + column;
        sum.Add(h[rank][row * c.k + l] * w[rank][group[row] * c.k * c.n + at]);
      }
      return sum;
    });
    // The same bits as sums in this order.
    std::vector<float> sums(c.tokens * c.n);
    for (int src = 0; src < c.world; ++src) {
      std::vector<float> parts(sums.size());
      for (int64_t i = 0; i < c.tokens * c.n; ++i) {
        float& part = parts[i];
        const std::vector<int32_t>& destination = routings[src].destination;
        for (int32_t j = 0; j < c.choices; ++j) {
          const int64_t slot = (rank * c.tokens + i / c.n) * c.choices + j;
          if (destination[slot] < 0) continue;
          const auto row = static_cast<float>(y[src][destination[slot] * c.n + i % c.n]);
          part = std::fma(weights.data[slot], row, part);
        }
        if (!c.wire) part = static_cast<float>(static_cast<Out>(part));
      }
      if (c.wire && src != rank) parts = ThroughWire(parts, *c.wire);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += parts[i];
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      const auto rounded = static_cast<float>(static_cast<Out>(sums[i]));
      wrong += !(out[rank][i] == static_cast<double>(rounded));
    }
    return wrong;
  }
};

// Runs three calls, and returns how many elements of all ranks' results are wrong.
template <typename T, typename Out>
int64_t Run(const Case& c, uint32_t seed) {
  constexpr int kCalls = 3;
  std::mt19937 random(seed);
  std::string error;
  GroupedMatmulReduceScatterParams p{c.world, c.tokens, c.choices, c.parts, c.item_tokens, {}};
  p.product.m = c.world * c.tokens * c.choices;
  p.product.k = c.k, p.product.n = c.n, p.product.groups = c.groups;
  p.product.dtype = simt::kDTypeOf<T>, p.product.out_dtype = simt::kDTypeOf<Out>;
  p.product.transpose_rhs = c.transpose_rhs;
  p.wire = c.wire;
  simt::DeviceHeap heap(c.world, SumLayout::Make(p).Workspace(), c.hooks);
  std::vector<Call<T, Out>> calls;
  for (int i = 0; i < kCalls; ++i)
    calls.emplace_back(c, random, (i + seed) % 4, /*own=*/i % 2 == 1);
  for (int i = 0; i < kCalls; ++i) {
    for (int rank = 0; rank < c.world; ++rank) {
      simt::SetDevice(rank);
      EXPECT(LoadGroupedMatmulReduceScatterKernels(&error)) << error;
      EXPECT(LaunchGroupedMatmulReduceScatter(p, calls[i].Arrays(rank), c.choice, /*site=*/0,
                                              heap.Device(rank, simt::SmsOfLaunch(seed)),
                                              heap.View(rank, i + 1), nullptr, &error))
          << error;
    }
  }
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure << ", seed " << seed;
  int64_t wrong = 0;
  for (int rank = 0; rank < c.world; ++rank) {
    EXPECT_EQ(heap.FaultOf(rank).kind, 0u);
    for (const auto& call : calls) wrong += call.Wrong(c, rank);
  }
  return wrong;
}

const Case kCases[] = {
    {2, 60, 2, 2, 2, 136, 200, 2, false, {192, 1, 1}},
    {3, 50, 2, 1, 3, 72, 136, 3, true, {128, 1, 2}, {0, /*max_delay_us=*/100}},
    {2, 150, 2, 4, 16, 72, 264, 2, false, {256, 2, 1}, {0, 100}},
    {3, 30, 3, 4, 1, 64, 264, 5, true, {256, 1, 1}},
    {2, 40, 1, 0, 4, 72, 64, 1, false, {128, 1, 1}, {0, 100}},  // one class
    {1, 90, 2, 0, 4, 72, 72, 2, false, {128, 1, 1}},            // one rank
    {3, 1, 2, 4, 2, 72, 64, 2, false, {192, 1, 1}, {0, 100}},   // most segments are empty
    {5, 20, 2, 2, 2, 72, 72, 2, false, {128, 1, 1}, {0, 100}},
    {7, 20, 2, 1, 3, 72, 72, 3, true, {128, 1, 2}},
    {8, 20, 2, 4, 3, 72, 72, 3, false, {128, 1, 1}, {0, 100}},
};

TEST(SumsAndScatters) {
  simt::SetSmCount(kSms);
  uint32_t seed = 1;
  for (const Case& c : kCases) {
    for (int schedule = 0; schedule < 3; ++schedule, ++seed) {
      const int64_t wrong =
          seed % 3 == 0 ? Run<__half, float>(c, seed) : Run<__nv_bfloat16, __nv_bfloat16>(c, seed);
      EXPECT(wrong == 0) << wrong << " wrong, seed " << seed << " case " << &c - kCases;
    }
  }
}

// Sums that travel quantised. Tokens of an item end within a pass of a warp; most segments are
// empty.
const Case kWireCases[] = {
    {2, 60, 2, 2, 2, 136, 256, 2, false, {256, 1, 1}, {}, DType::kF8E4M3FN},
    {3, 50, 2, 1, 3, 72, 128, 3, true, {256, 2, 1}, {0, 100}, DType::kS8},
    {3, 1, 2, 4, 2, 72, 384, 2, false, {256, 1, 1}, {0, 100}, DType::kF8E4M3FN},
    {1, 90, 2, 0, 4, 72, 128, 2, false, {256, 1, 1}, {}, DType::kS8},
};

TEST(SumsTravelInAWire) {
  simt::SetSmCount(kSms);
  uint32_t seed = 1;
  for (const Case& c : kWireCases) {
    for (int schedule = 0; schedule < 2; ++schedule, ++seed) {
      const int64_t wrong =
          seed % 2 == 0 ? Run<__half, float>(c, seed) : Run<__nv_bfloat16, __nv_bfloat16>(c, seed);
      EXPECT(wrong == 0) << wrong << " wrong, seed " << seed << " case " << &c - kWireCases;
    }
  }
}

// The kernel of the portable main loop. Few k-blocks: many copies at a time take long here.
const Case kPortableCases[] = {
    {2, 60, 2, 2, 2, 24, 200, 2, false, Portable(8)},
    {3, 30, 2, 1, 3, 40, 136, 3, true, Portable(2), {0, /*max_delay_us=*/100}},
    {2, 40, 2, 1, 3, 24, 128, 2, false, Portable(8), {}, DType::kS8},
};

TEST(InPortableCode) {
  simt::SetSmCount(2);
  for (const Case& c : kPortableCases) {
    EXPECT_EQ((Run<__nv_bfloat16, __nv_bfloat16>(c, 1)), 0) << "case " << &c - kPortableCases;
    if (c.wire) EXPECT_EQ((Run<__half, float>(c, 2)), 0);
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(kSms);
  Case c = kCases[0];
  c.hooks.skip_waits = 1;
  EXPECT((Run<__nv_bfloat16, __nv_bfloat16>(c, 1)) > 0);
  c = kWireCases[0];
  c.hooks.skip_waits = 1;
  EXPECT((Run<__nv_bfloat16, __nv_bfloat16>(c, 1)) > 0);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
