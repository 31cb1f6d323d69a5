"""Saves, removals and holds under drawn histories of processes that share a folder: only what nothing keeps goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shardckpt.commit import Owner
from shardckpt.commit.leftovers import find_leftovers
from shardckpt.commit.staging_names import temporary_name
from shardckpt.errors import CheckpointingException
from shardckpt.manager import (
    KeepEvery,
    KeepLatest,
    garbage_collection,
    lease_step,
    pin_step,
    prune_steps,
    unpin_step,
)
from shardckpt.manager.garbage_collection import collect_garbage, discard_steps_after
from shardckpt.manager.marks import identify_save, mark_checkpoint
from shardckpt.manager.retention import find_needed_steps
from tests import backends
from tests.commit import owners
from tests.manager import folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.manager import Lease
    from shardckpt.manager.retention import StepMetrics
    from shardckpt.manager.steps import StepFolder

LATEST, EVERY = 1, 4
POLICIES = [KeepLatest(LATEST), KeepEvery(EVERY)]
#: Those of another manager of the folder, or of a prune.
OTHERS = [KeepLatest(1)]
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
#: What changes a folder; a process that has crashed does none of these any more.
CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "open", "fsync")
STEPS = st.integers(0, 100)
#: Which of the complete steps, by age; the newest one more often, for most rules are about it.
CHOICES = st.sampled_from([-1, -1, -1, 0, 1, 2, 3])
BEGUN = (1, 2, 3, 5)


#: What another process may do in the middle of a removal.
ACTS = st.sampled_from(
    [
        *("save", "save_again", "pin", "lease", "verified", "failed", "damage", "prune_damaged"),
        *["prune"] * 3,
        *["discard"] * 3,
    ]
)


class Crash(BaseException):
    """Ends a call as a kill would: no handler of errors sees it, and nothing that cleans up works."""


@contextlib.contextmanager
def crash_at(number: int) -> Iterator[None]:
    """Crash at the change of that number, and at every later one."""
    changes = 0
    opened = os.open

    def crashing(function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal changes
            if function is not opened or arguments[1] & _FOR_WRITING:
                changes += 1
                if changes >= number:
                    raise Crash
            return function(*arguments, **options)

        return change

    with contextlib.ExitStack() as stack:
        for name in CHANGES:
            stack.enter_context(mock.patch.object(os, name, crashing(getattr(os, name))))
        yield


class Retention(RuleBasedStateMachine):
    """A folder of steps, and what must be in it."""

    dead: str  # the text of a process that has ended
    pristine: Path  # a folder of the steps that each history begins with
    store = ""  # what stands before a path to make it the URL of a store

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="shardckpt-retention-"))
        self.url = f"{self.store}{self.folder}"
        shutil.copytree(self.pristine, self.folder, dirs_exist_ok=True)
        #: The complete steps, with their states; and those that are damaged.
        self.states = dict.fromkeys(BEGUN, "candidate")
        self.damaged: set[int] = set()
        #: All that ever were: of these an overwrite that died may have left the only whole copy.
        self.were_damaged: set[int] = set()
        #: Which save each complete step is.
        self.saves = {step: identify_save(f"{self.url}/step-{step}") for step in BEGUN}
        self.pins: set[int] = set()
        self.leases: list[Lease] = []
        #: Staging directories of a process that lives, and how many there were.
        self.written: list[Path] = []
        self.begun = 0

    def teardown(self) -> None:
        """Every step loads, bit for bit."""
        for lease in self.leases:
            lease.close()
        broken = [step for step in self.states if not folders.is_intact(f"{self.url}/step-{step}", step)]
        shutil.rmtree(self.folder)
        assert not broken

    @rule(gap=st.integers(1, 3))
    def save(self, gap: int) -> None:
        """Save a later step."""
        self._save(max([*self.states, *self.damaged], default=0) + gap)

    @precondition(lambda self: self.states)
    @rule(choice=CHOICES)
    def save_again(self, choice: int) -> None:
        """Replace a step that is not held, as after a rollback; the verdict was about the old save."""
        self._save(self._choose(choice))

    @precondition(lambda self: not self.store)
    @rule(gap=st.integers(0, 2), number=st.integers(1, 40))
    def crash_in_a_save(self, gap: int, number: int) -> None:
        """Die in a save of the newest step, or of a later one: it is the old, the new, or absent."""
        step = max([*self.states, *self.damaged], default=1) + gap
        was_damaged = step in self.damaged
        with contextlib.suppress(Crash, CheckpointingException), crash_at(number):
            self._save(step)
        self._die()
        found = self._steps().inspect_step(step) if (self.folder / f"step-{step}").exists() else None
        if found is not None and found.is_loadable:
            self.damaged.discard(step)
            self.states[step] = "candidate" if found.mark is None else found.mark.verdict
            self.saves[step] = identify_save(f"{self.url}/step-{step}")
        else:
            assert step not in self.states
            assert found is None or was_damaged

    @precondition(lambda self: not self.store)
    @rule(step=STEPS)
    def begin_a_save(self, step: int) -> None:
        """A process that lives writes a step."""
        self.begun += 1
        path = self.folder / temporary_name(f"step-{step}", "staging", f"{self.begun:032x}", owners.living())
        path.mkdir()
        (path / "data").write_bytes(b"so far")
        self.written.append(path)

    @precondition(lambda self: self.written)
    @rule()
    def kill_a_save(self) -> None:
        """The process of a save dies."""
        path = self.written.pop()
        path.rename(path.with_name(path.name.replace(owners.living().text, self.dead)))

    @precondition(lambda self: self.states)
    @rule(choice=CHOICES)
    def pin(self, choice: int) -> None:
        """Pin a step."""
        self.pins.add(step := self._choose(choice))
        pin_step(self.url, step, "kept")

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        """Take the oldest pin away."""
        step = min(self.pins)
        self.pins.discard(step)
        unpin_step(self.url, step, "kept")

    @precondition(lambda self: self.states)
    @rule(choice=CHOICES, pruned=st.booleans())
    def lease(self, choice: int, *, pruned: bool) -> None:
        """Lease a step."""
        self.leases.append(lease_step(self.url, self._choose(choice)))
        if pruned:
            self.prune()

    @precondition(lambda self: self.leases)
    @rule(killed=st.booleans(), pruned=st.booleans())
    def end_lease(self, *, killed: bool, pruned: bool) -> None:
        """A reader ends, or dies with its lease, perhaps long after its step was the newest."""
        lease = self.leases.pop()
        if killed:
            lease._closed.set()
            lease._thread.join()
            lease._holds.put(lease._name, lease._hold.model_copy(update={"owner": self.dead}))
        else:
            lease.close()
        if pruned:
            self.save(2)
            self.prune()

    @precondition(lambda self: self.states)
    @rule(choice=CHOICES, verdict=st.sampled_from(["verified", "failed"]), pruned=st.booleans())
    def mark(self, choice: int, verdict: Any, *, pruned: bool) -> None:
        """Keep the verdict of a verification."""
        path = f"{self.url}/step-{(step := self._choose(choice))}"
        mark_checkpoint(path, identify_save(path), verdict, checked="digests", files=4)
        self.states[step] = verdict
        if pruned:
            self.prune()

    @precondition(lambda self: self.states)
    @rule(choice=CHOICES)
    def damage(self, choice: int) -> None:
        """Lose a byte of a step: nothing may remove it, and it is no longer the newest valid one."""
        step = self._choose(choice)
        # on a store a save that has replaced another is in a folder of its own
        data = next((self.folder / f"step-{step}").rglob(backends.data_file(0)))
        folders.damage(data.parent)
        del self.states[step]
        self.damaged.add(step)
        self.were_damaged.add(step)

    @rule()
    def prune_damaged(self) -> None:
        """What is damaged or has failed goes, but for what is held, and but for all where no step is sound."""
        failed = {step for step, state in self.states.items() if state == "failed"}
        gone = (self.damaged | failed) - self._held() if failed != self.states.keys() else set()
        prune_steps(self.url, [], damaged=True, older_than=0)
        self.damaged -= gone
        self.states = {step: state for step, state in self.states.items() if step not in gone}

    @rule()
    def prune(self) -> None:
        """Retention leaves what is kept; of dead processes nothing but the last whole copy of a damaged step."""
        kept = self._kept()
        collect_garbage(self._steps(), POLICIES)
        assert set(self._steps().steps()) == kept | self.damaged
        self.states = {step: state for step, state in self.states.items() if step in kept}
        if not self.store:
            only_copies = tuple(f".step-{step}.shardckpt-replaced-" for step in self.were_damaged)
            left = [leftover.path for leftover in find_leftovers(self.folder, lambda _: True)]
            assert [path for path in left if not path.name.startswith(only_copies)] == sorted(self.written)

    @precondition(lambda self: self.states)
    @rule(choice=CHOICES)
    def discard(self, choice: int) -> None:
        """A training goes back: all complete later steps go, or, where one is held or none would be left, none."""
        step = self._choose(choice)
        later = {each for each in self.states if each > step}
        is_refused = (later | {each for each in self.damaged if each > step}) & self._held() or not any(
            state != "failed" for each, state in self.states.items() if each <= step
        )
        # without a later directory there is nothing to refuse
        if is_refused and (later or any(each > step for each in self.damaged)):
            with pytest.raises(CheckpointingException):
                discard_steps_after(self._steps(), step)
            return
        assert discard_steps_after(self._steps(), step) == sorted(later)
        self.states = {each: state for each, state in self.states.items() if each not in later}

    @precondition(lambda self: self.states)
    @rule(act=ACTS, other=CHOICES)
    def act_in_a_prune(self, act: str, other: int) -> None:
        """Another process acts between a prune's look and its first step: what counts is what is there then."""
        self._remove(act, other, None)

    @precondition(lambda self: self.states)
    @rule(choice=st.sampled_from([0, 1]), act=ACTS, other=CHOICES)
    def act_in_a_discard(self, choice: int, act: str, other: int) -> None:
        """So it is where a training goes back."""
        self._remove(act, other, self._choose(choice))

    @precondition(lambda self: self.states)
    @rule(act=ACTS, other=CHOICES)
    def act_in_a_prune_of_damage(self, act: str, other: int) -> None:
        """So it is where damaged steps are removed: what is sound by then stays, and what is held."""
        is_done = False

        def look(found: StepMetrics) -> dict[int, str]:
            nonlocal is_done
            if not is_done:
                is_done = True
                self._act(act, other)
            return find_needed_steps(found)

        with mock.patch.object(garbage_collection, "find_needed_steps", look):
            prune_steps(self.url, [], damaged=True, older_than=0)
        left = set(self._steps().steps())
        assert {step for step, state in self.states.items() if state != "failed"} | self._held() <= left
        self.damaged &= left
        self.states = {step: state for step, state in self.states.items() if step in left}

    def _remove(self, act: str, other: int, rewind: int | None) -> None:
        """Prune, or discard all steps after one, while another process acts."""
        later = {each for each in self.states if rewind is not None and each > rewind}
        before: dict[int, tuple[str, str]] = {}

        def look(found: StepMetrics) -> dict[int, str]:
            if not before:
                before.update(self.saves)
                self._act(act, other)
            return find_needed_steps(found)

        with mock.patch.object(garbage_collection, "find_needed_steps", look):
            if rewind is not None:
                with contextlib.suppress(CheckpointingException):
                    discard_steps_after(self._steps(), rewind)
            else:
                collect_garbage(self._steps(), OTHERS)
        left = set(self._steps().steps())
        new = {step for step in self.states if before.get(step) != self.saves[step]}
        stay = {step: state for step, state in self.states.items() if step not in later - new}
        must = self._needed(stay if any(state != "failed" for state in stay.values()) else self.states)
        must |= self.states.keys() & (self._held() | new)
        assert must <= left
        self.states = {step: state for step, state in self.states.items() if step in left}

    @precondition(lambda self: not self.store)
    @rule(number=st.integers(1, 25))
    def crash_in_a_prune(self, number: int) -> None:
        """Die in a removal of older steps: each that may go is there whole, or not at all."""
        self.save(2)
        self.save(2)
        kept = self._kept()
        with contextlib.suppress(Crash, CheckpointingException), crash_at(number):
            collect_garbage(self._steps(), POLICIES)
        self._die()
        left = set(self._steps().steps())
        assert kept <= left
        self.states = {step: state for step, state in self.states.items() if step in left}

    @invariant()
    def every_step_is_whole(self) -> None:
        """The complete steps are there, with the states that they were given; the damaged ones, and saves under way."""
        folder = self._steps()
        found = {step: folder.inspect_step(step) for step in folder.steps()}
        assert found.keys() == self.states.keys() | self.damaged
        assert all(identify_save(f"{self.url}/step-{step}") == self.saves[step] for step in self.states)
        assert {step for step, each in found.items() if each.is_loadable} == self.states.keys()
        assert {step: each.metrics.state for step, each in found.items() if each.is_loadable} == self.states
        assert all((path / "data").read_bytes() == b"so far" for path in self.written)

    def _save(self, step: int) -> None:
        if step in self._held():
            with pytest.raises(CheckpointingException, match=f"step-{step} is (pinned|leased)"):
                folders.save(self.url, step, overwrite=True)
            return
        folders.save(self.url, step, overwrite=True)
        self.damaged.discard(step)
        self.states[step] = "candidate"
        self.saves[step] = identify_save(f"{self.url}/step-{step}")

    def _act(self, act: str, choice: int) -> None:
        """What another process does."""
        if not self.states:
            return
        if act in ("verified", "failed"):
            self.mark(choice, act, pruned=False)
        elif act == "lease":
            self.lease(choice, pruned=False)
        elif act == "save":
            self.save(1)
        elif act in ("prune", "prune_damaged"):
            getattr(self, act)()
        else:
            getattr(self, act)(choice)

    def _steps(self) -> StepFolder:
        return folders.steps_of(self.url)

    def _held(self) -> set[int]:
        existing = self.states.keys() | self.damaged
        return existing & (self.pins | {lease.step for lease in self.leases})

    @staticmethod
    def _needed(states: dict[int, str]) -> set[int]:
        """What a load takes, said without the code that decides it."""
        steps = sorted(states)
        valid = [step for step in steps if states[step] != "failed"]
        verified = [step for step in steps if states[step] == "verified"]
        return {*steps[-1:], *valid[-1:], *verified[-1:]}

    def _choose(self, choice: int) -> int:
        return sorted(self.states)[choice % len(self.states)]

    def _kept(self) -> set[int]:
        """What no collection may remove, said without the code that decides it."""
        steps = sorted(self.states)
        needed = {*steps[-LATEST:], *(step for step in steps if step % EVERY == 0)} | self._needed(self.states)
        return needed | (self.states.keys() & self._held())

    def _die(self) -> None:
        """Let what this process has left be that of a dead one, but for the leases and saves of living ones."""
        living = {lease._name for lease in self.leases}
        for hold in (self.folder / folders.HOLDS).glob("*.json"):
            if hold.name not in living:
                hold.write_text(hold.read_text().replace(Owner.current().text, self.dead))
        for path in list(self.folder.iterdir()):
            if Owner.current().text in path.name:
                path.rename(path.with_name(path.name.replace(Owner.current().text, self.dead)))


class RetentionOnStore(Retention):
    """The same on a store, where a save that replaces another has a folder of its own; without crashes."""

    store = "local://"


@pytest.mark.parametrize("machine", [Retention, RetentionOnStore])
@pytest.mark.parametrize(
    ("examples", "steps"),
    [(6, 15), pytest.param(150, 30, marks=pytest.mark.proof)],
    ids=["few", "many"],
)
def test_retention_removes_what_it_may_and_nothing_else(
    tmp_path: Path, examples: int, steps: int, machine: type[Retention]
) -> None:
    """No leased, pinned, newest valid, being-written or new step goes or is replaced; what nothing keeps does."""
    folders.save_all(tmp_path, *BEGUN)
    machine.pristine = tmp_path
    machine.dead = owners.dead().text
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            database=None,
        ),
    )
