// A mutant whose writers announce their data without release.
#define jflux jflux_mutant
#include "core/atomic.h"
namespace jflux {
inline void StoreRelaxed(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
}  // namespace jflux
#define StoreRelease StoreRelaxed
#include "mutant.h"

int main(int argc, char** argv) { return jflux::MutantMain(argc, argv, jflux::Expected::kRace); }
