// The load warp of a GEMM kernel, and how it loads A in boxes (gpu/gemm_operands_sm90.cuh).
#ifndef JFLUX_GPU_GEMM_LOAD_SM90_CUH_
#define JFLUX_GPU_GEMM_LOAD_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "gpu/block_scales_sm90.cuh"
#include "gpu/gemm_exchange.cuh"
#include "gpu/gemm_operands_sm90.cuh"
#include "gpu/gemm_schedule.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// The load warp's view of rows that peers send: of each k-block that arrives, or of rows that are
// all there.
struct AllArrived {
  uint32_t counter;
  __device__ bool Poll() const { return true; }
  __device__ void AwaitNext() const {}
};
template <typename Op>
using ARows = std::conditional_t<kDoes<typename Op::Exchange::Rows>, KBlocksReader, AllArrived>;

struct BoxesOfA : OperandsBase {
  static constexpr int kFullArrivals = 1;  // that fill a stage, beside its bytes

  template <typename Args, typename Coords>
  static __device__ __forceinline__ int32_t ABytes(const Args& args, const Coords&) {
    return args.a_bytes;
  }

  // Fills the stages with a tile's operands. Called by a full warp.
  template <typename Op>
  static __device__ __forceinline__ void LoadTile(const typename Op::Args& args,
                                                  const CallContext& call,
                                                  const GemmSmem<typename Op::Config>& smem,
                                                  uint32_t cta, Tile tile,
                                                  const typename Op::Operands::Coords& coords, int,
                                                  Ring<Op::Config::kStages>& stages,
                                                  ARows<Op>& a_rows) {
    // All lanes copy scales; one does all else.
    if (Op::Config::kBlockScales || ptx::ElectOne()) {
      LoadBoxes<Op>(args, call, smem, cta, tile, coords, stages, a_rows);
    }
  }

  // Consumers call it before they multiply a stage.
  static __device__ __forceinline__ void BeforeMultiply() {}

 private:
  // Every tile has a k-block of the first term.
  template <typename Op>
  static __device__ __forceinline__ void LoadBoxes(const typename Op::Args& args,
                                                   const CallContext& call,
                                                   const GemmSmem<typename Op::Config>& smem,
                                                   uint32_t cta, Tile tile,
                                                   const typename Op::Operands::Coords& coords,
                                                   Ring<Op::Config::kStages>& stages,
                                                   ARows<Op>& a_rows) {
    using Config = typename Op::Config;
    using Operands = typename Op::Operands;
    const auto by_one = [](auto&& f) {
      if (!Config::kBlockScales || ptx::ElectOne()) f();
      if constexpr (Config::kBlockScales) __syncwarp();
    };
    const auto all = [](bool each) {
      return Config::kBlockScales ? __all_sync(0xffffffff, each) != 0 : each;
    };
    const auto load_b = [&](const Ring<Config::kStages>& stage, const auto& rhs, int k0) {
      by_one([&] {
        const uint32_t bar = smem.Full(stage.index);
        ptx::MbarrierArriveExpectTx(bar, Operands::ABytes(args, coords) + Config::kBBytes);
        LoadB<Config>(smem.B(stage.index), rhs, bar, k0, cta);
      });
    };
    // w is loaded before A: it comes from device memory, and the other CTAs of the cluster need
    // this CTA's share of it even if A's rows are late.
    const KRange first = Operands::KOf(args, tile, coords, 0);
    const auto first_rhs = Operands::RhsOf(args, coords, 0);
    ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
    load_b(stages, first_rhs, first.begin);
    int staged = first.begin + Config::kTileK;  // first term: w is loaded up to here
    // While no rows of A have arrived, prefetch w into the free stages.
    Ring<Config::kStages> early = stages;
    early.Advance();
    const int most = Min(first.begin + Config::kStages * Config::kTileK, first.end);
    while (!all(a_rows.Poll())) {
      if (staged < most && all(ptx::MbarrierTest(smem.Empty(early.index), early.parity ^ 1))) {
        load_b(early, first_rhs, staged);
        early.Advance();
        staged += Config::kTileK;
      }
    }
    by_one([&] { ptx::MbarrierArrive(smem.LoadBegun()); });
    const auto scales = ScalesOfTile<Op>(args, call, RowBlockOf<Config>(tile, cta), tile);
    int k_block = first.begin / Config::kTileK;  // over all terms
    for (int term = 0; term < Operands::Terms(args); ++term) {
      const auto source = Operands::SourceOf(args, call, coords, term);
      const auto rhs = term == 0 ? first_rhs : Operands::RhsOf(args, coords, term);
      const KRange k = term == 0 ? first : Operands::KOf(args, tile, coords, term);
      for (int k0 = k.begin; k0 < k.end; k0 += Config::kTileK) {
        if (term != 0 || k0 >= staged) {
          ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
          load_b(stages, rhs, k0);
        }
        a_rows.AwaitNext();
        by_one([&] { source.Load(smem.A(stages.index), smem.Full(stages.index), k0); });
        scales.Copy(smem, stages.index, k_block++);
        stages.Advance();
      }
    }
  }
};

struct RaggedBoxesOfA : BoxesOfA {};
template <typename Operands>
inline constexpr bool kIsRagged = std::is_base_of_v<RaggedBoxesOfA, Operands>;

// Waits until all stages, or all queue entries, are empty; `next` is the next one to be filled. A
// CTA must not exit while another CTA of the cluster may still arrive at its barriers, and the
// arrivals that empty stages and entries are the last ones.
template <int kSize, typename BarrierOf>
__device__ __forceinline__ void AwaitAllEmpty(Ring<kSize> next, BarrierOf&& barrier_of) {
  for (int i = 0; i < kSize; ++i) {
    ptx::MbarrierWait(barrier_of(next.index), next.parity ^ 1);
    next.Advance();
  }
}

template <typename Op>
__device__ __forceinline__ void RunLoadWarp(const typename Op::Args& args, const CallContext& call,
                                            const GemmSmem<typename Op::Config>& smem,
                                            uint32_t cta) {
  using Config = typename Op::Config;
  using Operands = typename Op::Operands;
  TileReader<Config> reader{smem, {}};
  Ring<Config::kStages> stages;
  ARows<Op> a_rows{smem.KBlocksArrived()};
  for (int table = 0;; table ^= 1) {
    const Tile tile = reader.Enter();
    const auto coords = reader.template Coords<typename Operands::Coords>();
    reader.Leave();
    if (!IsTile(tile)) break;
    Operands::template LoadTile<Op>(args, call, smem, cta, tile, coords, table, stages, a_rows);
    __syncwarp();
  }
  if (Config::kClusterM > 1 && ptx::ElectOne()) {
    AwaitAllEmpty(stages, [&](int stage) { return smem.Empty(stage); });
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_LOAD_SM90_CUH_
