"""Bazel's built-in rules under the names that its own files load them by."""

proto_library = native.proto_library
proto_lang_toolchain = native.proto_lang_toolchain
