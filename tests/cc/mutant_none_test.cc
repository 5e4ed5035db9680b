// No mutation: the schedule that exposes the mutants does not break the correct protocol.
#define jflux jflux_mutant
#include "mutant.h"

int main(int argc, char** argv) { return jflux::MutantMain(argc, argv, jflux::Expected::kNothing); }
