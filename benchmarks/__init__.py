"""Benchmarks: one file a question, each run as ``python -m benchmarks.<name>``; never imported by tests."""
