"""Tools for authors of strategies: a contract of tests, a pool of ranks, stores that fail, drawn state dicts.

``pip install 'shardckpt[testing]'`` installs pytest, hypothesis and fsspec; each is imported only where it is
used. shardckpt/testing/README.md shows a contract of a strategy.
"""

from shardckpt.lazy import attach_stub

# lazy: pytest imports the plugin in every project that has shardckpt installed
__getattr__, __dir__, __all__ = attach_stub(__name__)
