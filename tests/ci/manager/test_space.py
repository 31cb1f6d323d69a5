"""A CheckpointManager on a disk that is nearly full."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import NotEnoughSpaceError
from shardckpt.manager import CheckpointConfig, CheckpointManager, garbage_collection, pin_step
from shardckpt.manager.garbage_collection import GarbageCollector
from shardckpt.manager.marks import identify_save, mark_checkpoint
from shardckpt.settings import SPACE_CHECK
from tests.faults.disks import small_disk
from tests.plugged import registered
from tests.plugins.manager import Recorder

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _make_manager(folder: Path | str, **options: Any) -> CheckpointManager:
    """A manager whose checkpoints have 1 MiB."""
    config = CheckpointConfig(folder=str(folder), interval=1, **options)
    model = torch.nn.Linear(512, 512, bias=False)
    torch.nn.init.ones_(model.weight)  # the same on every rank
    return CheckpointManager(config, {"model": model})


@pytest.mark.parametrize(
    ("mode", "kept", "size"), [("disabled", 1, "2500k"), pytest.param("async", 2, "3500k", marks=pytest.mark.proof)]
)
def test_a_save_waits_for_removals_that_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, kept: int, size: str
) -> None:
    """Where old steps are still being removed, the next save waits for their space; it is not refused."""
    collect, wait, is_waited_for = garbage_collection.collect_garbage, GarbageCollector.wait, threading.Event()

    def collect_late(*arguments: Any, **options: Any) -> list[int]:
        assert is_waited_for.wait(60)
        return collect(*arguments, **options)

    def wait_and_say(collector: GarbageCollector) -> None:
        is_waited_for.set()
        wait(collector)

    monkeypatch.setattr(garbage_collection, "collect_garbage", collect_late)
    monkeypatch.setattr(GarbageCollector, "wait", wait_and_say)
    with (
        small_disk(tmp_path / "disk", size) as disk,
        _make_manager(disk, keep_latest_k=kept, async_mode=mode) as manager,
    ):
        for step in range(1, kept + 2):
            assert manager.save(step)
            assert not is_waited_for.is_set()
        assert manager.save(kept + 2)
        assert is_waited_for.is_set()
        manager.wait()
        assert manager.steps() == list(range(3, kept + 3))


def _save_three(directory: str) -> list[int]:
    with registered(Recorder()) as recorder, _make_manager(directory, keep_latest_k=2, on_full="prune") as manager:
        steps = [step for step in (1, 2, 3) if manager.save(step)] and manager.steps()
    assert "failure" not in {event.state for event in recorder.events}
    return steps


TRIED = r"on_full='prune' was tried, and may remove none .*: step 1 \(1.1 MB: it is the newest, .*, pinned as 'paper'"


def test_a_full_disk_is_pruned_first_if_asked(ranks: Ranks, tmp_path: Path) -> None:
    """With on_full="prune" the oldest step goes before the save that has no space, which is no failed one."""
    with small_disk(tmp_path / "disk", "2700k") as disk:
        assert ranks.run(2, _save_three, str(disk)) == [[2, 3], [2, 3]]
    with small_disk(tmp_path / "other", "1500k") as disk, _make_manager(disk, keep_latest_k=1, on_full="prune") as one:
        assert one.save(1)
        pin_step(disk, 1, "paper")
        with pytest.raises(NotEnoughSpaceError, match=TRIED):
            one.save(2)
        assert one.steps() == [1]


def _save_and_wait(manager: CheckpointManager, step: int) -> bool:
    saved = manager.save(step)
    manager.wait()
    return saved


def _save_five(directory: str, mode: str) -> tuple[list[bool], list[int], str]:
    """Save five times where two fit, which only the write itself finds."""
    with (
        pytest.MonkeyPatch.context() as patched,
        _make_manager(directory, max_failed_saves=2, async_mode=mode, keep_latest_k=2) as manager,
    ):
        patched.setenv(SPACE_CHECK, "0")
        saved = [_save_and_wait(manager, step) for step in (1, 2, 3, 4)]
        with pytest.raises(NotEnoughSpaceError) as caught:
            _save_and_wait(manager, 5)
        return saved, manager.steps(), str(caught.value)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_ranks_go_on_without_the_same_saves(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """With max_failed_saves=2, all ranks tolerate two failures on a full disk; the third is one error on all.

    It says what could go, as that of a save that is refused before it writes.
    """
    with small_disk(tmp_path / "disk", "2700k") as disk:
        begun = mode == "async"  # then it fails later
        first, second = ranks.run(2, _save_five, str(disk), mode)
    assert first[:2] == ([True, True, begun, begun], [1, 2])
    assert first == second
    end = r"\(ENOSPC\)\. To make space: remove step 1 \(1\.1 MB\), which .* once step 5 is complete; on_full=.*\.$"
    assert re.search(end, first[2])


def _save_where_writes_find_no_space(directory: str, mode: str) -> tuple[list[bool], list[int], list[str]]:
    with (
        pytest.MonkeyPatch.context() as patched,
        registered(Recorder()) as recorder,
        _make_manager(directory, max_failed_saves=1, async_mode=mode, keep_latest_k=2, on_full="prune") as manager,
    ):
        patched.setenv(SPACE_CHECK, "0")
        saved = [_save_and_wait(manager, step) for step in (1, 2, 3, 4)]
        return saved, manager.steps(), [event.failed_phase for event in recorder.find("failure")]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_ranks_make_room_after_a_write_that_found_none(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """With on_full="prune", all ranks write the step anew; behind the training the next one has the space."""
    with small_disk(tmp_path / "disk", "2700k") as disk:
        first, second = ranks.run(2, _save_where_writes_find_no_space, str(disk), mode)
    assert first == second
    assert first == ([True] * 4, *(([3, 4], []) if mode == "disabled" else ([2, 4], ["writing shards"])))


def test_a_full_disk_does_not_cost_the_newest_sound_step(tmp_path: Path) -> None:
    """With on_full="prune", the step before a newest one that is marked as failed stays until there is another."""
    with small_disk(tmp_path / "disk", "2700k") as disk:
        with _make_manager(disk) as manager:
            assert manager.save(1)
            assert manager.save(2)
        failed = f"{disk}/step-2"
        mark_checkpoint(failed, identify_save(failed), "failed", checked="digests", files=1)
        with _make_manager(disk, keep_latest_k=1, on_full="prune") as manager:
            with pytest.raises(NotEnoughSpaceError):
                manager.save(3)
            assert manager.steps() == [1, 2]


def _broken_policy(steps: Any) -> list[int]:
    if 2 in steps:
        raise ValueError("no idea")
    return list(steps)


def _fill_the_disk(directory: str, options: dict[str, Any], pinned: bool) -> str:
    with _make_manager(directory, **options) as manager:
        assert manager.save(1)
        if pinned and dist.get_rank() == 0:
            pin_step(directory, 1, "best")
        with pytest.raises(NotEnoughSpaceError) as caught:
            manager.save(2)
        assert manager.steps() == [1]
        assert manager.load()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(directory) / "step-1")
        dist.barrier()
        assert manager.save(2)  # what failed can be saved a second time
        return str(caught.value)


@pytest.mark.parametrize(
    ("options", "pinned", "text"),
    [
        ({"keep_latest_k": 1}, True, " MB, pinned as 'best' now), which the retention policies"),
        pytest.param({"keep_latest_k": 1}, False, "remove step 1 (1.1 MB), which", marks=pytest.mark.proof),
        pytest.param({"keep_latest_k": 2}, False, "says how much space old steps would free", marks=pytest.mark.proof),
        pytest.param({"retention": [_broken_policy]}, False, "old steps would free", marks=pytest.mark.proof),
    ],
)
def test_the_error_names_the_steps_that_retention_would_free(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any], pinned: bool, text: str
) -> None:
    """Every rank gets the same error, with the steps that the new one would replace; the training can go on."""
    with small_disk(tmp_path / "disk", "1500k") as disk:
        (message,) = set(ranks.run(2, _fill_the_disk, str(disk), options, pinned))
    assert text in message
    assert ("no longer keep" in message) == (options == {"keep_latest_k": 1})
