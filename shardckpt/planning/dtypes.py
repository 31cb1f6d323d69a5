"""Check whether stored values can be loaded into tensors of another dtype, and what a cast would lose."""

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
#: What errors say about the argument that allows casts, to callers who can pass it.
_CAST_ADVICE = ", or load them as torch casts them: allow_dtype_cast=True"


def check_dtypes(
    wanted: Iterable[ShardedBase], stored: Mapping[str, torch.dtype], *, allow_cast: bool, advise: bool = True
) -> Casts:
    """Compare the dtypes of wanted tensors with those that are stored, by key; shards of other keys are not checked.

    Returns the casts that a load has to make: keys by stored and wanted dtype. Unless ``allow_cast``, one that would
    lose more than precision is a DtypeMismatchError, which names all such tensors, with both dtypes. It may ``advise``
    the argument that allows it if the caller can pass that.
    """
    casts: Casts = defaultdict(list)
    for shard in wanted:
        if isinstance(shard, ShardedTensor) and stored.get(shard.key, shard.dtype) is not shard.dtype:
            casts[stored[shard.key], shard.dtype].append(shard.key)
    faults = {pair: keys for pair, keys in casts.items() if not allow_cast and not keeps_meaning(*pair)}
    if faults:
        shown = sorted(
            {f"{key!r}: stored {pair[0]}, wanted {pair[1]}" for pair, keys in faults.items() for key in keys}
        )
        raise DtypeMismatchError(
            "stored values do not fit the dtypes that are wanted, and would be cut or wrapped around:\n  "
            + listed(shown, "\n  ")
            + "\nGive these tensors the stored dtype"
            + _CAST_ADVICE * advise
        )
    return dict(casts)


def refuse_cast(key: str, stored: torch.dtype, wanted: torch.dtype, *, advise: bool = True) -> None:
    """Raise :class:`DtypeMismatchError` if a cast of one tensor would lose more than precision."""
    if stored is not wanted:  # a shard of any shape will do: its key and dtype alone are compared
        shard = ShardedTensor.from_global_shape(key, wanted, ())
        check_dtypes([shard], {key: stored}, allow_cast=False, advise=advise)


def refuse_changed_values(key: str, source: torch.Tensor, wanted: torch.dtype, *, advise: bool = True) -> None:
    """Raise :class:`DtypeMismatchError` if a cast of a tensor would change a value by more than rounding a float."""
    if found := find_changed_value(source, wanted):
        raise make_changed_error([describe_changed_value(key, source.dtype, wanted, *found)], advise=advise)


def describe_changed_value(key: str, stored: torch.dtype, wanted: torch.dtype, value: Any, result: Any) -> str:
    """Return a line of :func:`make_changed_error`: the tensor, and one of its values that a cast changes."""
    return f"{key!r}: stored {stored}, wanted {wanted}: {value} would be {result}"


def make_changed_error(faults: Collection[str], *, advise: bool) -> DtypeMismatchError:
    """Return the error about values that casts change; ``advise`` is that of :func:`check_dtypes`."""
    return DtypeMismatchError(
        "stored values do not fit the dtypes that are wanted, and would be changed:\n  "
        + listed(sorted({*faults}), "\n  ")
        + "\nGive these tensors the stored dtype"
        + _CAST_ADVICE * advise
    )


def keeps_meaning(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast loses no more than precision: the table is in :func:`shardckpt.dist_checkpointing.load`.

    Values stay what they are, or become the nearest value of a float or complex dtype.
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
    except TypeError:  # bits and packed dtypes: torch knows no range of theirs
        return False
    return outer.min <= inner.min and inner.max <= outer.max


def is_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast that :func:`keeps_meaning` also keeps every value exactly.

    A float of more bytes holds every value of a number of fewer bytes. Of equal sizes this says no, also where a few
    casts would be exact: it decides how loudly a load logs, not what it loads.
    """
    if stored == torch.bool or not (wanted.is_floating_point or wanted.is_complex):
        return True
    return stored.itemsize < wanted.itemsize // (2 if wanted.is_complex and not stored.is_complex else 1)


def describe_casts(casts: Casts) -> str:
    """Return casts as text for a log: the dtypes, the number of tensors, and the first of them."""
    found = sorted((str(stored), str(wanted), keys) for (stored, wanted), keys in casts.items())
    return ", ".join(f"{stored} to {wanted} ({len(set(keys))}: {min(keys)!r}, ...)" for stored, wanted, keys in found)
