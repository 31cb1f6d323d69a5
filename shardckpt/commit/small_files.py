"""Small JSON files in a hidden directory next to the steps, each written in one step.

Anyone may write one by hand: a file whose content is not exactly as specified is refused as a whole.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from shardckpt.commit.owner import Owner
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError
from shardckpt.manifest.strict_json import parse_json
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.directory import refresh_listing
from shardckpt.storage.filesystem import put_file, wrap_os_errors
from shardckpt.storage.input_file import read_file
from shardckpt.storage.places import list_names, remove_file

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

_LARGEST = 64 << 10  # bytes of a file; ours have some 300, and marks up to 60 kB, as their limits of texts say
#: A time in seconds since 1970, up to the year 9999: beyond it there is no date to show.
Time = Annotated[float, Field(ge=0, le=253_402_300_799)]

_ATTEMPTS = 100
_TEMPORARY = re.compile(r"(?P<owner>[0-9a-f]{32})\.[0-9a-f]{32}\.tmp")


class SmallFile(BaseModel):
    """The content of a small file. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of a file; None if there is none.

        Any other content, or a file that this machine cannot read, is a CorruptCheckpointError. A store that does not
        answer is a StorageError: it must not pass for no file.
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


class SmallFiles:
    """The small files in a directory next to the steps; it is made with the first file, and goes with the last."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __str__(self) -> str:
        return str(self.place)

    def names(self) -> list[str]:
        """Return the names of the present files."""
        return list_names(self.place)

    def open(self) -> Path:
        """Return the directory to read files of; of a store, without an earlier listing."""
        return refresh_listing(self.place)

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a file, and make the directory. One that is too large is an error."""
        place = self.place
        if len(data) > _LARGEST:
            raise CheckpointingException(
                f"{place / name} would have {len(data)} bytes, and no reader takes more than {_LARGEST}: give less text"
            )
        for _ in range(_ATTEMPTS):
            # another process may remove the directory, which is empty, before this file is in it
            with contextlib.suppress(FileNotFoundError):
                put_file(place / name, data, f"{Owner.current().text}.{uuid.uuid4().hex}.tmp", makes_folder=True)
                return
        raise StorageError(
            f"cannot write {place / name}: its directory was gone after each of {_ATTEMPTS} attempts to make it. "
            f"Look whether {place} is a symbolic link to nothing, or whether something removes it."
        )

    def drop(self, name: str) -> None:
        """Remove a file, and the directory once it is empty; no error if that is done already."""
        remove_file(self.place / name)
        self._remove_if_empty()

    def clear(self) -> None:
        """Remove the leftovers of killed writes, and the directory if it is empty."""
        if not has_local_files(self.place):  # there each write is one request
            return
        with wrap_os_errors("clear", self.place):
            for name in self.names():  # none if another process has removed the directory meanwhile
                if (match := _TEMPORARY.fullmatch(name)) and Owner.from_text(match["owner"]).is_alive() is False:
                    (self.place / name).unlink(missing_ok=True)
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):  # it is not empty, or gone
            self.place.rmdir()
