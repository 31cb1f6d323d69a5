"""Integrations of other libraries: a module for each trainer (``shardckpt.integrations.lightning``), and fsspec."""
