"""Attention over a sequence, or a cache, that is split over ranks."""
