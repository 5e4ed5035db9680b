// moe_route: sorts slots by expert, on one device. Slot s = t * k + j is the j-th choice of token
// t; -1 means that it has no expert.
//
//   counts[e]       rows of expert e: its slots, or the first `capacity` of them
//   offsets[e]      the sum of the counts before e; offsets[experts] is that of all
//   destination[s]  the row of slot s, or -1
//   source[r]       the slot of row r, or -1 from offsets[experts] on
//
// Rows lie expert after expert, and within an expert in the order of slots. An index below -1 or
// from `experts` on is an error that names it.
//
// Python: jflux/_ops/experts/routing.py.
#ifndef JFLUX_OPS_MOE_ROUTE_MOE_ROUTE_H_
#define JFLUX_OPS_MOE_ROUTE_MOE_ROUTE_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kMoeRouteId{34};
inline constexpr OpFormats kMoeRouteFormats{SetOf(DType::kF32)};

struct MoeRouteParams {
  int64_t slots;     // tokens times choices of a token
  int64_t experts;   // from 0 on
  int64_t capacity;  // most rows of an expert; -1: any number
};

struct MoeRouteArrays {
  const int32_t* indices;  // [slots]
  int32_t* counts;         // [experts]
  int32_t* offsets;        // [experts + 1]
  int32_t* destination;    // [slots]
  int32_t* source;         // [slots]
};

// The CPU back end's body: a counting sort, O(slots + experts). What is wrong with the indices;
// empty if nothing is.
std::string MoeRouteCpu(const MoeRouteParams& params, const MoeRouteArrays& arrays);

// Enqueues the call on `stream`, on the current device: false and *error if it cannot. An index
// that is no expert's counts as -1.
bool LaunchMoeRoute(const MoeRouteParams& params, const MoeRouteArrays& arrays, cudaStream_t stream,
                    std::string* error);

// Loads the kernel on the current device.
bool LoadMoeRouteKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_ROUTE_MOE_ROUTE_H_
