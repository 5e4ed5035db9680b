"""On PYTHONPATH in Bazel's tests only, so that they test what Bazel built.

An editable installation of jflux in the same interpreter, such as ./test.sh makes, puts a finder
before PYTHONPATH. Python imports this module at its start, in child processes too.
"""

import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"
]
