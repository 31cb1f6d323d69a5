from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardckpt
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.maintenance import convert_checkpoint
from shardckpt.mapping import PlainObject, ShardedTensor
from tests import programs
from tests.maintenance.test_resumption import MIB, assert_same_files, make_source
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

#: The command, with a line in the journal for each 256 KiB; it kills itself when it comes to a moment.
COMMAND = """
import os, pathlib, signal, sys
from shardckpt.cli import main
from shardckpt.commit import commit
from shardckpt.huggingface import block_writer, small_file
from shardckpt.maintenance import proof
from shardckpt.storage import journal, resumable

resumable.NOTE_BYTES = block_writer.NOTE_BYTES = 1 << 18
block_writer.BLOCK_BYTES = 1 << 20
moment = sys.argv[1]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at(owner, name, count=1, before=True):
    original = getattr(owner, name)
    def call(*arguments, **options):
        nonlocal count
        count -= 1
        if not count and before:
            die()
        found = original(*arguments, **options)
        return found if count else die()
    setattr(owner, name, call)

if moment == "write":
    die_at(journal.Journal, "note", 4, before=False)
elif moment == "proof":
    die_at(proof, "sum_written")
elif moment == "proven":
    die_at(proof, "_compare", before=False)
elif moment == "rename":
    die_at(commit, "publish_staging")
    die_at(pathlib.Path, "replace")
elif moment == "renamed":
    die_at(commit.os, "rename", before=False)
    die_at(pathlib.Path, "replace", before=False)
sys.exit(main(["convert", *sys.argv[2:], "--memory", "32MiB", "--json"]))
"""


def start(folder: Path, to: str, moment: str = "") -> programs.Program:
    """Convert `old` to `new` in a process of its own."""
    return programs.start(COMMAND, moment, str(folder / "old"), str(folder / "new"), "--to", to)


def start_interpreter(folder: Path, to: str, moment: str = "") -> subprocess.Popen[str]:
    """The same in a new interpreter."""
    command = [sys.executable, "-c", COMMAND, moment, str(folder / "old"), str(folder / "new"), "--to", to]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: programs.Program | subprocess.Popen[str]) -> dict[str, Any]:
    """What a conversion that succeeds reports."""
    out, err = process.communicate(timeout=250)  # of fsync, where other programs fill the disk
    assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def prepare(folder: Path, to: str) -> list[dict[str, Any]]:
    """Make a source, and convert it without a kill to `whole`; return the proof."""
    make_source(folder / "old", is_checkpoint=to not in ("torch_dist", "dcp"))
    report = convert_checkpoint(folder / "old", folder / "whole", to, memory_budget=32 * MIB)
    return json.loads(json.dumps([tensor._asdict() for tensor in report.proof]))


def assert_resumed(folder: Path, expected: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Compare what a resumed conversion has written with the other, and look for what is left beside it."""
    assert_same_files(folder / "whole", folder / "new")
    assert report["proof"] == expected
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old", "whole"]


@pytest.mark.parametrize(
    ("to", "moments"),
    [
        pytest.param(to, ["write", "proof"], marks=pytest.mark.ci if to == "hf" else pytest.mark.proof)
        for to in ("safetensors", "torch_dist", "ep", "hf", "torch")
    ],
)
def test_a_killed_command_goes_on_in_a_fresh_process(tmp_path: Path, to: str, moments: list[str]) -> None:
    """Killed while it writes, and again while it proves what it wrote, the command goes on each time, to the same."""
    expected = prepare(tmp_path, to)
    begin = start_interpreter if to == "safetensors" else start  # the others as forks of one: importing takes longest
    for moment in moments:
        process = begin(tmp_path, to, moment)
        assert (process.communicate(timeout=120)[0], process.returncode) == ("", -signal.SIGKILL)
        assert not (tmp_path / "new").exists()
    report = finish(begin(tmp_path, to))
    assert report["resumed"] > 8 * MIB  # all was written
    assert_resumed(tmp_path, expected, report)


_COMMITS = {("safetensors", "rename"), ("safetensors", "renamed"), ("hf", "proven"), ("torch", "renamed")}


@pytest.mark.parametrize(
    ("to", "moment"),
    [  # each target, a directory or a file, and each moment; all of the product is long
        pytest.param(to, moment, marks=pytest.mark.ci if (to, moment) in _COMMITS else pytest.mark.proof)
        for to in ("safetensors", "hf", "torch")
        for moment in ("proven", "rename", "renamed")
    ],
)
def test_a_kill_at_the_commit(tmp_path: Path, to: str, moment: str) -> None:
    """Killed at the commit, DST is absent and the next run makes it, or DST is whole, and the next run refuses it."""
    expected = prepare(tmp_path, to)
    process = start(tmp_path, to, moment)
    assert (process.communicate(timeout=120)[0], process.returncode) == ("", -signal.SIGKILL)
    assert (tmp_path / "new").exists() == (moment == "renamed")
    if moment == "renamed":
        assert_same_files(tmp_path / "whole", tmp_path / "new")
        again = start(tmp_path, to)
        assert "new" in again.communicate(timeout=120)[1]
        assert again.returncode == 2
        assert main(["prune", str(tmp_path)]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "whole"]
    else:
        assert_resumed(tmp_path, expected, finish(start(tmp_path, to)))


@pytest.mark.proof
@pytest.mark.parametrize("to", ["safetensors", "hf", "torch"])
def test_kills_at_random_moments(tmp_path: Path, to: str) -> None:
    """Killed at 10 random moments, a fresh process goes on with what there is, to the same."""
    expected = prepare(tmp_path, to)
    began = time.monotonic()
    finish(start(tmp_path, to))
    seconds = time.monotonic() - began
    (tmp_path / "new").rename(tmp_path / "probe")
    remove(tmp_path / "probe")
    draw = random.Random(to)
    for _ in range(10):
        process = start(tmp_path, to)
        time.sleep(draw.uniform(0, 1) * seconds)
        os.kill(process.pid, signal.SIGKILL)  # nobody has asked for its end: the number is its own
        process.communicate(timeout=120)
        if (tmp_path / "new").exists():  # it was done before the kill
            assert_same_files(tmp_path / "whole", tmp_path / "new")
            remove(tmp_path / "new")
        lines = [path.read_bytes().count(b"progress") for path in tmp_path.glob(".new.*/.journal")]
        report = finish(start(tmp_path, to))
        assert bool(report["resumed"]) == bool(sum(lines))
        assert_resumed(tmp_path, expected, report)
        remove(tmp_path / "new")


def remove(path: Path) -> None:
    """Remove a file or directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_convert_prints_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`convert SRC DST --to ...` has a line a tensor with both fingerprints, or all of it as JSON."""
    values = {"w": torch.arange(6.0), "step": 3}
    torch.save(values, tmp_path / "a.pt")
    mark = shardckpt.fingerprint({"w": values["w"]})["w"]
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--to", "safetensors@1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2].split() == ["w", "float32", "[6]", mark, mark]
    assert said[-1].endswith(
        "safetensors version 1, written from torch_save version 1: 1 tensors of 24 bytes, 0 objects; read again, all "
        "fingerprints are equal"
    )
    arguments = ["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    (tensor,) = found["proof"]
    assert (tensor["dtype"], tensor["written_dtype"], found["left_out"]) == (
        "float32",
        "bfloat16",
        ["step", "content_metadata"],
    )
    assert tensor["before"] == tensor["after"] == shardckpt.fingerprint({"w": values["w"].bfloat16()})["w"]  # type: ignore[attr-defined]


@table("verb", ["convert", "merge"])
def test_what_only_other_libraries_look_for_does_not_read_as_lost(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that DST lacks are named; copies for other libraries, such as a learning rate's, are counted apart."""
    tensor = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    dc.save({"w": tensor, "step": 3, "lr": PlainObject("groups.0.lr", 0.5)}, tmp_path / "c", "torch_dist")
    sources = [str(tmp_path / "c")] * (1 + (verb == "merge"))
    assert main([verb, *sources, str(tmp_path / "new"), "--to", "safetensors"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not written: ")]
    assert said == ["not written: 1 objects for readers of other libraries alone"]
    assert main([verb, *sources, str(tmp_path / "hf"), "--to", "hf"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not written: ")]
    assert said == ["not written: step", "not written: 1 objects for readers of other libraries alone"]
