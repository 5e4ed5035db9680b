// The kernel of all_gather_matmul in the simulator: two to eight ranks that meet in the workspace,
// several calls one after the other, late ranks.
#include "ops/all_gather_matmul/all_gather_matmul.h"

#include <cmath>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "simt/device_calls.h"
#include "simt/machine.h"
#include "simt/quantized.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

constexpr int kSms = 3;

struct Case {
  Rows rows;
  int64_t k, n;
  bool transpose_rhs, return_gathered;
  GemmChoice choice;
  TestHooks hooks = {};
  // Of operands of 8 bits.
  Scales scales = Scales::kNone;
  bool float32 = false;                     // results
  bool same_x = false;                      // calls differ in scales alone
  Quantizing quantize = Quantizing::kNone;  // of float32, in calls of their own

  int64_t KBlocks() const {
    return scales == Scales::kOfBlocks ? CeilDiv<int64_t>(k, kScaleBlock) : 1;
  }
  int64_t ColumnBlock() const { return scales == Scales::kOfBlocks ? kScaleBlock : 1; }
};

// All ranks' operands of type T and results of type R of one call. Operands of 8 bits have scales.
template <typename T, typename R>
struct Call {
  using W = std::conditional_t<std::is_same_v<T, __nv_fp8_e5m2>, __nv_fp8_e4m3, T>;
  static constexpr bool kIsWhole = std::is_same_v<T, int8_t>;
  std::vector<Array<W>> w;
  std::vector<Array<T>> x, gathered;
  std::vector<Array<R>> y;
  std::vector<Array<float>> x_scale, w_scale, gathered_scale;
  std::vector<simt::QuantizedArray> quantized;  // y

  Call(const Case& c, std::mt19937& random) {
    std::mt19937 same(1);
    for (int rank = 0; rank < c.rows.world; ++rank) {
      x.push_back(RandomArray<T>(c.same_x ? same : random, c.rows.PerRank() * c.k));
      w.push_back(RandomArray<W>(c.same_x ? same : random, c.k * c.n));
      y.emplace_back(c.rows.Total() * c.n);
      quantized.emplace_back(c.rows.Total(), c.n);
      gathered.emplace_back(c.rows.Total() * c.k);
      const int64_t entries = c.scales != Scales::kNone ? c.rows.PerRank() * c.KBlocks() : 0;
      x_scale.push_back(RandomArray<float>(random, entries));
      gathered_scale.emplace_back(c.rows.world * entries);
      const int64_t columns = CeilDiv<int64_t>(c.n, c.ColumnBlock()) * c.KBlocks();
      w_scale.push_back(RandomArray<float>(random, c.scales != Scales::kNone ? columns : 0));
    }
  }

  int64_t Wrong(const Case& c, int rank) const {
    // Virtual row v of the gathered x, and where it is in y.
    const auto x_at = [&](int64_t v, int64_t l) {
      return x[c.rows.OwnerOf(v)][v % c.rows.PerRank() * c.k + l];
    };
    const int64_t blocks = c.KBlocks(), size = blocks == 1 ? c.k : kScaleBlock;
    const auto scale_at = [&](int64_t v, int64_t kb) {
      return x_scale[c.rows.OwnerOf(v)][v % c.rows.PerRank() * blocks + kb];
    };
    std::vector<int64_t> virtual_row(c.rows.Total());
    for (int64_t v = 0; v < c.rows.Total(); ++v) virtual_row[c.rows.Actual(v)] = v;
    int64_t wrong = simt::CountWrong(y[rank], [&](int64_t i) {
      const int64_t v = virtual_row[i / c.n], column = i % c.n;
      simt::Sum total;
      for (int64_t kb = 0; kb < blocks; ++kb) {
        simt::Sum sum;
        for (int64_t l = kb * size; l < Min(c.k, (kb + 1) * size); ++l) {
          const double term =
              x_at(v, l) * w[rank][c.transpose_rhs ? column * c.k + l : l * c.n + column];
          kIsWhole ? sum.AddWhole(term) : sum.Add(term);
        }
        if (c.scales != Scales::kNone) {
          sum = sum *
                simt::Sum(scale_at(v, kb) * w_scale[rank][column / c.ColumnBlock() * blocks + kb]);
        }
        total.value += sum.value;
        total.size += sum.size;
      }
      return total;
    });
    if constexpr (std::is_same_v<R, float>) {
      if (c.quantize != Quantizing::kNone) wrong += quantized[rank].Wrong(y[rank], c.quantize);
    }
    if (c.return_gathered) {
      wrong += simt::CountWrong(gathered[rank], [&](int64_t i) {
        return simt::Sum(x_at(virtual_row[i / c.k], i % c.k));
      });
      wrong += simt::CountWrong(gathered_scale[rank], [&](int64_t i) {
        return simt::Sum(scale_at(virtual_row[i / blocks], i % blocks));
      });
    }
    return wrong;
  }
};

// Runs three calls, each of them twice if it quantises, and returns how many elements of all ranks'
// results are wrong, from call `first` on.
template <typename T, typename R>
int64_t RunOf(const Case& c, uint32_t seed, size_t first = 0) {
  constexpr int kCalls = 3;
  std::mt19937 random(seed);
  AllGatherMatmulParams p{};
  p.rows = c.rows, p.k = c.k, p.n = c.n, p.dtype = simt::kDTypeOf<T>;
  p.out_dtype = simt::kDTypeOf<R>, p.w_dtype = simt::kDTypeOf<typename Call<T, R>::W>;
  p.transpose_rhs = c.transpose_rhs, p.return_gathered = c.return_gathered;
  const WorkspaceLayout workspace = CudaWorkspaceOf(p, c.scales);
  simt::DeviceHeap heap(c.rows.world, workspace, c.hooks);
  std::vector<Call<T, R>> calls;
  for (int i = 0; i < kCalls; ++i) calls.emplace_back(c, random);
  const int times = c.quantize == Quantizing::kNone ? 1 : 2;
  const bool ran = simt::RunOnDevices(
      heap, c.rows.world, kCalls * times, seed,
      [&](int number, const CudaDevice& device, const SymmetricView& view, std::string* error) {
        const int rank = view.rank, i = number / times;
        AllGatherMatmulOperands operands{};
        operands.x = calls[i].x[rank].get();
        operands.products[0] = {calls[i].w[rank].get(), calls[i].y[rank].get(), c.n, nullptr,
                                nullptr};
        operands.scales = c.scales;
        if (c.scales != Scales::kNone) {
          operands.x_scale = calls[i].x_scale[rank].get();
          operands.gathered_scale = calls[i].gathered_scale[rank].get();
          operands.products[0].scale = calls[i].w_scale[rank].get();
        }
        if (number % times == 1) {
          operands.quantize = c.quantize;
          operands.products[0].y = calls[i].quantized[rank].values.get();
          operands.products[0].y_scale = calls[i].quantized[rank].scale.get();
        }
        operands.weights = 1;
        operands.gathered = c.return_gathered ? calls[i].gathered[rank].get() : nullptr;
        const Machine machine{kSms};
        const bool quantizes = operands.quantize != Quantizing::kNone;
        const GemmChoice choice = quantizes ? ForQuantizing(c.choice) : c.choice;
        const ProductPlan plan{choice, AllGatherSenders(p, machine), workspace.TotalBytes()};
        return LoadAllGatherMatmulKernels(error) &&
               LaunchAllGatherMatmul(p, operands, plan, /*site=*/0, device, view, nullptr, error);
      });
  if (!ran) return -1;
  int64_t wrong = 0;
  for (int rank = 0; rank < c.rows.world; ++rank) {
    for (size_t i = first; i < calls.size(); ++i) wrong += calls[i].Wrong(c, rank);
  }
  return wrong;
}

int64_t Run(const Case& c, uint32_t seed) { return RunOf<__nv_bfloat16, __nv_bfloat16>(c, seed); }

const Case kCases[] = {
    {{2, 1, 100}, 136, 200, false, true, {192, 1, 1}},
    {{3, 2, 70}, 200, 264, true, false, {128, 1, 2}, {0, /*max_delay_us=*/100}},
    {{2, 1, 24}, 264, 136, false, false, {128, 1, 1, 2}, {0, 100}},  // two CTAs share k
    {{2, 1, 256}, 72, 232, true, true, {224, 2, 1}},                 // with a lent stage
    {{5, 1, 30}, 72, 136, false, true, {128, 1, 2}, {0, 100}},
    {{7, 1, 20}, 72, 136, true, false, {128, 1, 0}},
    {{8, 1, 40}, 72, 136, false, true, {128, 2, 1}, {0, 100}},
    {{8, 2, 20}, 72, 72, false, false, {128, 1, 1}, {0, 100}},
};

TEST(GathersAndMultiplies) {
  simt::SetSmCount(kSms);
  uint32_t seed = 1;
  for (const Case& c : kCases) {
    for (int schedule = 0; schedule < simt::Schedules(3); ++schedule, ++seed) {
      EXPECT(Run(c, seed) == 0) << "seed " << seed;
    }
  }
}

constexpr Scales kOfSums = Scales::kOfSums, kOfBlocks = Scales::kOfBlocks;
const Case kScaledCases[] = {
    {{2, 1, 100}, 144, 208, true, true, {192, 1, 1}, {}, kOfSums},
    {{3, 2, 70}, 272, 272, true, false, {128, 1, 2}, {0, 100}, kOfSums, /*float32=*/true},
    {{2, 1, 24}, 528, 144, true, false, {128, 1, 1, 2}, {0, 100}, kOfSums},  // two CTAs share k
    {{2, 1, 256}, 144, 240, true, true, {224, 2, 1}, {}, kOfSums},           // with a lent stage
    {{3, 1, 90}, 400, 272, true, false, {256, 2, 1}, {0, 100}, kOfSums},
    {{2, 1, 100}, 144, 400, true, true, {192, 1, 1}, {}, kOfBlocks},
    {{3, 2, 70}, 272, 272, true, false, {128, 1, 2}, {0, 100}, kOfBlocks, /*float32=*/true},
    {{3, 1, 90}, 400, 656, true, false, {160, 2, 1}, {0, 100}, kOfBlocks},
    {{2, 1, 150}, 656, 400, true, true, {256, 2, 1}, {0, 100}, kOfBlocks},  // with a lent stage
    {{2, 1, 24}, 528, 144, true, true, {128, 1, 1, 2}, {0, 100}, kOfBlocks},
    {{3, 2, 22}, 656, 144, true, true, {128, 1, 2}, {0, 100}, kOfBlocks},  // two boxes a k-panel
    {{2, 2, 90}, 272, 144, true, true, {192, 1, 1}, {0, 100}, kOfSums},
};

TEST(MultipliesAndScalesEightBits) {
  simt::SetSmCount(kSms);
  uint32_t seed = 1;
  for (const Case& c : kScaledCases) {
    for (int schedule = 0; schedule < simt::Schedules(2); ++schedule, ++seed) {
      const int64_t wrong = c.float32 ? RunOf<__nv_fp8_e4m3, float>(c, seed)
                                      : RunOf<__nv_fp8_e4m3, __nv_bfloat16>(c, seed);
      EXPECT(wrong == 0) << "seed " << seed;
    }
  }
  EXPECT((RunOf<__nv_fp8_e5m2, __nv_bfloat16>(kScaledCases[0], seed)) == 0);
  EXPECT((RunOf<__nv_fp8_e4m3, __half>(kScaledCases[1], seed)) == 0);
  EXPECT((RunOf<__nv_fp8_e4m3, __half>(kScaledCases[5], seed)) == 0);
}

TEST(GathersAndQuantizes) {
  simt::SetSmCount(kSms);
  Case c{{3, 2, 70}, 272, 272, true, true, {256, 2, 1}, {0, 100}, kOfSums, /*float32=*/true};
  c.quantize = Quantizing::kByAnyScale;
  EXPECT_EQ((RunOf<__nv_fp8_e4m3, float>(c, 1)), 0);
  c.scales = kOfBlocks, c.choice = {192, 1, 1}, c.quantize = Quantizing::kByPowersOfTwo;
  EXPECT_EQ((RunOf<__nv_fp8_e4m3, float>(c, 2)), 0);
}

TEST(MultipliesWholeNumbers) {
  simt::SetSmCount(kSms);
  for (uint32_t i = 0; i < 4; ++i) {  // with scales and without
    Case c = kScaledCases[i];
    c.scales = i % 2 == 0 ? kOfSums : Scales::kNone;
    const int64_t wrong =
        c.float32 ? RunOf<int8_t, float>(c, i) : RunOf<int8_t, __nv_bfloat16>(c, i);
    EXPECT_EQ(wrong, 0) << "case " << i;
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(kSms);
  simt::ExpectWrongWithoutWaits(kCases[0], Run);
}

// Where nothing but scales changes, the third call finds the first one's, unless it waits for its
// own.
TEST(StaleScalesAreFound) {
  simt::SetSmCount(kSms);
  for (Case c : {kScaledCases[1], kScaledCases[7]}) {
    c.same_x = true, c.float32 = false;
    const auto wrong = [&](uint32_t seed) {
      return RunOf<__nv_fp8_e4m3, __nv_bfloat16>(c, seed, /*first=*/2);
    };
    EXPECT_EQ(wrong(1), 0);
    c.hooks.skip_waits = 1;
    int64_t found = 0;  // in some schedule a peer is late
    for (uint32_t seed = 3; seed <= 5; ++seed) found += wrong(seed);
    EXPECT(found > 0);
  }
}

// A peer that never calls: the run fails, and says who waits.
TEST(AnAbsentRankIsADeadlock) {
  simt::SetSmCount(kSms);
  const Case c{{2, 1, 64}, 64, 128, false, false, {128, 1, 1}};
  std::mt19937 random(1);
  Call<__nv_bfloat16, __nv_bfloat16> call(c, random);
  AllGatherMatmulParams p{};
  p.rows = c.rows, p.k = c.k, p.n = c.n, p.dtype = p.out_dtype = DType::kBF16;
  const WorkspaceLayout workspace = CudaLayoutOf(p).Workspace();
  simt::DeviceHeap heap(2, workspace, {});
  simt::SetDevice(0);
  AllGatherMatmulOperands operands{};
  operands.x = call.x[0].get();
  operands.products[0] = {call.w[0].get(), call.y[0].get(), c.n, nullptr, nullptr};
  operands.weights = 1;
  std::string error;
  EXPECT(LoadAllGatherMatmulKernels(&error));
  EXPECT(LaunchAllGatherMatmul(p, operands, {c.choice, 1, workspace.TotalBytes()}, 0,
                               heap.Device(0, kSms), heap.View(0, 1), nullptr, &error));
  const std::string failure = simt::Run(1);
  EXPECT(failure.find("deadlock") == 0 && failure.find("device 0 CTA") != std::string::npos)
      << failure;
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
