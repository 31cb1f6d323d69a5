"""What the tests of convert share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardckpt.maintenance import convert_checkpoint
from tests import programs
from tests.maintenance.resumption import MIB, assert_same_files, make_source

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


#: The command, with a line in the journal for each 256 KiB; it kills itself when it comes to a moment.
COMMAND = """
import os, pathlib, signal, sys
from shardckpt.cli import main
from shardckpt.commit import commit
from shardckpt.huggingface import blocks, small_file
from shardckpt.maintenance import proof
from shardckpt.storage import journal, resumable

resumable.NOTE_BYTES = 1 << 18
blocks.BLOCK_BYTES = 1 << 20
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
