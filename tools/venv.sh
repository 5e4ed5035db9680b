# Sourced by run.sh and test.sh, in the root of the repository: makes .venv ready, with jflux and
# all that its tests and examples need. Does nothing if that was done and nothing changed since.
#
#   PYTHON      the interpreter to use; without it the first one found that is new enough
#   JFLUX_CUDA  AUTO (the default: builds the GPU kernels if there is an NVIDIA driver), ON or OFF

say() { printf 'jflux: %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "needs Python 3.11 or later${PYTHON:+; PYTHON=$PYTHON is not}"
  return 1
}

# Debian and Ubuntu ship Python in parts. Names what is missing of the parts that a build needs.
missing_packages() {
  local version
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$1" -c 'import ensurepip' 2>/dev/null || echo "python$version-venv"
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    echo "python$version-dev"
  command -v "${CXX:-c++}" >/dev/null || echo "g++"
}

install_missing_packages() {
  local missing
  missing=$(missing_packages "$1" | xargs)
  if [ -z "$missing" ]; then
    return
  elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $missing"
    # shellcheck disable=SC2086  # a list of words
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y $missing; } >&2
  elif [[ $missing == python*-venv ]] && "$1" -m pip --version >/dev/null 2>&1; then
    return  # pip can do ensurepip's part, below
  else
    say "something is missing on this machine; on Debian or Ubuntu: sudo apt-get install $missing"
    return 1
  fi
}

make_venv() {
  install_missing_packages "$1"
  if "$1" -c 'import ensurepip' 2>/dev/null; then
    "$1" -m venv --clear .venv
  else
    "$1" -m venv --clear --without-pip .venv
    "$1" -m pip --python .venv/bin/python install -q pip
  fi
}

# What the build compiles, and about how long that takes on two cores.
describe_build() {
  local mode=${JFLUX_CUDA:-AUTO}
  case "${mode^^} $1" in
    OFF\ *) echo "the CPU back end, 1 minute; no GPU kernels, since JFLUX_CUDA=OFF" ;;
    AUTO\ no) echo "the CPU back end, 1 minute; no GPU kernels, since there is no NVIDIA driver" ;;
    *) echo "the CPU back end and, if there is an nvcc, the GPU kernels, 10 minutes" ;;
  esac
}

# Changes when .venv has to be installed anew. The Python files of jflux do not count: the
# installation is an editable one.
fingerprint() {
  {
    find cc build_backend CMakeLists.txt pyproject.toml -type f ! -name '*.pyc' | LC_ALL=C sort |
      xargs cksum
    echo "$@" "${JFLUX_CUDA:-}" "${PYTHON:-}" "$PWD"
  } | cksum
}

setup_venv() {
  local extras=examples,test driver=no wanted python
  python=$(find_python)
  if "$python" build_backend/find_driver.py; then driver=yes extras+=,cuda; fi
  wanted=$(fingerprint "$extras")
  if [ "$(cat .venv/jflux-fingerprint 2>/dev/null)" = "$wanted" ]; then return; fi

  say "setting up .venv with $("$python" -V)"
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
    [ "$(.venv/bin/python -V)" != "$("$python" -V)" ]; then
    make_venv "$python"
  fi
  say "installing what jflux needs, 1 to 2 minutes, and compiling $(describe_build "$driver")"
  # -v shows the compiler's progress; the lines left out are pip's about files that it did not take.
  .venv/bin/python -m pip install --disable-pip-version-check -v -e ".[$extras]" 2>&1 |
    sed -u -E '/^ *(Link requires a different|changing mode of|Creating |-- Installing: )/d' >&2
  echo "$wanted" >.venv/jflux-fingerprint
}

setup_venv
