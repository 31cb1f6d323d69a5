"""Check that tensors have the global shapes that are stored, and name the likeliest reason if they do not."""

from __future__ import annotations

from operator import ne
from typing import TYPE_CHECKING

from shardckpt.errors import ShapeMismatchError
from shardckpt.mapping.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.mapping.base import ShardedBase
    from shardckpt.planning.boxes import Ints


def check_shapes(wanted: Iterable[ShardedBase], stored: Mapping[str, Ints], *, advise: bool = True) -> None:
    """Compare the global shapes of wanted tensors with the stored ones, by key; other keys are not checked.

    Tensors with ``allow_shape_mismatch`` need the same number of axes only. The ShapeMismatchError names all tensors
    that differ, with both shapes and a hint; hints may ``advise`` arguments of ShardedTensor if the caller has made the
    shards.
    """
    faults = set()
    for shard in wanted:
        if not isinstance(shard, ShardedTensor) or shard.key not in stored:
            continue
        found, asked = stored[shard.key], tuple(shard.global_shape)
        if found != asked and not (shard.allow_shape_mismatch and len(found) == len(asked)):
            hint = _guess_reason(found, asked, shard.prepend_axis_num, advise=advise)
            faults.add(f"{shard.key!r}: stored {found}, wanted {asked}{hint}")
    if faults:
        # Megatron's term, for which its callers look
        raise ShapeMismatchError("Global shape mismatch with the checkpoint:\n  " + "\n  ".join(sorted(faults)))


def _guess_reason(stored: Ints, wanted: Ints, prepended: int, *, advise: bool) -> str:
    if len(stored) > len(wanted) and stored[len(stored) - len(wanted) :] == wanted:
        return f" (stored with {len(stored) - len(wanted)} prepended axes{': prepend_axis_num' if advise else ''})"
    if len(wanted) > len(stored) and wanted[len(wanted) - len(stored) :] == stored:
        return " (stored without prepended axes" + (f"; wanted with prepend_axis_num={prepended})" if advise else ")")
    if len(stored) > 1 and stored[::-1] == wanted:
        return " (transposed?)"
    if len(stored) == len(wanted) > 2 and sum(map(ne, stored, wanted)) == 1:  # noqa: PLR2004 - experts, layers, heads
        return " (is it one rank's part? Describe it as a shard: a DTensor, or a layout of experts)"
    if len(stored) == len(wanted) and stored[1:] == wanted[1:]:
        call = "load(..., resize=[...])" if advise else "CheckpointConfig(resize=[...])"
        return f" (another size or padding of the vocabulary? {call} loads the rows that both have)"
    return ""
