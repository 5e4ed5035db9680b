"""How this copy of jflux was built. Written by CMake."""

CUDA = "OFF" == "ON"
CUDA_DETAIL = "JFLUX_CUDA=OFF; ask with JFLUX_CUDA=ON pip install ."  # the compiler, or why there is none
