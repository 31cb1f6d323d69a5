"""Names of what lies beside a target until a save, an overwrite or a removal has ended, and what they say.

``.<target>.shardckpt-<kind>-<id>-<owner>``: the kind, an id that no other has, and the process that it belongs to.
Older releases wrote no owner.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from typing import NamedTuple

from shardckpt.storage.owner import Owner

#: What a save fills.
STAGING = "staging"
#: The checkpoint that an overwrite moves aside: perhaps the only whole one.
REPLACED = "replaced"
#: A checkpoint that is being removed (:mod:`shardckpt.storage.removal`).
REMOVED = "removed"
#: What has this at its end was given up, and is being removed.
_DISCARDED = "-discarded"

#: Bytes that a name in a directory may have on Linux's file systems.
NAME_MAX = 255
_DIGITS = 32
_TEMPORARY = re.compile(
    rf"\.(?P<stem>.+)\.shardckpt-(?P<kind>{STAGING}|{REPLACED}|{REMOVED})-(?P<id>[0-9a-f]{{{_DIGITS}}})"
    rf"(?:-(?P<owner>[0-9a-f]{{{_DIGITS}}}))?(?P<end>{_DISCARDED})?",
    re.DOTALL,
)
#: Bytes that are left for the target's name.
_STEM_BYTES = NAME_MAX - len(f"..shardckpt-{REPLACED}-{'0' * _DIGITS}-{'0' * _DIGITS}{_DISCARDED}")
#: Digits of the digest that stands for the end of a long name.
_DIGEST_DIGITS = 16


class TemporaryName(NamedTuple):
    """What a name says.

    Attributes:
        stem: The :func:`stem` of the target's name.
        kind: ``STAGING``, ``REPLACED`` or ``REMOVED``.
        owner: The process that it belongs to; None where an older release has made it.
        is_garbage: Whether nobody wants it any more: it was discarded, or is of a checkpoint being removed.
    """

    stem: str
    kind: str
    owner: Owner | None
    is_garbage: bool


def new_save_id() -> str:
    """A name that no other save has: 128 bits in hex."""
    return uuid.uuid4().hex


def stem(name: str) -> str:
    """A target's name as those of its temporary directories have it: a long one is cut, and ends with its digest."""
    raw = os.fsencode(name)
    if len(raw) <= _STEM_BYTES:
        return name
    digest = f"~{hashlib.sha256(raw).hexdigest()[:_DIGEST_DIGITS]}"
    return raw[: _STEM_BYTES - len(digest)].decode(errors="ignore") + digest


def temporary_name(target: str, kind: str, save_id: str, owner: Owner | None = None) -> str:
    """The name of a temporary directory.

    Args:
        target: Name of what it is for.
        kind: ``STAGING``, ``REPLACED`` or ``REMOVED``.
        save_id: Its own name.
        owner: The process that it belongs to; by default this one.
    """
    return f"{prefix(stem(target), kind)}{save_id}-{(owner or Owner.current()).text}"


def prefix(stem: str, kind: str) -> str:
    """What the names of all temporary directories of a kind begin with."""
    return f".{stem}.shardckpt-{kind}-"


def discarded_name(name: str) -> str:
    """The name under which a temporary directory is removed; it promises no checkpoint, and no save goes on in it."""
    return name.replace(f".shardckpt-{REPLACED}-", f".shardckpt-{STAGING}-").removesuffix(_DISCARDED) + _DISCARDED


def parse_temporary(name: str) -> TemporaryName | None:
    """What a name says, if it is as a whole one of ours; None for any other."""
    found = _TEMPORARY.fullmatch(name)
    if found is None:
        return None
    owner = Owner.from_number(int(found["owner"], 16)) if found["owner"] else None
    return TemporaryName(found["stem"], found["kind"], owner, bool(found["end"]) or found["kind"] == REMOVED)


def is_temporary(name: str) -> bool:
    """Whether a directory of this name is a save's or a removal's own, not a checkpoint to load."""
    return name.startswith(".") and any(f".shardckpt-{kind}-" in name for kind in (STAGING, REPLACED, REMOVED))


__all__ = [
    "NAME_MAX",
    "REMOVED",
    "REPLACED",
    "STAGING",
    "TemporaryName",
    "discarded_name",
    "is_temporary",
    "new_save_id",
    "parse_temporary",
    "prefix",
    "stem",
    "temporary_name",
]
