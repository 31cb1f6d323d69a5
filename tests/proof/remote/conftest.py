"""The fixtures of tests/remote."""

from __future__ import annotations

from tests.remote.conftest import endpoint, no_spool_is_left, s3, store

__all__ = ["endpoint", "no_spool_is_left", "s3", "store"]
