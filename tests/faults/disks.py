"""Small file systems of a test's own, where the system permits to mount them."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.report_sets import outcome_of_full_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size at a new directory, or a skip where mounting is not permitted."""
    directory.mkdir()
    _mount(["-t", "tmpfs", "-o", f"size={size}", "shardckpt-test", str(directory)])
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], timeout=20, check=True)


def make_read_only(directory: Path) -> None:
    """Let nothing be written to a mounted file system any more."""
    _mount(["-o", "remount,ro", str(directory)])


def _mount(arguments: list[str]) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command: this needs a file system of its own")
    if done.returncode:
        pytest.skip(f"mounting a file system is not permitted: {done.stderr.strip()}")


SOME = 12  # sizes of the disk; the report has all


def outcomes_of(found: list[dict[str, Any]], case: str) -> list[str]:
    """What came of each save."""
    return [outcome_of_full_disk(each, case) for each in found]
