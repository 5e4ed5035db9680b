// The plan and the FFI handlers of decode_merge.
#include <optional>
#include <string>

#include "ops/decode_merge/decode_merge.h"
#include "runtime/fault.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

// Fields of a call: world, rows, width, by_owner, out_dtype. Of the plan: by_owner,
// workspace_bytes.
bool PlanDecodeMerge(CallReader& call, const Machine&, Fields* plan, std::string* why_not) {
  DecodeMergeParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.rows = call.Get("rows", 1, int64_t{1} << 31);
  p.width = call.Get("width", 1, int64_t{1} << 20);
  p.by_owner = call.Get("by_owner", 0, 1) != 0;
  p.dtype = call.GetFormat("out_dtype");
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"by_owner", p.by_owner}, {"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

struct Attributes {
  CallAttributes call;
  bool by_owner = false;
  void Read(AttributeReader& read) {
    call.Read(read);
    read("by_owner", &by_owner);
  }
};

struct Call : CallOf<kDecodeMergeId, DecodeMergeCpu, LaunchDecodeMerge> {
  std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> l) {
    if (x.dimensions().size() != 2) return kDoNotFit;
    const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
    const auto dtype = DTypeOf(y->element_type(), kDecodeMergeFormats.results);
    if (!dtype || rows < 1 || columns < 2 || !Is(x, ffi::F32, {rows, columns}) ||
        !Is(*y, y->element_type(), {rows, columns - 1}) || !Is(*l, ffi::F32, {rows})) {
      return kDoNotFit;
    }
    p = {static_cast<int32_t>(a.call.world), rows, columns - 1, a.by_owner, *dtype};
    arrays = {static_cast<const float*>(x.untyped_data()), y->untyped_data(),
              static_cast<float*>(l->untyped_data())};
    return "";
  }
  int64_t WorkspaceBytes() const { return p.Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kDecodeMergeOp;
const Op kDecodeMergeOp = {
    kDecodeMergeId,      "decode_merge",      OnCpu<Call>,    JFLUX_IF_CUDA(OnCuda<Call>),
    kDecodeMergeFormats, kDecodeMergeFormats, PlanDecodeMerge};

}  // namespace jflux
