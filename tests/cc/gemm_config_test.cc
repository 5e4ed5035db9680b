// gpu/gemm_config.h: which configuration a product gets, and how an all-gather groups its rows.
#include "gpu/gemm_config.h"

#include "ops/matmul_all_reduce/matmul_all_reduce_config.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int kSms = 132;

TEST(LargeProductsTakeTheLargestTile) {
  for (int64_t m : {2048, 4096, 8192}) {
    EXPECT_EQ(ChooseGemm(4, m / 4, 12288, kSms).tile_n, 192) << m;
  }
}

TEST(FewerWavesWin) {
  // 224 tiles of 192 columns are 1.7 waves, 256 of 160 columns 1.94.
  EXPECT(ChooseGemm(4, 512, 2560, kSms) == (GemmChoice{160, 2, 8}));
  const GemmChoice best = ChooseGemm(2, 256, 6144, kSms);
  for (const GemmChoice& c : kCompiled) {
    EXPECT(EstimateCost(best, 512, 6144, kSms) <= EstimateCost(c, 512, 6144, kSms)) << c.tile_n;
  }
}

TEST(AClustersRowsAreTwoRanksInOneSweepOnly) {
  for (int64_t n : {512, 2560, 12288}) {
    // 250 rows are fewer than a cluster's.
    const GemmChoice c = ChooseGemm(8, 250, n, kSms);
    EXPECT(!InOneSweep(8, 250) && c.cluster_m == 1 && c.group_m > 0) << "n " << n;
  }
  EXPECT_EQ(ChooseGemm(4, 128, 12288, kSms).group_m, 0);
  EXPECT_EQ(ChooseGemm(4, 128, 12288, kSms).cluster_m, 2);
}

TEST(FewRowsAreOneSweep) {
  for (int world = 2; world <= 8; ++world) {
    for (int64_t rows = 1; rows < 4000; ++rows) {
      const int64_t others = (world - 1) * rows;
      const bool in_one = InOneSweep(world, rows);
      EXPECT(in_one || others >= 1024) << world << " ranks, rows " << rows;
      EXPECT(!in_one || others <= 1600) << world << " ranks, rows " << rows;
    }
  }
  EXPECT(!InOneSweep(4, 512) && InOneSweep(4, 500));  // ragged ones a little longer
  EXPECT(!InOneSweep(1, 64));                         // a product alone
}

TEST(SweepsOf1024RowsOrOneOfAll) {
  EXPECT(ChooseGemm(2, 512, 24576, kSms) == (GemmChoice{192, 2, 0}));
  EXPECT(ChooseGemm(2, 1024, 24576, kSms) == (GemmChoice{192, 2, 8}));
  EXPECT(ChooseGemm(2, 4096, 24576, kSms) == (GemmChoice{192, 2, 4}));
}

// A sweep may begin when its rows have arrived, if it is of more than one tile row.
TEST(GatherGroupsAreThereInTime) {
  for (int world : {2, 3, 4, 8}) {
    for (int64_t rows : {128, 256, 512, 1024, 2048, 4096}) {
      for (int64_t n : {256, 1024, 2560, 4096, 12288, 49152}) {
        for (int cluster_m : {1, 2}) {
          const GemmChoice c = GatherGroups(GemmChoice{192, cluster_m, 16}, world, rows, n);
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
  const int64_t n = 12288, k = 12288;
  for (int64_t rows : {64, 512, 2048}) {
    const GemmChoice c = ChooseGemm(4, rows, n, kSms);
    EXPECT(ChooseReduceScatter(4, rows, n, k, kSms) == c);
    EXPECT(ChooseAllGather(4, rows, n, k, kSms) == GatherGroups(c, 4, rows, n));
  }
  for (int64_t rows : {1, 16, 32}) {
    EXPECT(ChooseReduceScatter(4, rows, n, k, kSms) == ChooseFew(4 * rows, n, k, kSms, 1));
    EXPECT(ChooseAllGather(4, rows, n, k, kSms) == ChooseFew(4 * rows, n, k, kSms, 8));
    EXPECT_EQ(ChooseReduceScatter(4, rows, 2048, 4096, kSms).splits, 1);
  }
}

TEST(AllReducesAreFinishedFromTheBeginningOn) {
  for (int64_t rows : {128, 512, 1024}) {
    const GemmChoice c = ChooseAllReduce(4, rows, 12288, kSms),
                     scatter = ChooseGemm(4, rows, 12288, kSms);
    EXPECT(c.group_m == 0 && c.tile_n == scatter.tile_n && c.cluster_m == scatter.cluster_m)
        << rows;
  }
  EXPECT(ChooseAllReduce(4, 2048, 12288, kSms) == ChooseGemm(4, 2048, 12288, kSms));
}

// What was fastest on an H200.
TEST(FewRowsKeepEnoughSmsReading) {
  for (int64_t m : {1, 16, 64, 128}) {
    EXPECT(ChooseFew(m, 12288, 12288, kSms, 8) == (GemmChoice{128, 1, 1})) << m;
    EXPECT(ChooseFew(m, 12288, 24576, kSms, 8) == (GemmChoice{128, 1, 1})) << m;
    EXPECT(ChooseFew(m, 24576, 12288, kSms, 8) == (GemmChoice{192, 1, 1})) << m;
    // 20 tiles would leave most SMs without work.
    EXPECT(ChooseFew(m, 2560, 8192, kSms, 8).splits > 1) << m;
  }
  EXPECT_EQ(ChooseFew(64, 128, 136, kSms, 8).splits, 1);  // sums would cost more than w
}

TEST(ImpossibleChoices) {
  for (const GemmChoice& c : kCompiled) EXPECT(IsPossible(c));
  EXPECT(IsPossible({128, 1, 1, 16}));
  EXPECT(IsPossible({192, 2, 0}));
  for (const GemmChoice c :
       {GemmChoice{64, 1, 1}, GemmChoice{192, 3, 1}, GemmChoice{192, 2, -1},
        GemmChoice{192, 2, kMaxGroup + 1}, GemmChoice{192, 2, 8, 2}, GemmChoice{128, 1, 1, 0},
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
      const GemmChoice c = ChooseGemm(1, m, n, kSms);
      bool compiled = false;
      for (const GemmChoice& k : kCompiled) {
        compiled |= k.tile_n == c.tile_n && k.cluster_m == c.cluster_m;
      }
      EXPECT(compiled) << m << " x " << n;
    }
  }
}

TEST(RanksThatChooseDifferentlyDisagree) {
  const GemmChoice a{192, 2, 8}, b{128, 1, 16};
  EXPECT(SignatureOf(1, 2, a) != SignatureOf(1, 2, b));
  EXPECT(SignatureOf(1, 2, a) != SignatureOf(1, 3, a));
  EXPECT(SignatureOf(1, 2, a) != SignatureOf(2, 2, a));
  EXPECT(SignatureOf(1, 2, b) != SignatureOf(1, 2, {128, 1, 16, 2}));
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
