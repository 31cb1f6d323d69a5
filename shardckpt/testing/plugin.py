"""A pytest plugin, found by its entry point: fixtures for tests of strategies, and reports of failed contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from shardckpt.testing.faulty_store import FaultyStore
    from shardckpt.testing.ranks import RankPool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a contract's failed test which promise is broken."""
    report = yield
    # setups raise for claims that an author has left out, as does a Failed without traceback, whose text says all
    is_promise = call.when == "call" and hasattr(getattr(item, "cls", None), "contract_page")
    if report.failed and call.excinfo is not None and is_promise and getattr(call.excinfo.value, "pytrace", True):
        from shardckpt.testing.broken_promise import explain

        report.longrepr = explain(item, call.excinfo)
    return report


#: Delay of a request to the slow store, in seconds.
_DELAY = 0.02


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Groups of 1 to 4 gloo ranks: ``rank_pool.run(3, function, *args)``; one pool for all tests of a session."""
    from shardckpt.testing.ranks import RankPool  # pytest imports this module in every project, and torch takes seconds

    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def faulty_store(tmp_path: Path) -> FaultyStore:
    """An object store, at ``faulty_store.url``, whose requests fail when the test says so; needs fsspec."""
    pytest.importorskip("fsspec", reason="the faulty store needs fsspec: pip install 'shardckpt[testing]'")
    from shardckpt.testing.faulty_store import FaultyStore

    return FaultyStore(tmp_path / "store")


@pytest.fixture
def slow_store(faulty_store: FaultyStore) -> FaultyStore:
    """An object store whose requests take some 20 ms each; needs fsspec."""
    for kind in ("put", "read", "list", "delete"):
        faulty_store.delays(kind, _DELAY)
    return faulty_store
