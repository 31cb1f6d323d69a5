"""The fixtures of tests/cli."""

from __future__ import annotations

from tests.cli.conftest import checkpoint

__all__ = ["checkpoint"]
