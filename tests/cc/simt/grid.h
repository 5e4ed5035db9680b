// The life of kernels, CTAs and threads, which the loop of machine.cc runs.
#ifndef JFLUX_TESTS_CC_SIMT_GRID_H_
#define JFLUX_TESTS_CC_SIMT_GRID_H_

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simt/machine.h"

namespace jflux::simt {

// The largest that a kernel's parameters can be.
struct alignas(128) Parameters {
  char bytes[4096];
};

struct Grid {
  Launch launch;
  Parameters parameters;
  std::vector<std::unique_ptr<Cluster>> clusters;  // that have begun
  int begun = 0, ended = 0;                        // of launch.ctas / launch.cluster
  int operations = 0;                              // asynchronous ones, not complete
  int Clusters() const { return launch.ctas / launch.cluster; }
};

// The kernels of each device's streams that have not ended. Only the first of a stream runs.
using Streams = std::map<std::pair<int, const void*>, std::deque<std::unique_ptr<Grid>>>;

// Those that have been launched since the last call.
Streams TakeLaunched();
// Has kernels and clusters begin, each at some later step. Takes ended kernels away.
void BeginWhatFits(Streams& streams);
bool AllEnded(const Streams& streams);
// For the report of a deadlock: one line for each warp and reason.
std::string WhoWaits(const Streams& streams);

// In machine.cc. A thread begins.
void AddRunnable(Thread* thread);

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_GRID_H_
