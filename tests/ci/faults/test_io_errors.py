"""A file system call that fails or lies once in a save is an error, or made good: old or new, no silent loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.io_errors import SOME, bad, endings_of
from tests.faults.programs import needs_strace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_strace, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("backend", "case", "before"),
    [  # the other pairs are among those of every call
        ("torch_dist", "existing", "old"),
        pytest.param("safetensors", "fresh", "absent", marks=pytest.mark.proof),
    ],
    indirect=["backend"],
    scope="module",
)
def test_calls_that_change_the_disk_fail_once(disk: Path, case: str, before: str) -> None:
    """The same holds for a sample of faults, with each call that changes the disk among them."""
    assert bad(endings_of(disk, case, SOME), before) == []
