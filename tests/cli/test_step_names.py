"""``prune`` and ``pin`` take the steps of a folder however they are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.manager import remove_step
from shardckpt.manager.step_names import StepNames, find_namings, parse_step
from shardckpt.mapping import ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _save(folder: Path, names: list[str]) -> None:
    for name in names:
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, folder / name)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@table(
    "names, left",
    [
        (["ckpt_000010", "ckpt_000020", "ckpt_1000000"], {"ckpt_1000000"}),
        (["epoch_3", "epoch_12", "epoch_4"], {"epoch_12"}),
        (["iter_0000100", "iter_0000200"], {"iter_0000200"}),
        (["model-step9", "model-step10"], {"model-step10"}),
        (["Checkpoint.1", "Checkpoint.2"], {"Checkpoint.2"}),
        (["step-1", "step-2", "ckpt_1", "ckpt_2"], {"step-2", "ckpt_2"}),
        (["step-1", "step-002", "step-003"], {"step-1", "step-002", "step-003"}),
    ],
)
def test_prune_takes_steps_of_any_name(tmp_path: Path, names: list[str], left: set[str]) -> None:
    """Each way of naming is pruned for itself; of two widths behind one prefix only the known one counts."""
    _save(tmp_path, names)
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--dry-run"]) == 0
    assert _names(tmp_path) == set(names)
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert _names(tmp_path) == left


def test_other_numbers_are_steps_by_names_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ends with a number behind no such word is left alone, and the error names it; --names takes it."""
    _save(tmp_path, ["Llama-3", "Llama-4", "run_7"])
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 2
    assert "Llama-3, Llama-4, run_7; --names run_ names the part before" in capsys.readouterr().err
    assert _names(tmp_path) == {"Llama-3", "Llama-4", "run_7"}
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--names", "Llama-", "--verify"]) == 0
    assert "Llama-4  verified" in capsys.readouterr().out
    assert _names(tmp_path) == {"Llama-4", "run_7"}


def test_a_pin_takes_steps_of_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By number or by name; the pruning keeps it, and says so, until the pin is taken away."""
    _save(tmp_path, ["ckpt_000010", "ckpt_000020", "epoch_3", "epoch_4", "epoch_10", "Llama-3"])
    for step in ("20", "epoch_3", "Llama-3"):
        assert main(["pin", str(tmp_path), step, "--label", "release"]) == 0
    assert main(["pin", str(tmp_path), "10", "--label", "x"]) == 2
    assert "several directories of step 10: name one, epoch_10, ckpt_000010" in capsys.readouterr().err
    assert main(["pin", str(tmp_path), "ckpt_000001", "--label", "x"]) == 2
    assert "did you mean ckpt_0000" in capsys.readouterr().err
    assert main(["pin", str(tmp_path), "final", "--label", "x"]) == 2
    assert "has no directory of a step 'final'" in capsys.readouterr().err
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert "kept: pinned as 'release'" in capsys.readouterr().out
    assert _names(tmp_path) == {"ckpt_000020", "epoch_3", "epoch_10", "Llama-3"}
    assert main(["pin", str(tmp_path), "epoch_3", "--label", "release", "--remove"]) == 0
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert _names(tmp_path) == {"ckpt_000020", "epoch_10", "Llama-3"}


def test_ls_shows_the_step_of_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The column of steps has what the name says; rows are in their order."""
    _save(tmp_path, ["ckpt_000020", "ckpt_000010"])
    assert main(["ls", str(tmp_path)]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:4]]
    assert rows == [["ckpt_000010", "10"], ["ckpt_000020", "20"]]


def test_one_step_of_any_name_is_removed(tmp_path: Path) -> None:
    """``remove_step`` takes numbers and names as ``pin_step`` does; the newest stays."""
    _save(tmp_path, ["ckpt_000010", "ckpt_000020"])
    assert not remove_step(tmp_path, "ckpt_000010").kept
    assert remove_step(tmp_path, 20).kept == "it is the newest"
    assert _names(tmp_path) == {"ckpt_000020"}


def test_names_of_steps_are_known() -> None:
    """A number behind a word that trainers use is a step; the width is that of the names with zeros in front."""
    for name, step in {"ckpt_000010": 10, "my-run.iter5": 5, "GlobalStep_7": 7, "epochs=3": 3, "step_0": 0}.items():
        assert parse_step(name) == step, name
    for name in ("Llama-3", "run_3", "misstep3", "7", "v1.5", "step-", "ckpt", ".ckpt_3", "step-٣"):
        assert parse_step(name) is None, name
    assert find_namings(["ckpt_0010", "ckpt_0020", "ckpt_12345"])[-1] == StepNames("ckpt_", 4)
    assert find_namings(["x9", "x10"], "x") == [StepNames("x", 1)]
