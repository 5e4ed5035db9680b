// The CPU back end of ragged_all_to_all: one thread runs a rank's part.
#include <cstdint>
#include <vector>

#include "ops/ragged_all_to_all/ragged_chunked_body.h"
#include "ops/ragged_all_to_all/ragged_packets_body.h"
#include "runtime/packet_call_cpu.h"

namespace jflux {

bool RaggedAllToAllCpu(const RaggedParams& p, const RaggedArrays& arrays, const SymmetricView& view,
                       uint64_t epoch, const WaitContext& ctx) {
  std::vector<uint32_t> memory(p.TableWords(/*threads=*/1));
  const RaggedTables tables = RaggedTables::In(memory.data(), p, arrays);
  if (p.chunked) {
    return shmem::internal::RunCall(view, p.ChunkedWorkspace(), epoch, p.Signature(), ctx,
                                    [&](const shmem::Context& call) {
                                      return RaggedChunkedBody{p, arrays, call, tables}.Run();
                                    });
  }
  return RunPackets(p, view, epoch, ctx, [&](const PacketCall& call) {
    return RaggedPacketsBody{p, arrays, call, tables}.Run(0, 1);
  });
}

}  // namespace jflux
