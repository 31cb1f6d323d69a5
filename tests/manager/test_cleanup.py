from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt.errors import CheckpointingException
from shardckpt.manager import cleanup_old_checkpoints
from tests.manager import folders
from tests.manager.cleanup import clean
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _error(folder: str, limit: Any) -> tuple[str, str]:
    return folders.error_of(clean, folder, limit)


def _clean_without_local_rank(folder: str) -> tuple[str, str]:
    os.environ.pop("LOCAL_RANK", None)
    return folders.error_of(clean, folder, 1, shared=False)


def _clean_with_limits(folder: str) -> tuple[str, str]:
    return folders.error_of(clean, folder, folders.rank() or None)


def _names_in(folder: Path) -> set[str]:
    return folders.names_in(folder) - {".shardckpt-holds"}  # on a store that has folders, it stays


@table("limit", [None, 0, -1])
def test_no_limit_keeps_all(tmp_path: Path, limit: int | None) -> None:
    """None, 0 and less keep all checkpoints, and so do arguments without a limit or a folder."""
    folders.save_all(tmp_path, 1, 2, 3)
    clean(str(tmp_path), limit)
    cleanup_old_checkpoints(Namespace(output_dir=str(tmp_path)))
    cleanup_old_checkpoints(Namespace())
    assert folders.names_in(tmp_path) == {"step-1", "step-2", "step-3"}


@table("argument", ["output_dir", "save"])
@table("name", ["step-{}", "checkpoint-{}", "iter_{:07d}", "global_step_{}", "epoch_{}"])
def test_every_trainers_names(tmp_path: Path, argument: str, name: str) -> None:
    """Ours, transformers', Megatron's, VeOmni's and epochs' directories are found, in the folder of either argument."""
    folders.save_all(tmp_path, 90, 100, 1000, name=name)
    cleanup_old_checkpoints(training_args=Namespace(**{argument: tmp_path, "save_total_limit": 2}))
    assert folders.names_in(tmp_path) == {name.format(100), name.format(1000)}


def test_checkpoints_lie_in_a_folder_of_that_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MindSpeed's trainers save to output_dir/checkpoints: that is cleaned, output_dir not, and a warning says so."""
    folders.save_all(tmp_path / "checkpoints", 1, 2, 3, name="global_step_{}")
    folders.save_all(tmp_path, 1, 2, name="global_step_{}")
    clean(str(tmp_path), 2)
    assert folders.names_in(tmp_path / "checkpoints") == {"global_step_2", "global_step_3"}
    assert folders.names_in(tmp_path) == {"checkpoints", "global_step_1", "global_step_2"}
    assert f"{tmp_path}: {tmp_path}/checkpoints is the one that is cleaned" in caplog.text


def test_a_folder_on_a_store_has_its_checkpoints_below(tmp_path: Path) -> None:
    """A URL as output_dir is looked into in the same way."""
    url = f"local://{tmp_path}/run"
    folders.save_all(f"{url}/checkpoints", 1, 2, 3)
    clean(url, 1)
    assert folders.steps_of(f"{url}/checkpoints").steps() == [3]


def test_what_is_left_is_said_once_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other names, links, and what is no whole checkpoint stay, and a warning says why, at the first call only."""
    place = tmp_path / "checkpoints"
    folders.save_all(place, 1, 2, 3)
    folders.save(place, 7, "best_7")
    folders.damage(place / "step-1")
    (place / "checkpoint-5").mkdir()
    (place / "checkpoint-5" / "model.bin").touch()
    (place / "step-9").symlink_to(place / "step-3")
    clean(str(tmp_path), 1)
    assert folders.names_in(place) == {"step-1", "step-3", "step-9", "best_7", "checkpoint-5"}
    said = {line.strip().partition(": ")[0]: line for line in caplog.text.splitlines()[1:]}
    assert said.keys() == {str(place / name) for name in ("step-1", "step-9", "best_7", "checkpoint-5")}
    assert (
        "not a step's (step-<n>, checkpoint-<n>, iter_<n>, global_step_<n>, epoch_<n>)" in said[str(place / "best_7")]
    )
    assert "it is a link" in said[str(place / "step-9")]
    assert "bytes, " in said[str(place / "step-1")]
    caplog.clear()
    folders.save(place, 4)
    clean(str(tmp_path), 1)
    assert not caplog.text
    # what a link leads to stays
    assert folders.names_in(place) == {"step-1", "step-3", "step-4", "step-9", "best_7", "checkpoint-5"}


def test_of_an_output_folder_only_checkpoints_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logs beside the checkpoints are no one's business; a checkpoint with another name is."""
    folders.save_all(tmp_path, 1, 2)
    folders.save(tmp_path, 7, "best")
    (tmp_path / "runs").mkdir()
    clean(str(tmp_path), 1)
    assert folders.names_in(tmp_path) == {"step-2", "best", "runs"}
    assert f"{tmp_path}/best: its name" in caplog.text
    assert "runs" not in caplog.text


def test_a_folder_without_checkpoints_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit that finds nothing to apply to does not let the disk fill in silence."""
    (tmp_path / "elsewhere").mkdir()
    clean(str(tmp_path), 1)
    assert f"{tmp_path}/checkpoints and {tmp_path}: no checkpoint of a step is there" in caplog.text


def test_names_that_are_nearly_right_stay(tmp_path: Path) -> None:
    """A name counts as a whole, with Megatron's zeros and without any elsewhere."""
    folders.save_all(tmp_path, 1, 2)
    others = [*folders.FOREIGN, "iter_7", "iter_00000007", "checkpoint-007", "checkpoint-7-best", "my_global_step_7"]
    for name in others:
        folders.save(tmp_path, 7, name)
    clean(str(tmp_path), 1)
    assert folders.names_in(tmp_path) == {"step-2", *others}


def test_plain_dcp_checkpoints_count(tmp_path: Path) -> None:
    """What torch's own DCP wrote is a checkpoint; what it had not ended is none, and stays."""
    for step in (1, 2, 3, 4):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-4/.metadata").unlink()
    clean(str(tmp_path), 1)
    assert folders.names_in(tmp_path) == {"checkpoint-3", "checkpoint-4"}


@table("place", ["{}", "local://{}"])
def test_the_step_that_megatron_would_load_stays(tmp_path: Path, place: str) -> None:
    """Megatron notes the newest step after it is saved: the noted one stays until then, on a store, too."""
    folders.save_all(tmp_path, 10, 20, 30, name="iter_{:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    clean(place.format(tmp_path), 1)
    assert _names_in(tmp_path) == {"iter_0000020", "iter_0000030", "latest_checkpointed_iteration.txt"}
    for other in ("release", "9" * 5000):
        folders.save(tmp_path, 20, "iter_00000{}", overwrite=True)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(other)
        clean(place.format(tmp_path), 1)
        assert _names_in(tmp_path) == {"iter_0000030", "latest_checkpointed_iteration.txt"}


@pytest.mark.parametrize("world_size", [2, *in_proof(1, 4)])
def test_the_main_rank_removes_for_all(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """On a file system that all ranks share, each checkpoint is removed once, and all ranks go on together."""
    folders.save_all(tmp_path, 1, 2, 3, 4)
    ranks.run(world_size, clean, str(tmp_path), 2)
    assert folders.names_in(tmp_path) == {"step-3", "step-4"}


def test_ranks_that_do_not_know_their_place_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """Without LOCAL_RANK no one can say who removes: an error, on all ranks, that says what sets it."""
    for kind, message in ranks.run(2, _clean_without_local_rank, str(tmp_path)):
        assert kind == "CheckpointingException"
        assert "LOCAL_RANK='' in the environment" in message
        assert "torchrun sets it" in message


def test_an_error_on_the_main_rank_is_everyones(ranks: Ranks, tmp_path: Path) -> None:
    """Where the folder cannot be listed no rank waits for another: all raise the same."""
    (tmp_path / "file").touch()
    errors = ranks.run(4, _error, str(tmp_path / "file"), 1)
    assert len(set(errors)) == 1
    assert errors[0][0] == "StorageError"
    assert "rank 0, in 'removing old checkpoints': cannot list" in errors[0][1]


def test_ranks_with_different_limits_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """A limit that is not the same on all ranks is an error on all, and nothing is removed."""
    folders.save_all(tmp_path, 1, 2)
    for kind, message in ranks.run(2, _clean_with_limits, str(tmp_path)):
        assert kind == "CheckpointingException"
        assert "ranks disagree on save_total_limit: 0 on rank 0, 1 on rank 1" in message
    assert folders.names_in(tmp_path) == {"step-1", "step-2"}


def test_arguments_that_say_too_little(tmp_path: Path) -> None:
    """A limit without a folder, and arguments of another kind, say what is wanted; numpy's numbers are some."""
    with pytest.raises(CheckpointingException, match="name no folder: give one as output_dir or save"):
        cleanup_old_checkpoints(Namespace(save_total_limit=2, output_dir=None))
    with pytest.raises(CheckpointingException, match="a dict with save_total_limit, which is read as an attribute"):
        cleanup_old_checkpoints({"save_total_limit": 2, "output_dir": str(tmp_path)})
    cleanup_old_checkpoints({"save_total_limit": None, "output_dir": str(tmp_path)})  # which keeps all
    with pytest.raises(CheckpointingException, match="save_total_limit is 'two': expected a whole number"):
        clean(str(tmp_path), "two")
    for limit in (True, np.ones(2, int)):
        with pytest.raises(CheckpointingException, match=r"save_total_limit is .*: expected a whole number"):
            clean(str(tmp_path), limit)
    for folder in (b"run", 3, np.array(["a", "b"])):
        with pytest.raises(CheckpointingException, match=r"output_dir is .*: expected a directory or URL"):
            cleanup_old_checkpoints(Namespace(save_total_limit=2, output_dir=folder))
    folders.save_all(tmp_path, 1, 2)
    clean(str(tmp_path), np.int64(1))
    assert folders.names_in(tmp_path) == {"step-2"}
