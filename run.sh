#!/usr/bin/env bash
# Trains a small tensor-parallel GPT on this machine's GPUs, or on its CPU: ./run.sh [--help]
set -euo pipefail
cd "$(dirname "$0")"
source tools/venv.sh
exec .venv/bin/python examples/train_gpt.py "$@"
