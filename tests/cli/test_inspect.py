"""``shardckpt inspect``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.cli.checkpoints import copy_golden, damage, save_plain_dcp

if TYPE_CHECKING:
    from pathlib import Path


def test_inspect_lists_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys with dtype, shape and bytes, objects and common state; a prefix lists a part."""
    state = {
        "w": ShardedTensor.from_rank_offsets("model.w", torch.ones(2, 3)),
        "o": ShardedObject("rng", 1, (1,), (0,)),
        "iteration": 3,
    }
    dc.save(state, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.w", "float32", "2x3", "24"] in rows
    assert ["rng/shard_0_1", "object"] in rows
    assert ["iteration", "common"] in rows
    assert main(["inspect", str(tmp_path / "c"), "model."]) == 0
    assert "rng" not in capsys.readouterr().out


@pytest.mark.parametrize("how", ["missing", "cut to a half"])
@pytest.mark.parametrize("version", ["ours", "0.16.1", "0.20.0", "dcp"])
def test_inspect_works_where_a_data_file_is_missing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], version: str, how: str
) -> None:
    """Everything is listed, and the file is named with the keys that are in it, by all of them or by a prefix."""
    made = {"ours": lambda: checkpoint, "dcp": lambda: save_plain_dcp(tmp_path)}
    path = made.get(version, lambda: copy_golden(version, tmp_path))()
    key = {"ours": "w", "dcp": "a"}.get(version, "decoder.final_layernorm.weight")
    assert main(["inspect", str(path)]) == 0
    before = capsys.readouterr().out
    assert "incomplete" not in before
    damage(path / "__0_0.distcp", how)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    has_common = version in ("ours", "0.16.1") or how != "missing"
    rows = [line.split() for line in before.splitlines()[3:]]
    assert [row for row in rows if has_common or row[-1] != "common"] == [
        line.split()
        for line in out.splitlines()[3 : 3 + len(rows)]
        if not line.startswith(("the common", "incomplete"))
    ]
    assert ("the common state cannot be read: " in out) != has_common
    (said,) = [line for line in out.splitlines() if line.startswith("incomplete: __0_0.distcp ")]
    assert ("is missing" if how == "missing" else "bytes, ") in said
    assert key in said
    assert main(["inspect", str(path), key]) == 0
    out = capsys.readouterr().out
    assert f"1 tensors and objects cannot be read completely: {key}" in out


def test_inspect_works_where_the_common_state_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors are listed, and the file is named."""
    path = copy_golden("0.16.1", tmp_path)
    (path / "common.pt").unlink()
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "decoder.final_layernorm.weight" in out
    assert f"the common state cannot be read: {path / 'common.pt'} is missing" in out
    assert "incomplete: common.pt is missing" in out


def test_a_prefix_that_nothing_begins_with(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1, with the prefix and the keys that there are, by every verb that takes one; nothing is made or changed."""
    verbs = (["inspect"], ["remove"], ["remove", "--dry-run"])
    for verb, *options in verbs:
        assert main([verb, str(checkpoint), "x", *options]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "a key that begins with 'x' (keys: w)" in shown.err
    assert main(["export", str(checkpoint), str(checkpoint.parent / "hf"), "--prefix", "x"]) == 1
    assert "whose key begins with 'x'; it has 'w'" in capsys.readouterr().err
    assert not (checkpoint.parent / "hf").exists()


def test_who_reads_a_listing_may_stop(tmp_path: Path) -> None:
    """``shardckpt inspect PATH | head -1`` ends without a word about the pipe."""
    dc.save({f"o{n}": ShardedObject(f"object.{n}", n, (1,), (0,)) for n in range(3000)}, tmp_path / "c")
    command = [sys.executable, "-m", "shardckpt", "inspect", str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""
