"""Checkpoints on every store that fsspec supports, and so on those of multi-storage-client (``msc://profile/path``)."""
