"""Scenarios of what is kept by step: the steps of a training, what is noted of one, and the checkpoints of a node."""

# ruff: noqa: D102 - Scenario says what its methods do
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.dist_checkpointing import load_plain_tensors
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, NotACheckpointError
from shardckpt.local import LocalCheckpointManager, TensorAwareStateDict
from shardckpt.manager import (
    CheckpointConfig,
    CheckpointManager,
    KeepLatest,
    Mark,
    find_holds,
    mark_checkpoint,
    pin_step,
    prune_steps,
    unpin_step,
)
from shardckpt.manager.garbage_collection import GarbageCollector
from shardckpt.manager.marks import identify_save, name_mark
from shardckpt.manager.step_names import MARKS_NAME
from tests.faults.behind import make_calls
from tests.faults.scenario import LATER, NEW, OLD, VERSIONS, Scenario
from tests.manager.folders import HOLDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What the step before that of ``OLD`` has, which goes when ``NEW`` is saved.
_FIRST = 0
#: The steps of ``_FIRST`` and ``OLD``: the first is pinned, the other one marked.
_PINNED, _MARKED = 1, 2


class _Values:
    """A state of a training, all of whose values tell the version."""

    def __init__(self, version: int) -> None:
        self.tensor = torch.arange(1000, dtype=torch.float32) + 1000 * version

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


class _Repeated(Scenario):
    """A change of which warnings say that it is not complete, and after whose repetition nothing is left beside it."""

    warns = True

    def leftovers(self, target: Path) -> list[str]:
        """Return the names of what should not be there after a change."""
        raise NotImplementedError

    def go_on(self, target: Path) -> str:
        """Make the next change, after which nothing is left of what was killed."""
        found = self.change_again(target)
        if left := self.leftovers(target):
            raise CheckpointingException(f"the next change leaves {left}")
        return found

    def change_again(self, target: Path) -> str:
        """Make the next change, and return which version is there then."""
        return super().go_on(target)

    def _unknown(self, target: Path, known: set[str]) -> list[str]:
        foreign = {name.partition("/")[0] for name in self.foreign}
        return sorted({path.name for path in target.iterdir()} - known - foreign)


class Steps(_Repeated):
    """Saves a step by a manager that keeps the two newest; the one before these goes.

    Args:
        folder: For files of its own.
        read: Returns which step a file or link of the manager names; None: a load chooses, as a training resumes.
        config: Of the manager.
    """

    #: The name of that file or link.
    word = "latest"

    def __init__(self, folder: Path, read: Callable[[Path], str] | None = None, **config: Any) -> None:
        super().__init__(folder)
        self._read = read
        self._config = config
        self._least = 0
        run = GarbageCollector._run

        def run_in_advance(collector: GarbageCollector) -> None:
            make_calls()
            run(collector)

        GarbageCollector._run = run_in_advance  # type: ignore[method-assign]

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        config = CheckpointConfig(folder=str(target), interval=1, keep_latest_k=2, **self._config)
        with CheckpointManager(config, {"values": _Values(version)}) as manager:
            manager.save(version + 1)
            manager.wait()  # for removals: what two threads do at once, a trace cannot order

    def prepare(self, target: Path) -> None:
        """Save two steps."""
        for version in (_FIRST, OLD):
            self.write(target, version, overwrite=False)
        self._least = 2

    def load(self, directory: Path) -> dict[str, Any]:
        if self._read is not None:
            try:
                return load_plain_tensors(directory / self._read(directory / self.word))
            except FileNotFoundError as exc:
                raise NotACheckpointError(str(exc)) from exc
        values = _Values(-1)
        with CheckpointManager(CheckpointConfig(folder=str(directory), load_only=True), {"values": values}) as manager:
            if not manager.load():
                raise NotACheckpointError(str(directory))
        return {"values.tensor": values.tensor}

    def differences(self, loaded: dict[str, Any], version: int) -> list[str]:
        same = torch.equal(loaded["values.tensor"], _Values(version).tensor)
        return [] if same and len(loaded) == 1 else ["values"]

    def find(self, directory: Path) -> str:
        """Which version a load gives, where all steps that are there are whole, and enough of them."""
        return self.find_unsound(directory) or super().find(directory)

    def find_unsound(self, directory: Path) -> str:
        """Say what is wrong with the steps that are there; one that is damaged is the error of its load."""
        steps = _list_steps(directory)
        wrong = [step for step in steps if self.differences(load_plain_tensors(directory / f"step-{step}"), step - 1)]
        if wrong:
            return f"mixed: other values in steps {wrong}"
        return f"too few steps: {steps}" if len(steps) < self._least else ""

    def leftovers(self, target: Path) -> list[str]:
        known = {f"step-{step}" for step in _list_steps(target)[-2:]}
        return self._unknown(target, known | ({self.word} if self._read else set()))

    def warm_up(self, scratch: Path) -> None:
        least = self._least
        self.prepare(scratch)
        self.change(scratch, overwrite=True)
        self.find(scratch)
        self.go_on(scratch)
        self._least = least


class Pin(Steps):
    """Pins a step that no policy keeps, or takes its pin away."""

    def __init__(self, folder: Path, *, removes: bool = False) -> None:
        super().__init__(folder)
        self._removes = removes

    def prepare(self, target: Path) -> None:
        """Save two steps, and pin one whose pin is to go."""
        super().prepare(target)
        if self._removes:
            pin_step(target, _PINNED, "new")

    def change(self, target: Path, *, overwrite: bool) -> None:
        (unpin_step if self._removes else pin_step)(target, _PINNED, "new")

    def find(self, directory: Path) -> str:
        """Whether the step is pinned."""
        if unsound := self.find_unsound(directory):
            return unsound
        holds = find_holds(directory).get(f"step-{_PINNED}", [])
        if unreadable := [hold for hold in holds if hold.kind != "pin"]:  # what a removal does not touch, either
            raise CorruptCheckpointError(f"{unreadable[0]}")
        labels = {hold.holder for hold in holds}
        if "later" in labels:
            return "later"
        return "new" if ("new" in labels) != self._removes else "old"

    def change_again(self, target: Path) -> str:
        """Pin the step (again), and remove all that is neither pinned nor the newest."""
        pin_step(target, _PINNED, "later")
        prune_steps(target, [KeepLatest(1)])
        return "later"

    def leftovers(self, target: Path) -> list[str]:
        holds = [path.name for path in target.glob(f"{HOLDS}/*")]
        known = {"step-1", "step-2", *([HOLDS] if holds else [])}
        return self._unknown(target, known) + [name for name in holds if not name.startswith(f"step-{_PINNED}.pin.")]


class Marks(Steps):
    """Marks a step as verified; the mark counts so many files as its version has."""

    def change(self, target: Path, *, overwrite: bool) -> None:
        self._mark(target, NEW)

    def find(self, directory: Path) -> str:
        """Whether the step has the mark."""
        if unsound := self.find_unsound(directory):
            return unsound
        mark = Mark.read(directory / MARKS_NAME / name_mark(f"step-{_MARKED}"))
        names = {version: name for name, version in VERSIONS.items()}
        return "old" if mark is None else names.get(mark.files, f"mixed: {mark}")

    def change_again(self, target: Path) -> str:
        """Mark the step anew, and remove the other."""
        self._mark(target, LATER)
        self._least = 1
        prune_steps(target, [KeepLatest(1)])
        return "later"

    def leftovers(self, target: Path) -> list[str]:
        marks = [path.name for path in target.glob(f"{MARKS_NAME}/*")]
        known = {"step-1", "step-2", *([MARKS_NAME] if marks else [])}
        return self._unknown(target, known) + [name for name in marks if name != name_mark(f"step-{_MARKED}")]

    def _mark(self, target: Path, version: int) -> None:
        step = target / f"step-{_MARKED}"
        mark_checkpoint(step, identify_save(step), "verified", checked="digests", files=version)


class LocalCheckpoints(_Repeated):
    """Saves a step of a rank on its node's disk; the step before goes."""

    def write(self, target: Path, version: int, *, overwrite: bool) -> None:
        LocalCheckpointManager(target).save(make_part(self.state(version)), version)

    def load(self, directory: Path) -> dict[str, Any]:
        manager = LocalCheckpointManager(directory)
        latest = manager.find_latest()
        if latest is None:  # what is damaged is left out, with a warning
            there = [path.name for path in directory.glob("step-*")]
            raise CorruptCheckpointError(f"damaged: {there}") if there else NotACheckpointError(str(directory))
        return manager.load(latest).to_state_dict(self.state(latest), algo="atomic")

    def leftovers(self, target: Path) -> list[str]:
        newest = [path.name for path in target.glob("step-*")]
        return self._unknown(target, {max(newest)} if newest else set())


def make_part(state: dict[str, Any]) -> TensorAwareStateDict:
    """Make of a rank's state what local checkpoints save."""
    return TensorAwareStateDict.from_state_dict(state, "atomic")[0]


def _list_steps(directory: Path) -> list[int]:
    """Return the numbers of the steps that have a directory, in ascending order."""
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))
