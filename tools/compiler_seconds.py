"""Runs a compiler, and notes the processor time that it took: a compiler launcher for CMake.

    CMAKE_CXX_COMPILER_LAUNCHER="python3;$PWD/tools/compiler_seconds.py"   and ..._CUDA_...

Adds a line to compiler_seconds.tsv in the build folder, where ninja runs compilers: the seconds
of user and system time of the command and all of its children, a tab, and the output. Unlike the
time between start and end, that is nearly the same on a machine that does other things too.
"""

import resource
import subprocess
import sys

RECORD = "compiler_seconds.tsv"


def main() -> int:
    command = sys.argv[1:]
    status = subprocess.run(command).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "-o" in command[:-1]:
        output = command[command.index("-o") + 1]
        with open(RECORD, "a") as record:
            record.write(f"{used.ru_utime + used.ru_stime:.2f}\t{output}\n")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
