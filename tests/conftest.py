"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from shardckpt.testing import RankThreads
from tests import backends, folders, guard, workers
from tests.clock import Clock
from tests.ranks import RUN_TIMEOUT, RankPool, Ranks
from tests.sites import VARIABLE
from tests.sites import find as find_site
from tests.tiers import choose_tiers, get_tier, pytest_addoption, pytest_ignore_collect, select_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.backends import Backend
    from tests.sites import Sites

__all__ = ["pytest_addoption", "pytest_ignore_collect"]  # pytest calls them

_TESTS = Path(__file__).parent
#: What ``pytest -m smoke`` runs in a few seconds: saves, loads, crashes, versions and ranks.
SMOKE = (
    "commit/test_commit.py",
    "distributed/test_comm.py",
    "engine/test_integrity.py",
    "manager/test_step_resolution.py",
    "plugins/test_registry.py",
    "plugins/test_resolver.py",
    "safetensors/test_load.py",
    "test_dist_checkpointing.py",
    "torch_dist/test_save.py",
    "validation/test_sharding.py",
)

# a test must not fail because the machine has other work, nor once and not again
settings.register_profile(
    "the same each time", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("proof", settings.get_profile("the same each time"), derandomize=False, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """Set up what all tests of this process share."""
    choose_tiers(config)
    settings.load_profile("proof" if config.option.tiers == ["proof"] else "the same each time")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored; some tests send it
    folders.choose()
    if missing := [name for name in SMOKE if not (_TESTS / name).exists()]:
        raise pytest.UsageError(f"tests/conftest.py: SMOKE names files that are not there: {missing}")
    if os.environ.get("TESTS_RANKS") != "gloo":
        config.pluginmanager.register(guard)
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of this run, not of those that tests start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the tiers that run, and mark the default ones of the files that matter most."""
    select_tiers(config, items)
    smoke = {_TESTS / name for name in SMOKE}
    for item in items:
        if item.path in smoke and get_tier(item) == "default":
            item.add_marker(pytest.mark.smoke)


def pytest_collection_finish() -> None:
    """What is imported stays, and no collection of garbage looks through it; workers share the cores, as ranks do."""
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect what cycles still hold, and hear its errors; pytest would look through all five times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The format by which the test saves: torch_dist, or each that a mark of tests.backends names."""
    with backends.use(getattr(request, "param", "torch_dist")) as chosen:
        yield chosen


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Processes of background saves are forks; a test of how they start has its own fixture of this name."""
    yield from workers.forked_here()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a store, a disk or another process tries again at once, and as often as it would."""
    monkeypatch.setattr("shardckpt.storage.remote._FIRST_DELAY", 0.0)
    monkeypatch.setattr("shardckpt.storage.filesystem._PAUSES", (0.0,) * 4)
    monkeypatch.setattr("shardckpt.storage.directory._PAUSES", (0.0,) * 23)
    monkeypatch.setattr("shardckpt.plugins.resolver._RENAME_PAUSES", (0.0,) * 5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of this process, which stands still until the test moves it."""
    found = Clock()
    monkeypatch.setattr("time.time", lambda: found.now)
    return found


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty folder on a disk, where ``tmp_path`` may be in memory."""
    with folders.on_disk() as folder:
        yield folder


class _Ranks(Ranks):
    """Ranks that are threads in default tests, and gloo's processes in CI and proof.

    Args:
        find_processes: Returns the pool of processes.
    """

    def __init__(self, find_processes: Callable[[], RankPool]) -> None:
        self._threads = RankThreads()
        self._find_processes = find_processes

    def outcomes(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Run a function on every rank."""
        chosen = self._threads if guard.is_on() else self._find_processes()
        return chosen.outcomes(world_size, function, *args, timeout=timeout)


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Ranks:
    """Groups of 1 to 4 ranks by the name that the contract knows: threads in default tests, else processes."""
    return _Ranks(lambda: request.getfixturevalue("gloo_ranks"))


@pytest.fixture(scope="session")
def ranks(rank_pool: Ranks) -> Ranks:
    """The same: ``ranks.run(3, function, *args)``."""
    return rank_pool


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[RankPool]:
    """Groups of 1 to 4 gloo ranks, which are processes: for CI and proof."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def sites() -> Sites:
    """Where a release of another library lies, by its name in ``.ci/sites.txt``; without it the test is skipped."""

    def find(name: str) -> Path:
        site = find_site(name)
        if site is None:
            pytest.skip(f"no site: python -m tests.sites FOLDER, and {VARIABLE}=FOLDER for the tests")
        return site

    return find


@pytest.fixture(scope="session")
def many_ranks() -> Iterator[RankPool]:
    """Groups of up to 8 gloo ranks, which are processes: for CI and proof."""
    pool = RankPool(8)
    yield pool
    pool.close()
