// Loads of an A whose rows lie anywhere (gpu/gemm_operands_sm90.cuh). TMA loads boxes of
// consecutive rows, so A is copied by cp.async, 16 bytes for each lane, and w by TMA as elsewhere.
//
//   addresses  The scheduler warp writes the address of each of a tile's rows into a row table in
//              shared memory, one tile ahead. There are two tables: when the load warp begins a
//              tile (LoadBegun), it is done with the table of the tile before.
//   layout     What TMA would write: rows of 128 bytes, whose 16-byte vectors are swizzled.
//   full       A stage is full when w's bytes have arrived and each lane's copies have: 33
//              arrivals. The load warp waits for no copy.
//   order      cp.async writes through the generic proxy, and wgmma reads through the async one: a
//              consumer that finds a stage full fences before it multiplies (BeforeMultiply).
#ifndef JFLUX_GPU_GATHER_ROWS_SM90_CUH_
#define JFLUX_GPU_GATHER_ROWS_SM90_CUH_

#include <cstdint>

#include "gpu/gemm_call.cuh"
#include "gpu/gemm_operands_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// Bytes of a row table. A null address stands for a row of zeros.
template <typename Config>
inline constexpr int kRowTableBytes = 8 * Config::kTileM;
// A Config with kRowTables of them has them behind all else.
template <typename Config>
__device__ __forceinline__ uint32_t RowTableAt(const GemmSmem<Config>& smem, int i) {
  return smem.base + Config::kSmemBytes - (Config::kRowTables - i) * kRowTableBytes<Config>;
}

// Copies kBlockBytes, from byte `at` of each row on, of a table's first `rows` rows (64 or 128).
// `bytes`: of a row from `at` on; past its end are zeros. `any`: what may be read. Called by a full
// warp; eight lanes copy a row.
__device__ __forceinline__ void CopyRows(uint32_t to, uint32_t table, int rows, int64_t at,
                                         int64_t bytes, const char* any) {
  constexpr int kBatch = 8;  // addresses that are read before their rows
  const int lane = threadIdx.x % 32, vector = lane % 8, first = lane / 8;
  const bool is_inside = vector * kVectorBytes < bytes;
  const int64_t offset = is_inside ? at + vector * kVectorBytes : 0;
  // Rows 4 apart: r % 8 is `first`, then first + 4, and so on.
  const uint32_t even = to + first * kBlockBytes + ((vector ^ first) << 4);
  const uint32_t odd = to + first * kBlockBytes + ((vector ^ (first + 4)) << 4);
#pragma unroll 1
  for (int i = 0; i < rows / 4; i += kBatch) {
    const char* row[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      row[j] = reinterpret_cast<const char*>(ptx::LoadShared8(table + 8 * (first + 4 * (i + j))));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool reads = row[j] != nullptr && is_inside;
      ptx::CopyAsync16((j % 2 == 0 ? even : odd) + (i + j) * 4 * kBlockBytes,
                       reads ? row[j] + offset : any, reads ? kVectorBytes : 0);
    }
  }
}

// How much of a tile's rows is loaded: of the first `count` (64 or 128), `bytes` each.
struct RowExtent {
  int count;
  int64_t bytes;
};

struct RowsOfA : OperandsBase {
  // Those of w's bytes, and of each lane's copies.
  static constexpr int kFullArrivals = 1 + 32;

  // Fills the stages with a tile's operands. Called by a full warp.
  template <typename Op>
  static __device__ __forceinline__ void LoadTile(const typename Op::Args& args, const CallContext&,
                                                  const GemmSmem<typename Op::Config>& smem,
                                                  uint32_t cta, Tile tile,
                                                  const typename Op::Operands::Coords& coords,
                                                  int i, Ring<Op::Config::kStages>& stages,
                                                  KBlocksReader& a_rows) {
    using Config = typename Op::Config;
    using Operands = typename Op::Operands;
    static_assert(!Config::kLendsStage);
    const uint32_t table = RowTableAt(smem, i);
    const KRange k = Operands::KOf(args, tile, coords, 0);
    const auto rhs = Operands::RhsOf(args, coords, 0);
    const auto load_b = [&](const Ring<Config::kStages>& stage, int k0) {
      if (ptx::ElectOne()) {
        const uint32_t bar = smem.Full(stage.index);
        ptx::MbarrierArriveExpectTx(bar, Config::kBBytes);
        LoadB<Config>(smem.B(stage.index), rhs, bar, k0, cta);
      }
      __syncwarp();
    };
    // w does not wait for A's rows: see BoxesOfA.
    ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
    load_b(stages, k.begin);
    int staged = k.begin + Config::kTileK;  // w is loaded up to here
    Ring<Config::kStages> early = stages;
    early.Advance();
    const int most = Min(k.begin + Config::kStages * Config::kTileK, k.end);
    while (!__all_sync(0xffffffff, a_rows.Poll())) {
      if (staged < most &&
          __all_sync(0xffffffff, ptx::MbarrierTest(smem.Empty(early.index), early.parity ^ 1))) {
        load_b(early, staged);
        early.Advance();
        staged += Config::kTileK;
      }
    }
    a_rows.consumed = a_rows.arrived;  // all k-blocks of a tile arrive together
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.LoadBegun());
    const RowExtent rows = Operands::RowsOf(args, coords);
    for (int k0 = k.begin; k0 < k.end; k0 += Config::kTileK) {
      if (k0 >= staged) {
        ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
        load_b(stages, k0);
      }
      const int64_t at = int64_t{k0} * sizeof(typename Config::T);
      CopyRows(smem.A(stages.index), table, rows.count, at, rows.bytes - at,
               Operands::AnyRow(args));
      ptx::CopyAsyncArrive(smem.Full(stages.index));
      stages.Advance();
    }
  }

  // A came by cp.async.
  static __device__ __forceinline__ void BeforeMultiply() { ptx::FenceProxyAsyncShared(); }
};

}  // namespace jflux

#endif  // JFLUX_GPU_GATHER_ROWS_SM90_CUH_
