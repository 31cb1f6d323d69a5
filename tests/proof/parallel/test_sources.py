"""What four ranks read of a checkpoint or a folder, counted by strace, whichever call reads it: mmap counts too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.parallel.sources import LAYERS, MESHES, READS, SOURCES, WIDTH, write_source

if TYPE_CHECKING:
    from pathlib import Path


def count_bytes_read(trace: str, folder: Path) -> int:
    """Return the bytes that the traced calls read or mapped of files in the folder."""
    unfinished: dict[str, str] = {}
    total = 0
    for line in trace.splitlines():
        pid, _, call = line.partition(" ")
        if "<unfinished ...>" in call:
            unfinished[pid] = call.partition("<unfinished ...>")[0]
            continue
        if resumed := re.search(r"<\.\.\. \w+ resumed>(.*)", call):
            call = unfinished.pop(pid) + resumed[1]
        found = re.search(r"(\w+)\((.*)\)\s+= (\w+)", call)
        if found is None or f"<{folder}/" not in found[2]:
            continue
        if found[1] in READS and found[3].isdecimal():
            total += int(found[3])
        elif found[1] == "mmap":
            total += int(found[2].split(", ")[1])
    return total


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of all sources, and what strace wrote while four ranks loaded each."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: it counts what processes read")
    folder = tmp_path_factory.mktemp("sources")
    for source in SOURCES:
        first, *others = (folder / f"{source}-{sharding}" for sharding in MESHES)
        write_source(source, first)
        for other in others:  # the same files by names of their own, by which their reads are counted
            shutil.copytree(first, other, copy_function=os.link)
    calls = ",".join((*READS, "mmap"))
    program = [sys.executable, "-m", "tests.parallel.sources", str(folder)]
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-s",
        "0",
        "-e",
        f"trace={calls}",
        "-o",
        str(folder / "trace"),
        *program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip(f"strace may not trace a process here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, (folder / "trace").read_text()


@pytest.mark.parametrize("sharding", MESHES)
@pytest.mark.parametrize("source", SOURCES)
def test_ranks_together_read_a_source_once(source: str, sharding: str, traced: tuple[Path, str]) -> None:
    """With fully_parallel, four ranks together read at most 1.1 times the bytes of any source, and load its values."""
    folder = traced[0] / f"{source}-{sharding}"
    needed = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    read = count_bytes_read(traced[1], folder)
    assert needed <= read <= 1.1 * stored, f"{read} bytes of {stored}"
