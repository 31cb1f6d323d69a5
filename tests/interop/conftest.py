"""The fixture that lends out releases of megatron-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.runner import Megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def megatron(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Megatron]]:
    """A release of megatron-core by its version, started once: ``megatron("0.16.1").run(4, "load", path)``."""
    running: dict[str, Megatron] = {}

    def start(release: str) -> Megatron:
        if release not in running:
            root = pytestconfig.cache.mkdir("shardckpt-megatron")
            log = tmp_path_factory.mktemp("megatron") / f"{release}.log"
            running[release] = Megatron(release, root, log)
        return running[release]

    yield start
    for process in running.values():
        process.close()
