from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.distributed.comm import Comm
from shardckpt.errors import (
    CannotLoadError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
    UnknownBackendError,
)
from shardckpt.manager import CheckpointConfig, CheckpointManager, step_resolution, steps
from shardckpt.manager.step_resolution import resolve_step
from shardckpt.manager.steps import StepFolder
from tests import backends
from tests.manager import folders
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _agree(folder: str, step: int = -1, **options: Any) -> int | None:
    """The answer of this rank, which sees ``folder``."""
    return resolve_step(folders.steps_of(folder), Comm(), step, **options)


def _error(folder: str, step: int = -1) -> tuple[str, str]:
    return folders.error_of(_agree, folder, step)


def _disagree(folder: str) -> tuple[str, str]:
    return folders.error_of(_agree, folder, folders.rank())


def _with_own_view(folder: str) -> int | None:
    """Only the main rank sees the folder as it is."""
    return _agree(folder if folders.rank() == 0 else f"{folder}/none")


@backends.both_in_proof
@pytest.mark.parametrize("world_size", [2, *in_proof(1, 4)])
def test_all_ranks_get_the_newest_step(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """By number, and none where there is none; what is no checkpoint is passed over."""
    assert ranks.run(world_size, _agree, str(tmp_path / "new")) == [None] * world_size
    folders.save_all(tmp_path, 9, 10, 2)
    for name in folders.FOREIGN:
        (tmp_path / name).mkdir()
    assert ranks.run(world_size, _agree, str(tmp_path)) == [10] * world_size
    assert ranks.run(world_size, _agree, str(tmp_path), 2) == [2] * world_size


@backends.both_in_proof
def test_one_rank_looks_and_the_others_hear(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that see another listing than the main rank, as on slow file systems, get the same answer."""
    folders.save(tmp_path, 4)
    assert ranks.run(3, _with_own_view, str(tmp_path)) == [4, 4, 4]


@backends.both_in_proof
def test_a_damaged_newest_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next one is taken, and the log says what is wrong with the newer ones."""
    folders.save_all(tmp_path, 1, 2, 3)
    folders.damage(tmp_path / "step-3")
    folders.lose_marker(tmp_path / "step-2")
    with caplog.at_level(logging.WARNING):
        assert _agree(str(tmp_path)) == 1
    damaged, unfinished = (record.getMessage() for record in caplog.records)
    assert f"step 3 in {tmp_path} is skipped, damaged: " in damaged
    assert f"{backends.data_file(0)} has" in damaged
    assert f"step 2 in {tmp_path} is skipped, not a complete checkpoint: " in unfinished


@table("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_newest_step_that_cannot_be_read_is_not_passed_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that the file system refuses to read may be whole: it is an error, with the step that can be loaded."""
    folders.save_all(tmp_path, 1, 2)
    whole_open = os.open

    def refuse(path: Any, *args: Any, dir_fd: int | None = None) -> int:
        folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        if str(folder / path).endswith("step-2/metadata.json"):
            raise OSError(number, os.strerror(number), str(path))
        return whole_open(path, *args, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=rf"step 2 .* may be whole, .*{errno.errorcode[number]}.*load\(step=1\)"):
        _agree(str(tmp_path))


@backends.both_in_proof
def test_what_was_found_damaged_is_not_given_again(tmp_path: Path) -> None:
    """A load that has met damage asks again, and is given the next step; when none is left it is told so."""
    folders.save_all(tmp_path, 1, 2)
    assert _agree(str(tmp_path), without=[2]) == 1
    with pytest.raises(CorruptCheckpointError, match=r"no checkpoint there can be loaded, and 2 are damaged"):
        _agree(str(tmp_path), without=[2, 1])


@backends.both_in_proof
def test_damage_does_not_begin_the_training_anew(tmp_path: Path) -> None:
    """Where all there is is damaged, that is an error; where all there is never was a checkpoint, it is not."""
    folders.save_all(tmp_path, 1, 2)
    folders.lose_marker(tmp_path / "step-2")
    folders.damage(tmp_path / "step-1")
    with pytest.raises(CorruptCheckpointError, match=r"1 are damaged .* move them away"):
        _agree(str(tmp_path))
    folders.lose_marker(tmp_path / "step-1")
    assert _agree(str(tmp_path)) is None


@backends.both_in_proof
def test_what_nothing_reads_is_not_passed_over(ranks: Ranks, tmp_path: Path) -> None:
    """A newest checkpoint that needs another plugin is an error on all ranks: an older one would lose steps."""
    folders.save_all(tmp_path, 1, 2)
    folders.say_backend(tmp_path / "step-2", "nobodys", 1)
    for kind, message in ranks.run(2, _error, str(tmp_path)):
        assert kind == "UnknownBackendError"
        assert "no installed plugin reads that backend" in message
    with pytest.raises(UnknownBackendError, match="step 2 cannot be loaded"):
        _agree(str(tmp_path), 2)
    assert _agree(str(tmp_path), 1) == 1


@backends.both_in_proof
def test_a_certain_step_that_is_missing_is_an_error(ranks: Ranks, tmp_path: Path, backend: backends.Backend) -> None:
    """All ranks raise it, and it lists the other steps that there are once, with the nearest."""
    folders.save_all(tmp_path, 1, 20)
    errors = ranks.run(2, _error, str(tmp_path), 7)
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "NotACheckpointError"
    there = f"in {tmp_path} there are the steps 1, 20; the newest whole one before it is 1: manager.load(step=1)"
    assert message.endswith(f"step 7 cannot be loaded: it does not exist\n{there}")
    with pytest.raises(NotACheckpointError, match=r"not exist\nin .* the steps 1, 20; the nearest is 1$"):
        _agree(str(tmp_path), 0)
    folders.lose_marker(tmp_path / "step-20")
    with pytest.raises(IncompleteCheckpointError, match=r"the other steps 1; the .*") as caught:  # not the refused one
        _agree(str(tmp_path), 20)
    # without the marker, the index of one format alone says which bytes there must be
    then = {
        "torch_dist": f"`shardckpt prune {tmp_path} --damaged` removes such steps",
        "safetensors": "the data is all there",
    }
    assert f"step-20` says what is damaged; {then[backend.name]}" in str(caught.value)
    assert "the newest whole one before it is 1: manager.load(step=1)" in str(caught.value)
    with pytest.raises(NotACheckpointError, match="there are no steps"):
        _agree(str(tmp_path / "new"), 7)


@backends.both_in_proof
def test_a_certain_step_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    """No other step is taken for it: the error says whether it is damaged, or was never committed."""
    folders.save_all(tmp_path, 1, 2, 3)
    folders.damage(tmp_path / "step-2")
    folders.lose_marker(tmp_path / "step-3")
    with pytest.raises(CorruptCheckpointError, match="step 2 cannot be loaded"):
        _agree(str(tmp_path), 2)
    with pytest.raises(IncompleteCheckpointError, match="step 3 cannot be loaded"):
        _agree(str(tmp_path), 3)


def test_a_certain_step_that_can_be_mended_says_how(tmp_path: Path) -> None:
    """Where no data is lost, the error names the conversion that writes the step anew, and no removal."""
    folders.save_all(tmp_path, 10, 20)
    (tmp_path / "step-20" / ".metadata").unlink()
    error = _error(str(tmp_path), 20)[1]
    assert "the data is all there, by the sizes of its files" in error
    assert f": `shardckpt convert {tmp_path / 'step-20'} NEW` writes the checkpoint anew" in error
    assert "prune" not in error


class DriverError(CannotLoadError):
    """A plugin's class whose constructor takes no text."""

    def __init__(self, *, driver: str) -> None:
        super().__init__(f"the driver {driver} is missing")
        self.driver = driver


@backends.both_in_proof
@table(("step", "text"), [(-1, "the driver x"), (1, "step 1 cannot be loaded: the driver x")])
def test_a_plugins_refusal_keeps_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, text: str
) -> None:
    """A refusal of a class whose constructor takes other arguments is raised as itself, with its attributes."""

    def refuse(*_: Any) -> None:
        raise DriverError(driver="x")

    folders.save(tmp_path, 1)
    monkeypatch.setattr(steps, "choose_reader", refuse)
    with pytest.raises(DriverError, match=text) as caught:
        _agree(str(tmp_path), step)
    assert caught.value.driver == "x"


@backends.both_in_proof
@pytest.mark.usefixtures("no_pauses")
def test_an_interrupted_overwrite_is_explained(tmp_path: Path) -> None:
    """A step that an overwrite had moved aside is named, with the way back."""
    folders.save(tmp_path, 3)
    (tmp_path / "step-3").rename(tmp_path / f".step-3.shardckpt-replaced-{'0' * 32}")
    with pytest.raises(CannotLoadError, match=r"a complete checkpoint is at .*rename it to step-3"):
        _agree(str(tmp_path), 3)


@backends.both_in_proof
def test_ranks_that_ask_for_different_steps_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """All raise the same error, which names the ranks."""
    folders.save_all(tmp_path, 0, 1)
    for kind, message in ranks.run(2, _disagree, str(tmp_path)):
        assert kind == "CheckpointingException"
        assert "ranks disagree on step: 0 on rank 0, 1 on rank 1" in message


def _save_steps(folder: Path, names: dict[int, str]) -> None:
    """Save steps with some of the states of :func:`_build`."""
    for step, states in names.items():
        with CheckpointManager(CheckpointConfig(folder=folder, keep_latest_k=0), _build(*states.split())) as manager:
            manager.save(step, force=True)


def _build(*names: str) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return {name: each for name, each in (("model", model), ("optimizer", optimizer)) if name in names}


def _load_error(folder: str, names: tuple[str, ...]) -> str:
    with CheckpointManager(CheckpointConfig(folder=folder), _build(*names)) as manager:
        return folders.error_of(manager.load)[1]


def test_the_step_with_the_missing_states_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """A newest step without the optimizer is refused with the newest sound step that has it, by the metadata alone."""
    _save_steps(tmp_path, {20: "model optimizer", 40: "model optimizer", 45: "model optimizer", 50: "model"})
    folders.damage(tmp_path / "step-45")
    for text in ranks.run(2, _load_error, str(tmp_path), ("model", "optimizer")):
        assert text.endswith("\nstep 40 has 'optimizer': manager.load(step=40)")


def test_a_folder_that_cannot_be_listed_replaces_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search for an older step fails, the error is still that of the missing states, without advice."""
    _save_steps(tmp_path, {40: "model optimizer", 50: "model"})

    def fail(_: StepFolder) -> list[int]:
        raise StorageError("stale file handle")

    def find_then_fail(*_: object) -> int:
        monkeypatch.setattr(StepFolder, "steps", fail)
        return 50

    monkeypatch.setattr(step_resolution, "find_newest", find_then_fail)
    text = _load_error(str(tmp_path), ("model", "optimizer"))
    assert "optimizer" in text
    assert "manager.load" not in text
    assert "stale" not in text


def test_no_step_is_named_for_states_that_none_has(tmp_path: Path) -> None:
    """A state that no older step has is new, and the error says how to begin with it."""
    _save_steps(tmp_path, {40: "model", 50: "model"})
    text = _load_error(str(tmp_path), ("model", "optimizer"))
    assert "manager.load" not in text
    assert "exclude_from_loading" in text


@table(
    ("below", "said"),
    [
        ("epoch_3/metadata.json", "it has epoch_3, and the names of steps are step-<n>"),
        ("epoch_3/.metadata", "it has epoch_3, and the names of steps are step-<n>"),
        (".metadata", "it is a checkpoint itself"),
        ("logs/epoch_3/.metadata", None),
        ("step-3/__0_0.distcp", None),
    ],
    ids=["other name", "of another library", "itself", "further below", "a save that did not end"],
)
def test_a_start_from_the_beginning_beside_other_checkpoints_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, below: str, said: str | None
) -> None:
    """A folder without a step that has checkpoints by other names, or is one, is a warning with what loads them."""
    caplog.clear()
    path = tmp_path / "runs" / below
    path.parent.mkdir(parents=True)
    path.touch()
    with CheckpointManager(CheckpointConfig(folder=tmp_path / "runs"), _build("model")) as manager:
        assert not manager.load()
    found = [record.message for record in caplog.records if "has no step" in record.message]
    assert len(found) == (said is not None)
    assert said is None or (said in found[0] and "initial_load_path=" in found[0])


def test_few_folders_are_looked_into_at_a_start_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder without a step, none that it has is listed, and twenty are looked into, however many there are."""
    for number in range(50):
        (tmp_path / f"epoch_{number}").mkdir()
    looked_at, listed = set(), []
    isfile, scandir = os.path.isfile, os.scandir
    monkeypatch.setattr(os.path, "isfile", lambda path: looked_at.add(Path(path).parent) or isfile(path))
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path)) or scandir(path))
    step_resolution.warn_of_others(folders.steps_of(tmp_path))
    assert listed == [tmp_path]
    assert len(looked_at - {tmp_path}) == 20
