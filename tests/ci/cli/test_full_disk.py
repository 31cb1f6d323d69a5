"""Verbs that write to a full disk say what they need, what is free, and what could go."""

from __future__ import annotations

import errno
import gc
import re
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import ShardedTensor
from tests.commit import owners
from tests.faults.disks import small_disk
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def _save(target: Path, nbytes: int) -> Path:
    """A checkpoint of two tensors, which have so many bytes each."""
    tensors = {key: torch.ones(nbytes, dtype=torch.uint8) for key in "ab"}
    dc.save({key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}, target)
    return target


@table(
    ("verb", "more"),
    [
        ("convert", ["--to", "safetensors"]),
        ("convert", ["--to", "torch"]),
        ("convert", ["--to", "hf"]),
        ("merge", ["--to", "safetensors"]),
        ("export", []),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, more: list[str]
) -> None:
    """The bytes that it takes, those that are free, the folder, and the commands that free some are said."""
    source = str(_save(tmp_path / "old", 2 * MIB))
    with small_disk(tmp_path / "disk", "3m") as disk:
        sources = [source] * (2 if verb == "merge" else 1)
        assert main([verb, *sources, str(disk / "new"), *more]) == 2
        assert list(disk.iterdir()) == []
    said = capsys.readouterr().err
    for text in (
        f"{'export' if verb == 'export' else 'convert'} to {disk}/new: `shardckpt prune",
        "The tensors take 4.2 MB",
        f"{disk} has 3.1 MB free, 1.",
        f"`shardckpt prune {disk} --keep-latest N --dry-run` says how much space old steps would free",
    ):
        assert text in said


def test_a_removal_of_keys_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rewritten files stand beside the old ones for a while: without room for them nothing is changed."""
    with small_disk(tmp_path / "disk", "5m") as disk:
        checkpoint = _save(disk / "c", 2 * MIB)
        before = sorted(path.name for path in checkpoint.iterdir())
        assert main(["remove", str(checkpoint), "a"]) == 2
        assert sorted(path.name for path in checkpoint.iterdir()) == before
        gc.collect()  # the error has a frame that holds the checkpoint open
    assert re.search(f"cannot remove keys from {checkpoint}: `.* The tensors take 2.1 MB", capsys.readouterr().err)


def test_a_quota_is_said_with_what_could_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota below the free bytes shows when a file is written: the error says how to see it, and what could go."""
    source = _save(tmp_path / "old", 1000)

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.pwritev", refuse)
    owners.leave(tmp_path / "new" / "other", owners.dead())
    assert main(["convert", str(source), str(tmp_path / "new" / "c"), "--to", "safetensors"]) == 2
    said = capsys.readouterr().err
    frees = f"`shardckpt prune {tmp_path / 'new'}` frees 6 B that interrupted saves have left"
    assert (
        f"(EDQUOT). To make space: {frees}. A quota permits less than the free space: `quota -s` says how much." in said
    )


def test_a_full_disk_is_freed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where not a byte is free, old steps are removed all the same: nothing needs to be written first."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        for step in (1, 2, 3):
            _save(disk / f"step-{step}", MIB // 4)
        with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb") as filler:
            filler.write(bytes(8 * MIB))
        assert main(["prune", str(disk), "--keep-latest", "1"]) == 0
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "step-3"]
    assert "no space" not in capsys.readouterr().err.lower()


def test_a_verdict_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was found of the bytes is in the answer all the same; the exit code says that it was not kept."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        step = _save(disk / "step-1", MIB // 4)
        with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb") as filler:
            filler.write(bytes(4 * MIB))
        assert main(["verify", str(step), "--mark"]) == 2
    said = capsys.readouterr().out
    assert "intact" in said
    assert re.search(r"not marked: .*cannot write .*ENOSPC", said)
