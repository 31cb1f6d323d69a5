"""Which runs of the contract are slow or long: all but a part of one strategy's."""

from __future__ import annotations

import pytest

#: Parts of the contract that start ranks or other processes, or draw many examples.
SLOW_PARTS = ("background", "kills", "resharding", "stores")
#: Classes that are long tests: the right strategy of test_mutations.py, and another writer of (safetensors, 1).
LONG_CLASSES = ("TestBlocks", "TestSafetensorsInParts")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave in the default run what is quick of the example that authors read."""
    for item in items:
        owner = getattr(item, "cls", None)
        module = getattr(getattr(item, "function", None), "__module__", "")
        if owner is not None and module.startswith("shardckpt.testing.contract."):
            slow = module.rpartition(".")[2] in SLOW_PARTS or item.name == "test_drawn_layouts"
            if slow or owner.__name__ != "TestNpy":
                item.add_marker(pytest.mark.slow)
            if owner.__name__ in LONG_CLASSES:
                item.add_marker(pytest.mark.long)
