"""Arithmetic of shards: boxes in global coordinates, and whether they cover what they should."""
