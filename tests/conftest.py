"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import backends, workers
from tests.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends import Backend


# a test must not fail because the machine has other work
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a long test be a slow one, or the default run would have it."""
    if item.get_closest_marker("long") is not None:
        item.add_marker("slow")


def pytest_configure() -> None:
    """Take Ctrl-C as usual even where pytest was started in the background, which ignores it: some tests send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:  # tests look at what is left there: what others leave is theirs
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="shardckpt-tests-")
        Path(tempfile.tempdir).chmod(0o755)  # for programs that go on as another user
        # after multiprocessing has removed what it has there, at its priority of -100
        Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)


@pytest.fixture(scope="module", autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The format by which the test saves: torch_dist, or each that a mark of tests.backends names."""
    with backends.use(getattr(request, "param", "torch_dist")) as chosen:
        yield chosen


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Processes of background saves are forks; a test of how they start has its own fixture of this name."""
    yield from workers.forked_here()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The pool of all tests, those of the contract, too, which know it by this name."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pool: RankPool) -> RankPool:
    """Groups of 1 to 4 gloo ranks: ``ranks.run(3, function, *args)``."""
    return rank_pool


@pytest.fixture(scope="session")
def releases_folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where releases of other libraries are installed: the pytest cache, or without it a folder of this session."""
    cache = getattr(pytestconfig, "cache", None)  # there is none with -p no:cacheprovider
    return tmp_path_factory.mktemp("releases") if cache is None else cache.mkdir("shardckpt-megatron")


@pytest.fixture(scope="session")
def many_ranks() -> Iterator[RankPool]:
    """Groups of up to 8 ranks, for slow tests."""
    pool = RankPool(8)
    yield pool
    pool.close()
