// Instantiates the kernels of all_to_all_matmul and launches one.
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "ops/all_to_all_matmul/all_to_all_matmul_sm90.cuh"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {
namespace {

struct Instances : FewOfInt8<AllToAllMatmulKernels> {
  static constexpr OpFormats kFormats = kAllToAllMatmulFormats;
  static constexpr int kMostSplits = 1;
  // Results go to this GPU's memory, which takes them at once.
  static constexpr bool kMayLendStage = true;
};

// The map of an array of shards that are one below the other (by_rows) or side by side. columns: of
// a shard. A box has rows and columns of one shard: beyond it, loads give zeros and stores do
// nothing.
bool EncodeShards(CUtensorMap* map, DType dtype, const void* data, const Rows& r, bool by_rows,
                  int64_t columns, int box_rows, int box_columns, Boxes boxes, std::string* error) {
  if (by_rows) {
    return EncodeTensorMap(map, dtype, data, {r.world, r.outer, r.inner, columns},
                           {r.inner * columns, r.world * r.inner * columns, columns},
                           {1, 1, box_rows, box_columns}, error, boxes);
  }
  return EncodeTensorMap(map, dtype, data, {r.world, 1, r.PerRank(), columns},
                         {columns, r.Total() * columns, r.world * columns},
                         {1, 1, box_rows, box_columns}, error, boxes);
}

// The map of w's rows [first_k, first_k + p.k), as LoadB of gpu/gemm_sm90.cuh reads them.
bool EncodeTermOfW(CUtensorMap* map, const AllToAllMatmulParams& p, const void* w, int64_t first_k,
                   const GemmChoice& choice, std::string* error) {
  const auto* data = static_cast<const char*>(w);
  const int block = BlockElements(p.dtype);
  if (p.transpose_rhs) {
    return EncodeTensorMap(map, p.dtype, data + first_k * SizeOf(p.dtype), {p.n, p.k}, {p.KOfW()},
                           {choice.tile_n / choice.cluster_m, block}, error);
  }
  return EncodeTensorMap(map, p.dtype, data + first_k * p.n * SizeOf(p.dtype), {p.k, p.n}, {p.n},
                         {block / choice.cluster_m, block}, error);
}

}  // namespace

bool LoadAllToAllMatmulKernels(std::string* error) {
  return LoadBothLoops(LoadGemmInstances<Instances>, LoadAllToAllMatmulKernels80, error);
}

bool LaunchAllToAllMatmul(const AllToAllMatmulParams& p, const AllToAllMatmulArrays& arrays,
                          const ProductPlan& plan, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  if (choice.portable) {
    return LaunchAllToAllMatmul80(p, arrays, plan, site, device, view, stream, error);
  }
  const Rows& r = p.rows;
  const int64_t rows = r.PerRank();
  AllToAllMatmulArgs args{};
  args.panels = CudaLayoutOf(p);
  args.workspace = args.panels.Workspace();
  args.state = device.state;
  args.view = view;
  args.rows = r;
  args.order = TileOrderOf(p, choice, device.sm_count);
  args.num_tiles = args.order.Total();
  args.terms = p.concat_rows ? 1 : r.world;
  args.k = static_cast<int32_t>(p.k);
  args.n = p.n;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kAllToAllMatmulId);
  args.split_rows = p.split_rows;
  args.concat_rows = p.concat_rows;
  args.gathers = arrays.gathered != nullptr;
  args.out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args.scale_entries = static_cast<int32_t>(ScaleEntries(p));
  // A rank's terms begin with its own.
  const bool is_rotated = arrays.scales == Scales::kOfBlocks && !p.concat_rows;
  const int64_t first = is_rotated ? view.rank * p.k / kScaleBlock : 0;
  args.x_scale = arrays.x_scale + first;
  args.w_scale = arrays.w_scale == nullptr ? nullptr : arrays.w_scale + first;
  args.send_order =
      ShardSendOrder::Make(args.panels, args.order.group_m * choice.cluster_m, p.concat_rows);
  args.senders = plan.senders;
  const int box_rows = BoxRows(rows);
  const int sent_rows = static_cast<int>(Min<int64_t>(rows, KPanelLayout::kBoxRows));
  args.a_bytes = box_rows * kBlockBytes;
  args.send_box_bytes = sent_rows * kBlockBytes;
  const int block = BlockElements(p.dtype);
  if (!EncodeShards(&args.x, p.dtype, arrays.x, r, p.split_rows, p.k, box_rows, block,
                    Boxes::kSwizzled, error) ||
      !EncodeShards(&args.send_boxes, p.dtype, arrays.x, r, p.split_rows, p.k, sent_rows, block,
                    Boxes::kLinear, error) ||
      (args.gathers && !EncodeShards(&args.gathered, p.dtype, arrays.gathered, r, p.concat_rows,
                                     p.k, KPanelLayout::kBoxRows, block, Boxes::kLinear, error)) ||
      // y has shards only if rows are put together.
      !EncodeShards(&args.y, p.out_dtype, arrays.y, p.concat_rows ? r : Rows{1, 1, rows},
                    /*by_rows=*/true, p.n, 64, StoreColumns(choice), Boxes::kSwizzled, error)) {
    return false;
  }
  // A map cannot be empty. A single rank has no peers and reads nothing through it.
  const int64_t slot_rows = Max(args.panels.peers, 1) * args.panels.ShardRows();
  for (int half = 0; half < 2; ++half) {
    if (!EncodeTensorMap(&args.workspace_maps[half], p.dtype,
                         view.At(view.rank, args.workspace.DataOffset(half)),
                         {1, 1, slot_rows, block}, {slot_rows * block, slot_rows * block, block},
                         {1, 1, box_rows, block}, error)) {
      return false;
    }
  }
  for (int term = 0; term < args.terms; ++term) {
    const int64_t first_k = p.concat_rows ? 0 : (view.rank + term) % r.world * p.k;
    if (!EncodeTermOfW(&args.w[term], p, arrays.w, first_k, choice, error)) return false;
  }
  return LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, choice, &args, args.num_tiles,
                                       device.sm_count, stream, error, arrays.scales);
}

}  // namespace jflux
