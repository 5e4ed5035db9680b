// The CPU back end of matmul_all_reduce of few rows: one rank's part, in host memory. It sends all
// m64 blocks before it waits for the first. Meanwhile y holds its own, rounded as the peer receives
// them.
#include <cstring>
#include <vector>

#include "ops/matmul_all_reduce/few_rows.h"
#include "runtime/cpu_matmul.h"

namespace jflux {
namespace {

// An m64 block of a slice: its rows and columns in y.
struct M64 {
  int32_t slice;
  int number;
  int64_t row0, rows, col0, cols;
};

std::vector<M64> M64BlocksOf(const FewRowsLayout& layout, int32_t slice_n, int64_t rows,
                             int64_t n) {
  std::vector<M64> blocks;
  for (int32_t slice = 0; slice < layout.slices; ++slice) {
    const int64_t col0 = static_cast<int64_t>(slice) * slice_n;
    for (int b = 0; b < layout.m64_blocks; ++b) {
      const int64_t row0 = b * 64;
      blocks.push_back(
          {slice, b, row0, Min<int64_t>(64, rows - row0), col0, Min<int64_t>(slice_n, n - col0)});
    }
  }
  return blocks;
}

}  // namespace

bool FewRowsCpu(const MatmulAllReduceParams& params, int32_t slice_n,
                const MatmulAllReduceArrays& arrays, const SymmetricView& view, uint64_t epoch,
                const WaitContext& ctx) {
  const MatmulReduceScatterParams& p = params.scatter;
  const auto layout = FewRowsLayoutOf(params, slice_n);
  const WorkspaceLayout workspace = layout.Workspace();
  const int64_t signals = workspace.SignalOffset(epoch), data = workspace.DataOffset(epoch);
  const Signal signal = MakeSignal(epoch, params.Signature());
  const int peer = 1 - view.rank;
  const auto blocks = M64BlocksOf(layout, slice_n, p.rows.Total(), p.n);
  const CpuRhs rhs(arrays.w, p.dtype, p.k, p.n, p.transpose_rhs);
  const DType wide = rhs.compute_dtype();
  const int64_t element = SizeOf(p.out_dtype);
  // Byte offset in y of row i of an m64 block. In the workspace its rows are contiguous.
  const auto in_y = [&](const M64& b, int64_t i) {
    return ((b.row0 + i) * p.n + b.col0) * element;
  };
  auto* y = static_cast<char*>(arrays.y);

  std::vector<char> product(64 * slice_n * SizeOf(wide));
  for (const M64& b : blocks) {
    rhs.Multiply(static_cast<const char*>(arrays.x) + b.row0 * p.k * SizeOf(p.dtype), b.rows,
                 b.col0, b.cols, product.data());
    char* sent = view.At(peer, data + layout.M64Offset(b.slice, b.number));
    for (int64_t i = 0; i < b.rows; ++i) {
      char* local = y + in_y(b, i);
      Convert(product.data() + i * b.cols * SizeOf(wide), wide, local, p.out_dtype, b.cols);
      std::memcpy(sent + i * b.cols * element, local, b.cols * element);
    }
    StoreRelease(view.At<Signal>(peer, signals + layout.SignalOffset(b.slice, b.number)), signal);
  }

  std::vector<char> sum(slice_n * SizeOf(wide));
  for (const M64& b : blocks) {
    const auto* word = view.At<Signal>(view.rank, signals + layout.SignalOffset(b.slice, b.number));
    if (!WaitSignal(word, signal, peer, b.slice, ctx)) return false;
    const char* partial = view.At(view.rank, data + layout.M64Offset(b.slice, b.number));
    for (int64_t i = 0; i < b.rows; ++i) {
      char* local = y + in_y(b, i);
      Convert(local, p.out_dtype, sum.data(), wide, b.cols);
      Accumulate(partial + i * b.cols * element, p.out_dtype, sum.data(), wide, b.cols);
      if (arrays.residual != nullptr) {
        Accumulate(static_cast<const char*>(arrays.residual) + in_y(b, i), p.out_dtype, sum.data(),
                   wide, b.cols);
      }
      Convert(sum.data(), wide, local, p.out_dtype, b.cols);
    }
  }
  return true;
}

}  // namespace jflux
