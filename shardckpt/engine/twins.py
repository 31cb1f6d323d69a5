"""Two stored tensors with one destination: those of a model that ties weights now, and did not when it was saved.

Whichever were read last would win. Both are read, and must be equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import KeyMismatchError
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import have_equal_bits
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.mapping.base import ShardedBase


def find_twins(wanted: Sequence[ShardedBase], not_stored: Collection[str] = ()) -> dict[int, int]:
    """Return for each shard whose data another one has, under another key, the number of the first of these."""
    first: dict[tuple[Any, ...], int] = {}
    twins: dict[int, int] = {}
    found = [
        (number, shard.key, data)
        for number, shard in enumerate(wanted)
        # wrapper tensors have no memory of their own
        if type(shard) is ShardedTensor and (data := shard.data) is not None and type(data) in ORDINARY
    ]
    addresses = [data.data_ptr() for _, _, data in found]
    if len(set(addresses)) == len(addresses):  # most models have none
        return twins
    for (number, key, data), address in zip(found, addresses, strict=True):
        if not address or key in not_stored:
            continue
        other = first.setdefault((address, data.shape, data.stride(), data.dtype), number)
        if other != number and wanted[other].key != key:
            twins[number] = other
    return twins


def check_twins(wanted: Sequence[ShardedBase], values: list[Any], twins: Mapping[int, int]) -> None:
    """Put the value of the first in the place of each twin's, which was read into memory of its own.

    Two that differ are a KeyMismatchError.
    """
    for number, other in twins.items():
        value, kept = values[number], values[other]
        if not have_equal_bits(value.to(kept.device, kept.dtype), kept):
            names = f"{wanted[other].key!r} and {wanted[number].key!r}"
            raise KeyMismatchError(
                f"{names} have one destination, a tensor that the model ties, and differ in the checkpoint. That of "
                f"{wanted[other].key!r} was loaded. Build the model without the tie, or leave one of them out of "
                "the load"
            )
        values[number] = kept
