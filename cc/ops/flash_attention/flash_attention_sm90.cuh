// The forward pass (attention_sm90.cuh): o = softmax(scores) v by a running maximum and sum.
//
// A consumer issues the scores of a block and then the sum of values of the block before, and
// computes the softmax of the one while the other runs. The two consumers take turns in issuing, so
// that one keeps the tensor cores busy while the other computes (arXiv 2407.08608, section 3.1).
//
// Keys is where the load warp finds keys and values: OwnKeys here; all_gather_attention has its
// own.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_SM90_CUH_

#include "ops/flash_attention/attention_sm90.cuh"
#include "ops/flash_attention/flash_attention.cuh"

namespace jflux::attention {

template <typename T_, int kWidth_, bool kSoftcap_>
struct ForwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr AttentionBlocks kBlocks = BlocksOf(AttentionPass::kForward, kWidth);
  static constexpr int kQueries = kBlocks.queries, kKeys = kBlocks.keys;
  static constexpr Registers kRegisters{40, 232};
  static_assert(Registers::Fit(kRegisters));
  static constexpr int kStages = 2;
  static constexpr int kQBytes = kQueries * kWidth * 2, kKBytes = kKeys * kWidth * 2;
  // Shared memory, in this order.
  static constexpr int kKOffset = kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kQNumbersOffset = kVOffset + kStages * kKBytes;
  static constexpr int kKNumbersOffset = kQNumbersOffset + kQueries * 8;
  static constexpr int kKindsOffset = kKNumbersOffset + kStages * kKeys * 8;
  static constexpr int kBarriersOffset = kKindsOffset + 16;
  static constexpr int kSmemBytes = kBarriersOffset + 8 * (2 + 4 * kStages);
  static_assert(4 * kStages <= 16 && kSmemBytes <= kHopper.smem_bytes);
};

template <typename Shape>
struct ForwardSmem {
  uint32_t base;

  __device__ uint32_t Q() const { return base; }
  __device__ uint32_t K(int stage) const { return base + Shape::kKOffset + stage * Shape::kKBytes; }
  __device__ uint32_t V(int stage) const { return base + Shape::kVOffset + stage * Shape::kKBytes; }
  __device__ uint32_t QNumbers() const { return base + Shape::kQNumbersOffset; }
  __device__ uint32_t KNumbers(int stage) const {
    return base + Shape::kKNumbersOffset + stage * Shape::kKeys * 8;
  }
  __device__ uint32_t Kind(int stage) const { return base + Shape::kKindsOffset + 4 * stage; }
  __device__ uint32_t Bar(int i) const { return base + Shape::kBarriersOffset + 8 * i; }
  // Filled by TMA, emptied by the consumers' warps. A stage of k has its numbers and its kind.
  __device__ uint32_t QFull() const { return Bar(0); }
  __device__ uint32_t QEmpty() const { return Bar(1); }
  __device__ uint32_t KFull(int stage) const { return Bar(2 + stage); }
  __device__ uint32_t KEmpty(int stage) const { return Bar(2 + Shape::kStages + stage); }
  __device__ uint32_t VFull(int stage) const { return Bar(2 + 2 * Shape::kStages + stage); }
  __device__ uint32_t VEmpty(int stage) const { return Bar(2 + 3 * Shape::kStages + stage); }
};

// Where a block of keys and its values lie.
struct KeyRows {
  const CUtensorMap *k, *v;
  int32_t k_batch, v_batch, first;  // coordinates in the maps
  int32_t number;                   // the first key's place among positions and segments
};

// The keys of this device.
template <typename Shape>
struct OwnKeys {
  // Calls load(rows, kind) for each block with scores of an item, in the order in which the item
  // meets them. All lanes.
  template <typename Load>
  __device__ __forceinline__ void ForEachBlock(const MapArgs& args, const Item& item, Load&& load) {
    const auto load_own = [&](int32_t block, int kind) {
      const int32_t first = block * Shape::kKeys;
      load(KeyRows{&args.k, &args.v, item.batch, item.batch, first, first}, kind);
    };
    attention::ForEachBlock(
        BlocksOfItem(args, args.arrays.blocks, item, args.query_blocks, args.key_blocks),
        args.key_blocks, load_own);
  }
};

template <typename Shape, typename Keys>
__device__ __forceinline__ void RunForwardLoads(const MapArgs& args, const ForwardSmem<Shape>& smem,
                                                Keys& source) {
  constexpr int kStages = Shape::kStages;
  Ring<kStages> keys, values;
  uint32_t parity = 1;  // of QEmpty
  const bool leads = ptx::ElectOne();
  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = Item::OfQueries(args, number);
    if (leads) {
      ptx::MbarrierWait(smem.QEmpty(), parity);
      ptx::MbarrierArriveExpectTx(smem.QFull(),
                                  Shape::kQBytes + BytesOfNumbers<Shape::kQueries>(args));
      const int32_t first = item.block * Shape::kQueries;
      LoadRows<Shape::kQueries, Shape::kWidth>(smem.Q(), &args.q, smem.QFull(), item.batch, first,
                                               item.head);
      LoadNumbers<Shape::kQueries>(args, smem.QNumbers(), smem.QFull(), args.arrays.q_positions,
                                   args.arrays.q_segments, args.padded_queries, item.batch, first);
    }
    parity ^= 1;
    const auto load = [&](const KeyRows& rows, int kind) {
      if (leads) {
        ptx::MbarrierWait(smem.KEmpty(keys.index), keys.parity ^ 1);
        ptx::StoreShared4(smem.Kind(keys.index), kind);
        ptx::MbarrierArriveExpectTx(smem.KFull(keys.index),
                                    Shape::kKBytes + BytesOfNumbers<Shape::kKeys>(args));
        LoadRows<Shape::kKeys, Shape::kWidth>(smem.K(keys.index), rows.k, smem.KFull(keys.index),
                                              rows.k_batch, rows.first, item.group);
        LoadNumbers<Shape::kKeys>(args, smem.KNumbers(keys.index), smem.KFull(keys.index),
                                  args.arrays.k_positions, args.arrays.k_segments, args.padded_keys,
                                  item.batch, rows.number);
        ptx::MbarrierWait(smem.VEmpty(values.index), values.parity ^ 1);
        ptx::MbarrierArriveExpectTx(smem.VFull(values.index), Shape::kKBytes);
        LoadRows<Shape::kKeys, Shape::kWidth>(smem.V(values.index), rows.v,
                                              smem.VFull(values.index), rows.v_batch, rows.first,
                                              item.group);
      }
      keys.Advance();
      values.Advance();
    };
    source.ForEachBlock(args, item, load);
    if (leads) {
      ptx::MbarrierWait(smem.KEmpty(keys.index), keys.parity ^ 1);
      ptx::StoreShared4(smem.Kind(keys.index), static_cast<int>(BlockKind::kEnd));
      ptx::MbarrierArrive(smem.KFull(keys.index));
    }
    keys.Advance();
  }
}

template <typename Shape>
__device__ __forceinline__ void RunForwardConsumer(const Args& args, const ForwardSmem<Shape>& smem,
                                                   int consumer) {
  using T = typename Shape::T;
  constexpr int kStages = Shape::kStages;
  Ring<kStages> keys, values;
  uint32_t parity = 0;  // of QFull
  const int row = 64 * consumer + FirstRow();
  // Turns: named barriers 1 and 2, on which the other consumer arrives when it has issued.
  const auto await_turn = [&] { ptx::BarrierSync(1 + consumer, 256); };
  const auto end_turn = [&] { ptx::BarrierArrive(2 - consumer, 256); };
  if (consumer == 1) end_turn();  // consumer 0 is the first

  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = Item::OfQueries(args, number);
    ptx::MbarrierWait(smem.QFull(), parity);
    parity ^= 1;
    const uint32_t q = smem.Q() + consumer * 8192;

    Running run{{-INFINITY, -INFINITY}, {0, 0}};
    float out[Shape::kWidth / 2];
#pragma unroll
    for (float& o : out) o = 0;
    uint32_t weights[Shape::kKeys / 16][4];
    // The scores of the stage `keys` have been computed: makes probabilities of them, and frees the
    // stage.
    const auto finish_scores = [&](float (&x)[Shape::kKeys / 2], BlockKind kind,
                                   float (&before)[2]) {
      if constexpr (Shape::kSoftcap) Cap(x, args.inner);
      if (kind == BlockKind::kSome) {
        MaskPairs</*kRowsAreKeys=*/false, Shape::kQueries>(args, x, smem.QNumbers(), row,
                                                           smem.KNumbers(keys.index), -INFINITY);
      }
      WarpArrive(smem.KEmpty(keys.index));
      keys.Advance();
      Softmax(x, args.factor, run, before);
    };

    ptx::MbarrierWait(smem.KFull(keys.index), keys.parity);
    BlockKind kind = LoadKind(smem.Kind(keys.index));
    if (kind != BlockKind::kEnd) {
      float x[Shape::kKeys / 2], before[2];
      wgmma::Fence();
      MultiplyColumns<T, Shape::kWidth, Shape::kQueries>(x, q, smem.K(keys.index));
      wgmma::Commit();
      wgmma::Pin(x);
      wgmma::Wait<0>();
      wgmma::Pin(x);
      finish_scores(x, kind, before);
      PackA<T>(x, weights);
      for (;;) {
        ptx::MbarrierWait(smem.KFull(keys.index), keys.parity);
        kind = LoadKind(smem.Kind(keys.index));
        if (kind == BlockKind::kEnd) break;
        await_turn();
        float next[Shape::kKeys / 2];
        wgmma::Pin(out);
        PinA(weights);
        wgmma::Fence();
        MultiplyColumns<T, Shape::kWidth, Shape::kQueries>(next, q, smem.K(keys.index));
        wgmma::Commit();
        ptx::MbarrierWait(smem.VFull(values.index), values.parity);
        MultiplyRows<T>(out, weights, smem.V(values.index), true);
        wgmma::Commit();
        end_turn();
        wgmma::Pin(next);
        wgmma::Wait<1>();
        wgmma::Pin(next);
        finish_scores(next, kind, before);
        wgmma::Wait<0>();
        wgmma::Pin(out);
        PinA(weights);
        WarpArrive(smem.VEmpty(values.index));
        values.Advance();
#pragma unroll
        for (int i = 0; i < Shape::kWidth / 2; ++i) out[i] *= before[HalfOf(i)];
        PackA<T>(next, weights);
      }
      WarpArrive(smem.QEmpty());
      ptx::MbarrierWait(smem.VFull(values.index), values.parity);
      wgmma::Pin(out);
      PinA(weights);
      wgmma::Fence();
      MultiplyRows<T>(out, weights, smem.V(values.index), true);
      wgmma::Commit();
      wgmma::Wait<0>();
      wgmma::Pin(out);
      WarpArrive(smem.VEmpty(values.index));
      values.Advance();
    } else {
      WarpArrive(smem.QEmpty());
    }
    WarpArrive(smem.KEmpty(keys.index));  // of kEnd
    keys.Advance();
    StoreRows<Shape>(args, item, row, out, run);
  }
}

// Calls run_producer(warp) in the warps of warpgroup 0. Warp 0 must run the loads.
template <typename Shape, typename Producer>
__device__ __forceinline__ void RunForward(const MapArgs& args, const ForwardSmem<Shape>& smem,
                                           Producer&& run_producer) {
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    ptx::MbarrierInit(smem.QFull(), 1);
    ptx::MbarrierInit(smem.QEmpty(), kConsumerWarps);
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::MbarrierInit(smem.KFull(i), 1);
      ptx::MbarrierInit(smem.KEmpty(i), kConsumerWarps);
      ptx::MbarrierInit(smem.VFull(i), 1);
      ptx::MbarrierInit(smem.VEmpty(i), kConsumerWarps);
    }
    ptx::FenceMbarrierInit();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::RegistersDown<Shape::kRegisters.producer>();
    run_producer(warp);
  } else {
    ptx::RegistersUp<Shape::kRegisters.consumer>();
    RunForwardConsumer<Shape>(args, smem, warp / 4 - 1);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kThreads, 1) ForwardKernel(const __grid_constant__ MapArgs args) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const ForwardSmem<Shape> smem{ptx::SmemAddress(storage)};
  RunForward<Shape>(args, smem, [&](int warp) {
    OwnKeys<Shape> keys;
    if (warp == 0) RunForwardLoads<Shape>(args, smem, keys);
  });
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_SM90_CUH_
