from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks import Folders, folders, run_benchmarks

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


def test_one_lost_bit_is_a_failure(folders: Folders, tmp_path: Path) -> None:
    """An adapter that brings back one wrong bit is named, has no figures, and makes the run fail."""
    (tmp_path / "lossy.py").write_text(LOSSY)
    options = ("--workloads", "tiny", "--ranks", "1", "--operations", "save,load")
    done = run_benchmarks(folders, *options, "--adapters", "reference-buffered,lossy:Lossy", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "note: lossy:Lossy FAILED in check" in done.stdout
    assert "1 tensors are not as they were saved: optimizer.exp_avg_sq." in done.stderr


def test_what_would_not_fit_is_refused(folders: Folders) -> None:
    """A scale that takes more memory or disk than a run may have is refused before anything is begun."""
    done = run_benchmarks(folders, "--workloads", "llama", "--scale", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("--scale 3.0 takes ")
