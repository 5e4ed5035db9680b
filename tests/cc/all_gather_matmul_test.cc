// all_gather_matmul's CPU body, which runs the tile protocol, on 1 to 8 threads. Tilings are small,
// so that tiles straddle ranks and chunks straddle rows.
#include "ops/all_gather_matmul/all_gather_matmul.h"

#include "all_gather_matmul_call.h"
#include "expect_right.h"
#include "plans.h"
#include "rank_errors.h"
#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int64_t outer, inner, k, n;
  CpuTiling tiling;
};
const Shape kShapes[] = {
    {1, 16, 8, 16, {64, 4, 8}},      // full tiles
    {1, 5, 7, 9, {64, 16, 8}},       // several ranks in one tile
    {1, 33, 16, 8, {4096, 16, 8}},   // tiles straddle; one chunk
    {1, 1, 3, 1, {64, 4, 8}},        // one row per rank
    {3, 7, 16, 20, {100, 8, 16}},    // outer rows; chunks end within elements
    {2, 16, 12, 33, {256, 32, 16}},  //
    {4, 3, 16, 17, {72, 32, 8}},     //
};

constexpr struct {
  DType x, w, y;
} kEightBits[] = {{DType::kF8E4M3FN, DType::kF8E4M3FN, DType::kBF16},
                  {DType::kF8E5M2, DType::kF8E4M3FN, DType::kF32},
                  {DType::kS8, DType::kS8, DType::kS32},
                  {DType::kS8, DType::kS8, DType::kF16}};

void Check(int world, const RunOptions& options) {
  uint32_t seed = 100 * world;
  for (const Shape& s : kShapes) {
    const auto check = [&](DType x, DType w, DType y) {
      ++seed;
      const bool transposed = seed % 2, gathered = seed % 3 != 0;
      const AllGatherMatmulParams p{
          Rows{world, s.outer, s.inner}, s.k, s.n, x, y, transposed, gathered, w};
      ExpectRight(world, options, seed, [&](uint32_t call_seed) {
        return std::make_unique<AllGatherMatmulCall>(p, s.tiling, call_seed);
      });
    };
    for (const auto& [in, out] : kProductTypes) check(in, in, out);
    for (const auto& [x, w, y] : kEightBits) check(x, w, y);
  }
}

TEST(EqualsItsDefinition) { OnEverySchedule(Check); }

AllGatherMatmulParams Small(int64_t inner, int64_t k) {
  return {Rows{3, 1, inner}, k, 8, DType::kF32, DType::kF32, false, false};
}

TEST(AnAbsentRankIsNamed) {
  AllGatherMatmulCall call(Small(8, 8), {64, 4, 8}, 1);
  ExpectAbsentRankIsNamed("all_gather_matmul", call, 3, 1);
}

// The shards of both calls have the same size.
TEST(RanksThatDisagreeAreTold) {
  AllGatherMatmulCall rank1s(Small(4, 16), {64, 4, 8}, 1), others(Small(8, 8), {64, 4, 8}, 1);
  ExpectDisagreementIsTold(rank1s, others, 3);
}

// What calls take on H200s: their configurations, how many send, and of the heap.
TEST(Plans) {
  ExpectPlans(
      "all_gather_matmul",
      {
          {2, 1, 32, 8192, 2560, DType::kBF16, {}, {128, 1, 1, 4}, 132, 2106368},
          {2, 1, 32, 8192, 2560, DType::kBF16, {{"gated", 1}}, {128, 1, 1, 1}, 132, 2106368},
          {2, 1, 64, 8192, 14336, DType::kBF16, {}, {128, 1, 1, 1}, 132, 4203520},
          {2, 1, 64, 8192, 14336, DType::kBF16, {{"gated", 1}}, {128, 1, 1, 1}, 132, 4203520},
          {2, 1, 256, 8192, 14336, DType::kBF16, {}, {224, 2, 0, 1}, 44, 16811008},
          {2, 1, 256, 8192, 14336, DType::kBF16, {{"gated", 1}}, {256, 2, 0, 1}, 44, 16811008},
          {2, 1, 333, 4104, 5520, DType::kBF16, {}, {256, 2, 0, 1}, 44, 16811008},
          {2, 1, 333, 4104, 5520, DType::kBF16, {{"gated", 1}}, {256, 2, 0, 1}, 44, 16811008},
          {2, 1, 1024, 4096, 8192, DType::kBF16, {}, {256, 2, 6, 1}, 44, 33620992},
          {2, 1, 1024, 4096, 8192, DType::kBF16, {{"gated", 1}}, {256, 2, 6, 1}, 44, 33620992},
          {4, 2, 512, 8192, 12288, DType::kBF16, {}, {256, 2, 4, 1}, 44, 134480896},
          {4, 2, 512, 8192, 12288, DType::kBF16, {{"gated", 1}}, {256, 2, 4, 1}, 44, 134480896},
          {8, 1, 128, 12288, 24576, DType::kBF16, {}, {256, 2, 0, 1}, 44, 67240960},
          {8, 1, 128, 12288, 24576, DType::kBF16, {{"gated", 1}}, {256, 2, 0, 1}, 44, 67240960},
          {8, 1, 1024, 256, 4096, DType::kBF16, {}, {192, 2, 4, 1}, 84, 8406016},
          {8, 1, 1024, 256, 4096, DType::kBF16, {{"gated", 1}}, {128, 2, 4, 1}, 84, 8406016},
          {4, 1, 4096, 24576, 12288, DType::kBF16, {}, {256, 2, 4, 1}, 44, 2151678976},
          {4, 1, 4096, 24576, 12288, DType::kBF16, {{"gated", 1}}, {256, 2, 4, 1}, 44, 2151678976},
          {2, 1, 16, 320, 4096, DType::kBF16, {}, {128, 1, 1, 1}, 132, 140288},
          {2, 1, 16, 320, 4096, DType::kBF16, {{"gated", 1}}, {128, 1, 1, 1}, 132, 140288},
          {3, 1, 640, 2048, 1000, DType::kBF16, {}, {128, 2, 2, 1}, 132, 16811008},
      });
}

// GPU kernels take 8 bits along k, 8-bit floats with w of e4m3, int8 with a result of floats; and
// no kernel two types that are no product.
TEST(FormatsThatAreRefused) {
  AllGatherMatmulParams p = Small(16, 16);
  p.dtype = DType::kF8E4M3FN, p.out_dtype = DType::kBF16, p.transpose_rhs = false;
  EXPECT_EQ(WhyNoKernel(p, kWgmmaFormats), "w of float8_e4m3fn must be stored [n, k]");
  p.transpose_rhs = true, p.k = p.n = 48;
  EXPECT_EQ(WhyNoKernel(p, kWgmmaFormats), "");
  p.dtype = DType::kF8E5M2, p.w_dtype = DType::kF8E4M3FN;
  EXPECT_EQ(WhyNoKernel(p, kWgmmaFormats), "");
  p.w_dtype = DType::kF8E5M2;
  EXPECT_EQ(WhyNoKernel(p, kWgmmaFormats),
            "x is float8_e5m2 and w is float8_e5m2, the kernels multiply float8_e5m2 by "
            "float8_e4m3fn");
  p.dtype = p.w_dtype.emplace(DType::kS8);
  EXPECT_EQ(WhyNoKernel(p, kWgmmaFormats), "");
  p.out_dtype = DType::kS32;
  EXPECT_EQ(WhyNoKernel(p, kWgmmaFormats),
            "results are int32, the kernels give float16, bfloat16, float32");
  // Portable code multiplies int8 everywhere, and float8 from 8.9 on.
  p.out_dtype = DType::kBF16;
  EXPECT_EQ(WhyNoKernel(p, FormatsOf(Machine{132, 0, kPortableArch})), "");
  p.dtype = p.w_dtype.emplace(DType::kF8E4M3FN);
  EXPECT_EQ(WhyNoKernel(p, FormatsOf(Machine{132, 0, kFloat8Arch})), "");
  EXPECT_EQ(WhyNoKernel(p, FormatsOf(Machine{132, 0, kPortableArch})),
            "operands are float8_e4m3fn, the kernels take float16, bfloat16, float32, int8");
  const auto why_not = [](DType x, DType w, DType y) {
    return WhyNotFormats(kAllGatherMatmulCpuFormats, kAllFormats, x, w, y);
  };
  for (const auto& [x, w, y] : kEightBits) EXPECT_EQ(why_not(x, w, y), "");
  EXPECT_EQ(why_not(DType::kF8E5M2, DType::kF8E5M2, DType::kBF16),
            "x is float8_e5m2 and w is float8_e5m2, the kernels multiply float8_e5m2 by "
            "float8_e4m3fn");
  EXPECT_EQ(why_not(DType::kF8E4M3FN, DType::kF8E4M3FN, DType::kF8E4M3FN),
            "results are float8_e4m3fn, the kernels give float16, bfloat16, float32");
  EXPECT_EQ(why_not(DType::kS32, DType::kS32, DType::kS32).rfind("operands are int32", 0), 0u);
  // What x and y were before there were two of them stays.
  EXPECT_EQ(why_not(DType::kBF16, DType::kBF16, DType::kF32), "");
  EXPECT_EQ(why_not(DType::kF32, DType::kF32, DType::kBF16),
            "results are bfloat16, the kernels give float32");
}

TEST(CallsThatHaveNoPlan) { ExpectProductRefusals("all_gather_matmul"); }

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
