"""A store as an author writes one: a directory, at ``own:///path``; and some that are wrong in one way."""

# ruff: noqa: D102, D103 - the methods are those of RemoteFolder

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from shardckpt import hookimpl


class Folder:
    """The objects below a URL, as the README of storage has it."""

    def __init__(self, url: str) -> None:
        self.url, self.place = url, Path(url.partition("://")[2])

    def files(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._list("*")}

    def tree(self) -> dict[str, int]:
        return {path.relative_to(self.place).as_posix(): path.stat().st_size for path in self._list("**/*")}

    def _list(self, pattern: str) -> list[Path]:
        return [path for path in self.place.glob(pattern) if path.is_file() and not path.name.endswith(".part")]

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        with (self.place / name).open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def upload(self, name: str, path: Path) -> None:
        target = self.place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        shutil.copy(path, part)
        part.rename(target)

    def delete(self, name: str) -> None:
        (self.place / name).unlink()

    def folders(self) -> list[str]:
        return [path.name for path in self.place.glob("*") if path.is_dir()]

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self.place / name)


class WritesInPlace(Folder):
    """An object is there before all of its bytes are."""

    def upload(self, name: str, path: Path) -> None:
        target = self.place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for part in (path.read_bytes()[:1000], path.read_bytes()[1000:]):
                file.write(part)
                file.flush()


class RemembersListings(Folder):
    """A listing is that of the first request."""

    _first: dict[str, int] | None = None

    def files(self) -> dict[str, int]:
        self._first = super().files() if self._first is None else self._first
        return self._first


class ReadsAll(Folder):
    """The end of a range counts for nothing."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return (self.place / name).read_bytes()[offset:]


class LosesFolders(Folder):
    """Folders of names are dropped."""

    def upload(self, name: str, path: Path) -> None:
        super().upload(name.rpartition("/")[2], path)


class HidesErrors(Folder):
    """An object that is not there is an error of another kind."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        if not (self.place / name).exists():
            raise LookupError(name)
        return super().read(name, offset, nbytes)


#: By the scheme of their URLs.
STORES: dict[str, type[Folder]] = {
    "own": Folder,
    "in-place": WritesInPlace,
    "remembers": RemembersListings,
    "reads-all": ReadsAll,
    "loses": LosesFolders,
    "hides": HidesErrors,
}


@hookimpl
def shardckpt_filesystem(url: str) -> Any:
    scheme = url.partition("://")[0]
    return STORES[scheme](url.rstrip("/")) if scheme in STORES else None
