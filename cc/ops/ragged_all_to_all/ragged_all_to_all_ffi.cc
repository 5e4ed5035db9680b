// The plan and the FFI handlers of ragged_all_to_all.
#include <cstring>
#include <limits>
#include <string>

#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "runtime/fault.h"
#include "runtime/handlers.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#include "runtime/cuda_check.h"
#endif

namespace jflux {
namespace {

// Fields of a call: world, slices, batch, output_rows, row_bytes and chunked. Of the plan:
// workspace_bytes.
bool PlanRaggedAllToAll(CallReader& call, const Machine&, Fields* plan, std::string* why_not) {
  constexpr int64_t kMost = int64_t{1} << 31;
  RaggedParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.slices = static_cast<int32_t>(call.Get("slices", 1, 1 << 20));
  p.batch = static_cast<int32_t>(call.Get("batch", 1, 1 << 20));
  p.output_rows = call.Get("output_rows", 1, kMost - 1);
  p.row_bytes = call.Get("row_bytes", 1, kMost - 1);
  p.chunked = call.Get("chunked", 0, 1) == 1;
  if (int64_t{p.slices} * p.batch > 1 << 20) call.Refuse("there are more than 2^20 slices");
  if (p.ImageRows() >= kMost) call.Refuse("there are 2^31 rows or more");
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.WorkspaceBytes()}};
  return true;
}

struct Attributes {
  CallAttributes call;
  int64_t batch = 0, row_bytes = 0;
  bool chunked = false;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("batch", &batch)("row_bytes", &row_bytes)("chunked", &chunked);
  }
};

struct Call : CallOf<kRaggedAllToAllId, RaggedAllToAllCpu, LaunchRaggedAllToAll> {
  // The lowering asks XLA to give `output` and the result one buffer. XLA for GPUs does not always
  // do so in a loop's body; then `output` is copied.
  const void* copied = nullptr;
  size_t bytes = 0;

  std::string Read(const Attributes& a, ffi::AnyBuffer operand, ffi::AnyBuffer output,
                   ffi::AnyBuffer input_offsets, ffi::AnyBuffer send_sizes,
                   ffi::AnyBuffer output_offsets, ffi::AnyBuffer recv_sizes,
                   ffi::Result<ffi::AnyBuffer> y) {
    const auto sizes = static_cast<int64_t>(input_offsets.element_count());
    for (const ffi::AnyBuffer* array :
         {&input_offsets, &send_sizes, &output_offsets, &recv_sizes}) {
      if (array->element_type() != ffi::DataType::S32 ||
          static_cast<int64_t>(array->element_count()) != sizes) {
        return kDoNotFit;
      }
    }
    const auto operand_bytes = static_cast<int64_t>(operand.size_bytes());
    const auto output_bytes = static_cast<int64_t>(output.size_bytes());
    if (operand.element_type() != y->element_type() || y->element_type() != output.element_type() ||
        output.size_bytes() != y->size_bytes() || a.batch < 1 || a.row_bytes < 1 || sizes < 1 ||
        a.batch > sizes || sizes % (a.call.world * a.batch) != 0 || sizes >= 1 << 28) {
      return kDoNotFit;
    }
    const int64_t entry = a.batch * a.row_bytes, most = int64_t{1} << 31;
    if (operand_bytes % entry != 0 || output_bytes % entry != 0 || output_bytes == 0 ||
        operand_bytes / a.row_bytes >= most || output_bytes / a.row_bytes >= most) {
      return kDoNotFit;
    }
    p.world = static_cast<int32_t>(a.call.world);
    p.slices = static_cast<int32_t>(sizes / (a.call.world * a.batch));
    p.batch = static_cast<int32_t>(a.batch);
    p.operand_rows = operand_bytes / entry;
    p.output_rows = output_bytes / entry;
    p.row_bytes = a.row_bytes;
    p.chunked = a.chunked;
    const auto numbers = [](const ffi::AnyBuffer& array) {
      return static_cast<const int32_t*>(array.untyped_data());
    };
    arrays = {operand.untyped_data(), y->untyped_data(),       numbers(input_offsets),
              numbers(send_sizes),    numbers(output_offsets), numbers(recv_sizes)};
    bytes = y->size_bytes();
    if (output.untyped_data() != arrays.y) copied = output.untyped_data();
    return "";
  }
  int64_t WorkspaceBytes() const { return p.WorkspaceBytes(); }
  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    if (copied != nullptr) std::memcpy(arrays.y, copied, bytes);
    return CallOf::Run(view, epoch, ctx);
  }
#ifdef JFLUX_WITH_CUDA
  bool Launch(int64_t site, const CudaDevice& device, const SymmetricView& view,
              cudaStream_t stream, std::string* error) const {
    if (copied != nullptr) {
      JFLUX_CUDA_OR_FALSE(
          cudaMemcpyAsync(arrays.y, copied, bytes, cudaMemcpyDeviceToDevice, stream), error);
    }
    return CallOf::Launch(site, device, view, stream, error);
  }
#endif
};

// moe_dispatch fails by a first offset of INT32_MIN and the number of slots that it may not drop
// (jflux/_ops/experts/_ragged_dispatch.py).
std::string Meaning(const Fault& fault) {
  const int64_t slots = static_cast<int64_t>(fault.seen) - std::numeric_limits<int32_t>::min();
  if (fault.argument != static_cast<int32_t>(RaggedArgument::kInputOffsets) || fault.tile != 0 ||
      slots < 1 || slots > 1 << 30) {
    return "";
  }
  return "jflux.moe_dispatch: " + std::to_string(slots) + " of the slots (token, expert) of rank " +
         std::to_string(fault.peer) +
         " have no place in their expert's capacity, or an expert that there is not, and "
         "on_overflow=\"error\". Make capacity larger, mend topk_indices, or let "
         "on_overflow=\"drop\" count them in statistics.dropped.";
}

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kRaggedAllToAllOp;
const Op kRaggedAllToAllOp = {kRaggedAllToAllId,           "ragged_all_to_all", OnCpu<Call>,
                              JFLUX_IF_CUDA(OnCuda<Call>), kMovesBytes,         kMovesBytes,
                              PlanRaggedAllToAll,
                              /*most_splits=*/1,
                              /*constants=*/nullptr,       kRaggedArguments,    Meaning};

}  // namespace jflux
