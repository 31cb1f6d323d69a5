"""Another job that overwrites a checkpoint while it is read: at a certain moment of the reading, or all the time."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.commit import commit
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import FullyParallelLoadStrategyWrapper
from tests.faults import samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from shardckpt.strategy import LoadStrategy

OLD, NEW = 1, 2


class Scene:
    """A checkpoint of save ``OLD`` at ``target``, in whose place one of save ``NEW`` may be put.

    Args:
        place: A directory that has a checkpoint ``old`` and one called ``new``; ``target`` is made in it.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.target = place / "target"
        self.names = {path.name for path in [*(place / "old").iterdir(), *(place / "new").iterdir()]}

    def reset(self) -> None:
        """Save ``OLD`` is there."""
        shutil.rmtree(self.target, ignore_errors=True)
        shutil.copytree(self.place / "old", self.target)

    def replace(self, source: str = "new") -> None:
        """Another save commits, as every overwrite does: it exchanges the directories, and removes the old one."""
        staging = commit.staging_path(self.target, commit.new_save_id())
        shutil.copytree(self.place / source, staging)
        commit.replace_target(staging, self.target, self.names)


class At:
    """Calls a function just before the n-th time that the directory or one of its files is opened for reading.

    Args:
        scene: The checkpoint.
        number: Counted from 1; 0 is never, -1 every time.
        call: The function; by default it replaces the checkpoint.
    """

    def __init__(self, scene: Scene, number: int, call: Callable[[], None] | None = None) -> None:
        self._names = {*scene.names, scene.target.name}
        self._number = number
        self._call = call or scene.replace
        self._busy = False
        self._lock = threading.Lock()
        self.opened = 0
        self._open = os.open

    def __enter__(self) -> Self:
        os.open = self._watched  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.open = self._open

    def _watched(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not self._busy and not flags & os.O_CREAT and Path(path).name in self._names:
            with self._lock:  # a load opens files in several threads
                self.opened += 1
                comes_now = not self._busy and self._number in (self.opened, -1)
                self._busy = self._busy or comes_now
            if comes_now:
                try:
                    self._call()
                finally:
                    self._busy = False
        return self._open(path, flags, *args, **kwargs)


def version_of(loaded: dict[str, Any], rank: int = 0, world: int = 1) -> int | list[str]:
    """The save that a loaded state dict is of, as a whole; else what is not of save ``NEW``."""
    for version in (OLD, NEW):
        if not samples.differences(loaded, version, rank, world):
            return version
    return samples.differences(loaded, NEW, rank, world)


def save_both(place: str) -> None:
    """The two saves, by all ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name, version in (("old", OLD), ("new", NEW)):
        dist_checkpointing.save(samples.state_dict(version, rank, world), Path(place, name))


def load_by_ranks(path: Path, *, parallel: bool) -> int | list[str]:
    """Which save this rank's part of a load is of."""
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy: LoadStrategy | None = None
    if parallel:
        strategy = FullyParallelLoadStrategyWrapper(dist_checkpointing.get_default_load_sharded_strategy(path))
    loaded = dist_checkpointing.load(samples.template(rank, world), path, strategy)
    return version_of(loaded, rank, world)


def replaced_on_each_rank(place: str, verify: str, parallel: bool) -> list[tuple[int, int, int | list[str]]]:
    """What this rank loads when the checkpoint is replaced at every moment of each rank's reading.

    Returns:
        For every moment the rank, the number of the open, and the save.
    """
    os.environ["SHARDCKPT_VERIFY_READS"] = verify
    scene, rank, found = Scene(Path(place)), dist.get_rank(), []
    try:
        for who in range(dist.get_world_size()):
            number = 0
            while True:
                number += 1
                if rank == 0:
                    scene.reset()
                dist.barrier()
                with At(scene, number if rank == who else 0) as at:
                    version = load_by_ranks(scene.target, parallel=parallel)
                done = [at.opened < number]
                dist.broadcast_object_list(done, src=who)
                if done[0]:
                    break
                found.append((who, number, version))
    finally:
        del os.environ["SHARDCKPT_VERIFY_READS"]
    return found


def always_replaced(place: str) -> str:
    """The error of a rank where another save comes whenever rank 1 opens anything."""
    scene = Scene(Path(place))
    if dist.get_rank() == 0:
        scene.reset()
    dist.barrier()
    with At(scene, -1 if dist.get_rank() == 1 else 0):
        try:
            load_by_ranks(scene.target, parallel=False)
        except dist_checkpointing.CheckpointingException as exc:
            return f"{type(exc).__name__}: {exc}"
    return "no error"


def read_while_overwritten(place: str, verify: str, overwrites: int) -> dict[str, int]:
    """The last rank overwrites the checkpoint again and again, the others load it; how often each save came.

    What is not whole, or an error, is counted by its text.
    """
    os.environ["SHARDCKPT_VERIFY_READS"] = verify
    path, rank, writer = Path(place) / "target", dist.get_rank(), dist.get_world_size() - 1
    groups = [dist.new_group(list(range(writer))), dist.new_group([writer])]
    if rank == writer:
        dist_checkpointing.save(samples.state_dict(OLD), path, process_group=groups[1])
    dist.barrier()
    found = Counter[str]()
    try:
        if rank == writer:
            for number in range(overwrites):
                state = samples.state_dict((NEW, OLD)[number % 2])
                dist_checkpointing.save(state, path, overwrite=True, process_group=groups[1])
            (path.parent / "done").touch()
            return {}
        ended = False
        while not ended:
            last = [(path.parent / "done").exists()]
            dist.broadcast_object_list(last, src=0, group=groups[0])
            ended = last[0]
            try:
                loaded = dist_checkpointing.load(samples.template(rank, writer), path, process_group=groups[0])
                found[str(version_of(loaded, rank, writer))] += 1
            except Exception as exc:  # noqa: BLE001 - each is a load that was refused
                found[f"{type(exc).__name__}: {exc}"] += 1
    finally:
        del os.environ["SHARDCKPT_VERIFY_READS"]
    return dict(found)


def plain_dcp(version: int) -> dict[str, Any]:
    """What a plain DCP job saves."""
    return {"a": torch.full((5000,), float(version)), "b": torch.full((7,), float(version)), "epoch": version}


def load_plain_dcp(path: Path) -> int | list[str]:
    """Which save it is of."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(plain_dcp(0)[key]), replica_id=rank) for key in "ab"
    }
    loaded = dist_checkpointing.load(wanted, path)
    found = {*loaded["a"].tolist(), *loaded["b"].tolist(), loaded["epoch"]}
    return int(found.pop()) if len(found) == 1 else sorted(map(str, found))


def load_foreign_between(place: str) -> int | list[str]:
    """What this rank loads when the checkpoint is replaced between the opening of rank 0 and that of rank 1."""
    scene, rank = Scene(Path(place)), dist.get_rank()
    if rank == 0:
        scene.reset()
    dist.barrier()
    with At(scene, rank):
        return load_plain_dcp(scene.target)
