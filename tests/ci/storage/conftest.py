"""The fixtures of tests/storage."""

from __future__ import annotations

from tests.storage.conftest import direct_directory

__all__ = ["direct_directory"]
