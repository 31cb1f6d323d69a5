"""The tiers of the contract's runs: quick parts of one strategy by default, all of it over both formats in CI."""

from __future__ import annotations

import pytest

#: Parts of the contract that start ranks or other processes, or draw many examples.
SLOW_PARTS = ("background", "kills", "resharding", "stores")
#: The strategies of the default run and of the CI tier; the runs over all others are proof.
DEFAULT, IN_CI = "TestNpy", ("TestNpy", "TestTorchDist", "TestSafetensors")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave in the default run what is quick of the example that authors read."""
    for item in items:
        owner = getattr(item, "cls", None)
        module = getattr(getattr(item, "function", None), "__module__", "")
        if owner is not None and module.startswith("shardckpt.testing.contract."):
            is_slow = module.rpartition(".")[2] in SLOW_PARTS or item.name == "test_drawn_layouts"
            if owner.__name__ not in IN_CI:
                item.add_marker(pytest.mark.proof)
            elif is_slow or owner.__name__ != DEFAULT:
                item.add_marker(pytest.mark.ci)
