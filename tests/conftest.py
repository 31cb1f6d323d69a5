"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    """Take Ctrl-C as usual even where pytest was started in the background, which ignores it: some tests send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:  # tests look at what is left there: what others leave is theirs
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="shardckpt-tests-")
        Path(tempfile.tempdir).chmod(0o755)  # for programs that go on as another user


def pytest_unconfigure() -> None:
    """Remove the worker's directory."""
    if "PYTEST_XDIST_WORKER" in os.environ and tempfile.tempdir is not None:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Groups of 1 to 4 gloo ranks: ``ranks.run(3, function, *args)``."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def many_ranks() -> Iterator[RankPool]:
    """Groups of up to 8 ranks, for slow tests."""
    pool = RankPool(8)
    yield pool
    pool.close()
