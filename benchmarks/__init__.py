"""Benchmarks: ``python -m benchmarks`` compares with peers side by side; ``python -m benchmarks.startup`` asks one thing."""
