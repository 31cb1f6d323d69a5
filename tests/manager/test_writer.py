"""A save over a step that somebody holds: a rollback saves its number again."""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager, find_holds, lease_step, pin_step, unpin_step
from shardckpt.manager.marks import identify_save, mark_checkpoint
from tests import backends
from tests.damage import flip
from tests.manager import folders
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

STEPS = (1, 2, 3)


@contextlib.contextmanager
def _pinned(folder: str, step: int) -> Any:
    pin_step(folder, step, "release 1.2")
    yield "pinned as 'release 1.2'"
    unpin_step(folder, step, "release 1.2")


@contextlib.contextmanager
def _leased(folder: str, step: int) -> Any:
    with lease_step(folder, step, holder="evaluation"):
        yield "leased by evaluation until "


def _history(manager: CheckpointManager, progress: Progress, step: int) -> list[int]:
    """What a step has."""
    assert manager.load(step)
    return progress.history


@folders.PLACES
@pytest.mark.parametrize("hold", [_pinned, _leased])
@backends.both_in_proof
def test_a_held_step_is_not_saved_anew(
    tmp_path: Path, place: str, hold: Callable[[str, int], contextlib.AbstractContextManager[str]]
) -> None:
    """After a rollback the save of a pinned step, or of one that this process leases, is an error with the holder."""
    folder = place.format(tmp_path / "run")
    progress = Progress()
    config = CheckpointConfig(folder=folder, interval=1, keep_latest_k=0, save_rng=False)
    with CheckpointManager(config, {"train_state": progress}) as manager:
        for step in STEPS:
            progress.history = [step]
            manager.save(step)
        with hold(folder, 2) as text:
            manager.load(1)
            progress.history = [9]
            with pytest.raises(CheckpointingException) as error:
                manager.save(2)
            assert f"step-2 is {text}" in str(error.value)
            assert "unpin_step" in str(error.value)
            assert _history(manager, progress, 2) == [2]
        assert not find_holds(folder)
        progress.history = [9]
        assert manager.save(2)
        assert _history(manager, progress, 2) == [9]


def _save_again(folder: str, mode: str) -> list[Any]:
    config = CheckpointConfig(folder=folder, interval=1, keep_latest_k=0, async_mode=mode)
    progress = Progress()
    with CheckpointManager(config, {"progress": progress}) as manager:
        progress.history = [9]
        said = folders.error_of(manager.save, 2)
        return [*said, _history(manager, progress, 2)]


def _save_first(folder: str) -> None:
    with CheckpointManager(CheckpointConfig(folder=folder, interval=1), {"progress": Progress()}) as manager:
        for step in STEPS:
            manager.save(step)


@folders.PLACES
@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.ci)])
def test_all_ranks_learn_what_holds_a_step(ranks: Ranks, tmp_path: Path, place: str, mode: str) -> None:
    """The error is the same on every rank, before anything is written, also of a save in the background."""
    folder = place.format(tmp_path / "run")
    ranks.run(2, _save_first, folder)
    pin_step(folder, 2, "paper")
    before = folders.names_in(tmp_path / "run" / "step-2")
    (kind, text, history), other = ranks.run(2, _save_again, folder, mode)
    assert (kind, history) == ("CheckpointingException", [])
    assert "step-2 is pinned as 'paper'" in text
    assert other == [kind, text, history]
    assert folders.names_in(tmp_path / "run" / "step-2") == before


def _mark(step: Path) -> None:
    mark_checkpoint(step, identify_save(step), "failed", checked="digests", files=1, faults=["a bit is flipped"])


def _lose_bytes(step: Path) -> None:
    os.truncate(step / "metadata.json", 1)


def _flip(step: Path) -> None:
    flip(step / backends.data_file(0), 100)


@folders.PLACES
@table(
    "harm, text",
    [
        (folders.damage, rf"damaged \(\S+/step-2: .*{backends.data_file(0)} has \d+ bytes"),
        (_lose_bytes, r"damaged \(\S+/step-2/metadata.json is damaged: "),
        (_flip, r"damaged \(\S.* are not those that were written"),
        (_mark, r"damaged \(marked failed on \S+ by digests: a bit is flipped"),
        (partial(folders.say_backend, backend="nobodys", version=1), r"no readable checkpoint \(.*reads that backend"),
    ],
)
def test_a_damaged_step_is_not_replaced_in_silence(
    tmp_path: Path, place: str, harm: Callable[[Path], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what was wrong, whether a load has met it or not; of a whole step there is none."""
    said = []
    for is_loaded in (True, False):
        run = tmp_path / f"run-{is_loaded}"
        config = CheckpointConfig(folder=place.format(run), interval=1, keep_latest_k=0, save_rng=False)
        with CheckpointManager(config, {"train_state": Progress()}) as manager:
            manager.save(1)
            manager.save(2)
        harm(run / "step-2")
        with CheckpointManager(config, {"train_state": Progress()}) as manager:
            if is_loaded and "readable" not in text:  # it would be an error
                assert manager.load()
                assert manager.loaded_step == 1
            caplog.clear()
            assert manager.save(2)
            assert manager.save(2, last_step=True)
        said += [each.getMessage() for each in caplog.records if "and is replaced by this save" in each.getMessage()]
        assert "are kept" not in caplog.text
    assert len(said) == (1 if harm is _flip else 2)
    for line in said:
        assert re.match(f"step 2 is {text}.*\\), and is replaced by this save$", line)


def test_another_librarys_step_on_a_store_is_not_deleted_while_it_is_held(tmp_path: Path) -> None:
    """What a save cannot overwrite there it deletes first, but nothing that is pinned."""
    folder = f"local://{tmp_path}/run"
    config = CheckpointConfig(folder=folder, interval=1, keep_latest_k=0, save_rng=False)
    with CheckpointManager(config, {"progress": Progress()}) as manager:
        manager.save(1)
        (tmp_path / "run" / "step-1" / "shardckpt.json").unlink()
        pin_step(folder, 1, "theirs")
        before = folders.names_in(tmp_path / "run" / "step-1")
        manager.load(1)
        with pytest.raises(CheckpointingException, match="step-1 is pinned as 'theirs'"):
            manager.save(1)
        assert folders.names_in(tmp_path / "run" / "step-1") == before
        unpin_step(folder, 1, "theirs")
        assert manager.save(1)
        assert "shardckpt.json" in folders.names_in(tmp_path / "run" / "step-1")


def test_a_step_that_is_a_link_is_held_by_its_name(tmp_path: Path) -> None:
    """The pin is beside the link, and the save would replace what it leads to."""
    folder = tmp_path / "run"
    progress = Progress()
    config = CheckpointConfig(folder=folder, interval=1, keep_latest_k=0, save_rng=False)
    with CheckpointManager(config, {"progress": progress}) as manager:
        manager.save(1)
        (folder / "step-1").rename(tmp_path / "elsewhere")
        (folder / "step-1").symlink_to(tmp_path / "elsewhere")
        pin_step(folder, 1, "paper")
        manager.load(1)
        progress.history = [9]
        with pytest.raises(CheckpointingException, match="step-1 is pinned as 'paper'"):
            manager.save(1)
        assert _history(manager, progress, 1) == []
