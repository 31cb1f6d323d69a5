"""The base of the scenarios: what is changed, by what, and what is read then; see :mod:`tests.faults.scenarios`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.errors import CheckpointingException
from tests.faults import samples
from tests.faults.behind import save_in
from tests.faults.forks import fork
from tests.logs import collect_warnings
from tests.states import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD, NEW, LATER = 1, 2, 3
VERSIONS = {"old": OLD, "new": NEW, "later": LATER}
#: How a change that has only warned is told.
WARNED = "refused: by warnings: "
#: Elements of a tensor of 3 MiB: what holds it is allocated ahead, written past the page cache, and cut in the end.
_LARGE = 3 << 18


class Scenario:
    """A save of version ``NEW`` over version ``OLD``, or to a fresh path.

    Args:
        folder: For files of its own.
        way: Of the save: see :func:`tests.faults.behind.save_in`.
    """

    #: Other people's files in the checkpoint, which stay.
    foreign: ClassVar = {"notes.txt": b"not the checkpoint's", "logs/run.log": b"kept too"}
    #: What a change may raise; anything else is a fault.
    errors: tuple[type[BaseException], ...] = (CheckpointingException,)

    #: Whether a change makes the folder above a fresh target.
    makes_folder = True
    #: Whether a change that is not complete may say so by warnings, and raise nothing.
    warns = False

    def __init__(self, folder: Path, way: str = "foreground") -> None:
        self._folder = folder
        self._way = way

    def state(self, version: int) -> dict[str, Any]:
        """This rank's part of the samples of a version, and of a large tensor."""
        rank, world = rank_and_size()
        part = _large(version).chunk(world)[rank].clone()
        large = ShardedTensor.from_rank_offsets("large", part, (0, rank, world))
        return {**samples.state_dict(version, rank, world), "large": large}

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        """Save a version, which nothing interrupts."""
        dist_checkpointing.save(self.state(version), target, overwrite=overwrite)

    def load(self, directory: Path) -> dict[str, Any]:
        """Load what is compared."""
        wanted = {**samples.template(), "large": ShardedTensor.from_rank_offsets("large", torch.full((_LARGE,), -7.0))}
        return dist_checkpointing.load(wanted, directory)

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        """Name what is not, bit for bit, what the version had."""
        small = {key: value for key, value in loaded.items() if key != "large"}
        same = torch.equal(loaded["large"], _large(version))
        return [*samples.differences(small, version), *([] if same else ["large"])]

    def prepare(self, target: Path) -> None:
        """Make what stands at the target before."""
        self.write(target, OLD, overwrite=False)

    def change(self, target: Path, *, overwrite: bool) -> None:
        """Do what is killed."""
        if self._way == "foreground":
            self.write(target, NEW, overwrite=overwrite)
        else:
            save_in(self._way, target, self.state(NEW), overwrite=overwrite)

    def change_and_tell(self, target: Path, told: Path, *, overwrite: bool) -> None:
        """Do it, and write how it ended: ``saved``, an error that it may raise as ``refused: ...``, or what else."""
        try:
            with collect_warnings(all_threads=True) as said:
                self.change(target, overwrite=overwrite)
        except self.errors as exc:
            ended = f"refused: {type(exc).__name__}: {exc}"
        except BaseException as exc:  # noqa: BLE001 - it is in the report
            ended = f"{type(exc).__name__}: {exc}"
        else:
            ended = f"{WARNED}{'; '.join(said)}" if self.warns and said else "saved"
        try:
            told.write_text(ended)
        except OSError:  # strace counts the calls of each thread: a fault may have waited for this one
            told.write_text(ended)

    def start(self, change: Callable[[], None]) -> tuple[int, list[int]]:
        """Fork what changes: see :meth:`tests.faults.killer.Killer._start`."""
        pid = fork(change, stopped=True)
        return pid, [pid]

    def find(self, directory: Path) -> str:
        """Which version a load gives, or how it is none."""
        loaded = self.load(directory)
        for name, version in VERSIONS.items():
            if not self.differences(loaded, version):
                return name
        return f"mixed: not new in {self.differences(loaded, NEW)}"

    def go_on(self, target: Path) -> str:
        """Make the next change after a kill; what must be found then."""
        self.write(target, LATER, overwrite=True)
        return "later"

    def warm_up(self, scratch: Path) -> None:
        """Do everything once that a first change or load does lazily, in this process."""
        for overwrite in (False, True):
            self.write(scratch, OLD, overwrite=overwrite)
        if self._way != "foreground":  # processes are forked later
            save_in("thread" if self._way == "thread" else "request", scratch, self.state(OLD), overwrite=True)
        self.load(scratch)


def _large(version: int) -> torch.Tensor:
    return torch.arange(_LARGE, dtype=torch.float32) + version
