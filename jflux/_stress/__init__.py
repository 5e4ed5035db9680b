"""What ``python -m jflux.stress`` is made of, and what jflux's own tests share with it."""
