"""Small files in a hidden directory beside the steps, each of which is written in one step."""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import TYPE_CHECKING

from shardckpt.commit.owner import Owner
from shardckpt.errors import StorageError
from shardckpt.storage import on_store, put_file, wrap_os_errors

if TYPE_CHECKING:
    from pathlib import Path

_ATTEMPTS = 100
_TEMPORARY = re.compile(r"(?P<owner>[0-9a-f]{32})\.[0-9a-f]{32}\.tmp")


def put_small_file(place: Path, name: str, data: bytes) -> None:
    """Write a file of a directory, which is made if it does not exist; replace that of the same name.

    Raises:
        StorageError: it cannot be written.
    """
    for _ in range(_ATTEMPTS):
        if on_store(place) is None:
            # mkdir(exist_ok=True) would raise where the directory is removed between the call and its second look
            with wrap_os_errors("make", place), contextlib.suppress(FileExistsError):
                place.mkdir()
        # another process may remove the directory, which is empty, before this file is in it
        with contextlib.suppress(FileNotFoundError):
            put_file(place / name, data, f"{Owner.current().text}.{uuid.uuid4().hex}.tmp")
            return
    raise StorageError(
        f"cannot write {place / name}: its directory was gone after each of {_ATTEMPTS} attempts to make it. "
        f"Look whether {place} is a symbolic link to nothing, or whether something removes it."
    )


def remove_temporaries(place: Path) -> None:
    """Remove what killed writes have left in a local directory, and the directory if it is empty."""
    for path in place.glob("*.tmp"):
        if (match := _TEMPORARY.fullmatch(path.name)) and Owner.from_text(match["owner"]).is_alive() is False:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty
        place.rmdir()
