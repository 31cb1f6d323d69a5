"""Benchmarks: ``python -m benchmarks`` compares with peers; ``.startup`` times the command. No test imports them."""
