"""The readable part of a damaged checkpoint: its index without the lost tensors and objects."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.engine.integrity import is_damage
from shardckpt.engine.opening import COMMON_STATE
from shardckpt.engine.progress import Progress
from shardckpt.engine.streaming import STREAM_BYTES, cut_stored, read_boxes
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError, format_many
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.validation.keys import stored_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.engine.streaming import TensorBox

#: Most bytes of boxes that are read at a time: as many as the least budget of a conversion has for tensors.
_MOST = STREAM_BYTES // 2


def hide_damaged(checkpoint: OpenCheckpoint, lost: Collection[str] = ()) -> OpenCheckpoint:
    """Return the checkpoint without the tensors, objects and common state that cannot be read. Not collective.

    Everything is read once, and compared with its digests, or where there are none with the CRC-32 of archives. A
    tensor with one damaged box is damaged. ``lost`` are names that its reader has found to be missing already. Plugins
    see the progress as that of ``verify``. From then on the reader accepts files that were cut, and reads the bytes
    before their end.

    It is a CorruptCheckpointError if no tensor can be read, and an error, too, if the index is damaged, or something
    cannot be read for another reason than damage.
    """
    index = checkpoint.index()
    checkpoint.context.reader.accept_cut_files()
    damaged = dict.fromkeys(lost)
    tensors = [shard for shard in index if isinstance(shard, ShardedTensor)]
    boxes = [*cut_stored(tensors, _MOST)]
    operation = checkpoint.operation
    progress = Progress("verify", operation.directory, sum(box.nbytes for box in boxes), operation.plugins)
    for batch in batch_by_bytes(boxes, lambda box: box.nbytes, _MOST):
        damaged.update(dict.fromkeys(_find_damaged(checkpoint, batch)))
        progress.add(sum(box.nbytes for box in batch))
    for shard in index:
        if not isinstance(shard, ShardedTensor) and _is_damaged(partial(checkpoint.values, [shard])):
            damaged[stored_key(shard)] = None
    if _is_damaged(checkpoint.common):
        damaged[COMMON_STATE] = None
    if (tensors or not index) and damaged and damaged.keys() >= {shard.key for shard in tensors}:
        raise CorruptCheckpointError(
            f"{checkpoint.operation.directory}: none of its {format_many(len(tensors), 'tensor')} can be read: "
            "`shardckpt verify` says why"
        )
    return replace(checkpoint, damaged=tuple(damaged))


def _find_damaged(checkpoint: OpenCheckpoint, boxes: Sequence[TensorBox]) -> Iterator[str]:
    """Yield the keys of boxes that cannot be read: of several each is read by itself, if one cannot."""
    if not _is_damaged(partial(read_boxes, checkpoint, boxes)):
        return
    if len(boxes) == 1:
        yield boxes[0].tensor.key
        return
    for box in boxes:
        yield from _find_damaged(checkpoint, [box])


def _is_damaged(read: Callable[[], object]) -> bool:
    """Return whether a read fails since bytes are missing, or not as written."""
    try:
        read()
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        if not is_damage(exc):
            raise
        return True
    return False
