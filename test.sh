#!/usr/bin/env bash
# Runs the Python tests, those that need GPUs too where there are some: ./test.sh [pytest options]
#
#   --full   every set of parameters, and tests that are slow; without it every test function has its
#            first set and a few others
#
# On CPUs up to four processes share the tests, one more than there are cores: some tests wait. On GPUs
# one process has them to itself;
# tests/gpu_suite.py takes less time there.
set -euo pipefail
cd "$(dirname "$0")"
source tools/venv.sh

processes=$(($(nproc) < 3 ? $(nproc) + 1 : 4))
if [ -e /dev/nvidia1 ]; then processes=0; fi
exec .venv/bin/python -m pytest -n "$processes" --dist worksteal "$@"
