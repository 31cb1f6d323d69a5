"""Small JSON files in a hidden directory beside the steps, each of which is written in one step.

Anyone may write one by hand: what does not say exactly what such a file says is refused as a whole.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from shardckpt.commit.owner import Owner
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.storage import has_local_files, on_store, parse_json, put_file, read_file, wrap_os_errors

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

_LARGEST = 64 << 10  # bytes of a file; ours have some 300
#: A time in seconds since 1970, up to the year 9999: beyond it there is no date to show.
Time = Annotated[float, Field(ge=0, le=253_402_300_799)]

_ATTEMPTS = 100
_TEMPORARY = re.compile(r"(?P<owner>[0-9a-f]{32})\.[0-9a-f]{32}\.tmp")


class SmallFile(BaseModel):
    """What a small file says. Fields that are not known are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return what a file says; None if there is none.

        Raises:
            CorruptCheckpointError: it is not such a file, or this machine cannot read it.
            StorageError: the store does not answer, which must not pass for no file.
        """
        try:
            return cls.model_validate(parse_json(read_file(path, _LARGEST)))
        except FileNotFoundError:
            return None
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return None
            if not has_local_files(path):
                raise
            raise CorruptCheckpointError(f"{path} cannot be read: {exc}") from exc
        except ValueError as exc:  # pydantic's ValidationError, too
            raise CorruptCheckpointError(f"{path}: {'; '.join(str(exc).splitlines()[:3]):.300}") from exc


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
