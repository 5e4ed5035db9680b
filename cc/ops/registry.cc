// The lists of ops: one line for each. docs/adding_an_op.md says what else an op has.
//
// FFI targets, names in error messages, the loading of kernels, jflux._jflux.plan and its constants
// follow from the Op. A local op needs no peers and no workspace (runtime/local_op.h).
#include "runtime/local_op.h"
#include "runtime/op.h"

// An Op is named k<Name>Op, and defined in the <name>_ffi.cc of its folder.
#define JFLUX_OPS(OP)            \
  OP(AllGatherMatmul)            \
  OP(MatmulReduceScatter)        \
  OP(MatmulAllToAll)             \
  OP(MatmulAllReduce)            \
  OP(AllToAllMatmul)             \
  OP(AllReduce)                  \
  OP(AllGather)                  \
  OP(AllToAll)                   \
  OP(ReduceScatter)              \
  OP(RaggedAllToAll)             \
  OP(AllGatherGroupedMatmul)     \
  OP(GroupedMatmulReduceScatter) \
  OP(MoeDispatch)                \
  OP(MoeCombine)                 \
  OP(DecodeMerge)                \
  OP(AllGatherAttention)

#define JFLUX_LOCAL_OPS(OP)  \
  OP(FlashAttention)         \
  OP(FlashAttentionBackward) \
  OP(FlashDecode)            \
  OP(GroupedMatmul)          \
  OP(GroupedMatmulDw)        \
  OP(MoeRoute)               \
  OP(MoeRows)

namespace jflux {

#define JFLUX_DECLARE(Name) extern const Op k##Name##Op;
JFLUX_OPS(JFLUX_DECLARE)
#undef JFLUX_DECLARE

#define JFLUX_DECLARE(Name) extern const LocalOp k##Name##Op;
JFLUX_LOCAL_OPS(JFLUX_DECLARE)
#undef JFLUX_DECLARE

const std::vector<const Op*>& AllOps() {
#define JFLUX_LIST(Name) &k##Name##Op,
  static const std::vector<const Op*> kOps = {JFLUX_OPS(JFLUX_LIST)};
#undef JFLUX_LIST
  return kOps;
}

const std::vector<const LocalOp*>& AllLocalOps() {
#define JFLUX_LIST(Name) &k##Name##Op,
  static const std::vector<const LocalOp*> kOps = {JFLUX_LOCAL_OPS(JFLUX_LIST)};
#undef JFLUX_LIST
  return kOps;
}

const Op* FindOp(const std::string& name) {
  for (const Op* op : AllOps()) {
    if (name == op->name) return op;
  }
  return nullptr;
}

}  // namespace jflux
