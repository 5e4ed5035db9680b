// A mutant whose writers signal without release.
#define jflux jflux_mutant
#include "core/atomic.h"
#define StoreRelease StoreRelaxed
#include "mutant.h"

int main(int argc, char** argv) { return jflux::MutantMain(argc, argv, jflux::Expected::kRace); }
