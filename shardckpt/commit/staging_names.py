"""Names of the temporary directories of a save, an overwrite or a removal, which have the target's parent.

``.<target>.shardckpt-<kind>-<id>-<owner>``: the kind, a unique id, and the process that owns the directory. Older
releases wrote no owner.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit.owner import Owner

if TYPE_CHECKING:
    from pathlib import Path

#: The directory of the leases and pins, next to the checkpoints; see :mod:`shardckpt.commit.holds`.
HOLDS_NAME = ".shardckpt-holds"
#: The directory that a save fills.
STAGING = "staging"
#: The old checkpoint, which an overwrite moves aside: it may be the only complete one.
REPLACED = "replaced"
#: A checkpoint that is being removed (:mod:`shardckpt.commit.removal`).
REMOVED = "removed"
#: End of the name of a directory that its owner has discarded: it is being removed.
_DISCARDED = "-discarded"

#: Longest file name on Linux's file systems, in bytes.
NAME_MAX = 255
_DIGITS = 32
_TEMPORARY = re.compile(
    rf"\.(?P<stem>.+)\.shardckpt-(?P<kind>{STAGING}|{REPLACED}|{REMOVED})-(?P<id>[0-9a-f]{{{_DIGITS}}})"
    rf"(?:-(?P<owner>[0-9a-f]{{{_DIGITS}}}))?(?P<end>{_DISCARDED})?",
    re.DOTALL,
)
#: Bytes that remain for the target's name: :func:`stem` cuts longer ones.
_STEM_BYTES = NAME_MAX - len(f"..shardckpt-{REPLACED}-{'0' * _DIGITS}-{'0' * _DIGITS}{_DISCARDED}")
#: Hex digits of the digest that replaces the end of a long name.
_DIGEST_DIGITS = 16


class Leftover(NamedTuple):
    """A temporary directory, or file, that may no longer be in use.

    Attributes:
        path: Its path; never a link.
        stem: The :func:`stem` of its target's name; ``""`` for a spool directory.
        kind: ``STAGING``, ``REPLACED`` or ``REMOVED``.
        owner: The process that owns it; None if an older release created it.
        is_garbage: Whether it may be removed whoever owns it: it was discarded, or is a checkpoint being removed.
    """

    path: Path
    stem: str
    kind: str
    owner: Owner | None
    is_garbage: bool = False

    @property
    def is_replaced(self) -> bool:
        """Whether it may be the only complete checkpoint: an overwrite has moved it aside."""
        return self.kind == REPLACED and not self.is_garbage


def new_save_id() -> str:
    """Return an id that no other save has: 128 random bits in hex."""
    import uuid  # slow to import, and only needed here

    return uuid.uuid4().hex


def stem(name: str) -> str:
    """Return a target's name as the names of its temporary directories contain it.

    A name that would make them too long for the file system is cut, and ends with ``~`` and a digest of the full name.
    """
    raw = os.fsencode(name)
    if len(raw) <= _STEM_BYTES:
        return name
    digest = f"~{hashlib.sha256(raw).hexdigest()[:_DIGEST_DIGITS]}"
    return raw[: _STEM_BYTES - len(digest)].decode(errors="ignore") + digest


def temporary_name(target: str, kind: str, save_id: str, owner: Owner | None = None) -> str:
    """Return the name of a temporary directory of a kind: ``STAGING``, ``REPLACED`` or ``REMOVED``.

    By default this process owns it.
    """
    return f"{prefix(stem(target), kind)}{save_id}-{(owner or Owner.current()).text}"


def prefix(stem: str, kind: str) -> str:
    """Return the common prefix of the names of all temporary directories of a kind, of one target."""
    return f".{stem}.shardckpt-{kind}-"


def discarded_name(name: str) -> str:
    """Return the name under which a temporary directory is removed: no load or save takes it for a live one."""
    return name.replace(f".shardckpt-{REPLACED}-", f".shardckpt-{STAGING}-").removesuffix(_DISCARDED) + _DISCARDED


def parse_temporary(path: Path) -> Leftover | None:
    """Return the temporary directory at a path, as its name describes it; None if it has any other name."""
    found = _TEMPORARY.fullmatch(path.name)
    if found is None:
        return None
    owner = Owner.from_text(found["owner"]) if found["owner"] else None
    return Leftover(path, found["stem"], found["kind"], owner, bool(found["end"]) or found["kind"] == REMOVED)


def get_save_id(path: Path) -> str:
    """Return the id in the name of a temporary directory."""
    found = _TEMPORARY.fullmatch(path.name)
    return found["id"] if found else ""


def is_temporary(name: str) -> bool:
    """Return whether a name belongs to a temporary directory, not to a checkpoint to load."""
    return name.startswith(".") and any(f".shardckpt-{kind}-" in name for kind in (STAGING, REPLACED, REMOVED))
