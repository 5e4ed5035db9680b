"""Calls of users' own kernels: `jflux.custom_call` and `jflux.symm`."""
