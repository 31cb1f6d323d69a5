"""A factory for a tensor that torch shards itself: stored as shards, loaded in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.mapping.factory import ShardedTensorFactory

if TYPE_CHECKING:
    from shardckpt.mapping.base import FactoryMergeFn


@dataclass
class InPlaceFactory(ShardedTensorFactory):
    """A factory whose shards are views of ``data``; a load fills them, and returns ``data`` itself.

    With ``detached`` it returns ``data`` detached: it is a parameter, which torch's state dicts have so.
    """

    builds_anew: ClassVar[bool] = True
    merge_fn: FactoryMergeFn = field(init=False, repr=False, compare=False)
    detached: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.merge_fn = self._get_data

    # the shards are views of data, so there is nothing to merge
    def _get_data(self, _: Any) -> Any:
        return self.data.detach() if self.detached else self.data
