"""The fixtures of tests/manager."""

from __future__ import annotations

from tests.manager.conftest import memory, store

__all__ = ["memory", "store"]
