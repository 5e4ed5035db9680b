// Every compiled kernel of a product is one that some call takes by default: what no call takes
// should not be compiled.
#include <map>
#include <tuple>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "testing.h"

namespace jflux {
namespace {

// Calls by tile_n, cluster_m and splits.
class Taken {
 public:
  void Add(const GemmChoice& c) { ++calls_[{c.tile_n, c.cluster_m, c.splits}]; }
  int Of(const GemmChoice& c, int32_t splits) const {
    const auto found = calls_.find({c.tile_n, c.cluster_m, splits});
    return found == calls_.end() ? 0 : found->second;
  }

 private:
  std::map<std::tuple<int32_t, int32_t, int32_t>, int> calls_;
};

// visit(world, rows of a rank, n, k, machine)
template <typename F>
void ForCalls(F&& visit) {
  for (int sms : {114, 132}) {
    for (int world : {1, 2, 3, 4, 8}) {
      for (int64_t rows : {1, 16, 64, 128, 256, 384, 512, 1000, 1024, 2048, 8192}) {
        for (int64_t n : {128, 512, 1024, 1536, 2560, 3584, 4096, 5120, 7168, 8192, 14336, 28672}) {
          for (int64_t k : {64, 1024, 4096, 8192, 14336}) visit(world, rows, n, k, Machine{sms});
        }
      }
    }
  }
}

// Of an op that has a kernel for each of kCompiled; the k of some tiles is shared by up to
// `splits`.
void ExpectAllTaken(const Taken& taken, const char* op, int32_t splits) {
  for (const GemmChoice& c : kCompiled) {
    for (int32_t s = 1; s <= (CanShareK(c.tile_n, c.cluster_m) ? splits : 1); s *= 2) {
      EXPECT(taken.Of(c, s) > 0) << op << ": " << c.tile_n << " " << c.cluster_m << " " << s;
    }
  }
}

TEST(EveryProductTakesAllOfItsKernels) {
  Taken gather, scatter, reduce, few_rows, from_all, to_all;
  ForCalls([&](int world, int64_t rows, int64_t n, int64_t k, const Machine& machine) {
    const int64_t m = world * rows;
    gather.Add(FitSplits(ChooseAllGather(world, rows, n, k, DType::kBF16, machine), m, 2 * k,
                         kGatherSplits));
    scatter.Add(FitSplits(ChooseReduceScatter(world, rows, n, k, DType::kBF16, machine), m, 2 * k,
                          kReduceSplits));
    for (bool concat_rows : {false, true}) {
      from_all.Add(ChooseAllToAllMatmul(world, rows, k, n, DType::kBF16, concat_rows, machine));
    }
    to_all.Add(ChooseAllToAll(world, rows, n, k, DType::kBF16, machine));
    const GemmChoice choice = ChooseAllReduce(world, rows, n, k, DType::kBF16, machine);
    if (AreFewRows(world, m)) {
      few_rows.Add(FitSplits({kSharedKTile, 1, 1, choice.splits}, m, 2 * k, kReduceSplits));
    } else if (rows % kGemmTileM == 0) {
      reduce.Add(FitSplits(choice, m, 2 * k, /*most=*/1));
    }
  });
  ExpectAllTaken(gather, "all_gather_matmul", kGatherSplits);
  ExpectAllTaken(scatter, "matmul_reduce_scatter", kReduceSplits);
  ExpectAllTaken(from_all, "all_to_all_matmul", 1);
  ExpectAllTaken(to_all, "matmul_all_to_all", 1);
  ExpectAllTaken(reduce, "matmul_all_reduce", 1);
  for (int32_t s = 1; s <= kReduceSplits; s *= 2) {
    EXPECT(few_rows.Of({kSharedKTile, 1, 1}, s) > 0) << "matmul_all_reduce of few rows: " << s;
  }
}

TEST(ProductsTakeBothOfTheirKernelsOfInt8) {
  constexpr DType kS8 = DType::kS8;
  Taken reduce, from_all, to_all;
  ForCalls([&](int world, int64_t rows, int64_t n, int64_t k, const Machine& machine) {
    reduce.Add(ForFew(ChooseAllReduce(world, rows, n, k, kS8, machine), kS8));
    from_all.Add(
        ForFew(ChooseAllToAllMatmul(world, rows, k, n, kS8, /*concat_rows=*/true, machine), kS8));
    to_all.Add(ForFew(ChooseAllToAll(world, rows, n, k, kS8, machine), kS8));
  });
  for (const Taken& taken : {reduce, from_all, to_all}) {
    for (int32_t cluster_m : {1, 2}) EXPECT(taken.Of({FewTileN(cluster_m), cluster_m, 0}, 1) > 0);
  }
}

TEST(GroupedProductsTakeAllOfTheirKernels) {
  Taken forward, dw;
  ForCalls([&](int world, int64_t rows, int64_t n, int64_t k, const Machine& machine) {
    for (int64_t groups : {8, 64}) {
      GroupedMatmulParams p{};
      p.m = 8 * world * rows;
      p.k = k;
      p.n = n;
      p.groups = groups;
      forward.Add(ChooseGrouped(p, machine));
      GroupedMatmulDwParams d{};
      d.m = p.m;
      d.k = k;
      d.n = n;
      d.groups = groups;
      dw.Add(ChooseGroupedDw(d, machine));
    }
  });
  for (const GemmChoice& c : kGroupedCompiled) {
    EXPECT(forward.Of(c, 1) > 0) << c.tile_n << " " << c.cluster_m;
    EXPECT(dw.Of(c, 1) > 0) << c.tile_n << " " << c.cluster_m;
  }
}

TEST(GroupedProductsWithScalesTakeAllOfTheirKernels) {
  for (const Scales scales : {Scales::kOfSums, Scales::kOfBlocks}) {
    Taken taken;
    ForCalls([&](int world, int64_t rows, int64_t n, int64_t k, const Machine& machine) {
      GroupedMatmulParams p{};
      p.m = 8 * world * rows;
      p.k = k;
      p.n = n;
      p.groups = 8;
      p.dtype = DType::kF8E4M3FN;
      p.scales = scales;
      for (const bool gated : {false, true}) {
        p.gated = gated;
        taken.Add(ChooseGrouped(p, machine));
      }
    });
    for (const GemmChoice& c : GroupedChoicesOf(scales)) {
      EXPECT(taken.Of(c, 1) > 0) << c.tile_n << " " << c.cluster_m;
    }
  }
  for (const Scales scales : {Scales::kOfVectors, Scales::kOfBlocks}) {
    Taken dw;
    ForCalls([&](int world, int64_t rows, int64_t n, int64_t k, const Machine& machine) {
      GroupedMatmulDwParams p{8 * world * rows, k, n, 8, DType::kF8E4M3FN};
      p.scales = scales;
      dw.Add(ChooseGroupedDw(p, machine));
    });
    for (const GemmChoice& c : GroupedChoicesOf(scales)) {
      EXPECT(dw.Of(c, 1) > 0) << c.tile_n << " " << c.cluster_m;
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
