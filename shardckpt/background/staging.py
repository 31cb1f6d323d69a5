"""Copying what a save is to write, so that the training can go on with its own tensors."""

from __future__ import annotations

import math
import os
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.background.slab import Slab, SlabPool, attach
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.storage.memory import is_plain, plain_cpu, synchronize_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardckpt.strategy import BackgroundWork

#: Where every tensor begins, in bytes: torch's own allocator aligns to it, and so do the largest elements.
_ALIGNED = 64

_pool = SlabPool()
os.register_at_fork(after_in_child=_pool.forget)


class _Place(NamedTuple):
    """Where a tensor stands in a slab."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor there."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)


@dataclass
class StagedWork:
    """Work whose tensors are copies in a slab; it travels to a thread as it is, to a process by the slab's path."""

    work: BackgroundWork
    places: list[_Place]
    slab: Slab | None
    path: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.slab is not None:  # who is staged and then forgotten must not keep the memory from others
            self._release = weakref.finalize(self, _pool.give_back, self.slab)
            self._release.atexit = False

    @contextmanager
    def opened(self) -> Iterator[BackgroundWork]:
        """The work, with its tensors."""
        memory = attach(self.path, self.nbytes) if self.slab is None else self.slab.memory
        self.work.tensors = [place.view(memory) for place in self.places]
        try:
            yield self.work
        finally:
            self.work.tensors = []

    def release(self) -> None:
        """The copies are no longer needed."""
        if self.slab is not None:
            self.slab = None
            self._release()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_release"} | {"slab": None}


def stage(work: BackgroundWork) -> StagedWork:
    """Copy the work's tensors; when this returns, their owner may change them.

    At most ``SHARDCKPT_STAGED_SAVES`` saves are staged at a time: for the next one this waits until one is written.
    """
    tensors, work.tensors = work.tensors, []
    places, nbytes = _placed(tensors)
    slab = _pool.take(nbytes)
    try:
        if any(tensor.device.type == "cuda" for tensor in tensors):
            slab.pin()
        _copy_all(work.keys, tensors, [place.view(slab.memory) for place in places])
    except BaseException:
        _pool.give_back(slab)
        raise
    return StagedWork(work, places, slab, slab.path, slab.nbytes)


def release_memory() -> None:
    """Give staging memory that no save uses back to the system; the next save takes it anew."""
    _pool.clear()


def _placed(tensors: list[torch.Tensor]) -> tuple[list[_Place], int]:
    """A place for every tensor, and the bytes of all."""
    places: list[_Place] = []
    end = 0
    for tensor in tensors:
        places.append(_Place(end, tensor.dtype, tuple(tensor.shape)))
        nbytes = tensor.numel() * tensor.element_size()
        end += -(-nbytes // _ALIGNED) * _ALIGNED
    return places, end


def _copy_all(keys: list[str], tensors: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    try:
        for key, tensor, copy in zip(keys, tensors, into, strict=True):
            _copy(key, tensor, copy)
    finally:  # after an error too: a copy still under way would land in what the next save has staged
        synchronize_devices(tensors)


def _copy(key: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
    try:
        values = tensor.detach() if is_plain(tensor) else plain_cpu(tensor)
    except CheckpointingException as exc:
        raise ShardingError(f"tensor {key!r}: {exc}") from exc
    into.copy_(values, non_blocking=True)


__all__ = ["StagedWork", "release_memory", "stage"]
