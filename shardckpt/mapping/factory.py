"""A tensor that is stored as several shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.errors import CheckpointingException, ShardingError, show_given
from shardckpt.mapping.base import FactoryBuildFn, FactoryMergeFn, ReplicaId, ShardedBase

if TYPE_CHECKING:
    import torch


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A local tensor that is stored as several shards: ``build_fn`` splits it, ``merge_fn`` joins them.

    Args:
        key: Passed to ``build_fn``.
        data: The local tensor.
        build_fn: ``(key, data, replica_id, flattened_range)`` → a nested dict or list of shards.
        merge_fn: The same nested dict or list, loaded → the local tensor.
        replica_id: See :class:`ShardedTensor`.
        flattened_range: Passed to ``build_fn``.

    Attributes:
        builds_anew: Whether each build makes new shards of detached data, in a flat list: they need no copies.
    """

    builds_anew: ClassVar[bool] = False

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the shards that ``data`` is stored as, in a nested dict or list; ShardingError if it is neither.

        Any other value, as of a ``build_fn`` without a ``return``, would be stored in the place of the tensor.
        """
        built = self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)
        if not isinstance(built, (dict, list, ShardedBase)):
            raise ShardingError(
                f"ShardedTensorFactory {self.key!r}: its build_fn returned {show_given(built)}, expected a dict "
                "or list of shards"
            )
        return built

    def validate_metadata_integrity(self) -> None:
        """Nothing to check before it is built."""

    def without_data(self) -> ShardedTensorFactory:
        """Raise CheckpointingException, and never return: a factory without data builds nothing."""
        raise CheckpointingException(f"ShardedTensorFactory {self.key!r} has no form without data: build() it first")
