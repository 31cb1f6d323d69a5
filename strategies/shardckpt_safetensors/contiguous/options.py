"""The tensors that are stored contiguously, and their names: the caller's options, and their meaning on all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, cast, get_args

from shardckpt.chunks import TieFinder
from shardckpt.errors import CheckpointingException, check_choice, listed
from shardckpt.huggingface import list_assets
from shardckpt.manifest import NAME_RULE, is_file_name

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardckpt.huggingface import Sections
    from shardckpt.mapping import ShardedBase
    from shardckpt.plugins import KeyMapping

logger = logging.getLogger(__name__)

#: How a tensor is stored: in one box a rank, contiguous, or contiguous where that needs no exchange between ranks.
Layout = Literal["boxes", "contiguous", "auto"]
#: The name of ``contiguous`` until November 2026.
_OLD_NAME = "whole"


@dataclass(frozen=True)
class ContiguousOptions:
    """The tensors that are stored contiguously: arguments of the strategy, parsed.

    ``patterns`` are of keys, each with the layout of the tensors that match: the first counts, and boxes where none
    does. ``limit`` are the bytes of tensors in a file, ``assets`` the files to copy.
    """

    patterns: tuple[tuple[str, Layout], ...]
    prefix: str | None
    mapping: KeyMapping
    limit: int
    assets: tuple[Path, ...]
    store_aliases: bool

    def choose(self, key: str, sections: Sections) -> Layout:
        """Return the layout of a tensor, by its key and the sections of all keys."""
        if not key.startswith(sections.model) or sections.has_optimizer_key(key):
            return "boxes"
        return next((layout for pattern, layout in self.patterns if fnmatchcase(key, pattern)), "boxes")

    def find_ties(self, shards: Sequence[ShardedBase]) -> list[tuple[str, ...]]:
        """Return the keys of contiguous tensors that share memory on this rank; none if each key is to be stored."""
        return TieFinder().find(shards) if self.store_aliases else []


def parse_patterns(layout: Layout | Mapping[str, Layout]) -> tuple[tuple[str, Layout], ...]:
    """Return patterns of keys with their layouts; none if everything is in boxes. An unknown layout is an error."""
    given: tuple[tuple[str, str], ...] = (("*", layout),) if isinstance(layout, str) else tuple(layout.items())
    if _OLD_NAME in dict(given).values():
        logger.warning("layout=%r is called 'contiguous' now, and the old name will go", _OLD_NAME)
    found = tuple((pattern, cast("Layout", "contiguous" if name == _OLD_NAME else name)) for pattern, name in given)
    for pattern, name in found:
        check_choice("layout" if isinstance(layout, str) else f"layout of {pattern!r}", name, get_args(Layout))
    return found if any(name != "boxes" for _, name in found) else ()


def choose_assets(assets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None) -> tuple[Path, ...]:
    """Return the files to copy, as an export does; a name that a file of a checkpoint cannot have is an error."""
    if assets is None:
        return ()
    files = list_assets(assets)
    if wrong := [path.name for path in files if not is_file_name(path.name)]:
        raise CheckpointingException(f"assets: {listed(wrong)} cannot be among a checkpoint's files: {NAME_RULE}")
    return tuple(files)
