# Sourced by .ci/run and .ci/nightly, in the root of the repository: the steps that both are made of.
out=$PWD/build/ci
mkdir -p "$out"

# step TITLE COMMAND...: a heading, the command, and how long it took.
step() {
  local title=$1 start=$SECONDS
  shift
  printf '\n==== %s\n' "$title"
  "$@"
  printf '==== %s: %d s\n' "$title" $((SECONDS - start))
}

# The usual names, and the places where pyenv keeps what is not on the PATH.
interpreters() {
  local python
  for python in python3 python3.{11..14} ~/.pyenv/versions/3.1[1-4].*/bin/python; do
    "$python" -c 'import ensurepip, sys
if (3, 11) <= sys.version_info < (3, 15): print("%d.%d" % sys.version_info[:2], sys.executable)' \
      2>/dev/null || true
  done | sort --version-sort --unique
}
oldest=$(interpreters | head -n 1 | cut -d ' ' -f 2)
newest=$(interpreters | tail -n 1 | cut -d ' ' -f 2)
[ -n "$oldest" ] || { echo "no Python 3.11 or later" >&2; exit 1; }

tools() {
  "$oldest" -m venv "$out/venv"
  "$out/venv/bin/pip" install -q --disable-pip-version-check "pip>=25.1"
  "$out/venv/bin/pip" install -q --group dev --group oldest
  export PATH=$out/venv/bin:$PATH
  python --version
  python -c 'import jax; print("jax", jax.__version__)'
  cuda=ON
  if [ -z "$(python build_backend/find_nvcc.py)" ]; then
    cuda=OFF
    echo "NOTICE: no nvcc is here: the GPU kernels are not compiled"
  fi
}

lint() {
  ruff check .
  ruff format --check .
  find cc tests examples -regex '.*\.\(h\|cc\|cu\|cuh\)' -print0 |
    xargs -0 clang-format --dry-run -Werror
  mypy
}

# All kernels and the library, what their files took, and their machine code. A launcher notes the
# compilers' processor time, which does not count what other programs take.
gpu_kernels() {
  local launcher="python;$PWD/tools/compiler_seconds.py"
  if [ "$cuda" = OFF ]; then return; fi
  cmake -S . -B "$out/cuda" -G Ninja -DJFLUX_BUILD_PYTHON=OFF -DJFLUX_CUDA=ON \
    -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher${CMAKE_CXX_COMPILER_LAUNCHER:+;$CMAKE_CXX_COMPILER_LAUNCHER}" \
    -DCMAKE_CUDA_COMPILER_LAUNCHER="$launcher${CMAKE_CUDA_COMPILER_LAUNCHER:+;$CMAKE_CUDA_COMPILER_LAUNCHER}"
  cmake --build "$out/cuda"
  python tools/build_times.py "$out/cuda"
  python tools/kernel_code.py "$out/cuda"
}

# cpp_tests FOLDER CMAKE_OPTION...
cpp_tests() {
  local folder=$out/$1
  shift
  cmake -S . -B "$folder" -G Ninja -DJFLUX_BUILD_PYTHON=OFF -DJFLUX_BUILD_TESTS=ON \
    -DJFLUX_CUDA=OFF "$@"
  cmake --build "$folder"
  ctest --test-dir "$folder" --output-on-failure --parallel "$(nproc)"
}

# with_bazel COMMAND OPTION...: with the Python and the GPU kernels of this run.
with_bazel() {
  local bazel
  if command -v npm >/dev/null; then
    npm install --silent --no-audit --no-fund --prefix "$out/npm" @bazel/bazel-linux_x64@2.1.0
    bazel=$(echo "$out"/npm/node_modules/@bazel/bazel-linux_x64/bazel-*)
  elif ! bazel=$(command -v bazel); then
    echo "NOTICE: neither npm nor bazel is here: nothing was built or tested with Bazel"
    return
  fi
  JFLUX_PYTHON=$out/venv/bin/python "$bazel" --batch "$@"
}

# Loads all targets, those of the GPU kernels too, and runs the tests without the tag "full".
bazel_handful() {
  JFLUX_CUDA=$cuda with_bazel build --nobuild //...
  JFLUX_CUDA=OFF with_bazel test --config=ci //...
}

bazel_all() {
  JFLUX_CUDA=OFF with_bazel test //...
}

docs() {
  pip install -q --group docs
  NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir "$out/site"
}
