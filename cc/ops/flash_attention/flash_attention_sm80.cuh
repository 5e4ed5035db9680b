// The forward pass in portable code (attention_sm80.cuh). A warp has 16 of an item's 128 queries.
//
// Blocks of keys are walked in parts, as many keys as two stages have room for. A part is copied
// while the one before is multiplied, and warps wait for each other once in a part: while one
// computes its softmax another multiplies.
//
//   await the rows of part i + 1       the first warp, if peers send them
//   barrier                            part i has come, and nobody reads part i - 1 any more
//   cp.async of part i + 1
//   scores, softmax, sums of part i
//
// Work is which items a CTA has, and where they find keys and values: OwnItems80 and OwnKeys80
// here; all_gather_attention has its own.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_SM80_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_SM80_CUH_

#include "gpu/machine.h"
#include "ops/flash_attention/attention_sm80.cuh"
#include "ops/flash_attention/flash_attention.cuh"

namespace jflux::attention {

template <typename T_, int kWidth_, bool kSoftcap_>
struct ForwardShape80 {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr AttentionBlocks kBlocks = BlocksOf(AttentionPass::kForward, kWidth);
  static constexpr int kQueries = kBlocks.queries, kKeys = kBlocks.keys;
  static constexpr int kThreads = kQueries / 16 * 32;
  // Sums of wide heads leave no registers for q: it is read from shared memory.
  static constexpr bool kKeepsQ = kWidth <= 128;
  static constexpr int kStages = 2;
  static constexpr int kStageKeys = kWidth == 64 ? 128 : kWidth == 128 ? 64 : 16;
  static_assert(kKeys % kStageKeys == 0);
  static constexpr int kQBytes = kQueries * kWidth * 2, kKBytes = kStageKeys * kWidth * 2;
  // Shared memory, in this order.
  static constexpr int kKOffset = kQBytes;
  static constexpr int kVOffset = kKOffset + kStages * kKBytes;
  static constexpr int kQNumbersOffset = kVOffset + kStages * kKBytes;
  static constexpr int kKNumbersOffset = kQNumbersOffset + kQueries * 8;
  static constexpr int kSmemBytes = kKNumbersOffset + kStages * kStageKeys * 8;
  static_assert(kSmemBytes + 256 <= kPortable.smem_bytes);  // and some variables
};

template <typename Shape>
struct ForwardSmem80 {
  uint32_t base;

  __device__ uint32_t Q() const { return base; }
  __device__ uint32_t K(int stage) const { return base + Shape::kKOffset + stage * Shape::kKBytes; }
  __device__ uint32_t V(int stage) const { return base + Shape::kVOffset + stage * Shape::kKBytes; }
  __device__ uint32_t QNumbers() const { return base + Shape::kQNumbersOffset; }
  __device__ uint32_t KNumbers(int stage) const {
    return base + Shape::kKNumbersOffset + stage * Shape::kStageKeys * 8;
  }
};

// The parts of a row's blocks with scores, one after the other. All lanes of a warp.
template <typename Shape>
class Parts80 {
 public:
  __device__ Parts80(const int8_t* row, int32_t count, int32_t keys)
      : walk_(row, count), keys_(keys), first_(0), end_(0) {}

  // The kind of the next part's block, or kEnd.
  __device__ __forceinline__ BlockKind Next() {
    first_ += Shape::kStageKeys;
    if (first_ < end_) return kind_;
    int32_t block = 0;
    kind_ = walk_.Next(&block);
    first_ = block * Shape::kKeys;
    end_ = Min(keys_, first_ + Shape::kKeys);
    return kind_;
  }
  // The part's first key.
  __device__ int32_t First() const { return first_; }

 private:
  BlockWalk80 walk_;
  int32_t keys_, first_, end_;
  BlockKind kind_;
};

// The keys of this device, as an item meets them. All functions are called by all threads, but for
// Await.
template <typename Shape>
class OwnKeys80 {
 public:
  __device__ OwnKeys80(const Args& args, const Item& item)
      : k_(HeadRows80::Of(args.arrays.k, item.batch, args.keys, args.groups, item.group,
                          args.width)),
        v_(static_cast<const char*>(args.arrays.v) - static_cast<const char*>(args.arrays.k)),
        parts_(BlocksOfItem(args, args.arrays.blocks, item, args.query_blocks, args.key_blocks),
               args.key_blocks, args.keys) {}

  // The kind of the next part's block, or kEnd.
  __device__ __forceinline__ BlockKind Next() { return parts_.Next(); }
  // Waits for the part's rows. All lanes of the first warp.
  __device__ __forceinline__ void Await() {}
  // Where the part's keys and values lie, the first of them there, and its place among positions
  // and segments.
  __device__ HeadRows80 K() const { return k_; }
  __device__ HeadRows80 V() const { return HeadRows80{k_.data + v_, k_.row_bytes, k_.rows}; }
  __device__ int32_t First() const { return parts_.First(); }
  __device__ int32_t Number() const { return parts_.First(); }

 private:
  HeadRows80 k_;
  int64_t v_;  // from a key to its value, in bytes
  Parts80<Shape> parts_;
};

// A CTA's items, in NextItem's order.
template <typename Shape>
struct OwnItems80 {
  const Args& args;

  // The item after `last`; the first after -1. All threads.
  __device__ __forceinline__ int32_t Next(int32_t last) {
    return last < 0 ? static_cast<int32_t>(blockIdx.x) : NextItem(last);
  }
  // The source of an item's keys.
  __device__ __forceinline__ OwnKeys80<Shape> KeysOf(const Item& item) {
    return OwnKeys80<Shape>(args, item);
  }
};

template <typename Shape, typename Keys>
__device__ __forceinline__ void CopyPart80(const Args& args, const ForwardSmem80<Shape>& smem,
                                           int stage, const Keys& keys, int32_t batch) {
  constexpr int kRows = Shape::kStageKeys, kWidth = Shape::kWidth, kThreads = Shape::kThreads;
  CopyRows80<kRows, kWidth, kThreads>(smem.K(stage), keys.K(), keys.First(), args.width);
  CopyPositions80<kRows>(args, smem.KNumbers(stage), args.arrays.k_positions,
                         args.arrays.k_segments, args.padded_keys, batch, keys.Number());
  CopyRows80<kRows, kWidth, kThreads>(smem.V(stage), keys.V(), keys.First(), args.width);
}

// All threads.
template <typename Shape, typename Work>
__device__ __forceinline__ void RunForward80(const Args& args, const ForwardSmem80<Shape>& smem,
                                             Work& work) {
  using T = typename Shape::T;
  constexpr int kWidth = Shape::kWidth, kStageKeys = Shape::kStageKeys;
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int row = 16 * warp + threadIdx.x % 32 / 4;
  const uint32_t q_rows = smem.Q() + warp * kSlabBytes80;

  for (int32_t number = work.Next(-1); number < args.items; number = work.Next(number)) {
    const Item item = Item::OfQueries(args, number);
    auto keys = work.KeysOf(item);
    BlockKind next = keys.Next();
    if (warp == 0 && next != BlockKind::kEnd) keys.Await();
    __syncthreads();  // nobody reads the last item's stages any more
    const int32_t first = item.block * Shape::kQueries;
    CopyRows80<Shape::kQueries, kWidth, Shape::kThreads>(
        smem.Q(),
        HeadRows80::Of(args.arrays.q, item.batch, args.queries, args.heads, item.head, args.width),
        first, args.width);
    CopyPositions80<Shape::kQueries>(args, smem.QNumbers(), args.arrays.q_positions,
                                     args.arrays.q_segments, args.padded_queries, item.batch,
                                     first);
    ptx::CopyAsyncCommit();
    if (next != BlockKind::kEnd) CopyPart80<Shape>(args, smem, 0, keys, item.batch);
    ptx::CopyAsyncCommit();

    uint32_t q[Shape::kKeepsQ ? kWidth / 16 : 1][4];
    if constexpr (Shape::kKeepsQ) {
      ptx::CopyAsyncWait<1>();
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kWidth / 16; ++k) LoadA80<Shape::kQueries>(q[k], q_rows, k);
    }
    Running run{{-INFINITY, -INFINITY}, {0, 0}};
    float out[1][kWidth / 2];
#pragma unroll
    for (float& o : out[0]) o = 0;
    int stage = 0;
    while (next != BlockKind::kEnd) {
      const BlockKind kind = next;
      next = keys.Next();
      if (warp == 0 && next != BlockKind::kEnd) keys.Await();
      ptx::CopyAsyncWait<0>();
      __syncthreads();
      if (next != BlockKind::kEnd) CopyPart80<Shape>(args, smem, stage ^ 1, keys, item.batch);
      ptx::CopyAsyncCommit();

      float x[1][kStageKeys / 2], before[2];
      MultiplyColumnsOf80<T, kWidth>(x, smem.K(stage), [&](uint32_t (&a)[4], int, int k) {
        if constexpr (Shape::kKeepsQ) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = q[k][i];
        } else {
          LoadA80<Shape::kQueries>(a, q_rows, k);
        }
      });
      if constexpr (Shape::kSoftcap) Cap(x[0], args.inner);
      if (kind == BlockKind::kSome) {
        MaskPairs</*kRowsAreKeys=*/false, Shape::kQueries>(args, x[0], smem.QNumbers(), row,
                                                           smem.KNumbers(stage), -INFINITY);
      }
      Softmax(x[0], args.factor, run, before);
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) out[0][i] *= before[HalfOf(i)];
      uint32_t weights[1][kStageKeys / 16][4];
      PackA<T>(x[0], weights[0]);
      MultiplyRows80<T>(out, weights, smem.V(stage));
      stage ^= 1;
    }
    ptx::CopyAsyncWait<0>();
    StoreRows<Shape>(args, item, row, out[0], run);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    ForwardKernel80(const __grid_constant__ Args args) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 128, storage);
  const ForwardSmem80<Shape> smem{ptx::SmemAddress(storage)};
  OwnItems80<Shape> work{args};
  RunForward80<Shape>(args, smem, work);
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_SM80_CUH_
