// grouped_matmul and its weight gradient in portable code (gpu/gemm_sm80.cuh). Of operands of 8
// bits the product is grouped_matmul_scaled's.
//
// The first warp of a CTA reads group_sizes, 32 at a time, as far as its next tile is. CTAs take
// every gridDim-th tile: all cost the same, and no counter has to be reset. Rows of a tile past the
// group's end are not stored.
//
//   waits   for nobody
//   order   a launch after what wrote the operands; the rows of y, and the tiles of dw, are
//           disjoint
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_SM80_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_SM80_CUH_

#include "core/activation.h"
#include "core/group_tiles.h"
#include "gpu/gemm_epilogue_sm80.cuh"
#include "gpu/gemm_sm80.cuh"
#include "gpu/group_table.cuh"
#include "gpu/warp_scan.cuh"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/grouped_rows.cuh"

namespace jflux {

// Finds the group of a tile. Called by a full warp, with a t that only grows. Sizes that make no
// sense are cut to the rows that there are, as in gpu/group_table.cuh.
class GroupFinder80 {
 public:
  struct Found {
    int32_t group, tile;  // the tile's number among the group's
    int32_t begin, end;   // the group's rows
  };
  // count(rows) -> tiles of a group. Group -1: there is no such tile.
  template <typename Count>
  __device__ Found Find(const GroupedRows& groups, int32_t t, Count&& count) {
    const int lane = threadIdx.x % 32;
    for (; first_ < groups.groups; first_ += 32) {
      if (!read_) {
        const bool is_group = first_ + lane < groups.groups;
        const int64_t size = is_group ? Max(__ldg(groups.group_sizes + first_ + lane), 0) : 0;
        sum_ = sum_before_ + WarpInclusiveSum(size);
        begin_ = static_cast<int32_t>(Min<int64_t>(groups.rows, sum_ - size));
        end_ = static_cast<int32_t>(Min<int64_t>(groups.rows, sum_));
        tiles_ = tiles_before_ + WarpInclusiveSum(is_group ? count(end_ - begin_) : 0);
        read_ = true;
      }
      const uint32_t after = __ballot_sync(0xffffffff, t < tiles_);
      if (after != 0) {
        const int at = __ffs(after) - 1;
        const int32_t before = __shfl_sync(0xffffffff, tiles_, Max(at - 1, 0));
        return Found{first_ + at, t - (at == 0 ? tiles_before_ : before),
                     __shfl_sync(0xffffffff, begin_, at), __shfl_sync(0xffffffff, end_, at)};
      }
      sum_before_ = __shfl_sync(0xffffffff, sum_, 31);
      tiles_before_ = __shfl_sync(0xffffffff, tiles_, 31);
      read_ = false;
    }
    return Found{-1, 0, 0, 0};
  }

 private:
  int32_t first_ = 0;         // the group of lane 0
  int64_t sum_before_ = 0;    // of the sizes of groups before it
  int32_t tiles_before_ = 0;  // and of their tiles
  bool read_ = false;         // whether the lanes know these of theirs:
  int64_t sum_ = 0;
  int32_t begin_ = 0, end_ = 0, tiles_ = 0;
};

// ---- y = x @ w of the row's group ---------------------------------------------------------------

struct GroupedMatmulArgs80 {
  GroupedRows groups;
  GroupTiles tiles;
  int32_t k, n, terms;
  bool gated;             // half of a tile's columns belong to each weight
  bool fill;              // rows past the last group are zeros
  bool out_f32, out_f16;  // out_f16: of operands of 8 bits
  Activation activation;
  const float* row_scale;  // [M], or null
  const void* x[2];
  const void* w[2];
  void* y;
  void* sums[2];  // or null
  // Of operands of 8 bits: of rows [M], and of the columns of each group.
  const float* x_scale;
  const float* w_scale[2];
};

template <typename Config_>
struct GroupedMatmulSm80 {
  using Config = Config_;
  using Args = GroupedMatmulArgs80;
  using T = typename Config::T;

  // A tile is {m: its first row, n: group * tiles_n + tile column, split: end of the group's rows}.
  struct Schedule : Rounds {
    GroupFinder80 finder;
    __device__ Schedule(const Args&, uint32_t) {}
    __device__ Tile Find(const Args& args, int32_t t) {
      const auto found =
          finder.Find(args.groups, t, [&](int32_t r) { return args.tiles.Count(r); });
      if (found.group < 0) return kNoTile80;
      const Tile tile = args.tiles.At(found.tile, found.end - found.begin);
      return Tile{found.begin + tile.m * Config::kTileM, found.group * args.tiles.tiles_n + tile.n,
                  found.end};
    }
  };
  // An op over ranks numbers the groups of each class of tiles anew.
  static __device__ int64_t GroupOf(const Args& args, Tile tile) {
    return tile.n / args.tiles.tiles_n % args.groups.groups;
  }
  // The tile's first column of y.
  static __device__ int64_t ColumnOf(const Args& args, Tile tile) {
    return static_cast<int64_t>(tile.n % args.tiles.tiles_n) *
           (args.gated ? Config::kTileN / 2 : Config::kTileN);
  }

  struct Operands {
    static constexpr int kMostTerms = Config::kNarrow ? 1 : 2;
    static __device__ int Terms(const Args& args) { return kMostTerms == 1 ? 1 : args.terms; }
    static __device__ int64_t KBytes(const Args& args, Tile, int) {
      return args.k * static_cast<int64_t>(sizeof(T));
    }
    static __device__ RowsToCopy<Config> LhsOf(const Args& args, const CallContext&, Tile tile,
                                               int term) {
      RowsToCopy<Config> a;
      a.skip = 0;
#pragma unroll
      for (int i = 0; i < a.kRows; ++i) {
        const int64_t row = Min(tile.m + a.RowOf(i), tile.split - 1);
        a.row[i] = static_cast<const char*>(args.x[term]) + row * KBytes(args, tile, term);
      }
      return a;
    }
    static __device__ Rhs80 RhsOf(const Args& args, Tile tile, int term) {
      const int64_t at = GroupOf(args, tile) * args.n * KBytes(args, tile, term);
      const auto weight = [&](int i) { return static_cast<const char*>(args.w[i]) + at; };
      return Rhs80{weight(term), args.gated ? weight(1) : nullptr, ColumnOf(args, tile), args.n};
    }
  };

  struct Epilogue {
    // Zeros for rows from `end` on. Called by one warp of each CTA.
    static __device__ void FillPast(const Args& args, int64_t end) {
      const int64_t rows = args.groups.rows;
      const int64_t bytes =
          args.n * (args.out_f32 ? int64_t{4} : int64_t{sizeof(typename Config::Result)});
      for (void* to : {args.y, args.sums[0], args.sums[1]}) {
        if (to != nullptr) ZeroFill(to, Max<int64_t>(0, Min(rows, end)) * bytes, rows * bytes);
      }
    }
    static __device__ void Store(const Args& args, const Columns8& columns, void* to, int64_t row,
                                 int64_t c) {
      const int64_t at = row * args.n;
      WithResult<Config>(args.out_f32, args.out_f16, [&](auto u) {
        columns.Store(static_cast<decltype(u)*>(to) + at, c, args.n);
      });
    }
    // Sums of a row, of a weight, with their scales if they have any.
    static __device__ void Scale(const Args& args, Columns8& columns, Tile tile, int64_t row,
                                 int weight, int64_t c) {
      if constexpr (Config::kNarrow) {
        const float* of_columns = args.w_scale[weight] + GroupOf(args, tile) * args.n;
        columns.Scale(__ldg(args.x_scale + row), of_columns, c);
      }
    }
    static __device__ __forceinline__ void Finish(const Args& args, const CallContext&,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      FinishRows(args, smem, sums, tile, [](int64_t) { return true; });
    }
    // is_there(row): else the row of x counts as zeros, whatever was multiplied.
    template <typename IsThere>
    static __device__ __forceinline__ void FinishRows(const Args& args, uint32_t smem,
                                                      Sums80<Config>& sums, Tile tile,
                                                      IsThere&& is_there) {
      using Rows = StagedRows<Config>;
      const int64_t n0 = ColumnOf(args, tile);
      ToFloats<Config>(sums);
      constexpr int kHalf = Rows::kGroups / 2;
      ForStagedRows<Config>(sums, smem, [&](const Rows& rows) {
        const auto finish = [&](int r, int group, bool gated) {
          const int64_t row = tile.m + rows.first_row + r;
          const int64_t c = n0 + rows.first_column / (gated ? 2 : 1) + group * Columns8::kCount;
          if (row >= tile.split || c >= args.n) return;
          Columns8 y = rows.Get(r, group), gate;
          if (gated) gate = rows.Get(r, group + kHalf);
          if (!is_there(row)) y = gate = Columns8{};
          Scale(args, y, tile, row, 0, c);
          if (gated) Scale(args, gate, tile, row, 1, c);
          if (args.sums[0] != nullptr) {
            Store(args, y, args.sums[0], row, c);
            if (gated) Store(args, gate, args.sums[1], row, c);
          }
          y.Activate(args.activation);
          const float scale = args.row_scale == nullptr ? 1 : __ldg(args.row_scale + row);
          y.Each([&](float& x, int e) { x *= gated ? gate.v[e] * scale : scale; });
          Store(args, y, args.y, row, c);
        };
        if (args.gated) {
          rows.template ForEach<kHalf>([&](int r, int group) { finish(r, group, true); });
        } else {
          rows.template ForEach<Rows::kGroups>([&](int r, int group) { finish(r, group, false); });
        }
      });
    }
  };

  struct Exchange : NoExchange80 {
    // Zeros for rows of no group.
    static __device__ void Finally(const Args& args, const CallContext&, uint32_t) {
      if (threadIdx.x >= 32) return;
      const GroupedRows& groups = args.groups;
      const int64_t sum = ForEachGroup(groups.group_sizes, groups.groups, groups.rows,
                                       [](int32_t, bool, GroupRows) {});
      CheckSizes(groups, sum);
      if (args.fill) Epilogue::FillPast(args, sum);
    }
  };
};

JFLUX_GEMM_KERNEL_80(GroupedMatmul);

// The arguments that ops over ranks share: without row scales, of one term or a gate.
inline GroupedMatmulArgs80 GroupedArgs80(const GroupedMatmulParams& p, int32_t group_m,
                                         const void* const (&w)[2], void* y,
                                         void* const (&sums)[2]) {
  GroupedMatmulArgs80 args{};
  const int64_t columns = kTileN80 / p.Weights();  // of y in a tile
  args.tiles =
      GroupTiles{kGemmTileM, static_cast<int32_t>(CeilDiv<int64_t>(p.n, columns)), group_m};
  args.k = static_cast<int32_t>(p.k);
  args.n = static_cast<int32_t>(p.n);
  args.terms = p.terms;
  args.gated = p.gated;
  args.fill = p.fill;
  args.out_f32 = p.out_dtype == DType::kF32;
  args.out_f16 = p.out_dtype == DType::kF16;
  args.activation = p.activation;
  args.y = y;
  for (int i = 0; i < 2; ++i) {
    args.w[i] = w[i];
    args.sums[i] = p.sums ? sums[i] : nullptr;
  }
  return args;
}

// ---- dw = x^T @ dy of a group's rows ------------------------------------------------------------

struct GroupedMatmulDwArgs80 {
  GroupedRows groups;
  int32_t tiles_k, tiles_n, group_m;  // tiles of a group; tile rows of a raster group
  int32_t k, n;
  bool out_f32;
  const void* x;
  const void* dy;
  void* dw;
};

template <typename Config_>
struct GroupedMatmulDwSm80 {
  using Config = Config_;
  using Args = GroupedMatmulDwArgs80;
  using T = typename Config::T;

  // Groups that have rows have tiles_k * tiles_n tiles. A tile is {m: its first row of rows,
  // n: (group * tiles_k + tile row) * tiles_n + tile column, split: end of the group's rows}.
  struct Schedule : Rounds {
    GroupFinder80 finder;
    __device__ Schedule(const Args&, uint32_t) {}
    __device__ Tile Find(const Args& args, int32_t t) {
      const auto found = finder.Find(
          args.groups, t, [&](int32_t rows) { return rows > 0 ? args.tiles_k * args.tiles_n : 0; });
      if (found.group < 0) return kNoTile80;
      const Tile tile = GroupedTile(found.tile, args.tiles_k, args.tiles_n, args.group_m);
      return Tile{found.begin, (found.group * args.tiles_k + tile.m) * args.tiles_n + tile.n,
                  found.end};
    }
  };
  static __device__ int32_t ColumnOf(const Args& args, Tile tile) {
    return tile.n % args.tiles_n * Config::kTileN;
  }
  static __device__ int32_t RowOf(const Args& args, Tile tile) {
    return tile.n / args.tiles_n % args.tiles_k * Config::kTileM;
  }

  struct Operands {
    static constexpr int kMostTerms = 1;
    static __device__ int Terms(const Args&) { return 1; }
    static __device__ int64_t KBytes(const Args&, Tile tile, int) {
      return static_cast<int64_t>(tile.split - tile.m) * sizeof(T);
    }
    static __device__ Rhs80 LhsOf(const Args& args, const CallContext&, Tile tile, int) {
      return Rhs80{static_cast<const T*>(args.x) + static_cast<int64_t>(tile.m) * args.k, nullptr,
                   RowOf(args, tile), args.k};
    }
    static __device__ Rhs80 RhsOf(const Args& args, Tile tile, int) {
      return Rhs80{static_cast<const T*>(args.dy) + static_cast<int64_t>(tile.m) * args.n, nullptr,
                   ColumnOf(args, tile), args.n};
    }
  };

  struct Epilogue {
    static __device__ __forceinline__ void Finish(const Args& args, const CallContext&,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      using Rows = StagedRows<Config>;
      const int64_t group = tile.n / args.tiles_n / args.tiles_k;
      ForStagedRows<Config>(sums, smem, [&](const Rows& rows) {
        rows.template ForEach<Rows::kGroups>([&](int r, int columns) {
          const int32_t row = RowOf(args, tile) + rows.first_row + r;
          const int32_t c = ColumnOf(args, tile) + rows.first_column + columns * Columns8::kCount;
          if (row >= args.k || c >= args.n) return;
          const int64_t at = (group * args.k + row) * args.n;
          const Columns8 y = rows.Get(r, columns);
          if constexpr (sizeof(T) == 2) {
            if (!args.out_f32) return y.Store(static_cast<T*>(args.dw) + at, c, args.n);
          }
          y.Store(static_cast<float*>(args.dw) + at, c, args.n);
        });
      });
    }
  };

  struct Exchange : NoExchange80 {
    // Zeros for groups without rows.
    static __device__ void Finally(const Args& args, const CallContext&, uint32_t) {
      if (threadIdx.x >= 32) return;
      const GroupedRows& groups = args.groups;
      const int64_t bytes =
          int64_t{args.k} * args.n * (args.out_f32 ? int64_t{4} : int64_t{sizeof(T)});
      CheckSizes(groups, FillEmptyGroups(groups, args.dw, bytes));
    }
  };
};

JFLUX_GEMM_KERNEL_80(GroupedMatmulDw);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_SM80_CUH_
