"""Strategies that lose what they were given, and what each rank does with them; module-level, for processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, release_memory
from shardckpt.errors import CheckpointingException
from shardckpt.manifest import FileRecord
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave, SaveStrategy
from shardckpt_safetensors.write_plan import FilePlan as SafetensorsFilePlan
from shardckpt_torch_dist.plan.write_plan import WritePlan
from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy
from tests import backends
from tests.remote import store  # noqa: F401 - it registers faulty://, in the ranks too
from tests.states import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable

#: Keys of which the highest rank has a shard of its own; all ranks have the other ones.
OWN = ("split", "flat", "object")


def state() -> dict[str, Any]:
    """Shards of each kind: split, flattened, replicated, empty, quantized, objects."""
    rank, world = rank_and_size()
    flat = torch.arange(7 * world, dtype=torch.float32)[7 * rank : 7 * rank + 7]
    float8 = torch.arange(8.0).to(torch.float8_e4m3fn)
    return {
        "split": ShardedTensor.from_rank_offsets("split", torch.full((2, 3), float(rank)), (0, rank, world)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat, (7, world), flattened_range=slice(7 * rank, 7 * rank + 7)
        ),
        "whole": ShardedTensor.from_rank_offsets("whole", torch.arange(5.0), replica_id=rank),
        "scalar": ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.0), replica_id=rank),
        "empty": ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 4), replica_id=rank),
        "float8": ShardedTensor.from_rank_offsets("float8", float8, replica_id=rank),
        "object": ShardedObject("object", {"of": rank}, (world,), (rank,)),
        "step": 1,
    }


def is_lost(shard: Any, key: str) -> bool:
    """Whether a strategy that loses the key loses this rank's shard."""
    rank, world = rank_and_size()
    return bool(shard.key == key) and (key not in OWN or rank == world - 1)


def _of_format(kind: type[Any]) -> Callable[[str], Any]:
    """Let a class extend the save strategy of the format of the test that makes an instance."""

    @functools.cache
    def extend(base: type[Any]) -> type[Any]:
        own = {"__module__": kind.__module__, "caches_plan": getattr(kind, "caches_plan", False)}
        return type(kind.__name__, (kind, base), own)

    @functools.wraps(kind, updated=())
    def make(key: str) -> Any:
        return extend(type(backends.current().save_strategy()))(key)

    return make


@_of_format
class Drops:
    """Hands on fewer shards than it was given."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        """Plan."""
        return super().prepare([shard for shard in shards if not is_lost(shard, self._key)], common, context)


class Delegates(SaveStrategy):
    """Another's strategy, given fewer shards."""

    version = 1

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def backend(self) -> str:  # type: ignore[override]
        """The format of the test."""
        return backends.current().name

    def save(self, shards: Any, common: Any, context: Any) -> None:
        """Save."""
        kept = [shard for shard in shards if not is_lost(shard, self._key)]
        backends.current().save_strategy().save(kept, common, context)


def _without(prepared: PreparedSave, key: str) -> PreparedSave:
    work: Any = prepared.work
    rank, world = rank_and_size()
    if key in OWN and rank != world - 1:
        return prepared
    files = [_lose(file, work, key) for file in work.files]
    return replace(prepared, work=replace(work, files=files))


def _lose(file: Any, work: Any, key: str) -> Any:
    """The plan of a file without the tensor of a key, or the object."""
    if isinstance(file, SafetensorsFilePlan):
        objects = {name: tail for name, tail in file.objects.items() if not name.startswith(f"{key}/")}
        kept = [n for n, position in enumerate(file.positions) if work.keys[position] != key]
        positions, sizes, tails = ([column[n] for n in kept] for column in (file.positions, file.sizes, file.tails))
        nbytes = len(file.head) + sum(sizes) + sum(tails)
        nbytes += sum(len(work.objects[name].data) + tail for name, tail in objects.items())
        return SafetensorsFilePlan(file.name, file.head, objects, positions, sizes, tails, nbytes)
    return replace(
        file,
        tensors=[number for number in file.tensors if work.keys[number] != key],
        objects=[name for name in file.objects if not name.startswith(f"{key}/")],
    )


@_of_format
class DropsWork:
    """Plans everything, and writes less."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        """Plan."""
        return _without(super().prepare(shards, common, context), self._key)


@_of_format
class DropsAgain:
    """Writes everything the first time, and less by the same plan."""

    caches_plan = True

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    @property
    def plan_cache_key(self) -> Any:
        """What is lost, too."""
        return type(self), self._key

    def replan(self, plan: Any, shards: Any, common: Any, context: Any) -> PreparedSave | None:
        """Plan by an earlier plan."""
        prepared = super().replan(plan, shards, common, context)
        return None if prepared is None else _without(prepared, self._key)


def wrapped(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """The strategy in the wrapper that deals replicas out."""
    return lambda key: FullyParallelSaveStrategyWrapper(make(key))


class Plain(SaveStrategy):
    """A file a rank, by the interface alone.

    Args:
        leave_out: Recorded are all main replicas but those of this key.
        more: Recorded, too.
    """

    backend, version = "plain", 1

    def __init__(self, leave_out: str = "", more: Any = ()) -> None:
        self._leave_out = leave_out
        self._more = more

    def save(self, shards: Any, common: Any, context: Any) -> None:
        """Save."""
        mine = [shard for shard in shards if is_main_replica(shard.replica_id)]
        context.writer.write(f"{context.comm.rank}", b"values")
        context.writer.record_shards(shard for shard in mine if not is_lost(shard, self._leave_out))
        context.writer.record_shards(self._more)


class Silent(Plain):
    """Says nothing of what it stored."""

    def save(self, shards: Any, common: Any, context: Any) -> None:
        """Save."""
        context.writer.write(f"{context.comm.rank}", b"values")


@dataclass
class _NoFile:
    """Says that it stored everything, and writes no file."""

    shards: Any
    tensors: Any = ()
    keys: Any = ()

    def write(self, writer: Any) -> None:
        """Record."""
        writer.record_shards(self.shards)


class Fileless(AsyncSaveStrategy):
    """A strategy that writes no file, in the foreground and behind the training."""

    backend, version = "plain", 1

    def __init__(self, _: str = "") -> None:
        """Take no key."""

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        """Plan."""
        return PreparedSave(_NoFile([shard for shard in shards if is_main_replica(shard.replica_id)]))


def _own(writer: Any, what: str) -> Path:
    """A file that no other rank has."""
    return Path(writer.directory) / f"{what}-{writer._rank}"


def _by_a_process(writer: Any) -> None:
    path = str(_own(writer, "past"))
    subprocess.run([sys.executable, "-S", "-c", f"open({path!r}, 'w').write('x')"], check=True)


def _folder(writer: Any) -> None:
    _own(writer, "past").mkdir()
    (_own(writer, "past") / "inner").write_bytes(b"past")


def _link(writer: Any, what: str = "past") -> None:
    _own(writer, what).symlink_to(sys.executable)


def _adopts(writer: Any, make: Callable[[Any], None]) -> None:
    make(writer)
    writer.adopt(_own(writer, "past").name)


def _appends(writer: Any) -> None:
    writer.write(_own(writer, "changed").name, b"abc")
    with _own(writer, "changed").open("ab") as file:
        file.write(b"more")


def _removes(writer: Any) -> None:
    writer.write(_own(writer, "changed").name, b"abc")
    _own(writer, "changed").unlink()


def _replaces(writer: Any) -> None:
    _removes(writer)
    _link(writer, "changed")


def _undigested(writer: Any) -> None:
    _own(writer, "bare").write_bytes(b"abc")
    name = _own(writer, "bare").name
    writer.files.append(FileRecord(name=name, size=3, rank=0, keys=1, digest="", segments=""))


def _unfinished(writer: Any) -> None:
    writer.create(_own(writer, "unfinished").name).append(3, lambda: [memoryview(b"abc")])


def _marker(writer: Any) -> None:
    if writer._rank == rank_and_size()[1] - 1:
        writer.write("metadata.json", b"{}")


#: What a strategy may do to its files on every rank, and what of it the error names.
MISDEEDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "unfinished": (_unfinished, "begun and not finished: 'unfinished-{rank}'"),
    "open": (lambda writer: _own(writer, "past").write_bytes(b"past"), "'past-{rank}'"),
    "torch.save": (lambda writer: torch.save({"a": 1}, _own(writer, "past")), "'past-{rank}'"),
    "process": (_by_a_process, "'past-{rank}'"),
    "folder": (_folder, "'past-{rank}' (a directory)"),
    "link": (_link, "'past-{rank}' (a symbolic link)"),
    "pipe": (lambda writer: os.mkfifo(_own(writer, "past")), "'past-{rank}' (a FIFO)"),
    "adopted link": (lambda writer: _adopts(writer, _link), "past-{rank}"),
    "adopted folder": (lambda writer: _adopts(writer, _folder), "past-{rank}"),
    "appended": (_appends, "'changed-{rank}' had 3 bytes, and has 7"),
    "removed": (_removes, "'changed-{rank}' is gone"),
    "replaced": (_replaces, "'changed-{rank}' is now a symbolic link"),
    "undigested": (_undigested, "recorded without digests: 'bare-{rank}'"),
    "marker": (_marker, "has written 'metadata.json': give it another name"),
}


@dataclass
class CarelessWork(WritePlan):
    """Writes everything, and does something else then."""

    misdeed: str = ""

    def write(self, writer: Any) -> None:
        """Write."""
        super().write(writer)
        MISDEEDS[self.misdeed][0](writer)


class Careless(TorchDistSaveShardedStrategy):
    """Does something to the files on the highest rank, or on the only one."""

    def __init__(self, misdeed: str) -> None:
        super().__init__()
        self._misdeed = misdeed

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        """Plan."""
        prepared = super().prepare(shards, common, context)
        rank, world = rank_and_size()
        if rank < world - 1:
            return replace(prepared, plan=None)
        return PreparedSave(CarelessWork(**vars(prepared.work), misdeed=self._misdeed))


class CarelessFinish(TorchDistSaveShardedStrategy):
    """Leaves a file unfinished when all have written."""

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        """Plan."""

        def finish(_results: Any, context: Any) -> None:
            if context.comm.is_main:
                context.writer.create("names")

        return PreparedSave(super().prepare(shards, common, context).work, finish)


def finishing(_: str) -> Any:
    """The strategy of a save whose ``finish`` is careless."""
    return CarelessFinish()


def save_in(way: str, path: str, strategy: Any, **options: Any) -> None:
    """A save of the state, in the foreground or behind the program."""
    if way == "foreground":
        dc.save(state(), path, strategy, **options)
        return
    with AsyncCallsQueue(persistent=way == "process") as queue:
        queue.schedule_async_request(dc.save(state(), path, strategy, async_sharded_save=True, **options))  # type: ignore[arg-type]


def refusal(way: str, folder: str, make: Callable[[str], Any], argument: str, saves: int = 1) -> tuple[str, str]:
    """Class and text of the error of the last of some saves over a good one, which must then be whole."""
    release_memory()
    _meet()
    Path(folder).mkdir(exist_ok=True)
    target = Path(folder) / "ckpt"
    dc.save(state(), target)
    _meet()
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    for _ in range(saves - 1):
        save_in(way, f"{folder}/sound", make(argument), overwrite=True)
    try:
        save_in(way, str(target), make(argument), overwrite=True)
    except CheckpointingException as exc:
        found = type(exc).__name__, str(exc)
    else:
        found = "", "it was saved"
    _meet()
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    assert {path.name for path in Path(folder).iterdir()} <= {"ckpt", "sound"}
    loaded = dc.load(state(), target)
    assert torch.equal(loaded["whole"], torch.arange(5.0))
    _meet()
    return found


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def url_refusal(url: str, misdeed: str) -> str:
    """The error of a save to a URL."""
    try:
        dc.save(state(), url, Careless(misdeed))
    except CheckpointingException as exc:
        return str(exc)
    return "it was saved"


def one(outcomes: list[tuple[str, str]]) -> tuple[str, str]:
    """What all ranks raised, which is the same."""
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


def new_folder(folder: Path, number: int) -> str:
    """Make a folder of a number."""
    (folder / str(number)).mkdir()
    return str(folder / str(number))
