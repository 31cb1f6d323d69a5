"""Checkpoints on every store that fsspec supports, and so on multi-storage-client's (``msc://profile/path``)."""
