"""Bazel's built-in rules under the names that its own files load them by."""

py_library = native.py_library
py_binary = native.py_binary
py_test = native.py_test
