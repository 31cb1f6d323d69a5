"""A value that torch spreads over ranks: stored as pieces, filled where it lies, and handed back itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.mapping import ShardedTensorFactory

if TYPE_CHECKING:
    from shardckpt.mapping import FactoryMergeFn


@dataclass
class InPlaceFactory(ShardedTensorFactory):
    """A factory of pieces that are views of ``data``; what a load gives back is ``data``, filled through them."""

    merge_fn: FactoryMergeFn = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.merge_fn = self._itself

    def _itself(self, _: Any) -> Any:
        return self.data


__all__ = ["InPlaceFactory"]
