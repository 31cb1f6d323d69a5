"""Colours by state, on terminals that show them."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.cli.colour import Painted, paint
from shardckpt.cli.output import say
from shardckpt.cli.table import table as make_table
from shardckpt.engine.amounts import format_count
from shardckpt.mapping import ShardedTensor
from tests.cli.checkpoints import damage
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

GREEN, YELLOW, RED, END = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"
_CODE = re.compile(r"\x1b\[\d+m")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output shows colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps that are whole, cut, and half-written."""
    for step in (1, 2, 3):
        tensor = ShardedTensor.from_rank_offsets("w", torch.full((64,), float(step)))
        dc.save({"w": tensor}, tmp_path / f"step-{step}", "torch_dist", step=step)
    damage(tmp_path / "step-2" / "__0_0.distcp", "cut by a byte")
    for path in (tmp_path / "step-3").iterdir():
        if path.suffix != ".distcp":
            path.unlink()
    return tmp_path


@pytest.mark.usefixtures("terminal")
@table(
    "call, painted",
    [
        ("ls {run}", [f"{GREEN}whole{END}", f"{RED}damaged: ", f"{YELLOW}incomplete: "]),
        ("verify {run}", [f"{GREEN}intact{END}", f"{RED}damaged{END}", f"{YELLOW}incomplete: "]),
        ("verify {run}/step-1", [f"{GREEN}as written{END}", f"{GREEN}{{run}}/step-1: intact"]),
        ("inspect {run}/step-2", [f"{RED}damaged: __0_0.distcp"]),
        ("diff {run}/step-1 {run}/step-1", [f"{GREEN}{{run}}/step-1, {{run}}/step-1: 1 of 1 tensor is equal"]),
    ],
)
def test_states_have_colours_on_a_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: str, painted: list[str]
) -> None:
    """Green is whole, yellow incomplete, red damaged; without colours the text is the same, and JSON never has any."""
    arguments = call.format(run=run).split()
    main(arguments)
    shown = capsys.readouterr().out
    assert all(text.format(run=run) in shown for text in painted), shown
    main([*arguments, "--json"])
    assert "x1b" not in json.dumps(json.loads(capsys.readouterr().out))
    monkeypatch.setenv("NO_COLOR", "1")
    main(arguments)
    assert capsys.readouterr().out == _CODE.sub("", shown)


@table(
    "variables, is_terminal, has_any",
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_the_usual_variables_decide(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_terminal: bool, has_any: bool
) -> None:
    """NO_COLOR goes first, then FORCE_COLOR, then TERM=dumb, then whether standard output is a terminal."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert isinstance(paint("x", "good"), Painted) == has_any


@pytest.mark.usefixtures("terminal")
def test_no_name_draws_a_colour(capsys: pytest.CaptureFixture[str]) -> None:
    """Codes in a name are shown by their escapes, in a painted line, a painted table, and a text joined of these."""
    hostile = f"{RED}w{END}"
    say(paint(hostile, "good"))
    say(make_table(("a", "b"), [(hostile, hostile)], ["good"]))
    shown = capsys.readouterr().out
    assert set(_CODE.findall(shown)) == {GREEN, END}
    assert shown.count(r"\x1b[31mw\x1b[0m") == 3
    say(f"{paint('x', 'good')}{hostile}")
    assert "\x1b" not in capsys.readouterr().out


@table("count, text", [(0, "0"), (999, "999"), (721_920, "722 k"), (1_200_000, "1.2 M"), (7_000_000_000, "7.0 B")])
def test_parameters_are_counted_as_people_say_them(count: int, text: str) -> None:
    """In thousands, millions and billions."""
    assert format_count(count) == text


def test_inspect_counts_parameters_without_the_optimizers_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elements of the model's tensors, without states of random generators, too; in JSON as a number."""
    keys = ("model.w", "optimizer.state.w.exp_avg", "rng_states.cpu", "cuda_rng", "app.rng", "random_states_0.x")
    tensors = {key: torch.ones(1000, 2) for key in keys}
    dc.save({key: ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c")]) == 0
    assert "6 tensors of 48,000 bytes, 2.0 k parameters, 0 objects" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "c"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 2000


@pytest.mark.parametrize("columns", [80, 120])
def test_rows_of_diff_and_verify_fit_a_terminal(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names lose their middle there, and keep their end, which tells them apart."""
    key = f"model.{'decoder.' * 12}weight"
    for name in ("a", "b"):
        tensor = ShardedTensor.from_rank_offsets(key, torch.full((4,), float(name == "a")))
        dc.save({"w": tensor}, tmp_path / f"run-{'x' * 90}" / name)
    folder = str(tmp_path / f"run-{'x' * 90}")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["diff", f"{folder}/a", f"{folder}/b"]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model.")]
    assert "weight  values" in row
    assert len(row) <= columns
    assert main(["verify", folder]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("  intact")]
    assert [len(line) <= columns for line in rows] == [True, True]
