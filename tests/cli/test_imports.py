"""What listings import: seconds that an operator would wait for at every command."""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

#: Each takes longer to import than a listing takes, or brings in one that does.
SLOW = ("torch", "numpy", "pydantic", "pluggy", "importlib.metadata", "dataclasses", "inspect", "shardckpt.strategy")


class _RefuseSlow(importlib.abc.MetaPathFinder):
    """Refuses to import what is slow, at once and by name."""

    def __init__(self) -> None:
        self.slow = {*SLOW}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in self.slow:
            frame, names = sys._getframe(1), []
            while frame is not None:
                name = frame.f_globals.get("__name__", "")
                if name.startswith("shardckpt") and name not in names:
                    names.append(name)
                frame = frame.f_back
            pytest.fail(f"{' <- '.join([fullname, *names])}: it takes long to import", pytrace=False)


@pytest.fixture
def fresh_modules() -> Iterator[set[str]]:
    """No module of shardckpt, and nothing slow, is imported yet; what the set has is refused until the end."""
    gone = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("shardckpt") or name.partition(".")[0] in SLOW or name in SLOW
    }
    for name in gone:
        del sys.modules[name]
    finder = _RefuseSlow()
    sys.meta_path.insert(0, finder)
    try:
        yield finder.slow
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith("shardckpt")]:
            del sys.modules[name]
        sys.modules.update(gone)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One of ours, in a folder of steps."""
    dc.save({"w": dc.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, tmp_path / "step-1")
    return tmp_path / "step-1"


# the summaries of `ls` are dataclasses, which import inspect: 10 ms
@table(("verb", "is_allowed"), [("ls", {"dataclasses", "inspect"}), ("inspect", set())])
def test_a_listing_imports_nothing_slow(
    checkpoint: Path, fresh_modules: set[str], capsys: pytest.CaptureFixture[str], verb: str, is_allowed: set[str]
) -> None:
    """Neither `shardckpt ls` nor `inspect` imports torch, pydantic, plugins or what an author of a strategy needs."""
    from shardckpt.cli import main

    fresh_modules -= is_allowed
    assert main([verb, str(checkpoint.parent if verb == "ls" else checkpoint)]) == 0
    assert "step-1" in capsys.readouterr().out
