from __future__ import annotations

import os
import re
import shutil
import zlib
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints
from shardckpt.mapping import ShardedTensor
from tests import programs
from tests.maintenance.resumption import MIB, assert_same_files, make_source
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

#: Converts with a line in the journal for each 256 KiB, and is killed when it has written so many lines.
RUN = """
import os, shutil, signal, sys, torch
from pathlib import Path
from shardckpt.storage import journal, resumable
from shardckpt.huggingface import blocks
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints

torch.set_num_threads(1)  # threads do not outlive a fork
old, new, to = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if to.startswith("merge "):
    def convert_checkpoint(old, new, to, memory_budget):
        return merge_checkpoints([old, old.with_name("other")], new, to.split()[1], slerp=0.25).conversion
resumable.NOTE_BYTES = 1 << 18
blocks.BLOCK_BYTES = 1 << 20
note = journal.Journal.note

def run(lines):
    left = lines
    def counted(self, *arguments):
        nonlocal left
        note(self, *arguments)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    journal.Journal.note = counted
    return convert_checkpoint(old, new, to, memory_budget=32 << 20)

kills = [int(text) for text in sys.argv[4].split(",")]
for kill in kills:
    if (pid := os.fork()) == 0:
        report = run(kill)
        print(report.resumed)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] in (0, signal.SIGKILL)
    if kill and new.exists():
        shutil.rmtree(new) if new.is_dir() else new.unlink()
"""


def start(old: Path, new: Path, to: str, kills: list[int]) -> list[int]:
    """Convert as often as there are numbers: killed after so many lines, or not (0).

    Returns:
        How many bytes each run that was not killed has gone on with.
    """
    done = programs.run(RUN, str(old), str(new), to, ",".join(map(str, kills)), timeout=300)
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("to", ["safetensors", *in_proof("hf")])
def test_a_killed_merge_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, to: str) -> None:
    """Killed three times, a merge has the bytes of one that was not; with a source that was replaced it starts anew."""
    for name in ("old", "other"):
        make_source(tmp_path / name, is_checkpoint=True)
    places = [tmp_path / "old", tmp_path / "other"]
    merge_checkpoints(places, tmp_path / "whole", to, slerp=0.25)
    (resumed,) = start(tmp_path / "old", tmp_path / "new", f"merge {to}", [2, 2, 2, 0])
    assert resumed >= MIB
    assert_same_files(tmp_path / "whole", tmp_path / "new")
    assert start(tmp_path / "old", tmp_path / "next", f"merge {to}", [2]) == []
    shutil.rmtree(tmp_path / "other")
    make_source(tmp_path / "other", is_checkpoint=True)
    report = merge_checkpoints(places, tmp_path / "next", to, slerp=0.25)
    assert report.conversion.resumed == 0
    assert "starts anew" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "next", "old", "other", "whole"]


def stage(folder: Path, to: str) -> None:
    """Leave what a conversion has that was killed after three lines of its journal."""
    make_source(folder / "old", is_checkpoint=True)
    assert start(folder / "old", folder / "new", to, [3]) == []
    assert any(path.name.startswith(".new.") for path in folder.iterdir())


def test_another_source_or_option_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a killed run has left of another source, or with another option, is not gone on with; a warning says so."""
    stage(tmp_path, "torch")
    report = convert_checkpoint(tmp_path / "old", tmp_path / "new", "torch", leave_out=["w.0"])
    assert (report.resumed, report.tensors) == (0, 56)
    assert "starts anew: an interrupted run has left files from another source or other options" in caplog.text
    (tmp_path / "new").unlink()
    assert start(tmp_path / "old", tmp_path / "new", "torch", [3]) == []
    state = {"w.0": ShardedTensor.from_rank_offsets("w.0", torch.ones(5))}
    dc.save(state, tmp_path / "old", overwrite=True)
    caplog.clear()
    assert convert_checkpoint(tmp_path / "old", tmp_path / "new", "torch").resumed == 0
    assert "starts anew" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize("damage", ["cut", "gone", "bit"])
def test_what_was_left_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """If what a killed run has left is damaged, the conversion starts anew, with a warning."""
    stage(tmp_path, "safetensors")
    (staging,) = tmp_path.glob(".new.*")
    (file,) = (path for path in staging.glob("*.safetensors") if path.stat().st_size > MIB)
    if damage == "cut":
        os.truncate(file, 1000)
    elif damage == "gone":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.seek(MIB // 2)
            byte = opened.read(1)
            opened.seek(MIB // 2)
            opened.write(bytes([byte[0] ^ 1]))
    report = convert_checkpoint(tmp_path / "old", tmp_path / "new", "safetensors", memory_budget=32 * MIB)
    assert report.resumed == 0
    assert "starts anew" in caplog.text


def test_a_strategy_that_writes_something_else_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the records to come are not those that a killed run has written, all is written anew."""
    stage(tmp_path, "safetensors")
    (staging,) = tmp_path.glob(".new.*")
    lines = (staging / ".journal").read_bytes().splitlines(keepends=True)
    text = re.sub(rb'[0-9a-f]{32}(?=", \[)', b"0" * 32, lines[-1][9:-1])
    (staging / ".journal").write_bytes(b"".join([*lines[:-1], b"%08x %b\n" % (zlib.crc32(text), text)]))
    report = convert_checkpoint(tmp_path / "old", tmp_path / "new", "safetensors", memory_budget=32 * MIB)
    assert report.resumed == 0
    assert "or has another content than is written now" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
