"""Pickling objects at a save: what cannot be pickled, or would be refused by a load, fails here and by name."""

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


def pickled(value: Any, what: str, allow_globals: Iterable[Any] = ()) -> bytes:
    """A value as a ``torch.save`` archive that a load accepts.

    Args:
        value: Any nest.
        what: Named in errors.
        allow_globals: Classes and functions that it may name besides the plain ones.

    Raises:
        ShardingError: it cannot be pickled; names the place.
        UnsafePickleError: it can, and a load would refuse it.
    """
    data = archived(value, what)
    check_loadable(data, what, allow_globals)
    return data.getvalue()


def archived(value: Any, what: str) -> io.BytesIO:
    """A value as a ``torch.save`` archive; ShardingError with the place of what cannot be pickled."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as exc:
        place = "".join(f"[{part!r}]" for part in _culprit(value))
        raise ShardingError(f"{what}{place} cannot be pickled: {type(exc).__name__}: {exc}") from exc
    file.seek(0)
    return file


def check_loadable(archive: io.BytesIO, what: str, allow_globals: Iterable[Any] = ()) -> None:
    """Fail as a load would: on classes outside the allow-list, on what our reader cannot rebuild."""
    try:
        load_bytes(archive.getvalue(), what, allow_globals)
    except CheckpointingException as exc:
        raise UnsafePickleError(f"a load would refuse {exc} (to save and to load)") from exc


def _culprit(value: Any) -> tuple[Any, ...]:
    """Path of the first leaf that cannot be pickled by itself."""
    return next((path for path, leaf in nested_items(value) if not can_be_pickled(leaf)), ())


__all__ = ["archived", "check_loadable", "pickled"]
