from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of (torch_dist, 1)."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "o": ShardedObject("o", 1, (1,), (0,))}
    dc.save({**state, "step": 7}, tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("to", ["ep", "ep@1"])
def test_migrate_writes_another_format(old: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`migrate OLD NEW --to BACKEND[@VERSION]` writes the checkpoint in that format, and says what it has written."""
    new = old.with_name("new")
    assert main(["migrate", str(old), str(new), "--to", to, "--memory", "32MiB"]) == 0
    said = f"{new}: ep version 1, written from torch_dist version 1: 1 tensor of 24 bytes, 1 object; read again, "
    assert capsys.readouterr().out.startswith(said)
    with dc.open_checkpoint(new) as stored:
        assert (stored.backend, stored.version, stored.common) == ("ep", 1, {"step": 7})
        assert torch.equal(stored["w"].read(), torch.arange(6.0))
    assert main(["migrate", str(old), str(new), "--to", to]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["migrate", str(old), str(new), "--to", to, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "zarr"], "zarr is read, and not written"),
        (["--to", "torch_dist"], "is a 'torch_dist' checkpoint of version 1 already"),
        ([], "version 1 already, the newest that is installed: nothing was written. Use it as it is"),
        (["--to", "1"], "version 1 already"),
        (["--to", "2"], "no installed plugin has a migration from version 1 to 2"),
        (["--to", "ep", "--memory", "much"], "--memory='much'"),
        (["--to", "ep", "--memory", "1MiB"], "at least 32MiB"),
        (["--to", "ep@new"], "invalid BACKEND[@VERSION] or VERSION value: 'ep@new'"),
        (["--to", "@1"], "invalid BACKEND[@VERSION] or VERSION value: '@1'"),
    ],
)
def test_migrate_says_what_is_wrong(
    old: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong target or size is an error that names it, with exit code 2."""
    command = ["migrate", str(old), str(old.with_name("new")), *arguments]
    try:
        found = main(command)
    except SystemExit as exc:
        found = int(exc.code or 0)
    assert found == 2
    assert text in capsys.readouterr().err
    assert not old.with_name("new").exists()


@pytest.mark.parametrize("to", [[], ["--to", "1"]])
def test_what_is_the_newest_in_its_place_is_well(old: Path, to: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of the newest version that is to replace itself stays as it is: exit code 0, and a line says so."""
    before = {path: path.stat().st_mtime_ns for path in old.iterdir()}
    for overwrite in ([], ["--overwrite"]):
        assert main(["migrate", str(old), f"{old.parent}/./{old.name}", *overwrite, *to]) == 0
        assert "torch_dist version 1 already, the newest that is installed" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in old.iterdir()}
