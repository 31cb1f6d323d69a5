"""Program: kill what is not a plain save at every file system call, as ``killer`` does a save.

``python -m tests.faults.operation_killer OPERATION FOLDER CASE COUNT`` prints the killer's report. Removals, migrations
and prunes have the case ``existing`` only.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardckpt import dist_checkpointing, hookimpl
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.engine import prune_leftovers
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface
from shardckpt.maintenance import convert_checkpoint, migrate_checkpoint, verify_checkpoint
from shardckpt.manifest import MARKER_NAME, Marker
from shardckpt.plugins import get_plugin_manager
from tests import backends
from tests.faults.behind import START_TIMEOUT, TracesWorker, fork_workers, save_in
from tests.faults.forks import fork, wait
from tests.faults.killer import LATER, NEW, OLD, Killer, differences, load, main, samples, state_dict
from tests.faults.removal_killer import RemovalKiller
from tests.maintenance import test_migrate as migration

if TYPE_CHECKING:
    from pathlib import Path


class ThreadKiller(Killer):
    """Saves behind the training, by a queue's thread."""

    def _change(self) -> None:
        save_in("thread", self._target(), state_dict(NEW), overwrite=self._case != "fresh")

    def _warm_up(self) -> None:
        super()._warm_up()
        save_in("thread", self._folder / "warm", state_dict(OLD), overwrite=True)


class RankKiller(Killer):
    """Saves by some ranks, of which one is killed; the others get an error, and end."""

    def __init__(self, folder: Path, case: str, victim: int, world: int, timeout: float = 8.0) -> None:
        self._victim = victim
        self._world = world
        self._saves = 0
        self.timeout = dt.timedelta(seconds=timeout)
        super().__init__(folder, case)

    def _start(self) -> tuple[int, list[int]]:
        self._saves += 1
        pids = [fork(partial(self._be_rank, rank)) for rank in range(self._world)]
        for pid in pids:  # until they have met: how often they look for each other differs from run to run
            os.waitpid(pid, os.WUNTRACED)
        return pids[self._victim], pids

    def _be_rank(self, rank: int) -> None:
        store = dist.FileStore(str(self._folder / f"store{self._saves}"), self._world)
        start = dt.timedelta(seconds=START_TIMEOUT)  # a loaded machine may take long to connect them
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self._world, timeout=start)
        dist.barrier()
        _set_pg_timeout(self.timeout, dist.group.WORLD)
        store.set_timeout(self.timeout)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            self._save_as_rank(rank)
        except CheckpointingException as exc:
            sys.stderr.write(f"rank {rank}: {exc}\n")  # what it must say is another test's

    def _save_as_rank(self, rank: int) -> None:
        state = state_dict(NEW, rank, self._world)
        dist_checkpointing.save(state, self._target(), overwrite=self._case != "fresh")


class WorkerKiller(TracesWorker, Killer):
    """Saves by a queue's process, which is killed; the training gets an error, and ends."""

    def _change(self) -> None:
        try:
            save_in("process", self._target(), state_dict(NEW), overwrite=self._case != "fresh")
        except CheckpointingException as exc:
            sys.stderr.write(f"{exc}\n")


class TrainingKiller(Killer):
    """Saves by a queue's process, and the training is killed, which plans, stages and commits."""

    def _start(self) -> tuple[int, list[int]]:
        pid = fork(self._train)
        os.waitpid(pid, os.WUNTRACED)  # its process was forked before: strace does not follow it
        return pid, [pid]

    def _train(self) -> None:
        fork_workers()
        AsyncCallsQueue.warmup_persistent_caller()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._change()

    def _change(self) -> None:
        save_in("process", self._target(), state_dict(NEW), overwrite=self._case != "fresh")


class ConversionKiller(Killer):
    """Converts a checkpoint of another format."""

    def _prepare(self) -> None:
        super()._prepare()
        other = "safetensors" if backends.current().name == "torch_dist" else "torch_dist"
        dist_checkpointing.save(state_dict(NEW), self._folder / "source", (other, 1))

    def _change(self) -> None:
        self._convert(self._target(), overwrite=self._case != "fresh")

    def _later(self) -> str:
        """Nothing if the conversion can be done (again), else what is wrong."""
        try:
            self._convert(self._target(), overwrite=True)
            wrong = differences(load(self._target()), NEW)
        except CheckpointingException as exc:
            return f"{type(exc).__name__}: {exc}"
        return f"wrong values in {wrong}" if wrong else ""

    def _convert(self, target: Path, *, overwrite: bool) -> None:
        target.parent.mkdir(exist_ok=True)
        convert_checkpoint(self._folder / "source", target, backends.current().name, overwrite=overwrite)

    def _warm_up(self) -> None:
        super()._warm_up()
        self._convert(self._folder / "warm", overwrite=True)


class ExportKiller(Killer):
    """Exports a checkpoint as a Hugging Face folder of several files."""

    def _prepare(self) -> None:
        for version in (OLD, NEW, LATER):
            dist_checkpointing.save(_tensors(version), self._source(version))
        if self._case != "fresh":
            self._export(OLD, self._pristine / "ckpt")

    def _change(self) -> None:
        self._export(NEW, self._target())

    def _state(self) -> str:
        """Which export a reader of the folder's files finds; what is in another's place is a mixture."""
        if not self._target().exists():
            return "absent"
        found = self._found(self._target())
        return found if self._foreign_kept() else f"{found}, but other files are lost"

    def _found(self, directory: Path) -> str:
        stored = {key: value for path in directory.glob("*.safetensors") for key, value in load_file(path).items()}
        for name, version in (("old", OLD), ("new", NEW), ("later", LATER)):
            expected = {key: leaf.data for key, leaf in _tensors(version).items()}
            if stored.keys() == expected.keys() and all(torch.equal(stored[key], expected[key]) for key in stored):
                return name
        return f"mixed: {sorted(stored)}"

    def _later(self) -> str:
        self._export(LATER, self._target())
        found = self._state()
        return "" if found == "later" else found

    def _source(self, version: int) -> Path:
        return self._folder / "sources" / str(version)

    def _export(self, version: int, target: Path) -> None:
        overwrite = self._case != "fresh" or version == LATER
        export_to_huggingface(self._source(version), target, max_shard_size=2 << 20, overwrite=overwrite)

    def _warm_up(self) -> None:
        for _ in range(2):
            export_to_huggingface(self._source(OLD), self._folder / "warm", max_shard_size=2 << 20, overwrite=True)


class MigrationKiller(Killer):
    """Migrates a checkpoint of version 1 in place."""

    def _prepare(self) -> None:
        migration.register()
        dist_checkpointing.save(migration.state(1.0), self._pristine / "ckpt", (migration.SaveText.backend, 1))

    def _change(self) -> None:
        migrate_checkpoint(self._target(), self._target(), overwrite=True)

    def _found(self, directory: Path) -> str:
        faults = [result.fault for result in verify_checkpoint(directory) if result.fault]
        version = Marker.model_validate_json((directory / MARKER_NAME).read_bytes()).sharded_backend_version
        if faults:
            return f"CorruptCheckpointError: {faults}"
        if version == 1:
            return "old"
        return "new" if migration.loaded(directory) == (3.0, 1) else "mixed: other values"

    def _later(self) -> str:
        if self._state() == "old":
            self._change()
        elif self._beside():
            prune_leftovers(self._target())
        found = self._state()
        return "" if found == "new" else found

    def _warm_up(self) -> None:
        scratch = self._folder / "warm"
        dist_checkpointing.save(migration.state(1.0), scratch, (migration.SaveText.backend, 1))
        migrate_checkpoint(scratch, scratch, overwrite=True)
        self._found(scratch)


class PruneKiller(Killer):
    """Prunes what a killed save has left beside a checkpoint, which stays: ``new`` is without the leftover."""

    def _prepare(self) -> None:
        super()._prepare()
        self._leave(self._pristine / "ckpt")

    def _leave(self, target: Path) -> None:
        """Kill a save before its commit."""
        wait([fork(partial(_die_committing, target))], START_TIMEOUT)
        if len(list(target.parent.iterdir())) < 2:
            raise SystemExit("a killed save has left nothing to prune")

    def _change(self) -> None:
        prune_leftovers(self._target())

    def _state(self) -> str:
        found = super()._state()
        return found if found != "old" or self._beside() else "new"

    def _later(self) -> str:
        self._change()
        found = self._state()
        return "" if found == "new" else found

    def _warm_up(self) -> None:
        scratch = self._folder / "warmth" / "ckpt"
        dist_checkpointing.save(state_dict(OLD), scratch)
        self._leave(scratch)
        prune_leftovers(scratch)
        load(scratch)


class OwnRemovalKiller(RemovalKiller):
    """Removes keys of a checkpoint that this process has saved."""

    def _prepare(self) -> None:
        more = {f"gone.{n}": ShardedTensor.from_rank_offsets(f"gone.{n}", torch.arange(9.0)) for n in range(3)}
        dist_checkpointing.save({**samples.state_dict(OLD), **more}, self._pristine / "ckpt")
        super()._prepare()


class _Dies:
    """A plugin that kills this process where a save begins to commit."""

    @hookimpl
    def shardckpt_event(self, event: Any) -> None:
        """Die."""
        if (event.phase, event.state) == ("committing", "start"):
            os.kill(os.getpid(), signal.SIGKILL)


def _die_committing(target: Path) -> None:
    get_plugin_manager().register(_Dies())
    dist_checkpointing.save(state_dict(NEW), target, overwrite=True)


def _tensors(version: int) -> dict[str, ShardedTensor]:
    """What an export takes: tensors of three dtypes, in more than one file."""
    tensors = {
        "large.weight": torch.arange(3 << 17, dtype=torch.float32) + version,
        "other.weight": torch.arange(3 << 17, dtype=torch.float32) - version,
        "small.bias": (torch.arange(40) + version).to(torch.bfloat16),
        "steps": torch.tensor([version]),
    }
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}


OPERATIONS: dict[str, Any] = {
    "thread": ThreadKiller,
    "process": WorkerKiller,
    "training": TrainingKiller,
    "rank 0 of 2": partial(RankKiller, victim=0, world=2),
    "rank 1 of 2": partial(RankKiller, victim=1, world=2),
    "rank 0 of 4": partial(RankKiller, victim=0, world=4),
    "rank 3 of 4": partial(RankKiller, victim=3, world=4),
    "convert": ConversionKiller,
    "export": ExportKiller,
    "migrate": MigrationKiller,
    "prune": PruneKiller,
    "remove": OwnRemovalKiller,
}

if __name__ == "__main__":
    main(OPERATIONS[sys.argv.pop(1)])
