"""The fingerprints of tensors whose boxes are read one after the other."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from shardckpt.tensors.fingerprint import finish_fingerprint, sum_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.planning.boxes import Ints

    #: A box of a tensor, and its sums: key, offset, shape, sums.
    _Logged = tuple[str, Ints, Ints, tuple[int, int]]


class TensorSums:
    """Adds up the fingerprints of tensors, box by box; a box that is read twice counts once.

    With ``is_logged`` it keeps a log of what is added, for :meth:`drain_log`, which must be called from time to time.
    """

    def __init__(self, *, is_logged: bool = False) -> None:
        self._log: list[_Logged] | None = [] if is_logged else None
        self._lock = threading.Lock()
        self._sums: dict[str, dict[tuple[Ints, Ints], tuple[int, int]]] = defaultdict(dict)

    def add(self, shards: Sequence[ShardedTensor], values: Sequence[torch.Tensor]) -> None:
        """Add boxes of tensors."""
        boxes = []
        for shard, value in zip(shards, values, strict=True):
            box = value.reshape((1,) * shard.prepend_axis_num + tuple(value.shape))  # with the global tensor's axes
            boxes.append((box, tuple(shard.global_offset), tuple(shard.global_shape)))
        found = sum_boxes(boxes)
        with self._lock:
            for shard, (value, offset, _), sums in zip(shards, boxes, found, strict=True):
                self._sums[shard.key][offset, tuple(value.shape)] = sums
                if self._log is not None:
                    self._log.append((shard.key, offset, tuple(value.shape), sums))

    def drain_log(self) -> list[_Logged]:
        """Return the sums added since the last call, as JSON values."""
        with self._lock:
            log, self._log = self._log or [], []
        return log

    def restore(self, log: Sequence[_Logged]) -> None:
        """Add the sums that another process logged; a box that was added here keeps its own."""
        with self._lock:
            for key, offset, shape, (first, second) in log:
                self._sums[key].setdefault((tuple(offset), tuple(shape)), (first, second))

    def finish(self, key: str, dtype: torch.dtype, shape: Ints) -> str:
        """Return the fingerprint of a tensor, once all its boxes are added."""
        boxes = self._sums.get(key, {}).values()
        sums = [sum(box[number] for box in boxes) for number in range(2)]
        return finish_fingerprint(str(dtype).removeprefix("torch."), shape, sums)
