"""The formats that tests run over by parameter: a test that is marked saves by each, and need not know which.

A module (``pytestmark``) or a test with the mark :data:`both` runs once for each format. A save that names no strategy
uses it, in this process, on all ranks of a pool, and in programs of ``tests.programs``; loads find it by themselves.
What a test must know of the format, such as the names of its files, it asks the fixture ``backend`` for.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.plugins.manager import get_plugin_manager
from tests import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.strategy import SaveStrategy

#: The variable that names the format in the environment of programs.
VARIABLE = "TESTS_BACKEND"


@dataclass(frozen=True)
class Backend:
    """What tests must know of a format.

    Attributes:
        name: Its backend; version 1.
        index: The file that names what is stored, of which a load needs all.
        common: The file with the common state.
        data: A rank's data files, with the places ``rank`` and ``number``.
        saver: The class that saves, as ``module:Class``.
        for_others: Files that a load of ours does not read.
    """

    name: str
    index: str
    common: str
    data: str
    saver: str
    for_others: frozenset[str] = field(default_factory=frozenset)

    def data_file(self, rank: int, number: int = 0) -> str:
        """Return the name of a data file of a rank."""
        return self.data.format(rank=rank, number=number)

    @property
    def data_files(self) -> str:
        """The pattern of the names of data files, for ``glob``."""
        return self.data.format(rank="*", number="*")

    @property
    def shared(self) -> frozenset[str]:
        """The files that every checkpoint has, beside data files."""
        return self.for_others | {self.index, self.common, names.MARKER, names.RECORD}

    def save_strategy(self, **options: Any) -> SaveStrategy:
        """Return a new strategy that saves, with options that all formats here have."""
        module, _, name = self.saver.partition(":")
        strategy: SaveStrategy = getattr(import_module(module), name)(**options)
        return strategy


_ALL = {
    backend.name: backend
    for backend in (
        Backend(
            "torch_dist",
            names.INDEX,
            names.COMMON,
            "__{rank}_{number}.distcp",
            "shardckpt_torch_dist:TorchDistSaveShardedStrategy",
            frozenset({names.METADATA}),
        ),
        Backend(
            "safetensors",
            "index.safetensors",
            "common.safetensors",
            "rank_{rank}_{number}.safetensors",
            "shardckpt_safetensors:SafetensorsSaveShardedStrategy",
        ),
    )
}

#: Formats that programs take by name; what they keep beyond the others is tested in a folder of their own.
_MORE = {
    backend.name: backend
    for backend in (
        Backend(
            "ep",
            names.INDEX,
            names.COMMON,
            "__{rank}_{number}.distcp",
            "shardckpt_ep:EPSaveStrategy",
            frozenset({names.METADATA}),
        ),
    )
}

_stack = [_ALL["torch_dist"]]

#: Run a test, or all of a module, over each format.
both = pytest.mark.parametrize("backend", list(_ALL), indirect=True, scope="module")
#: The same, where one format shows it in the default run or CI: the others are proof.
both_in_proof = pytest.mark.parametrize(
    "backend",
    ["torch_dist", *(pytest.param(name, marks=pytest.mark.proof) for name in _ALL if name != "torch_dist")],
    indirect=True,
    scope="module",
)


def current() -> Backend:
    """Return the format of the running test; on ranks and in programs, too."""
    return _stack[-1]


def data_file(rank: int, number: int = 0) -> str:
    """Return the name of a data file of a rank in the format of the running test."""
    return current().data_file(rank, number)


@contextmanager
def use(name: str) -> Iterator[Backend]:
    """Save by a format, where no strategy is named, until the block ends."""
    if name == current().name:
        yield current()
        return
    registry = get_plugin_manager().registry
    with registry.preserved():
        registry.add_lazy(name, 1, default=True, override=True)
        _stack.append(_find(name))
        os.environ[VARIABLE] = name  # for programs that are started from here
        try:
            yield current()
        finally:
            _stack.pop()
            os.environ[VARIABLE] = current().name


def become_default() -> None:
    """Let this process, a program that a test has started, save by the test's format to its end."""
    name = os.environ.get(VARIABLE, current().name)
    if name != current().name:
        get_plugin_manager().registry.add_lazy(name, 1, default=True, override=True)
        _stack.append(_find(name))


def _find(name: str) -> Backend:
    return _ALL[name] if name in _ALL else _MORE[name]


def run_with(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function that saves by a format, where it names no strategy."""
    with use(name):
        return function(*args)


__all__ = [
    "VARIABLE",
    "Backend",
    "become_default",
    "both",
    "both_in_proof",
    "current",
    "data_file",
    "run_with",
    "use",
]
