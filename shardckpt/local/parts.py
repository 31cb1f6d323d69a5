"""Parts of local checkpoints on the disk of a node: name, list, check and remove them."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit.leftovers import explain_kept, remove_unused
from shardckpt.commit.removal import clear_tombstones, make_tombstone
from shardckpt.commit.staging_names import STAGING, Leftover, parse_temporary
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manifest.names import RECORD_NAME
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.storage.filesystem import file_size, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

logger = logging.getLogger(__name__)

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}-([0-9a-f]{{16}})-rank-{_NUMBER}-of-{_NUMBER}")


class SaveId(NamedTuple):
    """One save of all ranks; a newer one compares greater."""

    step: int
    #: When the save began, in ns; above the stamps of earlier saves of the step.
    stamp: int
    #: Number of ranks that saved, and of parts.
    world_size: int


class PartId(NamedTuple):
    """The part of a save that one rank has saved, on any disk."""

    save: SaveId
    rank: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        step, stamp, world_size = self.save
        return f"step-{step}-{stamp:016x}-rank-{self.rank}-of-{world_size}"

    @classmethod
    def parse(cls, name: str) -> PartId | None:
        """Return the part whose directory has this name, or None if it is not the name of a part."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        step, stamp, rank, world_size = found.groups()
        return cls(SaveId(int(step), int(stamp, 16), int(world_size)), int(rank))


class Listing(NamedTuple):
    """The content of a :class:`PartFolder`."""

    #: The parts, each with its fault; ``""`` for none.
    parts: dict[PartId, str]
    #: Staging directories of saves and copies that were interrupted, and that no living process uses.
    leftovers: list[Leftover]


class PartFolder:
    """The parts on one disk, in a directory that need not exist yet. Other files in it are ignored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, part: PartId) -> Path:
        """Return the directory of a part, which need not exist."""
        return self.root / part.name

    def list_parts(self) -> Listing:
        """Return the parts and leftovers on this disk; the sizes of files are checked, not their bytes."""
        listing = Listing({}, [])
        with wrap_os_errors("list", self.root):
            found = sorted(self.root.iterdir()) if self.root.exists() else []
        for path in found:
            if path.is_symlink() or not path.is_dir():  # a link may lead to another job's directory
                continue
            part, leftover = PartId.parse(path.name), parse_temporary(path)
            if part is not None:
                fault = _find_fault(path)
                if not fault or path.is_dir():  # else another rank of this node has just removed it
                    listing.parts[part] = fault
            elif leftover and leftover.kind == STAGING and _is_part(leftover.stem) and not _explain_kept(leftover):
                listing.leftovers.append(leftover)
        return listing

    def remove(self, parts: Iterable[PartId]) -> None:
        """Remove parts; log the parts that cannot be removed."""
        for part in parts:
            path = self.path(part)
            try:
                if path.exists():
                    make_tombstone(path)  # one rename: no crash leaves half a part under its name
            except (OSError, StorageError) as exc:
                if path.exists():  # else another rank of this node was first
                    logger.warning("cannot remove %s, which is no longer needed: %s", path, exc)
        self.clear()

    def clear(self, leftovers: Iterable[Leftover] = ()) -> None:
        """Remove the given leftovers, and leftovers of interrupted removals; log each that cannot be removed."""
        remove_unused(leftovers, _explain_kept)
        try:
            if self.root.exists():
                clear_tombstones(self.root, _is_part)
        except (OSError, StorageError) as exc:
            logger.warning("cannot remove unused files in %s: %s", self.root, exc)


def _is_part(name: str) -> bool:
    return PartId.parse(name) is not None


def _explain_kept(leftover: Leftover) -> str:
    """Return why a leftover must stay, or ``""``."""
    # no grace period: the folder belongs to one job and one host, so no process of another host can use it
    return explain_kept(leftover, hours=0)


def _find_fault(path: Path) -> str:
    """Return the fault of a part, or ``""``."""
    try:
        record = read_manifest(path, get_plugin_manager()).record
        if record is None:
            return f"{path} has no {RECORD_NAME}"
        for name, written in record.list_files().items():
            with wrap_os_errors("find", path / name):
                size = file_size(path / name)
            if size != written:
                return f"{path / name} has {size} bytes, {written} were written"
    except CheckpointingException as exc:
        return str(exc)
    return ""
