"""What the drivers of kills, errors and power cuts run: how a checkpoint is changed, and what is read then.

The base is a save in the foreground; other scenarios say what differs. ``make_scenario(name, folder)`` knows them all.
"""

# ruff: noqa: D102 - Scenario says what its methods do
from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import signal
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardckpt import dist_checkpointing, hookimpl
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.chunks import LocalPlan
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.distributed import Comm
from shardckpt.engine.integrity import verify_integrity_manifest
from shardckpt.engine.pruning import prune_leftovers
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, NotACheckpointError
from shardckpt.huggingface import export_to_huggingface
from shardckpt.local import CliqueReplication, LocalCheckpointManager
from shardckpt.maintenance import convert_checkpoint, migrate_checkpoint, verify_checkpoint
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME, Marker
from shardckpt.mapping import ShardedBase
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import writer
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_torch_dist import CheckpointStorageReader, CheckpointStorageWriter
from tests import backends
from tests.faults import samples, stock_savers
from tests.faults.behind import START_TIMEOUT, fork_workers
from tests.faults.forks import fork, wait
from tests.faults.scenario import LATER, NEW, OLD, VERSIONS, WARNED, Scenario
from tests.faults.step_scenarios import LocalCheckpoints, Marks, Pin, Steps, make_part
from tests.maintenance import migrate as migration
from tests.trees import LoadTree, SaveTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Keys whose names begin so are removed.
GONE = "gone"


# ---- saves by other threads, processes and ranks


class Worker(Scenario):
    """Saves by a queue's process, which is killed; the training gets an error, and ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "process")

    def start(self, change: Callable[[], None]) -> tuple[int, list[int]]:
        """Let strace attach to the process of the training, not to that."""
        told = self._folder / "worker"
        told.unlink(missing_ok=True)

        def train() -> None:
            fork_workers(told)
            change()

        training = fork(train)
        begin = time.monotonic()
        while not told.exists():
            if time.monotonic() > begin + START_TIMEOUT:
                raise SystemExit("the training has not started its process")
            time.sleep(0.002)
        return int(told.read_text()), [training]


class Training(Scenario):
    """Saves by a queue's process, and the training is killed, which plans, stages and commits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "process")

    def start(self, change: Callable[[], None]) -> tuple[int, list[int]]:
        """Fork the training's process before: strace does not follow it."""

        def train() -> None:
            fork_workers()
            AsyncCallsQueue.warmup_persistent_caller()
            os.kill(os.getpid(), signal.SIGSTOP)
            change()

        pid = fork(train)
        os.waitpid(pid, os.WUNTRACED)
        return pid, [pid]


class Ranks(Scenario):
    """Saves by some ranks, of which one is killed; the others get an error, and end."""

    def __init__(self, folder: Path, victim: int, world: int, timeout: float = 8.0) -> None:
        super().__init__(folder)
        self._victim = victim
        self._world = world
        self._saves = 0
        self._timeout = dt.timedelta(seconds=timeout)

    def start(self, change: Callable[[], None]) -> tuple[int, list[int]]:
        """Fork the ranks, which stop when they have met: how often they look for each other differs."""
        self._saves += 1
        pids = [fork(partial(self._be_rank, rank, change)) for rank in range(self._world)]
        for pid in pids:
            os.waitpid(pid, os.WUNTRACED)
        return pids[self._victim], pids

    def _be_rank(self, rank: int, change: Callable[[], None]) -> None:
        store = dist.FileStore(str(self._folder / f"store{self._saves}"), self._world)
        start = dt.timedelta(seconds=START_TIMEOUT)  # a loaded machine may take long to connect them
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self._world, timeout=start)
        dist.barrier()
        _set_pg_timeout(self._timeout, dist.group.WORLD)
        store.set_timeout(self._timeout)
        os.kill(os.getpid(), signal.SIGSTOP)
        change()

    def change_and_tell(self, target: Path, told: Path, *, overwrite: bool) -> None:
        """The same on each rank; all must raise the same, or nothing. The victim tells."""
        own = told.with_name(f"{told.name}-{dist.get_rank()}")
        super().change_and_tell(target, own, overwrite=overwrite)
        ended: list[str] = [""] * self._world
        dist.all_gather_object(ended, own.read_text())
        raised = {"saved" if text.startswith(WARNED) else ": ".join(text.split(": ")[:2]) for text in ended}
        if dist.get_rank() == self._victim:
            told.write_text(ended[self._victim] if len(raised) == 1 else f"ranks differ: {ended}")

    def run_together(self, action: Callable[[], str]) -> str:
        """What an action returns on new ranks, the same on all."""

        def say() -> None:
            (self._folder / f"said-{dist.get_rank()}").write_text(action())

        _, pids = self.start(say)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        if any(wait(pids, START_TIMEOUT).values()):
            raise SystemExit("a rank has failed where no fault was")
        said = {(self._folder / f"said-{rank}").read_text() for rank in range(self._world)}
        return said.pop() if len(said) == 1 else f"mixed: {sorted(said)}"


class LocalCopies(Ranks):
    """Saves a step of two ranks on two nodes' disks, each with a copy of the other's part; the step before goes."""

    warns = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1, 2)
        self._alone = LocalCheckpoints(folder)

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        self._open(target).save(make_part(self.state(version)), version)

    def prepare(self, target: Path) -> None:
        self._write_together(target, OLD)

    def find(self, directory: Path) -> str:
        """Which version both ranks load."""
        return self.run_together(partial(self._find, directory))

    def go_on(self, target: Path) -> str:
        """Save the next step, after which each node has its two parts alone."""
        self._write_together(target, LATER)
        names = [path.name for path in target.glob("node*/*")]
        if len(names) != 2 * self._world or any(not name.startswith(f"step-{LATER}-") for name in names):
            raise CheckpointingException(f"the next change leaves {names}")
        return "later"

    def warm_up(self, scratch: Path) -> None:
        self._alone.warm_up(scratch)

    def _open(self, target: Path) -> LocalCheckpointManager:
        return LocalCheckpointManager(target / f"node{dist.get_rank()}", CliqueReplication(1, self._world))

    def _write_together(self, target: Path, version: int) -> None:
        self.run_together(lambda: self.write(target, version, overwrite=True) or "")

    def _find(self, directory: Path) -> str:
        try:
            loaded = self._open(directory).load().to_state_dict(self.state(-1), algo="atomic")
        except CheckpointingException as exc:
            return f"{type(exc).__name__}: {exc}"
        for name, version in VERSIONS.items():
            wanted = self.state(version).items()
            values = {key: value.data if isinstance(value, ShardedBase) else value for key, value in wanted}
            if not _differences(loaded, values):
                return name
        return "mixed: other values"


# ---- saves of other files


class Contiguous(Scenario):
    """Saves with whole tensors in files that other tools read."""

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        strategy = SafetensorsSaveShardedStrategy(layout="contiguous", prefix="")
        dist_checkpointing.save(self.state(version), target, strategy, overwrite=overwrite)


class ContiguousRanks(Contiguous, Ranks):
    """Saves so by some ranks, which write parts of the same files."""


class Small(Scenario):
    """Saves the samples alone: their files are of few pages."""

    def state(self, version: int) -> dict[str, Any]:
        return samples.state_dict(version)

    def load(self, directory: Path) -> dict[str, Any]:
        return samples.load(directory)

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        return samples.differences(loaded, version)


class Tables(Scenario):
    """Saves with the tables of digests in files of their own, as many ranks do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        gather = Comm.gather_up_to

        def gather_plans_alone(comm: Comm, limit: int, value: Any) -> list[Any] | None:
            return gather(comm, limit, value) if isinstance(value, LocalPlan) else None

        Comm.gather_up_to = gather_plans_alone  # type: ignore[method-assign]
        writer._INLINE_TABLE = 0


class NoFsync(Scenario):
    """Saves without fsync: what power cuts must find out."""

    def change(self, target: Path, *, overwrite: bool) -> None:
        os.fsync = lambda _: None
        super().change(target, overwrite=overwrite)


class Tree(Scenario):
    """Saves files in folders, of which one has other people's files, too."""

    foreign: ClassVar = {**Scenario.foreign, "arrays/w0/notes": b"kept"}

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        dist_checkpointing.save(self.state(version), target, SaveTree(), overwrite=overwrite)

    def load(self, directory: Path) -> dict[str, Any]:
        return dist_checkpointing.load(self.state(-1), directory, LoadTree())

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        wrong = [key for key, tensor in loaded.items() if key != "step" and tensor.tolist() != [float(version)] * 5]
        return [*wrong, *([] if loaded["step"] == version and len(loaded) == 4 else ["step"])]

    def state(self, version: int) -> dict[str, Any]:
        tensors = {f"w{n}": _tensor(f"w{n}", torch.full((5,), float(version))) for n in range(3)}
        return {**tensors, "step": version}


class Stock(Scenario):
    """Saves by another saver, for comparison."""

    errors = (BaseException,)  # DCP's is one

    def __init__(self, folder: Path, saver: str) -> None:
        super().__init__(folder)
        warnings.simplefilter("ignore")
        self._save, self._load, self._marker = stock_savers.SAVERS[saver]

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        self._save(target, version)

    def load(self, directory: Path) -> dict[str, Any]:
        return self._load(directory)

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        return stock_savers.differences(loaded, version)

    def find(self, directory: Path) -> str:
        """Which version a load gives; without the marker nothing was saved."""
        if not (directory / self._marker).exists():
            raise NotACheckpointError(str(directory))
        try:
            return super().find(directory)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, it is a refusal
            return f"refused: {type(exc).__name__}: {exc}"


class StorageWriter(Stock):
    """Saves by a plain ``dcp.save`` through our storage writer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "dcp")

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        dcp.save(stock_savers.state(version), storage_writer=CheckpointStorageWriter(target, overwrite=overwrite))

    def load(self, directory: Path) -> dict[str, Any]:
        CheckpointStorageReader(directory).read_metadata()  # dcp.load makes one error of all that it may raise
        wanted = stock_savers.state(0)
        dcp.load(wanted, storage_reader=CheckpointStorageReader(directory))
        return wanted

    def find(self, directory: Path) -> str:
        """Which version a load gives; its errors are the family's."""
        return Scenario.find(self, directory)


# ---- other changes of a checkpoint


class Conversion(Scenario):
    """Converts a checkpoint of another format; the same conversion is done after a kill."""

    makes_folder = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        other = "safetensors" if backends.current().name == "torch_dist" else "torch_dist"
        dist_checkpointing.save(self.state(NEW), folder / "source", (other, 1))

    def change(self, target: Path, *, overwrite: bool) -> None:
        convert_checkpoint(self._folder / "source", target, backends.current().name, overwrite=overwrite)

    def go_on(self, target: Path) -> str:
        """Convert (again)."""
        self.change(target, overwrite=True)
        return "new"

    def warm_up(self, scratch: Path) -> None:
        super().warm_up(scratch)
        self.change(scratch, overwrite=True)


class Export(Scenario):
    """Exports a checkpoint as a Hugging Face folder of several files, of tensors of three dtypes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for version in VERSIONS.values():
            sharded = {key: _tensor(key, value) for key, value in self._tensors(version).items()}
            dist_checkpointing.save(sharded, self._source(version))

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        export_to_huggingface(self._source(version), target, max_shard_size=2 << 20, overwrite=overwrite)

    def load(self, directory: Path) -> dict[str, Any]:
        if not directory.exists():
            raise NotACheckpointError(str(directory))
        try:
            return {key: value for path in directory.glob("*.safetensors") for key, value in load_file(path).items()}
        except SafetensorError as exc:  # a write that lied has been believed: the folder has no digests
            raise CorruptCheckpointError(str(exc)) from exc

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        return _differences(loaded, self._tensors(version))

    def _source(self, version: int) -> Path:
        return self._folder / "sources" / str(version)

    def _tensors(self, version: int) -> dict[str, torch.Tensor]:
        return {
            "large.weight": torch.arange(3 << 17, dtype=torch.float32) + version,
            "other.weight": torch.arange(3 << 17, dtype=torch.float32) - version,
            "small.bias": (torch.arange(40) + version).to(torch.bfloat16),
            "steps": torch.tensor([version]),
        }


class Migration(Scenario):
    """Migrates a checkpoint of version 1 in place."""

    def prepare(self, target: Path) -> None:
        """Save version 1."""
        migration.register()
        dist_checkpointing.save(migration.state(1.0), target, (migration.SaveText.backend, 1))

    def change(self, target: Path, *, overwrite: bool) -> None:
        migrate_checkpoint(target, target, overwrite=overwrite)

    def find(self, directory: Path) -> str:
        """Which version stands there, whole."""
        faults = [result.fault for result in verify_checkpoint(directory) if result.fault]
        version = Marker.model_validate_json((directory / MARKER_NAME).read_bytes()).sharded_backend_version
        if faults:
            return f"CorruptCheckpointError: {faults}"
        if version == 1:
            return "old"
        return "new" if migration.loaded(directory) == (3.0, 1) else "mixed: other values"

    def go_on(self, target: Path) -> str:
        """Migrate, or remove what a migration that was done has left."""
        if self.find(target) == "old":
            self.change(target, overwrite=True)
        elif _beside(target):
            prune_leftovers(target)
        return "new"

    def warm_up(self, scratch: Path) -> None:
        self.prepare(scratch)
        self.change(scratch, overwrite=True)
        self.find(scratch)


class Prune(Scenario):
    """Prunes what a killed save has left beside a checkpoint, which stays: ``new`` is without the leftover."""

    def prepare(self, target: Path) -> None:
        """Kill a save before its commit."""
        super().prepare(target)
        wait([fork(partial(self._die_committing, target))], START_TIMEOUT)
        if not _beside(target):
            raise SystemExit("a killed save has left nothing to prune")

    def _die_committing(self, target: Path) -> None:
        get_plugin_manager().register(_Dies())
        self.write(target, NEW, overwrite=True)

    def change(self, target: Path, *, overwrite: bool) -> None:
        if failed := [each.error for each in prune_leftovers(target) if each.error]:
            raise CheckpointingException("; ".join(failed))

    def find(self, directory: Path) -> str:
        """Whether the leftover is there."""
        found = super().find(directory)
        return found if found != "old" or _beside(directory) else "new"

    def go_on(self, target: Path) -> str:
        """Prune (again)."""
        prune_leftovers(target)
        return "new"

    def warm_up(self, scratch: Path) -> None:
        alone = scratch.with_name("warmth") / "ckpt"
        self.prepare(alone)
        prune_leftovers(alone)
        self.load(alone)


class Removal(Scenario):
    """Removes keys of the checkpoint that stands at ``FOLDER/pristine/ckpt``, or of one that it saves there."""

    def prepare(self, target: Path) -> None:
        """Save, if there is nothing, and look what is kept."""
        if not target.exists():
            gone = {f"{GONE}.{n}": _tensor(f"{GONE}.{n}", torch.arange(9.0)) for n in range(3)}
            dist_checkpointing.save({**samples.state_dict(OLD), **gone}, target)
        self._pristine = target
        old = self.load(target)
        self._expected = {OLD: old, NEW: {key: value for key, value in old.items() if not key.startswith(GONE)}}

    def load(self, directory: Path) -> dict[str, Any]:
        stored = dist_checkpointing.load_sharded_metadata(directory)
        tensors = dist_checkpointing.load_plain_tensors(directory)
        common = dist_checkpointing.load_common_state_dict(directory)
        return {**dict.fromkeys(stored), **tensors, "common state": common}

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        return _differences(loaded, self._expected.get(version, {}))

    def change(self, target: Path, *, overwrite: bool) -> None:
        dist_checkpointing.remove_sharded_tensors(target, GONE)

    def find(self, directory: Path) -> str:
        """Which keys are there, with digests that fit."""
        found = super().find(directory)
        faults = _faults(directory) if found in VERSIONS else ""
        return f"CorruptCheckpointError: {faults}" if faults else found

    def go_on(self, target: Path) -> str:
        """Remove the keys (again)."""
        self.change(target, overwrite=True)
        return "new"

    def warm_up(self, scratch: Path) -> None:
        shutil.copytree(self._pristine, scratch)
        self.change(scratch, overwrite=True)
        self.load(scratch)


class _Dies:
    """A plugin that kills this process where a save begins to commit."""

    @hookimpl
    def shardckpt_event(self, event: Any) -> None:
        """Die."""
        if (event.phase, event.state) == ("committing", "start"):
            os.kill(os.getpid(), signal.SIGKILL)


def _beside(target: Path) -> list[Path]:
    return [path for path in target.parent.iterdir() if path != target]


def _tensor(key: str, value: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, value)


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names that only one of them has, or whose values differ."""
    differ = {key for key in found.keys() & expected.keys() if not _same(found[key], expected[key])}
    return sorted((found.keys() ^ expected.keys()) | differ)


def _same(found: Any, expected: Any) -> bool:
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else bool(found == expected)


def _faults(directory: Path) -> str:
    """What does not fit the digests, where there are any."""
    try:
        if (directory / INTEGRITY_NAME).exists():
            verify_integrity_manifest(directory)
        if (directory / RECORD_NAME).exists():
            return "; ".join(result.fault for result in verify_checkpoint(directory) if result.fault)
    except CheckpointingException as exc:
        return str(exc)
    return ""


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "foreground": Scenario,
    "request": partial(Scenario, way="request"),
    "thread": partial(Scenario, way="thread"),
    "process": Worker,
    "training": Training,
    "tables": Tables,
    "no fsync": NoFsync,
    "tree": Tree,
    "dcp": partial(Stock, saver="dcp"),
    "torch.save": partial(Stock, saver="torch.save"),
    "storage writer": StorageWriter,
    "convert": Conversion,
    "export": Export,
    "migrate": Migration,
    "prune": Prune,
    "remove": Removal,
    "contiguous": Contiguous,
    "manager": Steps,
    "pointer": partial(Steps, read=lambda path: path.read_text().strip(), latest_pointer="latest"),
    "links": partial(Steps, read=os.readlink, links=True),
    "pin": Pin,
    "unpin": partial(Pin, removes=True),
    "mark": Marks,
    "local checkpoints": LocalCheckpoints,
    "copies of local checkpoints": LocalCopies,
}


def make_scenario(name: str, folder: Path) -> Scenario:
    """Make the scenario of a name, or of one like ``rank 0 of 2`` or ``contiguous, rank 0 of 2``."""
    ranks = re.fullmatch(r"(contiguous, )?rank (\d+) of (\d+)", name)
    if ranks is None:
        return SCENARIOS[name](folder)
    return (ContiguousRanks if ranks[1] else Ranks)(folder, int(ranks[2]), int(ranks[3]))
