"""Adapters to other libraries: a file for each trainer (``shardckpt.integrations.lightning``), and fsspec's stores."""
