"""Errors that a plugin's code raises name the plugin, the class and the source file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, RankFailedError
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt_torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from tests.plugins.origin import state
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

HERE = re.escape(__file__)


class CrookedError(ValueError):
    """A plugin's own, outside the family."""


class Fails(TorchDistSaveShardedStrategy):
    """Raises what it is given, while it plans, or inside a phase of its own."""

    def __init__(self, error: Exception, *, phase: bool = False) -> None:
        super().__init__()
        self._error = error
        self._phase = phase

    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        """Fail on the last rank."""
        if context.comm.rank == context.comm.world_size - 1 and self._phase:
            with context.comm.local_phase("looking"):
                raise self._error
        if context.comm.rank == context.comm.world_size - 1:
            raise self._error
        return super().prepare(shards, common, context)


class FailsToLoad(TorchDistLoadShardedStrategy):
    """Raises where it should load."""

    def load(self, wanted: Any, context: Any) -> Any:
        """Fail."""
        return {}["no such key"]


class Damaged(TorchDistLoadShardedStrategy):
    """Reads what is not there: the core finds that."""

    def load(self, wanted: Any, context: Any) -> Any:
        """Fail."""
        return context.reader.read_range("common.pt", 1 << 40, 1, "w")


def text_of(kind: type[Any]) -> str:
    """The origin that is named, as a pattern."""
    return rf"in {__name__}\.{kind.__name__} of this process, {HERE}:\d+: "


@table("phase", [False, True])
def test_an_error_names_class_and_line(tmp_path: Path, phase: bool) -> None:
    """A crash in a strategy names its class, file and line, also from inside a phase of its own; it is chained."""
    first = KeyError("x")
    with pytest.raises(RankFailedError, match=text_of(Fails) + "KeyError: 'x'") as caught:
        dc.save(state(), tmp_path / "c", Fails(first, phase=phase))
    assert caught.value.__cause__ is first


@table("error", [CrookedError("bent"), CheckpointingException("bent")])
def test_the_class_of_an_error_stays(tmp_path: Path, error: Exception) -> None:
    """An error of a plugin's own class, and one of the family, is caught as that, with the origin in its text."""
    with pytest.raises(type(error), match=text_of(Fails) + "bent") as caught:
        dc.save(state(), tmp_path / "c", Fails(error))
    assert isinstance(caught.value, CheckpointingException)
    assert caught.value.__cause__ is error


def test_a_load_names_its_strategy(tmp_path: Path) -> None:
    """The same for a load."""
    dc.save(state(), tmp_path / "c")
    with pytest.raises(RankFailedError, match=text_of(FailsToLoad) + "KeyError"):
        dc.load(state(), tmp_path / "c", FailsToLoad())


def test_what_the_core_finds_is_no_plugins_fault(tmp_path: Path) -> None:
    """Damage that the core's reader finds for a strategy, and errors of the built-in ones, keep their texts."""
    dc.save(state(), tmp_path / "c")
    with pytest.raises(CorruptCheckpointError) as caught:
        dc.load(state(), tmp_path / "c", Damaged())
    assert __file__ not in str(caught.value)
    (tmp_path / "c" / "common.pt").write_bytes(b"")
    with pytest.raises(CheckpointingException) as caught:
        dc.load(state(), tmp_path / "c")
    assert "plugin" not in str(caught.value)


def _fail_on_a_rank(directory: str, phase: bool) -> str:
    strategy = FullyParallelSaveStrategyWrapper(Fails(KeyError("x"), phase=phase))
    with pytest.raises(RankFailedError) as caught:
        dc.save(state(), directory, strategy)
    return str(caught.value)


@pytest.mark.parametrize("phase", [False, True])
def test_every_rank_names_the_same(ranks: Ranks, tmp_path: Path, phase: bool) -> None:
    """The rank that failed says whose code it was, and all ranks raise that, through a wrapper, too."""
    [text] = set(ranks.run(2, _fail_on_a_rank, str(tmp_path / "c"), phase))
    assert re.match(rf"rank 1, in '\w+', {text_of(Fails)}KeyError", text), text


class _Writes:
    def __init__(self, work: Any) -> None:
        self._work = work
        self.tensors, self.keys = work.tensors, work.keys

    def write(self, writer: Any) -> Any:
        return self._work.no_such_method(writer)


class FailsBehind(TorchDistSaveShardedStrategy):
    """Its work fails in the background."""

    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        """Plan."""
        prepared = super().prepare(shards, common, context)
        object.__setattr__(prepared, "work", _Writes(prepared.work))
        return prepared


def test_a_background_save_names_its_work(tmp_path: Path) -> None:
    """What fails in a thread behind the training names the class of the work."""
    queue = AsyncCallsQueue(persistent=False)
    queue.schedule_async_request(dc.save(state(), tmp_path / "c", FailsBehind(), async_sharded_save=True))
    with pytest.raises(CheckpointingException, match=text_of(_Writes) + "AttributeError"):
        queue.close()
