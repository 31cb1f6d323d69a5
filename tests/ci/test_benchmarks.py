from __future__ import annotations

from tests.benchmarks import Folders, folders, run_benchmarks

__all__ = ["folders"]  # fixtures


def test_what_would_not_fit_is_refused(folders: Folders) -> None:
    """A scale that takes more memory or disk than a run may have is refused before anything is begun."""
    done = run_benchmarks(folders, "--workloads", "llama", "--scale", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("--scale 3.0 takes ")
