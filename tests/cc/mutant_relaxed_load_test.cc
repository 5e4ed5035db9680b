// A mutant whose readers poll without acquire.
#define jflux jflux_mutant
#include "core/atomic.h"
#define LoadAcquire LoadRelaxed
#include "mutant.h"

int main(int argc, char** argv) { return jflux::MutantMain(argc, argv, jflux::Expected::kRace); }
