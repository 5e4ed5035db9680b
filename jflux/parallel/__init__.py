"""Tensor parallelism in up to three dimensions, beside data parallelism (arXiv 2305.13525)."""

from ._grid import Grid as Grid

__all__ = ["Grid"]
