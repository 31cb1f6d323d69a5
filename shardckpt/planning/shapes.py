"""Check that tensors have the global shapes that are stored, and name the likeliest reason if they do not."""

from __future__ import annotations

from operator import ne
from typing import TYPE_CHECKING

from shardckpt.errors import ShapeMismatchError
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.mapping import ShardedBase
    from shardckpt.planning.boxes import Ints


def check_shapes(wanted: Iterable[ShardedBase], stored: Mapping[str, Ints]) -> None:
    """Compare the global shapes of wanted tensors with those that are stored.

    Args:
        wanted: Shards; tensors with ``allow_shape_mismatch`` need the same number of axes only.
        stored: Global shape by key; shards of other keys are not checked.

    Raises:
        ShapeMismatchError: some shapes differ; it names all such tensors, with both shapes and a hint.
    """
    faults = {
        f"{shard.key!r}: stored {stored[shard.key]}, wanted {tuple(shard.global_shape)}"
        f"{_hint(stored[shard.key], tuple(shard.global_shape), shard.prepend_axis_num)}"
        for shard in wanted
        if isinstance(shard, ShardedTensor) and shard.key in stored and not _fits(shard, stored[shard.key])
    }
    if faults:
        raise ShapeMismatchError("global shapes differ from those in the checkpoint:\n  " + "\n  ".join(sorted(faults)))


def _fits(shard: ShardedTensor, stored: Ints) -> bool:
    wanted = tuple(shard.global_shape)
    return stored == wanted or (shard.allow_shape_mismatch and len(stored) == len(wanted))


def _hint(stored: Ints, wanted: Ints, prepended: int) -> str:
    if len(stored) > len(wanted) and stored[len(stored) - len(wanted) :] == wanted:
        return f" (stored with {len(stored) - len(wanted)} prepended axes: prepend_axis_num)"
    if len(wanted) > len(stored) and wanted[len(wanted) - len(stored) :] == stored:
        return f" (stored without prepended axes; wanted with prepend_axis_num={prepended})"
    if len(stored) > 1 and stored[::-1] == wanted:
        return " (transposed?)"
    if len(stored) == len(wanted) > 2 and sum(map(ne, stored, wanted)) == 1:  # noqa: PLR2004 - experts, layers, heads
        return " (is it one rank's part? Describe it as a shard: a DTensor, or a layout of experts)"
    if len(stored) == len(wanted) and stored[1:] == wanted[1:]:
        return " (another padding of the vocabulary? allow_shape_mismatch=True loads the common rows)"
    return ""


__all__ = ["check_shapes"]
