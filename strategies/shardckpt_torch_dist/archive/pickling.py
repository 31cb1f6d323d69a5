"""Pickle objects at a save. What cannot be pickled, or what a load would refuse, fails here with its place."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.distributed import can_be_pickled
from shardckpt.errors import CheckpointingException, ShardingError, UnsafePickleError
from shardckpt.state_dict import nested_items
from shardckpt_torch_dist.archive.reader import load_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


def make_loadable_archive(value: Any, what: str, allow_globals: Iterable[Any] = ()) -> bytes:
    """Pickle a value as a ``torch.save`` archive that a load accepts.

    Args:
        value: Any value, for example a nested dict.
        what: What the value is, for errors: "object 'key'".
        allow_globals: Classes and functions that the pickle may name, in addition to the plain ones.

    Returns:
        The bytes of the archive.

    Raises:
        ShardingError: The value cannot be pickled; the error names the place in it.
        UnsafePickleError: It can be pickled, but a load would refuse it.
    """
    data = make_archive(value, what)
    check_loadable(data, what, allow_globals)
    return data.getvalue()


def make_archive(value: Any, what: str) -> io.BytesIO:
    """Pickle a value as a ``torch.save`` archive, without asking whether a load would accept it.

    Returns:
        The archive, positioned at its start.

    Raises:
        ShardingError: The value cannot be pickled; the error names the place in it.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as exc:
        place = "".join(f"[{part!r}]" for part in _find_unpicklable(value))
        raise ShardingError(f"{what}{place} cannot be pickled: {type(exc).__name__}: {exc}") from exc
    file.seek(0)
    return file


def check_loadable(archive: io.BytesIO, what: str, allow_globals: Iterable[Any] = ()) -> None:
    """Raise UnsafePickleError if a load would refuse the archive: for a class outside the allow-list, for example."""
    try:
        load_bytes(archive.getvalue(), what, allow_globals)
    except CheckpointingException as exc:
        raise UnsafePickleError(f"a load would refuse {exc} (to save and to load)") from exc


def _find_unpicklable(value: Any) -> tuple[Any, ...]:
    """Return the path of the first leaf that cannot be pickled by itself."""
    return next((path for path, leaf in nested_items(value) if not can_be_pickled(leaf)), ())


__all__ = ["check_loadable", "make_archive", "make_loadable_archive"]
