"""What stands at the target: refused and untouched, or replaced whole, with everyone else's files kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults.disks import make_read_only, small_disk
from tests.faults.overwrite import refuse_parent

if TYPE_CHECKING:
    from pathlib import Path


def test_parent_on_a_read_only_file_system(tmp_path: Path) -> None:
    """A parent on a read-only file system is an error that names path and reason."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        make_read_only(disk)
        refuse_parent(disk, "EROFS")
