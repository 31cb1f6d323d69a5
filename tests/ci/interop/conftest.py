"""The fixtures of tests/interop."""

from __future__ import annotations

from tests.interop.conftest import megatron, saved

__all__ = ["megatron", "saved"]
