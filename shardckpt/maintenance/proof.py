"""The proof of a conversion: fingerprints of what was read, and of what is read again from where it was written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.engine import OpenCheckpoint, TensorSums
from shardckpt.errors import CorruptCheckpointError, listed
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from shardckpt.huggingface import HubTensor
    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import Ints


class TensorProof(NamedTuple):
    """What a conversion has read and written of a tensor.

    Attributes:
        key: Its key in the source.
        names: The tensors of the target that have its values: its key, or others by a key mapping.
        shape: Its shape in the source.
        dtype: Its dtype in the source.
        written_dtype: Its dtype in the target.
        before: The fingerprint of the values that were read from the source, in the target's dtype, and so, without a
            cast, that of the source's tensor.
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
    """An open checkpoint that adds up the fingerprints of the tensors that are read.

    Attributes:
        sums: What has been read.
    """

    sums: TensorSums

    def values(self, wanted: list[ShardedBase]) -> list[Any]:
        """Return the values of shards, and add those of tensors."""
        found = super().values(wanted)
        both = [(shard, v) for shard, v in zip(wanted, found, strict=True) if isinstance(shard, ShardedTensor)]
        self.sums.add([shard for shard, _ in both], [value for _, value in both])
        return found


def prove(
    tensors: Sequence[HubTensor],
    stored: Iterable[ShardedBase],
    before: TensorSums,
    after: TensorSums,
    target: str,
) -> tuple[TensorProof, ...]:
    """Compare what was read from the source with what was read again from the target.

    Args:
        tensors: The tensors of the target, with the parts of the source's that they are made of.
        stored: Descriptions of what the source has.
        before: What was read from the source.
        after: What was read from the target, under the source's keys.
        target: The target, for the error.

    Returns:
        A proof for each tensor of the source that was written.

    Raises:
        CorruptCheckpointError: Fingerprints differ.
    """
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
            f"{target} was written, and has other values than were read: {listed(wrong)}. Do not use it: the strategy "
            "that wrote it is at fault, or the disk or memory; verify it, and convert again to another place"
        )
    return tuple(proofs)


def list_fingerprints(tensors: Iterable[HubTensor], before: TensorSums) -> dict[str, str]:
    """Return the fingerprints of tensors of the target, from what was read of the source.

    Args:
        tensors: The tensors of the target, with the parts of the source's that they are made of.
        before: What was read from the source: all of these tensors.

    Returns:
        Those of tensors that are one of the source's, with the same axes, by their names in the target: the elements of
        others have other places.
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
