#!/usr/bin/env bash
# Checks a wheel on this machine, without a network: on its GPUs, or without any on its CPU.
#
#   bash tools/check_wheel.sh dist/jflux-0.2.0-cp312-abi3-*.whl
#
# The wheel goes into an environment that has nothing but it. What it requires, JAX above all, is
# found in the environment of PYTHON. Runs tools/check_install.py, the doctor, the quickstart and
# random programs of all ops against float64 (python -m jflux.stress). Takes two minutes.
#
#   PYTHON    the interpreter that has JAX (python3)
#   PLATFORM  gpu or cpu (what JAX finds)
#   MINUTES   of random programs (0.5)
#   KIND      what the wheel must have: cuda or cpu (cuda on GPUs, cpu elsewhere)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "${1:?the wheel}")
python=$(command -v "${PYTHON:-python3}")
version=$(basename "$wheel" | cut -d - -f 2)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

step() {
  local title=$1 start=$SECONDS
  shift
  printf '==== %s\n' "$title"
  "$@"
  printf '==== %s: right, %d s\n' "$title" $((SECONDS - start))
}

# Not `venv --system-site-packages`: if PYTHON is of a virtual environment, that leads past it, to
# the packages of the interpreter that it was made with. A path in a .pth file comes after the new
# environment's own packages, and .pth files there, such as those of editable installs, are not read.
install() {
  "$python" -m venv --without-pip "$folder/venv"
  "$python" -m pip --python "$folder/venv/bin/python" install -q --disable-pip-version-check \
    --no-index --no-deps "$wheel"
  "$python" -c 'import sysconfig
for name in dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")): print(name)' \
    >"$(echo "$folder"/venv/lib/python3*/site-packages)/of_python.pth"
  "$folder/venv/bin/python" -c 'import importlib.metadata as m
print(*(f"{name} {m.version(name)}" for name in ("jflux", "jax", "jaxlib", "numpy")), sep=", ")'
}

cd "$folder"
step "install" install
run=$folder/venv/bin/python
if [ -z "${PLATFORM:-}" ]; then
  PLATFORM=$("$run" -c 'import jax; print(jax.default_backend())')
fi
if [ "$PLATFORM" = cpu ]; then
  export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
fi
kind=${KIND:-$([ "$PLATFORM" = gpu ] && echo cuda || echo cpu)}
found=$("$run" -c 'import jax; print(jax.default_backend(), len(jax.devices()))')
case $found in
  "$PLATFORM "*) echo "devices: $found" ;;
  *) echo "wanted $PLATFORM, and JAX has: $found" >&2; exit 1 ;;
esac

step "what is installed" "$run" "$root/tools/check_install.py" "$version" "$kind"
step "doctor" "$run" -m jflux.doctor
step "quickstart" "$run" "$root/examples/quickstart.py"
step "random programs" "$run" -m jflux.stress --minutes "${MINUTES:-0.5}"
printf '==== %s works on %s devices: %s, %d s\n' "$(basename "$wheel")" ${found##* } "$PLATFORM" $SECONDS
