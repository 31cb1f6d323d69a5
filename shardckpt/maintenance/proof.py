"""The proof of a conversion: fingerprints of the values that were read, and of values read again after the write."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.engine.opening import OpenCheckpoint
from shardckpt.engine.tensor_sums import TensorSums
from shardckpt.errors import CorruptCheckpointError, listed
from shardckpt.maintenance.sources import Reading, open_staged
from shardckpt.maintenance.tensor_boxes import cut_tensors, sum_written
from shardckpt.mapping.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch

    from shardckpt.engine.operation import Operation
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.planning.boxes import Ints


class TensorProof(NamedTuple):
    """The bytes of a tensor that a conversion has read and written.

    Attributes:
        key: Its key in the source, as are shape and dtype.
        names: The tensors of the target that have its values: its key, or others by a key mapping.
        written_dtype: Its dtype in the target.
        before: The fingerprint of the values that were read from the source, in the target's dtype; without a cast it
            equals the fingerprint of the source's tensor.
        after: The fingerprint of the same values, read again from the target.
    """

    key: str
    names: tuple[str, ...]
    shape: Ints
    dtype: str
    written_dtype: str
    before: str
    after: str


@dataclass(frozen=True)
class SummedCheckpoint(OpenCheckpoint):
    """An open checkpoint that adds up the fingerprints of the tensors that are read."""

    sums: TensorSums

    def values(self, wanted: list[ShardedBase], *, is_synced: bool = False) -> list[Any]:
        """Return the values of shards, and add the sums of tensors."""
        found = super().values(wanted, is_synced=is_synced)
        both = [(shard, v) for shard, v in zip(wanted, found, strict=True) if isinstance(shard, ShardedTensor)]
        self.sums.add([shard for shard, _ in both], [value for _, value in both])
        return found


@dataclass
class StagedProof:
    """The proof that the staged files have the values that were read; without it, nothing is committed.

    Attributes:
        stored: The source; all that is written has been read from it.
        operation: Counts the bytes that are read again.
        target: Where it is committed to, for errors.
        most: Most bytes of a box that is read.
        has_others: Whether tensors of objects and the common state may be among the written tensors.
        buffers: Bytes that reading may hold next to the boxes; None: as many as are fast.
        tensors: The proof of each tensor, once there is one.
        made: Backend and version of the target, once they are known.
    """

    stored: SummedCheckpoint
    operation: Operation
    target: Path
    most: int
    has_others: bool
    buffers: int | None = None
    tensors: tuple[TensorProof, ...] = ()
    made: tuple[str, int] = ("", 0)

    def make(self, written: Sequence[HubTensor], staging: Path, files: Path) -> None:
        """Read the staged files, and compare them with the values of the source.

        If it has other tensors, or other values, it is a CorruptCheckpointError.
        """
        after, context = TensorSums(), self.stored.context
        plugins = self.stored.operation.plugins
        how = Reading(context.allow_globals, memory_budget=self.buffers)
        with open_staged(staging, files, plugins, how) as result:
            self._check_names(result, written)
            self.operation.share_progress(result.operation)
            sum_written(result, cut_tensors(written, self.most), after)
            manifest = result.context.reader.manifest
        self.made = manifest.backend, manifest.version
        self.tensors = _compare(written, self.stored.index(), self.stored.sums, after, str(self.target))

    def _check_names(self, result: OpenCheckpoint, tensors: Sequence[HubTensor]) -> None:
        """Raise CorruptCheckpointError unless these tensors were written, and no others that may not be there."""
        found = {(s.key, tuple(s.global_shape), str(s.dtype)) for s in result.index() if isinstance(s, ShardedTensor)}
        wanted = {(tensor.name, tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors}
        wrong = wanted - found if self.has_others else wanted ^ found
        if wrong:
            names = listed(sorted(f"{name!r} of {dtype} {shape}" for name, shape, dtype in wrong))
            raise CorruptCheckpointError(
                f"the checkpoint written for {self.target} has other tensors than it should, and was removed: {names}. "
                "The strategy that wrote it is at fault"
            )


def _compare(
    tensors: Sequence[HubTensor],
    stored: Iterable[ShardedBase],
    before: TensorSums,
    after: TensorSums,
    target: str,
) -> tuple[TensorProof, ...]:
    """Return a proof for each tensor of the source that was written; raise CorruptCheckpointError if values differ."""
    described = {shard.key: shard for shard in stored if isinstance(shard, ShardedTensor)}
    names: dict[str, list[HubTensor]] = defaultdict(list)
    for tensor in tensors:
        for key in dict.fromkeys(part.key for part in tensor.parts):
            names[key].append(tensor)
    proofs = []
    for key, made in names.items():
        shape, dtype, written = tuple(described[key].global_shape), described[key].dtype, made[0].dtype
        sums = (each.finish(key, written, shape) for each in (before, after))
        hub = tuple(tensor.name for tensor in made)
        proofs.append(TensorProof(key, hub, shape, _name_dtype(dtype), _name_dtype(written), *sums))
    wrong = [repr(proof.key) for proof in proofs if proof.before != proof.after]
    if wrong:
        raise CorruptCheckpointError(
            f"the checkpoint written for {target} has other values than were read: {listed(wrong)}; it was removed. "
            "The strategy that wrote it is at fault, or the disk or memory: convert again, on another machine if it "
            "recurs"
        )
    return tuple(proofs)


def list_fingerprints(tensors: Iterable[HubTensor], before: TensorSums) -> dict[str, str]:
    """Return the fingerprints of tensors of the target, by their names there, from sums of the source's values.

    They are the fingerprints of tensors that are one of the source's, with the same axes: the elements of others have
    other places. ``tensors`` come with the parts of the source's that they are made of; all these have been read.
    """
    found = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if len(tensor.parts) != 1:
            continue
        (part,) = tensor.parts
        if not part.link.transposed and tuple(part.shape) == tuple(tensor.shape):
            found[tensor.name] = before.finish(part.key, tensor.dtype, tuple(tensor.shape))
    return found


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
