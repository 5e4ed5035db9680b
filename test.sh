#!/usr/bin/env bash
# Runs the Python tests, those that need GPUs too where there are some: ./test.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")"
source tools/venv.sh
exec .venv/bin/python -m pytest "$@"
