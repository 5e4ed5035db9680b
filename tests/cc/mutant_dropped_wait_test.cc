// A mutant that does not wait for its peers' data.
#define jflux jflux_mutant
#define JFLUX_MUTANT_WAIT(...) true
#include "mutant.h"

int main(int argc, char** argv) {
  return jflux::MutantMain(argc, argv, jflux::Expected::kWrongResults);
}
