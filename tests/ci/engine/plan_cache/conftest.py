"""The fixtures of tests/engine/plan_cache."""

from __future__ import annotations

from tests.engine.plan_cache.conftest import mode

__all__ = ["mode"]
