// A mutant whose calls all use the same half of the workspace.
#define jflux jflux_mutant
#define JFLUX_MUTANT_DATA_EPOCH(epoch) 0
#include "mutant.h"

int main(int argc, char** argv) {
  return jflux::MutantMain(argc, argv, jflux::Expected::kWrongResults);
}
