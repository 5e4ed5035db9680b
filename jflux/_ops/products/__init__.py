"""Products of x and w that a collective is part of, and grouped products."""
