#!/bin/bash
# Bazel's side of tools/pytest.bzl: run_pytest.sh PYTHON JAX_PLATFORMS FILE...
set -euo pipefail
python=$1
export JAX_PLATFORMS=$2 PYTHONPATH=$PWD:$PWD/tools/bazel_site PYTHONDONTWRITEBYTECODE=1
shift 2
"$python" -c 'import importlib.util as u, os
where = u.find_spec("jflux").origin
assert where.startswith(os.getcwd()), f"would test {where}, which Bazel did not build"'
status=0
"$python" -m pytest -q -p no:cacheprovider "$@" || status=$?
# 5: all of the file was skipped, for want of a package such as Flax.
[ "$status" = 5 ] || exit "$status"
