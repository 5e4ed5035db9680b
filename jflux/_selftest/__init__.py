"""The parts of `python -m jflux.selftest`."""
