"""Fixtures of the tests of other systems' names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def registry() -> Iterator[Any]:
    """The registry, which is as it was again after each test."""
    found = get_plugin_manager().registry
    with found.preserved():
        yield found
