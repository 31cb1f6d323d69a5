"""What the tests of table files share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardckpt.engine import transaction
from shardckpt.manifest import RECORD_NAME, Record
from shardckpt.manifest.names import TABLE_SUFFIX
from shardckpt.storage import writer
from tests.remote import jobs
from tests.shared import shared_by_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@shared_by_ranks
@contextmanager
def moved() -> Iterator[None]:
    """Every table is more than the record may have."""
    before = transaction.INLINE_TABLES, writer._INLINE_TABLE
    transaction.INLINE_TABLES, writer._INLINE_TABLE = -1, 0
    try:
        yield
    finally:
        transaction.INLINE_TABLES, writer._INLINE_TABLE = before


def save_value(path: str, value: float = 1.0, how: str = "", **options: Any) -> None:
    """Save a value in some way, with tables in files."""
    with moved():
        if how:
            jobs.save_in_background(path, value, how == "process")
        else:
            jobs.save(path, value, **options)


def read_record(path: Path) -> Record:
    """Read the record of a checkpoint."""
    return Record.parse((path / RECORD_NAME).read_bytes())


def list_tables(path: Path) -> set[str]:
    """List the files of tables."""
    return {file.relative_to(path).as_posix() for file in path.rglob(f"*{TABLE_SUFFIX}")}
