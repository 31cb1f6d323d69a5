from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.benchmarks import Folders, folders, run_benchmarks
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folders"]  # fixtures

#: An adapter that loses one bit of what it loads.
LOSSY = """
import torch
from benchmarks.adapters.reference import Buffered

class Lossy(Buffered):
    def load(self, described, path):
        super().load(described, path)
        described.pieces[-1].tensor.view(torch.uint8).view(-1)[-1] ^= 1
"""


def test_every_adapter_round_trips_and_stands_in_the_table(folders: Folders, tmp_path: Path) -> None:
    """Each library saves, loads, slices and saves behind the training, bit for bit, with one rank and with two."""
    results = tmp_path / "results.md"
    options = ("--workloads", "llama", "--ranks", "1,2", "--operations", "save,load,slice,async")
    done = run_benchmarks(folders, *options, "--results", str(results))
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    columns = ["shardckpt", "reference", "dcp-1", "dcp-2", "torch.save", "safetensors"]
    table = _table(results)
    if "megatron is left out" not in done.stdout:  # no network
        columns.append("megatron")
    for group in ("Llama-like, 1 rank", "Llama-like, 2 ranks"):
        for operation in ("save (s)", "load (s)"):
            assert all(float(cell.split()[0]) > 0 for cell in _cells(table, group, operation, columns)), group
    for operation in ("async save: blocked (s)", "async save: whole (s)"):
        assert "-" not in _cells(table, "Llama-like, 2 ranks", operation, ["shardckpt", "reference", "dcp-1", "dcp-2"])
    assert "-" not in _cells(table, "Llama-like, 1 rank", "load 1/64 of rows (s)", columns)
    assert all(title in done.stdout for _, title in table)


def test_resharding_memory_and_simulated_ranks_stand_in_the_table(folders: Folders, tmp_path: Path) -> None:
    """Resharding, peak memory and the simulation come out for whoever can, with bytes read counted."""
    results = tmp_path / "results.md"
    options = ("--workloads", "big", "--operations", "reshard,memory,simulate", "--adapters", "shardckpt,dcp-1")
    done = run_benchmarks(folders, *options, "--results", str(results), "--simulated-ranks", "5", "--chunks", "20")
    assert done.returncode == 0, done.stderr
    table, both = _table(results), ["shardckpt", "dcp-1"]
    for before, after in (("4 ranks", 2), ("2 ranks", 4)):
        for axis in ("rows", "columns"):
            name = f"reshard to {after} ranks, {axis}"
            assert "-" not in _cells(table, f"few big tensors, {before}", f"{name} (s)", both)
            read = _cells(table, f"few big tensors, {before}", f"{name}: read (x)", both)
            assert all(float(cell) >= 1 for cell in read)
    assert "-" not in _cells(table, "few big tensors, 1 rank", "load: peak memory over the state (MiB)", both)
    for title in ("planning: CPU of rank 0 (s)", "metadata on disk (MiB)", "open metadata: CPU (s)"):
        assert "-" not in _cells(table, "5 simulated ranks x 4 shards", title, both)
    assert float(_cells(table, "5 simulated", "validation: received by rank 0 (MiB)", both)[0]) > 0


def test_a_library_that_cannot_be_had_is_left_out(folders: Folders, tmp_path: Path) -> None:
    """Without Megatron, and without a way to install it, the rest is measured and a note says why."""
    options = ("--workloads", "tiny", "--ranks", "1", "--operations", "save,load", "--adapters", "reference,megatron")
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}
    done = run_benchmarks(folders, *options, "--megatron", str(tmp_path / "megatron"), **offline)
    assert done.returncode == 0, done.stderr
    assert "note: megatron is left out: uv could not install megatron-core-0.16.1: " in done.stdout
    assert "save (s)" in done.stdout


def test_a_run_that_is_ended_leaves_nothing(folders: Folders) -> None:
    """SIGTERM in the middle of a measurement leaves no file and no process."""
    options = ("--workloads", "tiny", "--ranks", "2", "--operations", "save", "--adapters", "reference-buffered")
    command = [sys.executable, "-m", "benchmarks", *options, "--scale", "0.01", "--rounds", "1000000"]
    command += ["--directory", str(folders.disk)]
    environment = {**os.environ, "TMPDIR": str(folders.temporary)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        try:
            assert run.stderr.readline().startswith("... tiny, 2 ranks")
            assert len(folders.processes()) >= 3  # the runner's own, what forks, two ranks
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 143
        finally:
            run.kill()
    assert not folders.left()


def _table(results: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Cells by group and operation, then by column."""
    lines = [line for line in results.read_text().splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table, group = {}, ""
    for row in rows:
        group = row[0] or group
        table[group, row[1]] = dict(zip(header, row, strict=True))
    return table


def _cells(table: dict[tuple[str, str], dict[str, str]], group: str, operation: str, columns: list[str]) -> list[str]:
    """Of the one group whose name has all these words' beginnings, without its size."""
    first, _, last = group.partition(", ")
    (found,) = [row for (name, title), row in table.items() if title == operation and _is(name, first, last)]
    return [found[column] for column in columns]


def _is(name: str, first: str, last: str) -> bool:
    return name.startswith(first) and (not last or name.endswith(f", {last}"))


def test_stores_are_measured() -> None:
    """Each column saves and loads what it saved, and its requests are counted."""
    command = [sys.executable, "-m", "benchmarks.stores", "--mib", "8", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("save ", "load "))]
    assert len(rows) == 8  # four clients, of which two are raw ones
    assert all(float(row[-6]) > 0 for row in rows if row[0] == "save")  # PUT
    assert all(float(row[-4]) > 0 for row in rows if row[0] == "load")  # GET


def test_one_lost_bit_is_a_failure(folders: Folders, tmp_path: Path) -> None:
    """An adapter that brings back one wrong bit is named, has no figures, and makes the run fail."""
    (tmp_path / "lossy.py").write_text(LOSSY)
    options = ("--workloads", "tiny", "--ranks", "1", "--operations", "save,load")
    done = run_benchmarks(folders, *options, "--adapters", "reference-buffered,lossy:Lossy", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "note: lossy:Lossy FAILED in check" in done.stdout
    assert "1 tensors are not as they were saved: optimizer.exp_avg_sq." in done.stderr
