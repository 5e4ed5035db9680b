// matmul_reduce_scatter's CPU body, which runs the tile protocol, on 1 to 8 threads. Tilings are
// small, so that tiles straddle ranks, and several ranks own rows of one tile.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

#include "expect_right.h"
#include "matmul_reduce_scatter_call.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t outer, inner, k, n;
  ScatterTiling tiling;
};
const Shape kShapes[] = {
    {1, 16, 8, 16, {4, 8}},     // full tiles
    {1, 5, 7, 9, {16, 8}},      // several ranks in one tile
    {1, 33, 16, 8, {16, 8}},    // tiles straddle
    {1, 7, 5, 24, {4, 8}},      // tiles straddle on both sides
    {1, 1, 3, 1, {4, 8}},       // one row per rank
    {3, 7, 16, 20, {8, 16}},    // outer rows
    {2, 16, 12, 33, {32, 16}},  //
    {4, 3, 16, 17, {32, 8}},    //
};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    for (const auto& [in, out] : kProductTypes) {
      ++seed;
      const bool transposed = seed % 2;
      const MatmulReduceScatterParams p{
          Rows{world, s.outer, s.inner}, s.k, s.n, in, out, transposed};
      ExpectRight(world, options, seed, [&](uint32_t call_seed) {
        return std::make_unique<MatmulReduceScatterCall>(p, s.tiling, call_seed);
      });
    }
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

MatmulReduceScatterParams Small(int64_t n) {
  return {Rows{3, 1, 8}, 8, n, DType::kF32, DType::kF32, false};
}

TEST(AnAbsentRankIsNamed) {
  MatmulReduceScatterCall call(Small(8), {4, 8}, 1);
  ExpectAbsentRankIsNamed("matmul_reduce_scatter", call, 3, 1);
}

TEST(RanksThatDisagreeAreTold) {
  MatmulReduceScatterCall rank1s(Small(8), {4, 8}, 1), others(Small(7), {4, 8}, 1);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

// What calls take on H200s: their configurations, how many send, and of the heap.
TEST(Plans) {
  constexpr DType kBF16 = DType::kBF16, kF32 = DType::kF32;
  ExpectPlans(
      "matmul_reduce_scatter",
      {
          {2, 1, 32, 8192, 2560, kBF16, {}, {128, 1, 1, 2}, 0, 4203520},
          {2, 1, 32, 16384, 2560, kBF16, {{"first_k", 8192}}, {128, 1, 1, 2}, 0, 4203520},
          {2, 1, 32, 8192, 2560, kF32, {}, {128, 1, 1, 2}, 0, 8406016},
          {2, 1, 32, 16384, 2560, kF32, {{"first_k", 8192}}, {128, 1, 1, 2}, 0, 8406016},
          {2, 1, 64, 8192, 14336, kBF16, {}, {128, 1, 1, 1}, 0, 16811008},
          {2, 1, 64, 16384, 14336, kBF16, {{"first_k", 8192}}, {128, 1, 1, 1}, 0, 16811008},
          {2, 1, 64, 8192, 14336, kF32, {}, {128, 1, 1, 1}, 0, 33620992},
          {2, 1, 64, 16384, 14336, kF32, {{"first_k", 8192}}, {128, 1, 1, 1}, 0, 33620992},
          {2, 1, 256, 8192, 14336, kBF16, {}, {224, 2, 0, 1}, 0, 33620992},
          {2, 1, 256, 16384, 14336, kBF16, {{"first_k", 8192}}, {224, 2, 0, 1}, 0, 33620992},
          {2, 1, 256, 8192, 14336, kF32, {}, {224, 2, 0, 1}, 0, 67240960},
          {2, 1, 256, 16384, 14336, kF32, {{"first_k", 8192}}, {224, 2, 0, 1}, 0, 67240960},
          {2, 1, 333, 4104, 5520, kBF16, {}, {256, 2, 0, 1}, 0, 33620992},
          {2, 1, 333, 8208, 5520, kBF16, {{"first_k", 4104}}, {128, 2, 0, 1}, 0, 33620992},
          {2, 1, 333, 4104, 5520, kF32, {}, {256, 2, 0, 1}, 0, 67240960},
          {2, 1, 333, 8208, 5520, kF32, {{"first_k", 4104}}, {128, 2, 0, 1}, 0, 67240960},
          {2, 1, 1024, 4096, 8192, kBF16, {}, {128, 2, 8, 1}, 28, 67240960},
          {2, 1, 1024, 8192, 8192, kBF16, {{"first_k", 4096}}, {256, 2, 8, 1}, 14, 67240960},
          {2, 1, 1024, 4096, 8192, kF32, {}, {128, 2, 8, 1}, 32, 134480896},
          {2, 1, 1024, 8192, 8192, kF32, {{"first_k", 4096}}, {256, 2, 8, 1}, 28, 134480896},
          {4, 2, 512, 8192, 12288, kBF16, {}, {256, 2, 4, 1}, 14, 268960768},
          {4, 2, 512, 16384, 12288, kBF16, {{"first_k", 8192}}, {256, 2, 4, 1}, 8, 268960768},
          {4, 2, 512, 8192, 12288, kF32, {}, {256, 2, 4, 1}, 28, 537920512},
          {4, 2, 512, 16384, 12288, kF32, {{"first_k", 8192}}, {256, 2, 4, 1}, 14, 537920512},
          {8, 1, 128, 12288, 24576, kBF16, {}, {256, 2, 0, 1}, 0, 134480896},
          {8, 1, 128, 24576, 24576, kBF16, {{"first_k", 12288}}, {256, 2, 0, 1}, 0, 134480896},
          {8, 1, 128, 12288, 24576, kF32, {}, {256, 2, 0, 1}, 0, 268960768},
          {8, 1, 128, 24576, 24576, kF32, {{"first_k", 12288}}, {256, 2, 0, 1}, 0, 268960768},
          {8, 1, 1024, 256, 4096, kBF16, {}, {128, 2, 4, 1}, 0, 134480896},
          {8, 1, 1024, 512, 4096, kBF16, {{"first_k", 256}}, {128, 2, 4, 1}, 32, 134480896},
          {8, 1, 1024, 256, 4096, kF32, {}, {128, 2, 4, 1}, 0, 268960768},
          {8, 1, 1024, 512, 4096, kF32, {{"first_k", 256}}, {128, 2, 4, 1}, 32, 268960768},
          {4, 1, 4096, 24576, 12288, kBF16, {}, {256, 2, 4, 1}, 8, 1075840000},
          {4, 1, 4096, 49152, 12288, kBF16, {{"first_k", 24576}}, {256, 2, 4, 1}, 8, 1075840000},
          {4, 1, 4096, 24576, 12288, kF32, {}, {256, 2, 4, 1}, 9, 2151678976},
          {4, 1, 4096, 49152, 12288, kF32, {{"first_k", 24576}}, {256, 2, 4, 1}, 8, 2151678976},
          {2, 1, 16, 320, 4096, kBF16, {}, {128, 1, 1, 1}, 0, 4203520},
          {2, 1, 16, 640, 4096, kBF16, {{"first_k", 320}}, {128, 1, 1, 1}, 0, 4203520},
          {2, 1, 16, 320, 4096, kF32, {}, {128, 1, 1, 1}, 0, 8406016},
          {2, 1, 16, 640, 4096, kF32, {{"first_k", 320}}, {128, 1, 1, 1}, 0, 8406016},
          {3, 1, 640, 2048, 1000, kBF16, {}, {128, 2, 8, 1}, 0, 8406016},
          {3, 1, 640, 4096, 1000, kBF16, {{"first_k", 2048}}, {128, 2, 8, 1}, 0, 8406016},
          {3, 1, 640, 2048, 1000, kF32, {}, {128, 2, 8, 1}, 0, 16811008},
          {3, 1, 640, 4096, 1000, kF32, {{"first_k", 2048}}, {128, 2, 8, 1}, 0, 16811008},
      });
}

TEST(CallsThatHaveNoPlan) { ExpectProductRefusals("matmul_reduce_scatter"); }

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
