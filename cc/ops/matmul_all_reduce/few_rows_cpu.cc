// The CPU back end of matmul_all_reduce of few rows: one rank's part in host memory. It sends all
// blocks before it waits for the first; its own, rounded as the peer gets them, are in y meanwhile.
#include <cstring>
#include <vector>

#include "ops/matmul_all_reduce/few_rows.h"
#include "runtime/cpu_matmul.h"

namespace jflux {
namespace {

// A block of a slice: its rows and columns in y.
struct Block {
  int32_t slice;
  int number;
  int64_t row0, rows, col0, cols;
};

std::vector<Block> BlocksOf(const FewRowsLayout& layout, int32_t slice_n, int64_t rows, int64_t n) {
  std::vector<Block> blocks;
  for (int32_t slice = 0; slice < layout.slices; ++slice) {
    const int64_t col0 = static_cast<int64_t>(slice) * slice_n;
    for (int b = 0; b < layout.blocks; ++b) {
      const int64_t row0 = b * 64;
      blocks.push_back(
          {slice, b, row0, Min<int64_t>(64, rows - row0), col0, Min<int64_t>(slice_n, n - col0)});
    }
  }
  return blocks;
}

}  // namespace

bool FewRowsCpu(const MatmulAllReduceParams& params, int32_t slice_n,
                const MatmulAllReduceArrays& arrays, const SymmetricView& view, uint32_t epoch,
                const WaitContext& ctx) {
  const MatmulReduceScatterParams& p = params.scatter;
  const auto layout = FewRowsLayoutOf(params, slice_n);
  const WorkspaceLayout workspace = layout.Workspace();
  const int64_t signals = workspace.SignalOffset(epoch), data = workspace.DataOffset(epoch);
  const Signal signal = MakeSignal(epoch, params.Signature());
  const int peer = 1 - view.rank;
  const auto blocks = BlocksOf(layout, slice_n, p.rows.Total(), p.n);
  const CpuRhs rhs(arrays.w, p.dtype, p.k, p.n, p.transpose_rhs);
  const DType wide = rhs.compute_dtype();
  const int64_t element = SizeOf(p.out_dtype);
  // Bytes before row i of a block, in y; the peer's rows follow each other.
  const auto in_y = [&](const Block& b, int64_t i) {
    return ((b.row0 + i) * p.n + b.col0) * element;
  };
  auto* y = static_cast<char*>(arrays.y);

  std::vector<char> product(64 * slice_n * SizeOf(wide));
  for (const Block& b : blocks) {
    rhs.Multiply(static_cast<const char*>(arrays.x) + b.row0 * p.k * SizeOf(p.dtype), b.rows,
                 b.col0, b.cols, product.data());
    char* sent = view.At(peer, data + layout.BlockOffset(b.slice, b.number));
    for (int64_t i = 0; i < b.rows; ++i) {
      char* own = y + in_y(b, i);
      Convert(product.data() + i * b.cols * SizeOf(wide), wide, own, p.out_dtype, b.cols);
      std::memcpy(sent + i * b.cols * element, own, b.cols * element);
    }
    StoreRelease(view.At<Signal>(peer, signals + layout.SignalOffset(b.slice, b.number)), signal);
  }

  std::vector<char> sum(slice_n * SizeOf(wide));
  for (const Block& b : blocks) {
    const auto* word = view.At<Signal>(view.rank, signals + layout.SignalOffset(b.slice, b.number));
    if (!WaitSignal(word, signal, peer, b.slice, ctx)) return false;
    const char* part = view.At(view.rank, data + layout.BlockOffset(b.slice, b.number));
    for (int64_t i = 0; i < b.rows; ++i) {
      char* own = y + in_y(b, i);
      Convert(own, p.out_dtype, sum.data(), wide, b.cols);
      Accumulate(part + i * b.cols * element, p.out_dtype, sum.data(), wide, b.cols);
      if (arrays.residual != nullptr) {
        Accumulate(static_cast<const char*>(arrays.residual) + in_y(b, i), p.out_dtype, sum.data(),
                   wide, b.cols);
      }
      Convert(sum.data(), wide, own, p.out_dtype, b.cols);
    }
  }
  return true;
}

}  // namespace jflux
