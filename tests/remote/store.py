"""Stores for tests of URLs: the faulty one that authors of strategies get, and one as fsspec's clouds have them."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from shardckpt.testing import FaultyFileSystem
from shardckpt.testing import FaultyStore as Store


class LoopedFileSystem(AsyncFileSystem):
    """A directory behind an event loop, with listings that are kept, as fsspec's cloud filesystems have them."""

    protocol = "looped"
    _listings: ClassVar[dict[str, list[Any]]] = {}
    _local = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("looped://").rstrip("/")

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget all listings."""
        self._listings.clear()

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if path not in self._listings:
            self._listings[path] = self._local.ls(path, detail)
        return self._listings[path]

    async def _exists(self, path: str, **_: Any) -> bool:
        return self._local.exists(path)  # type: ignore[no-any-return]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._local.cat_file(path, start, end)  # type: ignore[no-any-return]

    async def _put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._local.put_file(lpath, rpath)

    async def _rm_file(self, path: str, **_: Any) -> None:
        self._local.rm_file(path)


fsspec.register_implementation("looped", LoopedFileSystem, clobber=True)

__all__ = ["FaultyFileSystem", "LoopedFileSystem", "Store"]
