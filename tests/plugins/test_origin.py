"""Errors that a plugin's code raises name the plugin, the class and the source file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, RankFailedError
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt_torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from tests import programs
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


def state() -> dict[str, Any]:
    """A tensor that all ranks share."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, rank, world))}


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


PLUGIN = """
from shardckpt import LoadStrategy, SaveStrategy, hookimpl

class Save(SaveStrategy):
    backend, version = "bent", 1
    def save(self, shards, common, context):
        context.writer.write("a.bin", b"x")
        context.writer.record_shards(shards)

class Save2(Save):
    version = 2

class Load(LoadStrategy):
    backend, version = "bent", 1
    def load_index(self, context):
        raise KeyError("bent index")
    load = load_common = load_index
    def list_files(self, reader):
        return []
    def check_files(self, reader):
        raise KeyError("bent check")

class Refuses(Load):
    version = 2
    def cannot_load(self, manifest):
        raise KeyError("bent gate")

def run(options):
    raise KeyError("bent verb")

@hookimpl
def shardckpt_register(registry):
    registry.add(Save)
    registry.add(Load)
    registry.add(Refuses)
    registry.add(Save2)

@hookimpl
def shardckpt_commands(subparsers):
    subparsers.add_parser("bend").set_defaults(run=run)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an installed plugin, and a checkpoint that only it reads."""
    path = tmp_path_factory.mktemp("site")
    (path / "bent_plugin.py").write_text(PLUGIN)
    info = path / "shardckpt_bent-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-bent\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[shardckpt]\nbent = bent_plugin\n")
    return path


SESSION = """
import os, sys, torch
from shardckpt import ShardedTensor, dist_checkpointing as dc
from shardckpt.cli import main
def state():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
def show(error):
    print(type(error).__name__, str(error).splitlines()[0], repr(error.__cause__), sep="#")
for version in (1, 2):
    dc.save(state(), str(version), ("bent", version))
    try:
        dc.load(state(), str(version))
    except Exception as error:
        show(error)
os.remove("1/shardckpt.json")
for arguments in (["inspect", "1"], ["verify", "1"], ["bend"], ["--traceback", "bend"]):
    print("$", *arguments, file=sys.stderr)
    print("=", main(arguments), file=sys.stderr)
"""


@pytest.mark.ci
def test_api_and_command_name_the_plugin(site: Path, tmp_path: Path) -> None:
    """Errors of an installed plugin name entry point and distribution, in the API and the command line."""
    path = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    done = programs.run(path + SESSION, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    who = rf"of plugin bent \(shardckpt-bent 1\.5\), {re.escape(str(site))}/bent_plugin\.py:\d+"
    load, gate = (line.split("#") for line in done.stdout.splitlines())
    text = rf"in 'reading the index', in bent_plugin\.Load {who}: KeyError: 'bent index'"
    assert load[::2] == ["RankFailedError", "KeyError('bent index')"]
    assert re.fullmatch(text, load[1])
    assert gate[0] == "BrokenPluginError"
    assert re.search(rf"does not work: in bent_plugin\.Refuses {who}: KeyError: 'bent gate'", gate[1])
    assert "bent gate" in gate[2]
    shown = {command: output for part in done.stderr.split("$ ")[1:] for command, _, output in [part.partition("\n")]}
    assert re.fullmatch(rf"shardckpt inspect: {text}\n= 2\n", shown["inspect 1"])
    verify = rf"shardckpt verify: in bent_plugin\.Load {who}: KeyError: 'bent check'\n= 2\n"
    assert re.fullmatch(verify, shown["verify 1"])
    verb = (
        rf"shardckpt bend: KeyError: 'bent verb' \(in bent_plugin\.run {who}\); shardckpt --traceback shows the whole"
    )
    assert re.fullmatch(rf"{verb} traceback\n= 2\n", shown["bend"])
    long = shown["--traceback bend"]
    assert long.startswith("Traceback (most recent call last):")
    assert "bent_plugin.py" in long
    assert re.search(verb, long)
