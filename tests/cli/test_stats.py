"""Statistics of all tensors, and what is shown while bytes are read."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.engine import display
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _save(path: Path, **tensors: torch.Tensor) -> None:
    dc.save({key: ShardedTensor.from_rank_offsets(key, each) for key, each in tensors.items()}, path)


def test_inspect_has_the_statistics_of_each_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--stats: norm, mean, least, greatest; NaN and Inf have a column where a tensor has some; JSON has all."""
    _save(tmp_path / "c", a=torch.tensor([3.0, -4.0]), b=torch.tensor([1, 2, 3]))
    assert main(["inspect", str(tmp_path / "c"), "--stats"]) == 0
    header, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert header == ["key", "kind", "shape", "norm", "mean", "min", "max"]
    assert rows == [["a", "float32", "2", "5", "-0.5", "-4", "3"], ["b", "int64", "3", "3.74166", "2", "1", "3"]]
    _save(tmp_path / "odd", a=torch.tensor([1.0, float("nan"), float("inf")]), b=torch.ones(1))
    assert main(["inspect", str(tmp_path / "odd"), "a", "--stats"]) == 0
    assert "1 NaN, 1 Inf" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "odd"), "--stats", "--json"]) == 0
    found: dict[str, Any] = {each["key"]: each for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert (found["a"]["statistics"]["nans"], found["b"]["statistics"]["mean"]) == (1, 1.0)


def test_a_packed_dtype_has_no_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Torch converts no element of it to a number: the other tensors have theirs."""
    packed = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    _save(tmp_path / "c", a=torch.tensor([3.0, -4.0]), p=packed)
    assert main(["inspect", str(tmp_path / "c"), "--stats", "--json"]) == 0
    found: dict[str, Any] = {each["key"]: each for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert (found["a"]["statistics"]["norm"], found["p"].get("statistics")) == (5.0, None)


def test_statistics_of_no_tensor_are_a_table_without_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of objects alone has none, on a terminal, too."""
    dc.save({"rng": ShardedObject("rng", 1, (1,), (0,))}, tmp_path / "c")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(tmp_path / "c"), "--stats"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:3] == ["key", "kind", "shape"]


@table(
    "call",
    [
        "inspect {run}/a --stats",
        "inspect {run}/a w[]",
        "diff {run}/a {run}/b",
        "remove {run}/a v",
        "prune {run} --keep-latest 1",
    ],
)
def test_verbs_that_read_or_remove_bytes_show_their_progress(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where standard error is no terminal, lines say how many bytes are done, to all of them at the end."""
    for name in ("a", "b", "step-1", "step-2"):
        _save(tmp_path / name, w=torch.ones(1 << 18), v=torch.ones(4))
    monkeypatch.setattr(display, "_PAUSE", 0.0)
    verb, *rest = call.format(run=tmp_path).split()
    assert main([verb, *rest]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith(f"{verb}: ") for line in lines), lines
    done, _, total = lines[-1].removeprefix(f"{verb}: ").partition(",")[0].partition(" of ")
    assert done == total != "0 B"
