"""Triton kernels on the symmetric heap: docs/guide/python_kernels.md.

:mod:`jflux.triton` has the device functions.
"""

from ._own_kernels.symm_call import call as call
from ._own_kernels.symm_check import Report as Report
from ._own_kernels.symm_check import check as check

__all__ = ["Report", "call", "check"]
