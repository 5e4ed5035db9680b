// The ops: a row for each folder of cc/ops. docs/adding_an_op.md says what else an op has.
//
//   FOLDER(Name,      Load<Name>Kernels loads what the folder's .cu files hold
//          GPUs,      that they are compiled for (gpu/machine.h). A file whose name ends in _sm90
//                     is for Hopper alone, and one in _sm80 portable; one in _sm89 is portable too,
//                     but for kFloat8Arch
//          OP(Name),  k<Name>Op, defined in the folder's _ffi.cc
//          INSTANCE(format, layout of w))  an object of its own (runtime/gemm_instances_cuda.h);
//                                          nk_blocks: [n, k], with scales of blocks;
//                                          nk_quantizing, nk_blocks_quantizing: results too
//
// FFI targets, names in error messages, the loading of kernels, jflux._jflux.plan and its constants
// follow from the rows. The build reads them too (build_backend/kernel_files.py).
#include "runtime/op.h"

#define JFLUX_FOLDERS(FOLDER, OP)                                                               \
  FOLDER(AllGatherMatmul, kPortable, OP(AllGatherMatmul),                                       \
         INSTANCE(F16, kn) INSTANCE(F16, nk) INSTANCE(BF16, kn) INSTANCE(BF16, nk)              \
             INSTANCE(F8E4M3FN, nk) INSTANCE(F8E4M3FN, nk_blocks) INSTANCE(F8E5M2, nk)          \
                 INSTANCE(F8E5M2, nk_blocks) INSTANCE(S8, nk) INSTANCE(F8E4M3FN, nk_quantizing) \
                     INSTANCE(F8E4M3FN, nk_blocks_quantizing))                                  \
  FOLDER(Matmul, kPortable, OP(Matmul))                                                         \
  FOLDER(MatmulReduceScatter, kPortable, OP(MatmulReduceScatter))                               \
  FOLDER(MatmulAllToAll, kPortable, OP(MatmulAllToAll))                                         \
  FOLDER(MatmulAllReduce, kPortable, OP(MatmulAllReduce))                                       \
  FOLDER(AllToAllMatmul, kPortable, OP(AllToAllMatmul))                                         \
  FOLDER(AllReduce, kPortable, OP(AllReduce))                                                   \
  FOLDER(Exchange, kPortable, OP(AllGather) OP(AllToAll) OP(ReduceScatter))                     \
  FOLDER(RaggedAllToAll, kPortable, OP(RaggedAllToAll))                                         \
  FOLDER(AllGatherGroupedMatmul, kPortable, OP(AllGatherGroupedMatmul))                         \
  FOLDER(GroupedMatmulReduceScatter, kPortable, OP(GroupedMatmulReduceScatter))                 \
  FOLDER(MoeDispatch, kPortable, OP(MoeDispatch) OP(MoeCombine))                                \
  FOLDER(DecodeMerge, kPortable, OP(DecodeMerge))                                               \
  FOLDER(AllGatherAttention, kPortable, OP(AllGatherAttention))                                 \
  FOLDER(FlashAttention, kPortable, OP(FlashAttention) OP(FlashAttentionBackward))              \
  FOLDER(FlashDecode, kPortable, OP(FlashDecode))                                               \
  FOLDER(LatentDecode, kPortable, OP(LatentDecode))                                             \
  FOLDER(GroupedMatmul, kPortable, OP(GroupedMatmul) OP(GroupedMatmulDw))                       \
  FOLDER(GroupedMatmulScaled, kPortable, OP(GroupedMatmulScaled))                               \
  FOLDER(GroupedMatmulDwScaled, kHopper, OP(GroupedMatmulDwScaled))                             \
  FOLDER(ActivationGradient, kPortable, OP(ActivationGradient))                                 \
  FOLDER(MoeGate, kPortable, OP(MoeGate) OP(MoeGateGradient))                                   \
  FOLDER(MoeRoute, kPortable, OP(MoeRoute))                                                     \
  FOLDER(MoeRows, kPortable, OP(MoeRows))                                                       \
  FOLDER(Quantize, kPortable, OP(Quantize))

namespace jflux {

#define JFLUX_DECLARE_OP(Name) extern const Op k##Name##Op;
#define JFLUX_DECLARE(Name, gpus, ops, ...)     \
  bool Load##Name##Kernels(std::string* error); \
  ops
JFLUX_FOLDERS(JFLUX_DECLARE, JFLUX_DECLARE_OP)

const std::vector<OpFolder>& AllFolders() {
#define JFLUX_LIST_OP(Name) &k##Name##Op,
#define JFLUX_LIST(Name, gpus, ops, ...) {gpus, JFLUX_IF_CUDA(Load##Name##Kernels), {ops}},
  static const std::vector<OpFolder> kAll = {JFLUX_FOLDERS(JFLUX_LIST, JFLUX_LIST_OP)};
  return kAll;
}

const std::vector<const Op*>& AllOps() {
#define JFLUX_OPS(Name, gpus, ops, ...) ops
  static const std::vector<const Op*> kAll = {JFLUX_FOLDERS(JFLUX_OPS, JFLUX_LIST_OP)};
  return kAll;
}

const Op* FindOp(const std::string& name) {
  for (const Op* op : AllOps()) {
    if (name == op->name) return op;
  }
  return nullptr;
}

}  // namespace jflux
