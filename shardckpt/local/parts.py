"""Parts of local checkpoints on the disk of a node: their names, whether they are whole, and their removal."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError
from shardckpt.manifest import RECORD_NAME
from shardckpt.plugins import host, read_manifest
from shardckpt.storage import (
    STAGING,
    Leftover,
    clear_tombstones,
    file_size,
    make_tombstone,
    naming,
    parse_temporary,
    remove_free,
    why_kept,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

logger = logging.getLogger(__name__)

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}-([0-9a-f]{{16}})-rank-{_NUMBER}-of-{_NUMBER}")


class SaveId(NamedTuple):
    """One save of all ranks, in the order of what is newer.

    Attributes:
        step: Of the training.
        stamp: Of the save: when it began, in nanoseconds, and later than any other of the step.
        world_size: How many ranks have a part in it.
    """

    step: int
    stamp: int
    world_size: int


class PartId(NamedTuple):
    """One rank's part of a save, on whatever disk."""

    save: SaveId
    rank: int

    @property
    def name(self) -> str:
        """Of its directory."""
        step, stamp, world_size = self.save
        return f"step-{step}-{stamp:016x}-rank-{self.rank}-of-{world_size}"

    @classmethod
    def parse(cls, name: str) -> PartId | None:
        """The part with this name; None for any other name."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        step, stamp, rank, world_size = found.groups()
        return cls(SaveId(int(step), int(stamp, 16), int(world_size)), int(rank))


class Listing(NamedTuple):
    """What a folder has.

    Attributes:
        parts: What is wrong with each; ``""`` for nothing.
        leftovers: What saves and copies left that did not end, and that no living process of this host has.
    """

    parts: dict[PartId, str]
    leftovers: list[Leftover]


class PartFolder:
    """The parts on one disk; other names in the directory are neither counted nor touched.

    Args:
        root: The directory, which need not be there yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, part: PartId) -> Path:
        """Where a part is, or is to be."""
        return self.root / part.name

    def look(self) -> Listing:
        """What is there; files are looked at, not read."""
        listing = Listing({}, [])
        with naming("list", self.root):
            found = sorted(self.root.iterdir()) if self.root.exists() else []
        for path in found:
            if path.is_symlink() or not path.is_dir():
                continue
            part = PartId.parse(path.name)
            if part is not None:
                fault = _fault(path)
                if not fault or path.is_dir():  # else another rank of this node has just removed it
                    listing.parts[part] = fault
            elif (leftover := _leftover(path)) is not None:
                listing.leftovers.append(leftover)
        return listing

    def remove(self, parts: Iterable[PartId]) -> None:
        """Take parts away, each in one step; what cannot be removed is a warning."""
        for part in parts:
            path = self.path(part)
            try:
                if path.exists():
                    make_tombstone(path)
            except (OSError, StorageError) as exc:
                if path.exists():  # else another rank of this node was first
                    logger.warning("cannot remove %s, which is no longer needed: %s", path, exc)
        self.clear()

    def clear(self, leftovers: Iterable[Leftover] = ()) -> None:
        """Remove what is left of removals, and the given leftovers; what cannot be removed is a warning."""
        remove_free(leftovers, _why_kept)
        try:
            if self.root.exists():
                clear_tombstones(self.root, _is_part)
        except (OSError, StorageError) as exc:
            logger.warning("cannot remove what is no longer needed in %s: %s", self.root, exc)


def _is_part(name: str) -> bool:
    return PartId.parse(name) is not None


def _leftover(path: Path) -> Leftover | None:
    """What a save or a copy of a part has left there, if it is that."""
    name = parse_temporary(path.name)
    if name is None or name.kind != STAGING or not _is_part(name.stem):
        return None
    found = Leftover(path, *name)
    return None if _why_kept(found) else found


def _why_kept(leftover: Leftover) -> str:
    """Why a leftover must stay: the folder is one job's, so that nothing on another host can have it."""
    return why_kept(leftover, hours=0)


def _fault(path: Path) -> str:
    """Why a part does not count; ``""`` if it does."""
    try:
        record = read_manifest(path, host()).record
        if record is None:
            raise CorruptCheckpointError(f"{path} has no {RECORD_NAME}")
        for file in record.files:
            with naming("find", path / file.name):
                size = file_size(path / file.name)
            if size != file.size:
                raise CorruptCheckpointError(f"{path / file.name} has {size} bytes, {file.size} were written")
    except CheckpointingException as exc:
        return str(exc)
    return ""


__all__ = ["Listing", "PartFolder", "PartId", "SaveId"]
