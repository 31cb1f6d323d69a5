"""Checkpoints on every store that fsspec knows, and by it on those of multi-storage-client (``msc://profile/path``)."""
