"""The tiers of the contract's rows: what starts ranks or other processes, or draws many examples, is proof.

The CI tier runs it on (torch_dist, 1), whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.plugins import get_plugin_manager
from tests.testing import own_store

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Parts of the contract that do.
SLOW_PARTS = ("background", "kills", "resharding", "stores")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave in the default tier what is quick."""
    for item in items:
        module = getattr(getattr(item, "function", None), "__module__", "")
        is_slow = module.rpartition(".")[2] in SLOW_PARTS or item.name == "test_drawn_layouts"
        if module.startswith("shardckpt.testing.contract.") and is_slow:
            item.add_marker(pytest.mark.proof)


@pytest.fixture
def own_stores() -> Iterator[None]:
    """Serve the right store and the wrong ones."""
    get_plugin_manager().register(own_store)
    yield
    get_plugin_manager().unregister(own_store)
