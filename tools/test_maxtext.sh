#!/usr/bin/env bash
# Installs MaxText, Tunix, what their models import, and jflux for the CPU into an environment of
# its own, and runs there the tests that need them: test_maxtext.py, test_tunix.py, test_nn_qwix.py.
# Takes pytest's options. Not a part of .ci/run: the environment is 1.4 GB.
#
#   PYTHON   a Python 3.12 or later, which MaxText needs
#   MAXTEXT  the folder of the environment; build/maxtext without it
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.12}
folder=${MAXTEXT:-build/maxtext}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  echo "MaxText needs Python 3.12 or later; set PYTHON to one" >&2
  exit 1
fi

# MaxText declares no requirements but those of its extras, which bring TensorFlow and CUDA. These
# are what the model imports, as of 0.2.5.
with_requirements=(
  "jax>=0.11,<0.12" flax optax orbax-checkpoint grain transformers fastapi uvicorn requests omegaconf
  pydantic jinja2 ml_collections tabulate tiktoken sentencepiece pillow portpicker cloudpickle fire
  tqdm psutil drjax sympy six pandas tensorboardX perfetto wrapt
  pytest pytest-timeout pytest-xdist hypothesis
)
# Theirs bring TensorFlow, TensorBoard or Google Cloud, which the model does without.
alone=(
  maxtext==0.2.5 aqtp qwix tokamax pathwaysutils xprof einshape immutabledict jaxtyping wadler_lindig
  google-tunix==0.1.7 google-metrax clu
)

say() { printf 'test_maxtext: %s (%d s)\n' "$*" "$SECONDS"; }

if [ ! -e "$folder/complete" ]; then
  say "installing MaxText into $folder"
  "$python" -m venv --clear "$folder"
  "$folder/bin/pip" install -q "${with_requirements[@]}"
  "$folder/bin/pip" install -q --no-deps "${alone[@]}"
  touch "$folder/complete"
  say "installed $(du -sh "$folder" | cut -f1)"
fi
say "compiling jflux's CPU back end, 1 minute"
JFLUX_CUDA=OFF "$folder/bin/pip" install -q --no-deps -C build-dir=build/maxtext-cpu -e .
say "running the tests"
"$folder/bin/python" -m pytest --timeout 900 -n 0 -rs -v tests/test_maxtext.py tests/test_tunix.py \
  tests/test_nn_qwix.py "$@"
say "done"
