// A persistent, warp-specialised GEMM main loop for Hopper, with hooks per tile.
//
// A CTA computes kTileM x kTileN tiles; kClusterM CTAs form a cluster that computes that many tiles
// one below the other, sharing w's tile by multicast. Three warpgroups:
//
//   0, warp 0   loader: feeds the stages by TMA, one tile's operands after the other's
//   0, warp 1   Op::Send: moves this rank's data to its peers (all-gather); then, if there are
//               parts of tiles that others compute, waits for them (Op::WaitForParts)
//   0, warp 2   storer: Op::Store writes out what the consumers staged
//   0, warp 3   scout: takes tiles from a counter in device memory, one ahead of the loader, and
//               waits for a tile's rows of A (Op::WaitForRows)
//   1 and 2     consumers, which take tiles in turn: wgmma, then Op::Finish, which adds others'
//               parts and stages the result
//
//   scout --tile--> loader --stages--> consumers --staging--> storer
//
// Each hands on to the next and goes on at once: while a tile is finished, written out, or waits
// for parts or rows, the other consumer keeps the tensor cores busy (docs/design/0003).
//
// Tiles and units of sending are taken from counters, so a kernel makes progress with whatever
// CTAs the device has room for: one that starts late, because another kernel holds its SM, finds
// its share done. The counters are put back when nobody takes from them any more, and then the
// epoch is published too.
//
// The Op (ops/*/*_sm90.cuh) is a struct of static device functions and an Args type; see RunGemm.
#ifndef JFLUX_GPU_GEMM_SM90_CUH_
#define JFLUX_GPU_GEMM_SM90_CUH_

#include <cstdint>

#include "core/layout.h"
#include "core/signal.h"
#include "core/tile_order.h"
#include "gpu/device_state.h"
#include "gpu/ptx.cuh"
#include "gpu/timeline.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

template <typename T_, int kTileN_, int kClusterM_, bool kTransposeRhs_>
struct GemmConfig {
  using T = T_;
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = 64;
  static constexpr int kClusterM = kClusterM_;
  static constexpr bool kTransposeRhs = kTransposeRhs_;  // w is [n, k], K-major

  static constexpr int kThreads = 384;
  // Registers per thread of the two kinds of warpgroups. A CTA can only redistribute what it was
  // launched with: 168 for each of 384 threads. One more would wait forever.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kLoaderRegisters + 2 * kConsumerRegisters <= 3 * 168);
  static constexpr int kConsumers = 2;
  static constexpr int kBlocks = kTileM / 64;       // of a tile: the rows of one wgmma
  static constexpr int kAccumulators = kTileN / 2;  // of a thread, for a block
  // Boxes of w stored [k, n] are 64 columns wide; some of the last one's may not be needed.
  static constexpr int kLoadN = kTransposeRhs ? kTileN : CeilDiv(kTileN, 64) * 64;
  static constexpr int kABytes = kTileM * kTileK * 2;
  static constexpr int kBBytes = kLoadN * kTileK * 2;
  // A block in a 16-bit type, on its way out.
  static constexpr int kStagingBytes = 64 * kTileN * 2;
  static constexpr int kPieceBytes = 4096;  // of what Op::Send moves
  static constexpr int kPieces = 4;
  static constexpr int64_t kChunkBytes = kPieces * kPieceBytes;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kStages =
      (232448 - kBarrierBytes - kPieces * kPieceBytes - kConsumers * kStagingBytes) /
      (kABytes + kBBytes);
  // Of w, for each tile that waits for its rows: 256 KiB of each CTA, so 34 MB for 132 of them, of
  // 50 or 60 MB of L2.
  static constexpr int kPrefetchBlocks = 262144 * kClusterM / kBBytes;
  // How the CTAs of a cluster share the loading of w's tile, stored [k, n]: by rows.
  static constexpr int kBoxRows = kTileK / kClusterM;
  static constexpr int kSlots = 8;  // tiles handed out and not yet finished

  // Shared memory, in this order.
  static constexpr int kBOffset = kStages * kABytes;
  static constexpr int kStagingOffset = kBOffset + kStages * kBBytes;
  static constexpr int kSendOffset = kStagingOffset + kConsumers * kStagingBytes;
  static constexpr int kBarrierOffset = kSendOffset + kPieces * kPieceBytes;
  static constexpr int kSmemBytes = kBarrierOffset + kBarrierBytes;
  static_assert(kSmemBytes <= 232448);
};

// Barriers and small variables, by shared-memory address.
template <typename Config>
struct GemmSmem {
  uint32_t base;

  __device__ uint32_t A(int stage) const { return base + stage * Config::kABytes; }
  __device__ uint32_t B(int stage) const {
    return base + Config::kBOffset + stage * Config::kBBytes;
  }
  __device__ uint32_t Staging(int consumer) const {
    return base + Config::kStagingOffset + consumer * Config::kStagingBytes;
  }
  __device__ uint32_t Piece(int i) const {
    return base + Config::kSendOffset + i * Config::kPieceBytes;
  }
  __device__ uint32_t Bar(int i) const { return base + Config::kBarrierOffset + 8 * i; }
  // Stages: filled by TMA, emptied by the consumers of all CTAs that share them.
  __device__ uint32_t Full(int stage) const { return Bar(stage); }
  __device__ uint32_t Empty(int stage) const { return Bar(Config::kStages + stage); }
  // Slots: a tile is published; all are done with it; its rows are there; the others' parts are.
  static constexpr int kSlot = 2 * Config::kStages;
  __device__ uint32_t SlotFull(int slot) const { return Bar(kSlot + slot); }
  __device__ uint32_t SlotEmpty(int slot) const { return Bar(kSlot + Config::kSlots + slot); }
  __device__ uint32_t RowsReady(int slot) const { return Bar(kSlot + 2 * Config::kSlots + slot); }
  __device__ uint32_t PartsReady(int slot) const { return Bar(kSlot + 3 * Config::kSlots + slot); }
  static constexpr int kOther = kSlot + 4 * Config::kSlots;
  // The loader begins with a tile, so the scout may take the next.
  __device__ uint32_t Begun() const { return Bar(kOther); }
  // All of the other consumer's stages are full, so the next ones are this consumer's.
  __device__ uint32_t Turn(int consumer) const { return Bar(kOther + 1 + consumer); }
  // A consumer's staging: written by it; read by the storer.
  __device__ uint32_t Staged(int consumer) const { return Bar(kOther + 3 + consumer); }
  __device__ uint32_t Stored(int consumer) const { return Bar(kOther + 5 + consumer); }
  __device__ uint32_t PieceFull(int i) const { return Bar(kOther + 7 + i); }
  static constexpr int kBarriers = kOther + 7 + Config::kPieces;
  __device__ uint32_t SlotTile(int slot) const { return Bar(kBarriers) + 4 * slot; }
  static_assert(kBarriers * 8 + Config::kSlots * 4 <= Config::kBarrierBytes);
};

// A ring index with the parity that mbarriers want.
template <int kSize>
struct Ring {
  int index = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int count) {
    index += count;
    parity ^= index / kSize & 1;
    index %= kSize;
  }
};

// What a role knows of the call it serves.
struct CallContext {
  WaitContext wait;      // its deadline is set when a wait begins: reading the clock takes long
  uint64_t patience_ns;  // how long a wait may last
  uint32_t epoch;
  Signal signal;
  const DeviceState* state;
  bool recording;

  __device__ __forceinline__ uint64_t Start() const { return recording ? NowNs() : 0; }
  __device__ __forceinline__ void Done(EventKind kind, uint64_t start, int32_t a, int32_t b) const {
    Record(state, recording, kind, start, epoch, a, b);
  }
};

template <typename Args>
__device__ __forceinline__ CallContext MakeContext(const Args& args) {
  CallContext call;
  const DeviceState state = *args.state;
  auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  call.epoch = header->epoch + 1;
  call.signal = MakeSignal(call.epoch, args.signature);
  call.state = args.state;
  call.recording = state.timeline.events != nullptr;
  call.patience_ns = state.deadline_ns;
  call.wait = WaitContext{state.fault, &header->stop,  0,
                          args.op,     args.view.rank, state.hooks.skip_waits != 0};
  if (state.hooks.max_delay_us != 0) {
    const uint64_t start = NowNs();
    const uint32_t hash = SignatureBuilder().Add(call.epoch).Add(args.view.rank).Get();
    const uint64_t delay_ns = static_cast<uint64_t>(hash % state.hooks.max_delay_us) * 1000;
    while (NowNs() - start < delay_ns) {
    }
  }
  return call;
}

// Waits for a peer. A wait that fails lets the kernel run on, so that it ends soon, with wrong
// values; EndOfWaits turns that into an error.
__device__ __forceinline__ void AwaitPeer(const CallContext& call, const Signal* word, int peer,
                                          int64_t unit) {
  if (Classify(LoadAcquire(word), call.signal) == SignalState::kReady) return;
  WaitContext wait = call.wait;
  wait.deadline_ns = NowNs() + call.patience_ns;
  WaitSignal(word, call.signal, peer, unit, wait);
}

// One lane of each warp that waits for peers calls it after its last wait.
template <typename Args>
__device__ __forceinline__ void EndOfWaits(const Args& args) {
  const auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  if (LoadRelaxed(&header->stop) == 0) return;
  // A call that failed must not look like one that did not. The host first gets the time to print
  // why: XLA will only say that a launch failed.
  const uint64_t start = NowNs();
  while (NowNs() - start < 300000000ull) {
  }
  __trap();
}

// One lane of each warp that takes from a counter calls it when it has taken its last: of each CTA
// the scout and the sender. All have read the epoch by then.
template <typename Args>
__device__ __forceinline__ void LeaveCounters(const Args& args) {
  auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  __threadfence();
  if (atomicAdd(&header->exited, 1) != 2 * gridDim.x - 1) return;
  header->next_send = 0;
  header->next_tile = 0;
  header->exited = 0;
  header->epoch += 1;
}

template <typename Args>
__device__ __forceinline__ int32_t TakeTile(const Args& args) {
  return static_cast<int32_t>(
      atomicAdd(&args.view.template At<ChannelHeader>(args.view.rank, 0)->next_tile, 1));
}

// Readers of the slots in which the leader CTA's scout publishes tiles: of every CTA the consumers'
// warps, the storer, the loader and, if there are parts, who waits for them; and the scouts of the
// other CTAs.
template <typename Config>
__device__ __forceinline__ int SlotReaders(bool has_parts) {
  return Config::kClusterM * (4 * Config::kConsumers + 2 + (has_parts ? 1 : 0)) +
         (Config::kClusterM - 1);
}

// One reader's view of the published tiles. A slot is used again when all have left it.
template <typename Config>
struct TileReader {
  GemmSmem<Config> smem;
  Ring<Config::kSlots> ring;

  // For a whole warp. The shuffle also tells the compiler that all lanes hold the same.
  __device__ int32_t Enter() const { return __shfl_sync(0xffffffff, Peek(), 0); }
  __device__ void Leave() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive();
    ring.Advance();
  }
  __device__ int32_t Next() {
    const int32_t t = Enter();
    Leave();
    return t;
  }
  // For a single lane.
  __device__ int32_t NextAlone() {
    const int32_t t = Peek();
    Arrive();
    ring.Advance();
    return t;
  }

 private:
  __device__ int32_t Peek() const {
    ptx::MbarrierWait(smem.SlotFull(ring.index), ring.parity);
    return ptx::LoadShared(smem.SlotTile(ring.index));
  }
  __device__ void Arrive() const {
    ptx::MbarrierArriveRemote(ptx::MapToCta(smem.SlotEmpty(ring.index), 0));
  }
};

template <typename Config>
__device__ __forceinline__ void PublishTile(const GemmSmem<Config>& smem,
                                            const Ring<Config::kSlots>& ring, int32_t t) {
  ptx::MbarrierWait(smem.SlotEmpty(ring.index), ring.parity ^ 1);
#pragma unroll
  for (int cta = 0; cta < Config::kClusterM; ++cta) {
    ptx::SendRemote(ptx::MapToCta(smem.SlotTile(ring.index), cta), t,
                    ptx::MapToCta(smem.SlotFull(ring.index), cta));
  }
}

// Where the columns of a tile are: the tensor map of a w, and the first column in it.
struct Rhs {
  const CUtensorMap* map;
  int32_t n0;
};

// Of k, in elements; begins at a multiple of kTileK.
struct KRange {
  int32_t begin, end;
};

// Part `split` of k: all are equal, but for rounding to k blocks.
template <typename Config>
__device__ __forceinline__ KRange SplitOfK(int64_t k, int split, int splits) {
  const auto end = static_cast<int32_t>(k);
  if (splits == 1) return KRange{0, end};
  const int32_t blocks = CeilDiv(end, Config::kTileK);
  return KRange{split * blocks / splits * Config::kTileK,
                Min(end, (split + 1) * blocks / splits * Config::kTileK)};
}

// Calls load(offset in w's tile in shared memory, row and column of w's tensor map) for each box of
// this CTA's share of w's tile for one k block. Boxes are 128 bytes wide: 64 of k if w is stored
// [n, k], else 64 columns.
template <typename Config, typename Load>
__device__ __forceinline__ void EachBoxOfB(int k0, int n0, uint32_t cta, Load&& load) {
  const int i = static_cast<int>(cta);
  if constexpr (Config::kTransposeRhs) {
    constexpr int kShare = Config::kTileN / Config::kClusterM;
    load(i * kShare * 128, n0 + i * kShare, k0);
  } else {
    const int row = i * Config::kBoxRows;
#pragma unroll
    for (int box = 0; box < Config::kLoadN / 64; ++box) {
      load(box * 8192 + row * 128, k0 + row, n0 + box * 64);
    }
  }
}

// w's tile for one k block: this CTA's share, to every CTA of the cluster.
template <typename Config>
__device__ __forceinline__ void LoadB(uint32_t smem_b, const CUtensorMap* w, uint32_t bar, int k0,
                                      int n0, uint32_t cta) {
  EachBoxOfB<Config>(k0, n0, cta, [&](int at, int row, int column) {
    if constexpr (Config::kClusterM == 1) {
      ptx::TmaLoad2d(smem_b + at, w, bar, column, row);
    } else {
      constexpr auto kAll = static_cast<uint16_t>((1 << Config::kClusterM) - 1);
      ptx::TmaLoad2dMulticast(smem_b + at, w, bar, column, row, kAll);
    }
  });
}

// What LoadB will load, to L2.
template <typename Config>
__device__ __forceinline__ void PrefetchB(const CUtensorMap* w, int k0, int n0, uint32_t cta) {
  EachBoxOfB<Config>(k0, n0, cta,
                     [&](int, int row, int column) { ptx::TmaPrefetch2d(w, column, row); });
}

// A thread's share of a tile.
template <typename Config>
using Accumulators = float[Config::kBlocks][Config::kAccumulators];

// acc += A @ B over one k block of 64.
template <typename Config>
__device__ __forceinline__ void MultiplyStage(Accumulators<Config>& acc, uint32_t a, uint32_t b) {
  constexpr int kTransB = Config::kTransposeRhs ? 0 : 1;
#pragma unroll
  for (int k = 0; k < Config::kTileK / 16; ++k) {
    const uint64_t desc_b = kTransB ? wgmma::Descriptor(b + k * 2048, 8192, 1024)
                                    : wgmma::Descriptor(b + k * 32, 16, 1024);
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      const uint64_t desc_a = wgmma::Descriptor(a + block * 8192 + k * 32, 16, 1024);
      wgmma::Multiply<typename Config::T, kTransB, Config::kTileN>(acc[block], desc_a, desc_b);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void PinAll(Accumulators<Config>& acc) {
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) wgmma::Pin(acc[block]);
}

template <typename Config>
__device__ __forceinline__ int32_t BlockRow(Tile tile, uint32_t cta) {
  return tile.m * Config::kClusterM + static_cast<int32_t>(cta);
}

template <typename Op>
__device__ __forceinline__ void RunScout(const typename Op::Args& args, const CallContext& call,
                                         const GemmSmem<typename Op::Config>& smem, uint32_t cta,
                                         int32_t taken) {
  using Config = typename Op::Config;
  const int lane = threadIdx.x % 32;
  Ring<Config::kSlots> slots;
  TileReader<Config> reader{smem, {}};
  uint32_t begun = 0;  // parity
  for (;;) {
    int32_t t;
    const int slot = cta == 0 ? slots.index : reader.ring.index;
    if (cta == 0) {
      if (lane == 0) PublishTile<Config>(smem, slots, taken);
      t = __shfl_sync(0xffffffff, taken, 0);
      slots.Advance();
    } else {
      t = reader.Next();
    }
    if (t >= args.num_tiles) return;
    const Tile tile = Op::TileAt(args, t);
    const int32_t block_m = BlockRow<Config>(tile, cta);
    const uint64_t start = call.Start();
    Op::WaitForRows(args, call, block_m);
    __syncwarp();
    if (lane == 0) {
      call.Done(EventKind::kWaitRows, start, block_m, tile.n);
      ptx::MbarrierArrive(smem.RowsReady(slot));
    }
    ptx::MbarrierWait(smem.Begun(), begun);
    begun ^= 1;
    if (cta == 0 && lane == 0) taken = TakeTile(args);
  }
}

// Waits for the parts of tiles that others compute.
template <typename Op>
__device__ __forceinline__ void RunPartsScout(const typename Op::Args& args,
                                              const CallContext& call,
                                              const GemmSmem<typename Op::Config>& smem,
                                              uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  for (;;) {
    const int slot = reader.ring.index;
    const int32_t t = reader.Enter();
    if (t < args.num_tiles) {
      const Tile tile = Op::TileAt(args, t);
      Op::WaitForParts(args, call, BlockRow<Config>(tile, cta), tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(smem.PartsReady(slot));
    }
    reader.Leave();
    if (t >= args.num_tiles) return;
  }
}

template <typename Op>
__device__ __forceinline__ void RunLoader(const typename Op::Args& args, const CallContext& call,
                                          const GemmSmem<typename Op::Config>& smem, uint32_t cta) {
  using Config = typename Op::Config;
  const int lane = threadIdx.x % 32;
  TileReader<Config> reader{smem, {}};
  Ring<Config::kStages> stages;
  for (;;) {
    const Ring<Config::kSlots> slot = reader.ring;
    const int32_t t = reader.Next();
    if (t >= args.num_tiles) return;
    const Tile tile = Op::TileAt(args, t);
    const int32_t block_m = BlockRow<Config>(tile, cta);
    if (lane == 0) {
      const auto load_b = [&](const Ring<Config::kStages>& stage, const Rhs& rhs, int k0) {
        const uint32_t bar = smem.Full(stage.index);
        ptx::MbarrierArriveExpectTx(bar, args.a_bytes + Config::kBBytes);
        LoadB<Config>(smem.B(stage.index), rhs.map, bar, k0, rhs.n0, cta);
      };
      // As long as the rows are on their way, w comes: to the stages that are free, and what
      // follows to L2. The CTAs of a cluster need each other's share of w, whoever's rows are late.
      const KRange first = Op::KOf(args, tile, 0);
      const Rhs first_rhs = Op::RhsOf(args, tile.n, 0);
      Ring<Config::kStages> early = stages;
      int staged = first.begin, fetched = first.begin;  // so far
      const int most = first.begin + Config::kStages * Config::kTileK;
      const int far = first.begin + Config::kPrefetchBlocks * Config::kTileK;
      while (!ptx::MbarrierTest(smem.RowsReady(slot.index), slot.parity)) {
        if (staged < Min(most, first.end) &&
            ptx::MbarrierTest(smem.Empty(early.index), early.parity ^ 1)) {
          load_b(early, first_rhs, staged);
          early.Advance();
          staged += Config::kTileK;
        } else if (Max(fetched, staged) < Min(far, first.end)) {
          fetched = Max(fetched, staged);
          PrefetchB<Config>(first_rhs.map, fetched, first_rhs.n0, cta);
          fetched += Config::kTileK;
        }
      }
      ptx::MbarrierArrive(smem.Begun());
      for (int term = 0; term < Op::TermsOf(args); ++term) {
        const auto source = Op::SourceOf(args, call, block_m, term);
        const Rhs rhs = Op::RhsOf(args, tile.n, term);
        const KRange k = Op::KOf(args, tile, term);
        for (int k0 = k.begin; k0 < k.end; k0 += Config::kTileK) {
          if (term != 0 || k0 >= staged) {
            ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
            load_b(stages, rhs, k0);
          }
          Op::LoadA(source, smem.A(stages.index), smem.Full(stages.index), k0);
          stages.Advance();
        }
      }
    }
    __syncwarp();
  }
}

// A consumer's side of its staging. Acquire and Publish are called by all its threads.
template <typename Config>
struct StagingWriter {
  GemmSmem<Config> smem;
  int consumer;
  uint32_t parity = 0;

  __device__ uint32_t Acquire() {
    ptx::MbarrierWait(smem.Stored(consumer), parity ^ 1);
    return smem.Staging(consumer);
  }
  __device__ void Publish() {
    ptx::FenceProxyAsyncShared();  // bulk copies will read it
    ptx::MbarrierArrive(smem.Staged(consumer));
    parity ^= 1;
  }
};

// The storer's side, a single lane.
template <typename Config>
struct StagingReader {
  GemmSmem<Config> smem;
  int consumer;
  uint32_t parity = 0;

  __device__ uint32_t Acquire() {
    ptx::MbarrierWait(smem.Staged(consumer), parity);
    parity ^= 1;
    return smem.Staging(consumer);
  }
  // After the copies out of it have been issued and committed.
  __device__ void Release() {
    ptx::BulkWaitRead<0>();
    ptx::MbarrierArrive(smem.Stored(consumer));
  }
};

// One lane for both consumers: TMA takes its operands from registers that a warp shares, so lanes
// must not issue stores side by side.
template <typename Op>
__device__ __forceinline__ void RunStorer(const typename Op::Args& args, const CallContext& call,
                                          const GemmSmem<typename Op::Config>& smem, uint32_t cta) {
  using Config = typename Op::Config;
  TileReader<Config> reader{smem, {}};
  StagingReader<Config> staging[Config::kConsumers] = {{smem, 0}, {smem, 1}};
  const auto store = [&](StagingReader<Config>& from) {
    const int32_t t = reader.NextAlone();
    if (t >= args.num_tiles) return false;
    const Tile tile = Op::TileAt(args, t);
    Op::Store(args, call, from, BlockRow<Config>(tile, cta), tile);
    return true;
  };
  while (store(staging[0]) && store(staging[1])) {
  }
  ptx::BulkWait<0>();
}

template <typename Op>
__device__ __forceinline__ void RunConsumer(const typename Op::Args& args, const CallContext& call,
                                            const GemmSmem<typename Op::Config>& smem, uint32_t cta,
                                            int consumer) {
  using Config = typename Op::Config;
  const int lane = threadIdx.x % 32;
  TileReader<Config> reader{smem, {}};
  StagingWriter<Config> staging{smem, consumer};
  Ring<Config::kStages> stages;
  uint32_t turn_parity = consumer == 0 ? 1 : 0;  // the first turn is consumer 0's
  const bool records = call.recording && threadIdx.x % 128 == 0;
  Accumulators<Config> acc;
  const auto release = [&](int stage) {
    if (lane < Config::kClusterM) {
      ptx::MbarrierArriveRemote(ptx::MapToCta(smem.Empty(stage), lane));
    }
  };
  for (int turn = 0;; turn ^= 1) {
    const Ring<Config::kSlots> slot = reader.ring;
    const int32_t t = reader.Enter();
    if (t >= args.num_tiles) return reader.Leave();
    const Tile tile = Op::TileAt(args, t);
    int k_blocks = 0;
    for (int term = 0; term < Op::TermsOf(args); ++term) {
      const KRange k = Op::KOf(args, tile, term);
      k_blocks += CeilDiv<int>(k.end - k.begin, Config::kTileK);
    }
    if (turn != consumer) {
      reader.Leave();
      stages.Skip(k_blocks);
      continue;
    }
    const int32_t block_m = BlockRow<Config>(tile, cta);
    // Zeroed here, in code that all threads reach, and not by the first product: registers that
    // come from an epilogue's branches would serialise wgmma.
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Config::kAccumulators; ++i) acc[block][i] = 0;
    }
    // Until the other's stages are full, this one's have phases that cannot be told from earlier
    // ones.
    ptx::MbarrierWait(smem.Turn(consumer), turn_parity);
    turn_parity ^= 1;
    int last = -1;
    if (call.recording && k_blocks > 0) {
      ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    }
    uint64_t start = call.Start();
    for (int kb = 0; kb < k_blocks; ++kb) {
      ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
      PinAll<Config>(acc);
      wgmma::Fence();
      MultiplyStage<Config>(acc, smem.A(stages.index), smem.B(stages.index));
      wgmma::Commit();
      PinAll<Config>(acc);
      wgmma::Wait<1>();  // the block before this one has been read
      if (last >= 0) release(last);
      last = stages.index;
      stages.Advance();
    }
    if (lane == 0) ptx::MbarrierArrive(smem.Turn(1 - consumer));
    wgmma::Wait<0>();
    PinAll<Config>(acc);
    if (last >= 0) release(last);
    if (records) call.Done(EventKind::kMultiply, start, block_m, tile.n);
    start = call.Start();
    Op::Finish(args, call, staging, acc, block_m, tile,
               [&] { ptx::MbarrierWait(smem.PartsReady(slot.index), slot.parity); });
    if (records) call.Done(EventKind::kEpilogue, start, block_m, tile.n);
    reader.Leave();
  }
}

// The kernel body. Op provides
//   Config, Args {state, view, signature, op, num_tiles, a_bytes, ...}
//   TileAt(args, t) -> Tile             in units of cluster tiles
//   PrefetchMaps(args)                  one lane
//   WaitForRows(args, call, block_m)    all lanes of the scout: until A's rows can be read
//   TermsOf(args), KOf(args, tile, term) -> KRange
//                                       a tile is the sum of so many products, each over its k
//   SourceOf(args, call, block_m, term), LoadA(source, smem, bar, k0)
//   RhsOf(args, tile_n, term) -> Rhs
//   HasParts(args)                      whether there are tiles with parts that others compute
//   WaitForParts(args, call, block_m, tile)                     all lanes, if HasParts
//   Send(args, call, smem)              one lane; everything that peers wait for without waiting
//   Finish(args, call, staging, acc, block_m, tile, await_parts)
//                                       adds the parts and stages, block by block, what Store takes
//   Store(args, call, staging, block_m, tile)                   one lane; in the same order
template <typename Op>
__device__ __forceinline__ void RunGemm(const typename Op::Args& args) {
  using Config = typename Op::Config;
  extern __shared__ __align__(1024) uint8_t storage[];
  const GemmSmem<Config> smem{ptx::SmemAddress(storage)};
  const uint32_t cta = Config::kClusterM == 1 ? 0 : ptx::ClusterCtaRank();
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;

  // What takes long is asked for first.
  const bool takes = warp == 3 && lane == 0 && cta == 0;
  const int32_t taken = takes ? TakeTile(args) : 0;
  const CallContext call = MakeContext(args);
  if (threadIdx.x == 32) Op::PrefetchMaps(args);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::MbarrierInit(smem.Full(i), 1);
      ptx::MbarrierInit(smem.Empty(i), Config::kClusterM * 4);
    }
    for (int i = 0; i < Config::kSlots; ++i) {
      ptx::MbarrierInit(smem.SlotFull(i), 1);
      ptx::MbarrierInit(smem.SlotEmpty(i), SlotReaders<Config>(Op::HasParts(args)));
      ptx::MbarrierInit(smem.RowsReady(i), 1);
      ptx::MbarrierInit(smem.PartsReady(i), 1);
    }
    ptx::MbarrierInit(smem.Begun(), 1);
    for (int i = 0; i < Config::kConsumers; ++i) {
      ptx::MbarrierInit(smem.Turn(i), 4);
      ptx::MbarrierInit(smem.Staged(i), 128);
      ptx::MbarrierInit(smem.Stored(i), 1);
    }
    for (int i = 0; i < Config::kPieces; ++i) ptx::MbarrierInit(smem.PieceFull(i), 1);
    ptx::FenceMbarrierInit();
  }
  if (Config::kClusterM == 1) {
    __syncthreads();
  } else {
    ptx::ClusterSync();
  }

  if (warp < 4) {
    ptx::RegistersDown<Config::kLoaderRegisters>();
    if (warp == 0) {
      RunLoader<Op>(args, call, smem, cta);
    } else if (warp == 1) {
      if (lane == 0) {
        Op::Send(args, call, smem);
        LeaveCounters(args);
      }
      __syncwarp();
      if (Op::HasParts(args)) RunPartsScout<Op>(args, call, smem, cta);
      if (lane == 0) EndOfWaits(args);
    } else if (warp == 2) {
      if (lane == 0) RunStorer<Op>(args, call, smem, cta);
    } else {
      RunScout<Op>(args, call, smem, cta, taken);
      if (lane == 0) {
        LeaveCounters(args);
        EndOfWaits(args);
      }
    }
  } else {
    ptx::RegistersUp<Config::kConsumerRegisters>();
    RunConsumer<Op>(args, call, smem, cta, warp / 4 - 1);
  }

  // Nobody may leave while a peer of the cluster still writes here.
  __syncwarp();
  __syncthreads();
  if (Config::kClusterM > 1) ptx::ClusterSync();
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SM90_CUH_
