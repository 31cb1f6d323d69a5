"""Check whether stored values can be loaded into tensors of another dtype, and the loss of a cast."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shardckpt.errors import DtypeMismatchError, listed
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.tensors.casts import find_changed_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardckpt.mapping.base import ShardedBase

#: The keys of the tensors that are cast, by stored and wanted dtype.
Casts: TypeAlias = "dict[tuple[torch.dtype, torch.dtype], list[str]]"
#: The effect of a cast on values beyond the range of the wanted dtype.
_CUT = "be cut or wrapped around"
#: The end of an error, if the caller's function has the argument ``allow_dtype_cast``; others pass ``advise=False``.
_CAST_ADVICE = ", or load them as torch casts them: allow_dtype_cast=True"


def check_dtypes(
    wanted: Iterable[ShardedBase], stored: Mapping[str, torch.dtype], *, allow_cast: bool, advise: bool = True
) -> Casts:
    """Return the casts that a load has to make: keys by stored and wanted dtype.

    Args:
        wanted: The shards to load; objects, and tensors that are not stored, are not checked.
        stored: The stored dtypes by key.
        allow_cast: Allow casts that lose more than precision.
        advise: Whether the caller can pass ``allow_dtype_cast``, so that the error names it.

    Raises:
        DtypeMismatchError: A cast would lose more than precision. It names all such tensors, with both dtypes.
    """
    casts: Casts = defaultdict(list)
    for shard in wanted:
        if isinstance(shard, ShardedTensor) and stored.get(shard.key, shard.dtype) is not shard.dtype:
            casts[stored[shard.key], shard.dtype].append(shard.key)
    refused = {} if allow_cast else {pair: keys for pair, keys in casts.items() if not keeps_meaning(*pair)}
    if refused:
        shown = sorted({_describe_cast(key, *pair) for pair, keys in refused.items() for key in keys})
        raise _make_error(_CUT, shown, advise=advise)
    return dict(casts)


def refuse_cast(key: str, stored: torch.dtype, wanted: torch.dtype, *, advise: bool = True) -> None:
    """Raise :class:`DtypeMismatchError` if a cast of one tensor would lose more than precision."""
    if stored is not wanted and not keeps_meaning(stored, wanted):
        raise _make_error(_CUT, [_describe_cast(key, stored, wanted)], advise=advise)


def refuse_changed_values(key: str, source: torch.Tensor, wanted: torch.dtype, *, advise: bool = True) -> None:
    """Raise :class:`DtypeMismatchError` if a cast of a tensor would change a value by more than rounding a float."""
    if found := find_changed_value(source, wanted):
        raise make_changed_error([describe_changed_value(key, source.dtype, wanted, *found)], advise=advise)


def describe_changed_value(key: str, stored: torch.dtype, wanted: torch.dtype, value: Any, result: Any) -> str:
    """Return a line for :func:`make_changed_error`: a tensor, a value of it, and the result of its cast."""
    return f"{_describe_cast(key, stored, wanted)}: {value} would be {result}"


def make_changed_error(faults: Collection[str], *, advise: bool) -> DtypeMismatchError:
    """Return the error about values that casts change; ``advise`` as for :func:`check_dtypes`."""
    return _make_error("be changed", sorted({*faults}), advise=advise)


def _describe_cast(key: str, stored: torch.dtype, wanted: torch.dtype) -> str:
    return f"{key!r}: stored {stored}, wanted {wanted}"


def _make_error(change: str, faults: list[str], *, advise: bool) -> DtypeMismatchError:
    return DtypeMismatchError(
        f"stored values do not fit the dtypes that are wanted, and would {change}:\n  "
        + listed(faults, "\n  ")
        + f"\nGive these tensors the stored dtype{_CAST_ADVICE if advise else ''}"
    )


def keeps_meaning(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast loses no more than precision, by the table in :func:`shardckpt.dist_checkpointing.load`.

    Only the dtypes are compared: single values may still change, such as those that overflow, which a load refuses.
    Casts of packed dtypes are not judged here: the reads of each format refuse them.
    """
    if wanted.is_complex or stored == torch.bool:
        return True
    if stored.is_complex or wanted == torch.bool:
        return False
    if wanted.is_floating_point:
        return True
    if stored.is_floating_point:
        return False
    try:
        outer, inner = torch.iinfo(wanted), torch.iinfo(stored)
    except TypeError:  # torch has no range for bits and packed dtypes
        return False
    return outer.min <= inner.min and inner.max <= outer.max


def is_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast that :func:`keeps_meaning` allows keeps every value exactly; it decides the level of a log.

    Only sizes are compared: a wider float counts as exact, which is wrong only for ``float8_e8m0fnu`` to float16 or
    complex32; one of the same size does not, although a few such casts are exact.
    """
    if stored == torch.bool or not (wanted.is_floating_point or wanted.is_complex):
        return True  # an integer: keeps_meaning has compared the ranges
    # a real number has only half of a complex one
    room = wanted.itemsize // 2 if wanted.is_complex and not stored.is_complex else wanted.itemsize
    return stored.itemsize < room


def describe_casts(casts: Casts) -> str:
    """Return casts as text for a log: for each, its dtypes, the number of tensors and the first key."""
    rows = sorted((str(stored), str(wanted), keys) for (stored, wanted), keys in casts.items())
    return ", ".join(f"{stored} to {wanted} ({len(set(keys))}: {min(keys)!r}, ...)" for stored, wanted, keys in rows)
