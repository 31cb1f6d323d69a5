"""A factory for a tensor that torch shards itself: stored as shards, loaded in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.mapping import ShardedTensorFactory

if TYPE_CHECKING:
    from shardckpt.mapping import FactoryMergeFn


@dataclass
class InPlaceFactory(ShardedTensorFactory):
    """A factory whose shards are views of ``data``; a load fills them, and returns ``data`` itself."""

    merge_fn: FactoryMergeFn = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.merge_fn = self._get_data

    # the shards are views of data, so there is nothing to merge
    def _get_data(self, _: Any) -> Any:
        return self.data
