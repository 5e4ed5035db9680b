"""Ranks: mesh axes and the groups along them, groups that span nodes, and global arrays."""
