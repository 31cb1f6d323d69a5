"""Fixtures that lend out releases of megatron-core, and the sample as everyone saves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop import here
from tests.interop.runner import Megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.ranks import Ranks
    from tests.sites import Sites

    Releases = Callable[[str], Megatron]


@pytest.fixture(scope="session")
def megatron(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Releases]:
    """A release of megatron-core by its version, started once: ``megatron("0.16.1").run(4, "save", path)``."""
    running: dict[str, Megatron] = {}

    def start(release: str) -> Megatron:
        if release not in running:
            log = tmp_path_factory.mktemp("megatron") / f"{release}.log"
            running[release] = Megatron(release, [sites(f"megatron-core-{release}"), sites("megatron-needs")], log)
        return running[release]

    yield start
    for process in running.values():
        process.close()


@pytest.fixture(scope="session")
def saved(ranks: Ranks, megatron: Releases, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Where the sample lies as 4 ranks of a writer saved it, once: ``saved("0.12.3")``, ``saved("shardckpt")``."""
    paths: dict[str, str] = {}

    def save(writer: str) -> str:
        if writer not in paths:
            path = str(tmp_path_factory.mktemp("saved") / writer)
            if writer == "shardckpt":
                ranks.run(4, here.save, path)
            else:
                megatron(writer).run(4, "save", path)
            paths[writer] = path
        return paths[writer]

    return save
