"""The fixtures of tests/compat."""

from __future__ import annotations

from tests.compat.conftest import registry

__all__ = ["registry"]
