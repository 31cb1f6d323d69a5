from __future__ import annotations

import json
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.cli import main
from shardckpt.engine import display
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import merge_checkpoints
from shardckpt.manager import CheckpointConfig, CheckpointManager, list_checkpoints
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@table(
    ("options", "value"),
    [
        ([], 3.0),
        (["--weights", "1,0,1"], 2.5),
        (["--decay", "0.5"], 3.25),
        (["--wsm", "linear"], 3.0),
        (["--wsm", "linear", "--steps", "1,2,4"], 10 / 3),
    ],
)
def test_merge_has_the_weights_that_the_options_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], value: float
) -> None:
    """`merge SRC... DST` averages files with equal weights, or by the weights, the EMA or the decay that are given."""
    for number, content in enumerate((1.0, 4.0, 4.0)):
        torch.save({"w": torch.full((3,), content)}, tmp_path / f"{number}.pt")
    sources = [str(tmp_path / f"{number}.pt") for number in range(3)]
    arguments = ["merge", *sources, str(tmp_path / "new.pt"), "--to", "torch", "--accumulate", "fp64", *options]
    assert main(arguments) == 0
    assert "read again, all fingerprints are equal" in capsys.readouterr().out
    assert torch.load(tmp_path / "new.pt")["w"].tolist() == pytest.approx([value] * 3)


def test_merge_of_two_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--linear and --slerp interpolate two; --json prints weights, base and proof."""
    for number in (0, 1):
        torch.save({"w": torch.eye(2)[number], "step": number}, tmp_path / f"{number}.pt")
    sources = [str(tmp_path / f"{number}.pt") for number in (0, 1)]
    assert main(["merge", *sources, str(tmp_path / "a"), "--linear", "0.25", "--json", "--base", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["weights"], report["base"], report["conversion"]["tensors"]) == ([0.75, 0.25], 0, 1)
    assert main(["merge", *sources, str(tmp_path / "b.pt"), "--slerp", "0.5", "--to", "torch"]) == 0
    found = torch.load(tmp_path / "b.pt")
    assert found["w"].tolist() == pytest.approx([0.5**0.5] * 2)
    assert found["step"] == 1


def test_names_of_one_source_are_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--rename N:OLD=NEW is for the N-th alone; no such source, two new names and a wrong list are errors."""
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    torch.save({"ema": {"w": torch.full((2,), 3.0)}}, tmp_path / "b.pt")
    places = [str(tmp_path / name) for name in ("a.pt", "b.pt", "new.pt")]
    assert main(["merge", *places, "--to", "torch", "--rename", "2:ema=model"]) == 0
    assert torch.load(places[-1])["model.w"].tolist() == [2.0, 2.0]
    assert main(["merge", *places, "--to", "torch", "--overwrite", "--rename", "3:ema=model"]) == 2
    assert "--rename 3:ema=model: there are 2 SRC, numbered from 1" in capsys.readouterr().err
    for names in (["2:ema=model", "ema=net"], ["ema=net", "2:ema=model"], ["2:ema=model", "02:ema=net"]):
        options = [part for name in names for part in ("--rename", name)]
        assert main(["merge", *places, "--to", "torch", "--overwrite", *options]) == 2
        assert "'ema' cannot become both" in capsys.readouterr().err
    with pytest.raises(CheckpointingException, match="rename is a list of 1, for 2 sources"):
        merge_checkpoints(places[:2], places[2], "torch", rename=[{"ema": "model"}])


def test_merge_shows_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no terminal, lines say how many bytes are read, and read again, of those of the merge."""
    monkeypatch.setattr(display, "_PAUSE", 0.0)
    sources = [str(tmp_path / f"{number}.pt") for number in range(3)]
    for source in sources:
        torch.save({"w": torch.ones(1 << 18)}, source)
    assert main(["merge", *sources, str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("merge: ") for line in lines)
    assert lines[0].startswith("merge: 0 B of 2.1 MB")
    assert lines[-1].startswith("merge: 2.1 MB of 2.1 MB")


@table(
    "options, text",
    [
        ("--weights 1,2,3", "weights [1.0, 2.0, 3.0]: there are 3 for 2 sources: give one for each"),
        ("--weights 1,-1", "weights [1.0, -1.0]: weights are divided by their sum, which must not be 0"),
        ("--weights nan,1", "weights [nan, 1.0]: weights are finite numbers"),
        ("--slerp 3", "slerp 3 of 2 sources: it takes two, a number from 0 to 1, which is the second"),
        ("--decay 2", "decay 2: an EMA's decay is above 0 and below 1, such as 0.9"),
        ("c.pt --linear 0.5", "weights [0.5, 0.5]: there are 2 for 3 sources: give one for each"),
        ("c.pt --slerp 0.5", "slerp 0.5 of 3 sources: it takes two"),
    ],
)
def test_wrong_weights_are_named_as_the_command_has_them(
    tmp_path: Path, options: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of an option says its value, in the words of the command line as in those of Python."""
    assert main(["merge", "a.pt", "b.pt", *options.split(), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.startswith(f"shardckpt merge: {text}")


def test_a_merge_of_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """DST was taken for a source, or a source was forgotten."""
    assert main(["merge", "a.pt", "new"]) == 2
    assert (
        "1 source: a merge takes two checkpoints or more; of a command, DST stands behind them"
        in capsys.readouterr().err
    )


def test_merge_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options and sources that do not fit are errors of exit code 2, with the way out, and write nothing."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"v": torch.ones(2)}, tmp_path / "b.pt")
    both = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), str(tmp_path / "new")]
    for options, text in (
        ([], "not all sources have the same tensors: 1 of 2 are not in"),
        (["--base", "3"], "numbered from 1"),
        (["--steps", "1,2"], "--wsm"),
    ):
        assert main(["merge", *both, *options]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_merge_suggests_the_rename(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a source has the first's tensors by other names, the error has the option that reads them by these."""
    sources = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    for name, path in zip(("model", "net.module"), sources, strict=True):
        torch.save({f"{name}.{key}": torch.ones(2) for key in ("w", "v")}, path)
    assert main(["merge", *sources, str(tmp_path / "new")]) == 2
    assert "(--rename 2:net.module=model, rename=" in capsys.readouterr().err
    assert main(["merge", *sources, str(tmp_path / "new"), "--rename", "2:net.module=model"]) == 0


def _save_steps(folder: Path, *names: str) -> list[str]:
    for name in names:
        dist_checkpointing.save(to_sharded_state_dict(torch.nn.Linear(2, 2)), folder / name)
    return [str(folder / name) for name in names]


@table(
    "names",
    [
        ["step-1", "step-2", "step-3"],
        ["step-10", "step-8", "step-11"],  # as no shell sorts them
        ["iter_0000008", "iter_0000009", "iter_0000010"],
    ],
)
def test_a_pattern_of_the_shell_does_not_replace_the_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    """`merge run/step-* --overwrite` names a step as DST: it is refused, and stays as it is."""
    places = _save_steps(tmp_path, *names)
    before = (tmp_path / names[-1] / "shardckpt.json").read_bytes()
    assert main(["merge", *places, "--overwrite"]) == 2
    pattern = f"{names[-1].rstrip('0123456789')}*"
    assert f"{names[-1]} is the last step in the folder of all SRC: a pattern such as {tmp_path / pattern}" in (
        capsys.readouterr().err
    )
    assert (tmp_path / names[-1] / "shardckpt.json").read_bytes() == before


def test_steps_of_urls_do_not_replace_the_last_one_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Braces of a shell name URLs as a pattern names paths: the last step is refused, in every spelling."""
    urls = [f"memory://merged/step-{step}" for step in (1, 2, 3)]
    _save_steps(tmp_path, "step-1", "step-2", "step-3")
    for url in urls:
        dist_checkpointing.save(to_sharded_state_dict(torch.nn.Linear(2, 2)), url)
    files = [f"file://{tmp_path}/step-1", str(tmp_path / "step-2"), f"file://{tmp_path}/step-3"]
    for places in (urls, files):
        assert main(["merge", *places, "--overwrite"]) == 2
        assert f"{places[-1]} is the last step in the folder of all SRC" in capsys.readouterr().err
    assert main(["merge", urls[0], urls[1], "memory://merged/soup", "--overwrite"]) == 0
    fsspec.filesystem("memory").store.clear()


@table("target", ["step-1", "step-merged", "merged-4", "other/step-4", "step-5"])
def test_what_no_pattern_names_last_is_replaced(tmp_path: Path, target: str) -> None:
    """A DST of another name, folder or number, and an empty one, is written as ``--overwrite`` says."""
    sources = _save_steps(tmp_path, "step-2", "step-3")
    if target == "step-5":
        (tmp_path / target).mkdir()
    else:
        (tmp_path / target).parent.mkdir(exist_ok=True)
        _save_steps(tmp_path, target)
    assert main(["merge", *sources, str(tmp_path / target), "--overwrite"]) == 0


def test_a_step_that_is_not_overwritten_is_an_error_as_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--overwrite`` nothing is in danger: the error is that of every DST that is there."""
    assert main(["merge", *_save_steps(tmp_path, "step-1", "step-2", "step-3")]) == 2
    error = capsys.readouterr().err
    assert "step-3" in error
    assert "pattern" not in error


def test_a_merge_has_no_metrics(tmp_path: Path) -> None:
    """Nobody has measured it: the loss of its base would make it the best of its folder."""
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path), interval=1), {"model": model}) as manager:
        for step, loss in ((1, 2.0), (2, 1.0)):
            manager.save(step, metrics={"loss": loss})
    places = [str(tmp_path / name) for name in ("step-1", "step-2", "out/ema")]
    assert main(["merge", *places, "--decay", "0.5"]) == 0
    (merged,) = list_checkpoints(places[-1])
    assert (merged.step, merged.metrics) == (2, {})
    assert list_checkpoints(places[1])[0].metrics == {"loss": 1.0}
