// No mutation: the schedule that exposes the mutants does no harm to the protocol as it is.
#define jflux jflux_mutant
#include "mutant.h"

int main(int argc, char** argv) { return jflux::MutantMain(argc, argv, jflux::Expected::kNothing); }
