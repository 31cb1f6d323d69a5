from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import __version__
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["strategies", "--help"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every verb, the version is the package's."""
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    out = capsys.readouterr().out
    expected = {
        "--help": ("demo", "strategies", "inspect", "verify", "migrate", "remove", "prune", "export"),
        "--version": (__version__,),
    }
    assert all(text in out for text in expected.get(arguments[0], ("usage",)))


def test_strategies_lists_the_built_ins(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each strategy: backend, version, what it does, who brought it."""
    assert main(["strategies"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch_dist", "1"] in [row[:2] for row in rows]
    assert {row[2] for row in rows if row[:1] == ["torch_dist"]} == {"load", "save"}
    assert all(f"shardckpt {__version__}" in " ".join(row) for row in rows if row[:1] == ["torch_dist"])


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


def test_verify_says_as_written_or_what_is_wrong(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a whole checkpoint, 1 with the file and the reason for a damaged one."""
    assert main(["verify", str(checkpoint)]) == 0
    assert "__0_0.distcp" in capsys.readouterr().out
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[-800] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)
    assert main(["verify", str(checkpoint)]) == 1
    assert "digest differs" in capsys.readouterr().out


def test_verify_lets_other_files_be(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file beside the checkpoint's is listed as foreign and no reason to fail; a missing one of its own is."""
    (checkpoint / "tokenizer.json").write_text("{}")
    assert main(["verify", str(checkpoint)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "tokenizer.json" in line]
    assert "not a file of this checkpoint" in row
    (checkpoint / "common.pt").unlink()
    assert main(["verify", str(checkpoint)]) == 1
    assert "common.pt" in capsys.readouterr().out


def test_errors_go_to_standard_error_with_the_verb(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal exits with 1 and one message, without a traceback."""
    assert main(["verify", str(checkpoint) + "x"]) == 1
    assert main(["migrate", str(checkpoint), str(checkpoint) + "2"]) == 1
    err = capsys.readouterr().err
    assert "shardckpt verify: " in err
    assert "does not exist" in err
    assert "shardckpt migrate: " in err
    assert "Traceback" not in err


def test_a_wrong_call_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's convention for a call that cannot be taken."""
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


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
