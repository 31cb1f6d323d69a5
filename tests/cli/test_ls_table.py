"""The table of ``shardckpt ls``: the metric, what is left out, and how it fits a terminal."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING
from unittest import mock

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import ls, main
from shardckpt.cli.ls import _summarize
from shardckpt.manager import CheckpointSummary, mark_checkpoint
from shardckpt.manager.marks import identify_save
from tests.cli.checkpoints import copy_golden
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _list(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The lines that ls prints."""
    main(["ls", *map(str, arguments)])
    return capsys.readouterr().out.splitlines()


def _column(lines: list[str], name: str) -> dict[str, str]:
    """The cells of a column by the name of the row."""
    start = f"{lines[0]}  ".index(f"  {name}  ") + 2
    width = len(lines[1][start:].split("  ")[0])
    rows = [line for line in lines[2:] if line.startswith(("step-", "logs"))]
    return {line.split()[0]: line[start : start + width].strip() for line in rows}


def test_ls_shows_a_metric_and_the_best_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first metric that most have, with a star at the least; --metric chooses another, or the most."""
    for step, metrics in ((1, {"ppl": 9.0}), (2, {"loss": 0.25, "ppl": 4}), (3, {"loss": 1 / 3, "ppl": 7, "late": 1})):
        folders.save(tmp_path, step, **metrics)
    folders.save(tmp_path, 4, loss=0.5)
    folders.save(tmp_path, 5)
    lines = _list(capsys, tmp_path)
    assert _column(lines, "ppl") == {"step-1": "9", "step-2": "4 *", "step-3": "7", "step-4": "-", "step-5": "-"}
    assert lines[-1] == "*: the smallest ppl of the whole checkpoints; --metric ppl:max shows the largest"
    assert _column(_list(capsys, tmp_path, "--metric", "loss"), "loss")["step-3"] == "0.333333"
    lines = _list(capsys, tmp_path, "--metric", "loss:max")
    assert _column(lines, "loss") == {
        "step-1": "-",
        "step-2": "0.25",
        "step-3": "0.333333",
        "step-4": "0.5 *",
        "step-5": "-",
    }
    assert lines[-1].startswith("*: the largest loss")


def test_the_advice_quotes_a_name_as_a_shell_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A metric's name with a space is one word of the option that shows the other end."""
    folders.save(tmp_path, 1, **{"val loss": 9.0})
    assert _list(capsys, tmp_path)[-1].endswith("; --metric 'val loss:max' shows the largest")


def test_the_best_of_many_folders_looks_at_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of the stars of ls -r grows with the steps, not with steps times folders."""
    found = [
        CheckpointSummary(f"/{folder}/step-{step}", f"{folder}/step-{step}", "whole", step=step, metrics={"loss": step})
        for folder in range(50)
        for step in range(2)
    ]
    metrics = ls._choose_metrics(None, found)
    name_folder = mock.Mock(side_effect=ls._name_folder)
    monkeypatch.setattr(ls, "_name_folder", name_folder)
    best = ls._find_best(found, metrics)
    assert {each.step for each in best.values()} == {0}
    assert len(best) == 50
    assert name_folder.call_count == len(found)


def test_each_folder_has_its_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With -r a star is at the best of each folder, by its manager's settings; metrics that are not shown are named."""
    for step in (1, 2):
        folders.save(tmp_path / "a", step, loss=step, config={"best_metric": "loss", "best_mode": "min"})
        folders.save(tmp_path / "b", step, loss=9 + step)
        folders.save(tmp_path / "c", step, loss=7, acc=step, lr=1, config={"best_metric": "acc", "best_mode": "max"})
    (tmp_path / "a" / "from-b").symlink_to("../b/step-1")

    def find_stars(*arguments: object) -> dict[str, str]:
        lines = _list(capsys, "-r", *arguments)
        assert lines[-1].startswith("*: ")
        assert lines[-2].startswith(("more metrics: lr: --metric NAME", "6 checkpoints"))
        return {line.split()[0]: line.split(" *")[0].split("  ")[-1].strip() for line in lines[2:-1] if " *" in line}

    assert find_stars(tmp_path) == {"a/step-1": "loss 1", "b/step-1": "loss 10", "c/step-2": "acc 2"}
    assert find_stars(tmp_path, "--metric", "loss:max") == {"a/step-2": "2", "b/step-2": "11", "c/step-2": "7"}


def test_the_best_is_whole_has_not_failed_and_is_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No star for a step that is damaged or marked as failed; of equal values, the newer step has it."""
    for step, loss in ((1, 0.5), (2, 0.5), (3, 0.25), (4, 0.125)):
        folders.save(tmp_path, step, loss=loss)
    folders.damage(tmp_path / "step-3")
    mark_checkpoint(tmp_path / "step-4", identify_save(tmp_path / "step-4"), "failed", checked="digests", files=1)
    lines = _list(capsys, tmp_path)
    found = _column(lines, "loss")
    assert found == {"step-1": "0.5", "step-2": "0.5 *", "step-3": "0.25", "step-4": "0.125"}
    assert [line for line in lines if line.startswith("4 checkpoints, 2 whole, 1 marked as failed, ")]


def test_the_state_of_a_failed_step_begins_with_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is marked as failed is not called whole; another mark follows the state."""
    folders.save_all(tmp_path, 1, 2, 3)
    for step, verdict in ((1, "verified"), (2, "failed"), (3, "failed")):
        path = tmp_path / f"step-{step}"
        mark_checkpoint(path, identify_save(path), verdict, checked="digests", files=1)
    folders.damage(tmp_path / "step-3")
    verified, failed, cut = (line.split("  ")[-1] for line in _list(capsys, tmp_path)[2:5])
    assert verified.startswith("whole, marked verified on ")
    assert re.fullmatch("marked failed on .* by digests", failed)
    assert re.match("marked failed on .* by digests, damaged: __0_0.distcp has", cut)


def test_columns_without_anything_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fingerprints and metrics have a column if any row has one; who wrote all is said once, several in a column."""
    folders.save_all(tmp_path, 1, 2)
    lines = _list(capsys, tmp_path)
    assert lines[0].split() == ["checkpoint", "step", "age", "size", "strategy", "state"]
    assert lines[-1].partition(", written by ")[2].startswith("shardckpt ")
    (tmp_path / "logs").mkdir()
    assert "strategy" in _list(capsys, tmp_path)[0]
    copy_golden("0.16.1", tmp_path).rename(tmp_path / "step-3")
    dc.save({"a": 1}, tmp_path / "step-4", fingerprints=True)
    lines = _list(capsys, tmp_path)
    assert _column(lines, "written by")["step-3"] == "Megatron-Core"
    assert "written by" not in lines[-1]


@table("columns", [80, 120])
def test_long_names_are_whole_on_a_terminal_too(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied into other commands: there one that a line has no room for stands above its row."""
    name = f"run-{'x' * 90}-step-"
    for step in (1, 2):
        folders.save(tmp_path, step, name=f"{name}{{}}", loss=0.25)
    assert all(f"{name}{step} " in _list(capsys, tmp_path)[1 + step] for step in (1, 2))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = _list(capsys, tmp_path)
    assert lines[2:6:2] == [f"{name}1", f"{name}2"]
    assert all(
        line.split()[0] == str(step) and len(line) <= columns for step, line in zip((1, 2), lines[3:6:2], strict=True)
    )
    found = json.loads("\n".join(_list(capsys, tmp_path, "--json")))
    assert [each["name"] for each in found] == [f"{name}1", f"{name}2"]


def test_the_narrowest_terminal_has_a_table_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal of no more columns than reasons are indented by gets lines that are too long, and no error."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.txt").write_text("a line")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "4")
    assert "logs" in "\n".join(_list(capsys, tmp_path))


def test_who_wrote_it_begins_no_line() -> None:
    """The name of a library comes from the checkpoint: line ends in it are escaped in the last lines, too."""
    found = CheckpointSummary("step-1", "/c/step-1", "whole", writer="evil\n2 checkpoints, 2 whole 1.0")
    assert "evil\\n2 checkpoints" in _summarize("c", [found])[0]


def test_a_narrow_diff_has_how_many_elements_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns a row still says how many elements differ, and by how much: it is what the table is read for."""
    for name, value in (("a", 0.0), ("b", 1.25)):
        torch.save(
            {f"layers.{n}.attention.weight": torch.full((1, 1, 1, 1, 1000), value) for n in (1, 2)},
            tmp_path / f"{name}.pt",
        )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    said = capsys.readouterr().out
    assert (said.count("all 1,000"), said.count("1.25")) == (2, 2)
