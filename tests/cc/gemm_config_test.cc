// gpu/gemm_config.h: which configuration a product gets, and how an all-gather groups its rows.
#include "gpu/gemm_config.h"

#include "testing.h"

namespace jflux {
namespace {

constexpr int kSms = 132;

TEST(LargeProductsTakeTheLargestTile) {
  for (int64_t m : {2048, 4096, 8192}) {
    EXPECT(ChooseGemm(m, 12288, kSms) == (GemmChoice{256, 2, 8})) << m;
  }
}

TEST(FewerWavesWin) {
  // 192 tiles of 256 columns are 1.45 waves, 384 of 128 are 2.9.
  EXPECT(ChooseGemm(512, 12288, kSms) == (GemmChoice{128, 1, 16}));
  const GemmChoice best = ChooseGemm(512, 6144, kSms);
  for (const GemmChoice c :
       {GemmChoice{256, 2, 8}, GemmChoice{256, 1, 16}, GemmChoice{128, 1, 16}}) {
    EXPECT(EstimateCost(best, 512, 6144, kSms) <= EstimateCost(c, 512, 6144, kSms)) << c.tile_n;
  }
}

// A sweep may begin when its rows have arrived, if it is of more than one tile row.
TEST(GatherGroupsAreThereInTime) {
  for (int world : {2, 3, 4, 8}) {
    for (int64_t rows : {128, 256, 512, 1024, 2048, 4096}) {
      for (int64_t n : {256, 1024, 2560, 4096, 12288, 49152}) {
        for (int cluster_m : {1, 2}) {
          const GemmChoice c = GatherGroups(GemmChoice{256, cluster_m, 16}, world, rows, n);
          EXPECT(1 <= c.group_m && c.group_m <= 16);
          if (c.group_m == 1) continue;
          const double row_arrives = 3000.0 / static_cast<double>(n);  // 1: a row's product
          const int64_t sweep = c.group_m * kGemmTileM * c.cluster_m;
          for (int64_t done = rows; done < world * rows; done += sweep) {
            const int64_t needed = Min(done + sweep, world * rows) - rows;
            EXPECT(static_cast<double>(needed) * row_arrives <= static_cast<double>(done) * 1.0001)
                << world << " ranks, rows " << rows << " n " << n << " done " << done;
          }
        }
      }
    }
  }
}

TEST(OpsChooseAsTheirPartsDo) {
  for (int64_t rows : {32, 512, 2048}) {
    const GemmChoice c = ChooseGemm(4 * rows, 12288, kSms);
    EXPECT(ChooseReduceScatter(4, rows, 12288, kSms) == c);
    EXPECT(ChooseAllGather(4, rows, 12288, 12288, kSms) ==
           SplitFew(GatherGroups(c, 4, rows, 12288), 4 * rows, 12288, 12288, kSms));
  }
}

// 96 tiles on 132 SMs: a quarter of the SMs would read nothing; 4 splits are 2.9 waves of a fourth.
TEST(FewRowsKeepAllSmsReading) {
  for (int64_t m : {1, 16, 64, 128}) {
    const GemmChoice c = ChooseAllGather(1, m, 12288, 12288, kSms);
    EXPECT(c == (GemmChoice{128, 1, 1, 4})) << m;
  }
  for (int64_t n : {256, 1280, 2560, 7168, 12288, 28672}) {
    const GemmChoice c = ChooseAllGather(4, 16, n, 8192, kSms);
    const auto waves = [&](int splits) {
      return static_cast<double>(CeilDiv<int64_t>(CeilDiv<int64_t>(n, 128) * splits, kSms)) /
             splits;
    };
    EXPECT(1 <= c.splits && c.splits <= 8);
    EXPECT(waves(c.splits) <= waves(1)) << n;
  }
  EXPECT_EQ(ChooseAllGather(4, 128, 12288, 12288, kSms).splits, 1);
  EXPECT_EQ(ChooseAllGather(4, 16, 128, 136, kSms).splits, 1);  // sums would be more than w
}

TEST(ImpossibleChoices) {
  for (const GemmChoice& c : kCompiled) EXPECT(IsPossible(c));
  EXPECT(IsPossible({128, 1, 1, 16}));
  for (const GemmChoice c : {GemmChoice{64, 1, 1}, GemmChoice{256, 3, 1}, GemmChoice{256, 2, 0},
                             GemmChoice{256, 2, 8, 2}, GemmChoice{128, 1, 1, 0},
                             GemmChoice{128, 1, 1, 17}, GemmChoice{0, 0, 0, 0}}) {
    EXPECT(!IsPossible(c)) << c.tile_n << " " << c.cluster_m;
  }
  EXPECT_EQ(SplitsOf({128, 1, 1, 8}, 64), 1);
  EXPECT_EQ(SplitsOf({128, 1, 1, 8}, 65), 2);
  EXPECT_EQ(SplitsOf({128, 1, 1, 8}, 12288), 8);
}

TEST(WhatIsChosenIsCompiled) {
  for (int64_t m : {1, 64, 512, 1000, 8192}) {
    for (int64_t n : {8, 2560, 12288}) {
      const GemmChoice c = ChooseGemm(m, n, kSms);
      bool compiled = false;
      for (const GemmChoice& k : kCompiled) {
        compiled |= k.tile_n == c.tile_n && k.cluster_m == c.cluster_m;
      }
      EXPECT(compiled) << m << " x " << n;
    }
  }
}

TEST(RanksThatChooseDifferentlyDisagree) {
  const GemmChoice a{256, 2, 8}, b{128, 1, 16};
  EXPECT(SignatureOf(1, 2, a) != SignatureOf(1, 2, b));
  EXPECT(SignatureOf(1, 2, a) != SignatureOf(1, 3, a));
  EXPECT(SignatureOf(1, 2, a) != SignatureOf(2, 2, a));
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
