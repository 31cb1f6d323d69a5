"""What holds a step: leases of readers and pins, against every removal by a policy."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardckpt.cli import main
from shardckpt.commit import Owner
from shardckpt.commit.holds import Hold, Holds
from shardckpt.errors import CannotLoadError, CheckpointingException, StorageError
from shardckpt.manager import (
    CheckpointConfig,
    CheckpointManager,
    find_holds,
    lease_step,
    pin_step,
    prune_steps,
    unpin_step,
)
from shardckpt.manager.holds import Lease
from tests.manager import folders
from tests.manager.holds import NEWEST, collect_newest
from tests.manager.training import Progress
from tests.remote.store import FaultyFileSystem
from tests.resources import refuse_threads
from tests.tables import table

if TYPE_CHECKING:
    from tests.clock import Clock
    from tests.ranks import Ranks

#: A process of another host: nobody here knows whether it is alive.
ELSEWHERE = Owner(host=1, pid=1, start=1).text


@folders.PLACES
def test_a_leased_step_stays_until_the_lease_ends(tmp_path: Path, place: str) -> None:
    """Retention removes what it may beside the leased step, and that step as soon as the lease is closed."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2, 3)
    with lease_step(folder, 1, holder="evaluation") as lease:
        assert collect_newest(folder) == [2]
        assert lease.is_held
        assert folders.is_intact(lease.path, 1)
    assert not lease.is_held
    assert collect_newest(folder) == [1]
    assert folders.names_in(tmp_path / "run") - {folders.HOLDS if place != "{}" else ""} == {"step-3"}


def test_the_newest_is_leased_by_default(tmp_path: Path) -> None:
    """An evaluation that names no step holds the newest one that can be loaded, and no damaged one."""
    folders.save_all(tmp_path, 1, 2, 3)
    folders.damage(tmp_path / "step-3")
    with lease_step(tmp_path) as lease:
        assert lease.step == 2
    assert folders.names_in(tmp_path) == {"step-1", "step-2", "step-3"}


def test_a_lease_that_cannot_be_renewed_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started to renew a lease, that is an error, and the step may go."""
    folders.save_all(tmp_path, 1, 2)
    refuse_threads(monkeypatch)
    with pytest.raises(RuntimeError, match="thread"):
        lease_step(tmp_path, 1)
    assert find_holds(tmp_path) == {}


@table(("left", "removed"), [(60.0, [2]), (-1.0, [1, 2])])
def test_the_lease_of_another_host_lasts_until_its_time(
    tmp_path: Path, clock: Clock, left: float, removed: list[int]
) -> None:
    """Where nobody can see whether the holder is alive, the time that it wrote decides."""
    folders.save_all(tmp_path, 1, 2, 3)
    hold = Hold(directory="step-1", kind="lease", holder="far", until=clock.now + left, owner=ELSEWHERE)
    folders.steps_of(tmp_path).holds.put(f"step-1.lease.{'0' * 32}.json", hold)
    assert collect_newest(tmp_path) == removed


def test_a_living_process_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease outlives the time that it was made for while its process lives."""
    folders.save_all(tmp_path, 1, 2)
    folder, renewed = folders.steps_of(tmp_path), threading.Event()
    waits: list[tuple[float | None, float | None]] = []

    class Clock(threading.Event):
        """Lets the first wait of a lease end at once, by its time; notes how long each lease is by then."""

        def wait(self, timeout: float | None = None) -> bool:
            ((hold,),) = folder.holds.find().values()
            waits.append((timeout, hold.until))
            if len(waits) == 1:
                return False
            renewed.set()
            return super().wait()

    monkeypatch.setattr("shardckpt.manager.holds.threading", SimpleNamespace(Event=Clock, Thread=threading.Thread))
    with Lease(folder, 1, "reader", seconds=3600) as lease:
        assert renewed.wait(60)
        assert lease.is_held
    (first, before), (second, after) = waits
    assert first == second == 1200
    assert before < after


def test_of_a_lease_and_a_removal_one_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun at the same moment, either the reader has the whole step, or it is told that the step is gone."""
    folders.save_all(tmp_path, 1, 2, 3)
    leases: list[Lease] = []
    removing, put = Holds.removing, Holds.put

    def lease_and_remove(holds: Holds, name: str, *arguments: Any) -> Any:
        if name == "step-1":  # which was chosen when nothing held it
            leases.append(lease_step(tmp_path, 1))
        return removing(holds, name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Holds, "removing", lease_and_remove)
        assert collect_newest(tmp_path) == [2]
    assert folders.is_intact(leases[0].path, 1)
    leases[0].close()

    def put_late(holds: Holds, *arguments: Any) -> None:
        monkeypatch.undo()
        assert collect_newest(tmp_path) == [1]
        put(holds, *arguments)

    monkeypatch.setattr(Holds, "put", put_late)
    with pytest.raises(CannotLoadError):
        lease_step(tmp_path, 1)
    assert folders.names_in(tmp_path) == {"step-3"}


def test_a_removal_under_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that finds the mark of a removal waits; when the removal gave way, it has the step."""
    folders.save_all(tmp_path, 1, 2)
    waits, gave_way = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        waits.set()
        assert gave_way.wait(60)

    monkeypatch.setattr("time.sleep", sleep)
    holds = folders.steps_of(tmp_path).holds
    with holds.removing("step-1") as held:
        assert held == []
        thread = threading.Thread(target=lambda: lease_step(tmp_path, 1).close())
        thread.start()
        assert waits.wait(60)
        assert thread.is_alive()
    gave_way.set()
    thread.join()
    assert collect_newest(tmp_path) == [1]


@folders.PLACES
def test_a_pinned_step_stays_until_it_is_unpinned(tmp_path: Path, place: str) -> None:
    """Every pin must be taken away; one label is one pin; prune says by which label a step is kept."""
    folder = place.format(tmp_path / "run")
    folders.save_all(folder, 1, 2, 3)
    for label in ("release 1.2", "paper", "paper"):
        pin_step(folder, 1, label)
    results = {result.step: result for result in prune_steps(folder, NEWEST)}
    assert sorted(results[1].kept.split(", ")) == ["pinned as 'paper'", "pinned as 'release 1.2'"]
    assert (results[2].kept, results[2].error, results[3].kept) == (
        "",
        "",
        "it is the newest, among the newest 1",
    )
    unpin_step(folder, 1, "paper")
    assert collect_newest(folder) == []
    unpin_step(folder, 1, "release 1.2")
    unpin_step(folder, 1, "release 1.2")
    assert collect_newest(folder) == [1]


def test_what_cannot_be_held_is_an_error(tmp_path: Path) -> None:
    """A step that is not there, a pin without a label, and too short a lease are refused, and write nothing."""
    folders.save_all(tmp_path, 1)
    with pytest.raises(CannotLoadError, match="step 7 cannot be loaded"):
        lease_step(tmp_path, 7)
    with pytest.raises(CannotLoadError, match="step 7 cannot be loaded"):
        pin_step(tmp_path, 7, "x")
    with pytest.raises(CheckpointingException, match="needs a label"):
        pin_step(tmp_path, 1, " ")
    with pytest.raises(CheckpointingException, match=r"give 3\.0 or more"):
        lease_step(tmp_path, 1, seconds=1)
    for seconds in (float("nan"), float("inf"), 1e300):
        with pytest.raises(CheckpointingException, match="at most"):
            lease_step(tmp_path, 1, seconds=seconds)
    with pytest.raises(CheckpointingException, match="no checkpoint to lease"):
        lease_step(tmp_path / "empty")
    for step in (True, 1.5, None, [1]):
        with pytest.raises(CheckpointingException, match="is no step; give its number, or the name of its directory"):
            pin_step(tmp_path, step, "x")  # type: ignore[arg-type]
    assert folders.names_in(tmp_path) == {"step-1"}


def test_numpys_step_is_pinned_and_leased(tmp_path: Path) -> None:
    """A number of an array is a step as Python's is."""
    folders.save_all(tmp_path, 1)
    pin_step(tmp_path, np.int64(1), "x")  # type: ignore[arg-type]
    with lease_step(tmp_path, np.int64(1)):  # type: ignore[arg-type]
        assert [hold.holder for hold in find_holds(tmp_path)["step-1"] if hold.kind == "pin"] == ["x"]


def test_a_step_that_cannot_be_looked_at_is_not_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system is one of the family, with the step's path, and there is no pin."""
    folders.save_all(tmp_path, 1)

    def fail(path: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_symlink", fail)
        with pytest.raises(StorageError, match=rf"{tmp_path}/step-1: .* \(EIO\)"):
            pin_step(tmp_path, 1, "release 1.2")
    assert find_holds(tmp_path) == {}


def test_a_hold_that_cannot_be_read_keeps_its_step(tmp_path: Path) -> None:
    """A damaged file says that something held the step: it stays, and prune names the file."""
    folders.save_all(tmp_path, 1, 2)
    place = tmp_path / folders.HOLDS
    place.mkdir()
    file = place / f"step-1.lease.{'0' * 32}.json"
    file.write_text('{"directory": "step-1", "kind"')
    (place / "step-1.other.json").write_text("{}")  # no name of ours
    assert str(file) in prune_steps(tmp_path, NEWEST)[0].kept
    assert collect_newest(tmp_path) == []


def test_a_mark_that_cannot_be_read_holds_its_step_everywhere(tmp_path: Path) -> None:
    """It is a lease to those that list holds, too: a discard removes no step then, and waits for no removal."""
    folders.save_all(tmp_path, 1, 2, 3)
    (tmp_path / folders.HOLDS).mkdir()
    file = tmp_path / folders.HOLDS / f"step-2.removal.{'0' * 32}.json"
    file.write_text("{")
    holds = folders.steps_of(tmp_path).holds
    assert (list(holds.find()), holds.find_removals()) == (["step-2"], set())
    said, left = _discard(str(tmp_path), 1)
    assert "step 2 is held" in said
    assert left == [1, 2, 3]


#: What a person, a later release or a broken disk may have left in a hold's file, but for the field that is odd.
ODD_HOLDS = {
    "an owner that is none": '"until": 99999999999, "owner": "zz"',
    "a longer owner": f'"until": 99999999999, "owner": "{ELSEWHERE}0"',
    "an owner of two lines": f'"until": 99999999999, "owner": "{ELSEWHERE}\\n"',
    "a time that no calendar has": '"until": 1e300',
    "a time before 1970": '"until": -1',
    "NaN": '"until": NaN',
    "a float that is infinite": '"until": 1e999',
    "an integer that no float is": f'"until": {10**400}',
    "a text for a number": '"until": "0"',
    "a truth for a number": '"until": true',
    "two times": '"until": 0, "until": 99999999999',
    "deep lists": f'"until": {"[" * 20_000}',
}


def test_an_odd_hold_stops_no_other_removal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hold that is none keeps its own step and is named; `ls`, `pin`, `prune` and retention go on without it."""
    folders.save_all(tmp_path / "saved", 1, 2, 3)
    for number, (what, odd) in enumerate(ODD_HOLDS.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "saved", folder)
        (folder / folders.HOLDS).mkdir()
        file = folder / folders.HOLDS / f"step-1.lease.{'0' * 32}.json"
        file.write_text(f'{{"directory": "step-1", "kind": "lease", "holder": "x", {odd}}}')
        for verb in (["ls", str(folder)], ["pin", str(folder)], ["prune", str(folder), "--keep-latest", "2"]):
            assert main(verb) == 0, (what, verb)
            assert f"unreadable file, {file}" in capsys.readouterr().out, (what, verb)
        assert collect_newest(folder) == [2], what
        assert folders.is_intact(folder / "step-1", 1), what


def test_a_hold_that_this_machine_cannot_read_keeps_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the system refuses to read, or a directory of such a name, holds its step and stops nothing else."""
    folders.save_all(tmp_path, 1, 2, 3, 4)
    pin_step(tmp_path, 1, "paper")
    (tmp_path / folders.HOLDS / f"step-2.pin.{'0' * 32}.json").mkdir()
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if "step-1.pin" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert collect_newest(tmp_path) == [3]


@table(
    "hold", [Hold(directory="step-2", kind="lease", holder="x"), Hold(directory="step-1", kind="removal", holder="x")]
)
def test_a_hold_that_says_something_else_than_its_name_keeps_the_step_of_its_name(tmp_path: Path, hold: Hold) -> None:
    """Of a file that was renamed or edited by hand, its name counts everywhere, and prune names the file."""
    folders.save_all(tmp_path, 1, 2, 3)
    name = f"step-1.lease.{'0' * 32}.json"
    folders.steps_of(tmp_path).holds.put(name, hold)
    assert list(find_holds(tmp_path)) == ["step-1"]
    results = prune_steps(tmp_path, NEWEST)
    assert name in results[0].kept
    assert (results[1].kept, results[1].error) == ("", "")
    assert folders.steps_of(tmp_path).steps() == [1, 3]


def test_a_store_that_does_not_answer_is_not_one_without_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a lease cannot be read, nothing is removed: the step may be held."""
    (tmp_path / "run").mkdir()
    folder = f"faulty://{tmp_path}/run"
    folders.save_all(folder, 1, 2)
    monkeypatch.setenv("SHARDCKPT_REMOTE_ATTEMPTS", "1")
    read = FaultyFileSystem.cat_file

    def fail(self: Any, path: str, *args: Any, **kwargs: Any) -> bytes:
        if folders.HOLDS in path:
            raise ConnectionError("no answer")
        return read(self, path, *args, **kwargs)

    with lease_step(folder, 1):
        monkeypatch.setattr(FaultyFileSystem, "cat_file", fail)
        with pytest.raises(StorageError, match="no answer"):
            collect_newest(folder)
        monkeypatch.setattr(FaultyFileSystem, "cat_file", read)
        assert collect_newest(folder) == []
        assert folders.is_intact(f"{folder}/step-1", 1)


def test_pin_and_unpin_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`shardckpt pin` keeps a step under a label, lists what is held, and takes it away."""
    folders.save_all(tmp_path, 1, 2)
    assert main(["pin", str(tmp_path), "1", "--label", "release"]) == 0
    assert main(["pin", str(tmp_path)]) == 0
    assert "step-1  pinned as 'release'" in capsys.readouterr().out
    assert main(["ls", str(tmp_path)]) == 0
    assert "whole, pinned as 'release'" in capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert "kept: pinned as 'release'" in capsys.readouterr().out
    assert main(["pin", str(tmp_path), "1", "--label", "release", "--remove"]) == 0
    assert collect_newest(tmp_path) == [1]


def test_a_label_needs_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`pin FOLDER STEP LABEL` is the same as with --label; two labels are an error."""
    folders.save_all(tmp_path, 1)
    assert main(["pin", str(tmp_path), "1", "the release"]) == 0
    assert capsys.readouterr().out == "1 is pinned as 'the release'\n"
    with pytest.raises(SystemExit):
        main(["pin", str(tmp_path), "1", "one", "--label", "two"])
    assert "two labels are given, 'one' and 'two'" in capsys.readouterr().err


def _discard(folder: str, step: int) -> tuple[Any, list[int]]:
    with CheckpointManager(
        CheckpointConfig(folder=folder, latest_pointer="latest"), {"progress": Progress()}
    ) as manager:
        try:
            said: Any = manager.discard_after(step)
        except CheckpointingException as exc:
            said = str(exc)
        return said, manager.steps()


def test_what_came_after_a_rewind_is_discarded(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks learn which steps are gone; the pointer names the newest that is left; a restart loads that one."""
    folders.save_all(tmp_path, 10, 20, 30, 40)
    assert ranks.run(2, _discard, str(tmp_path), 20) == [([30, 40], [10, 20])] * 2
    assert (tmp_path / "latest").read_text() == "step-20\n"
    assert ranks.run(2, _discard, str(tmp_path), 20) == [([], [10, 20])] * 2


def test_a_discard_that_would_lose_something_removes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Held later steps, and a rewind to before the first checkpoint, are the same error on all ranks."""
    folders.save_all(tmp_path, 10, 20, 30)
    pin_step(tmp_path, 20, "paper")
    for step, text in ((10, "step 20 is pinned as 'paper'"), (5, "no step up to 5 can be loaded")):
        for said, left in ranks.run(2, _discard, str(tmp_path), step):
            assert text in said
            assert left == [10, 20, 30]


def test_the_pointer_names_the_newest_durable_step(tmp_path: Path) -> None:
    """While a step is being written the file names the one before it; a name of a step is refused."""
    config = CheckpointConfig(folder=tmp_path, interval=1, async_mode="async", latest_pointer="latest", keep_latest_k=2)
    with CheckpointManager(config, {"progress": Progress()}) as manager:
        for step in range(1, 5):
            manager.save(step)
            if step > 1:
                assert (tmp_path / "latest").read_text() == f"step-{step - 1}\n"
        manager.wait()
        assert (tmp_path / "latest").read_text() == "step-4\n"
    assert folders.names_in(tmp_path) == {"step-3", "step-4", "latest"}
    with pytest.raises(ValueError, match="is the name of a step's directory"):
        CheckpointConfig(latest_pointer="step-3")
