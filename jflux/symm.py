"""Triton kernels on the symmetric heap: docs/guide/python_kernels.md.

:mod:`jflux.triton` has the device functions.
"""

from ._symm.call import call as call
from ._symm.checking import Report as Report
from ._symm.checking import check as check

__all__ = ["Report", "call", "check"]
