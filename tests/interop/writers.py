"""Who saves the sample, and what each release of megatron-core can and cannot do."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.interop.sample import UNEVEN

_GRID = "must be divisible by local shape"  # its ShardedTensor takes regular grids only
_BOXES = "tuple index out of range"  # it gives such chunks as many offsets as axes, and fewer sizes


@dataclass(frozen=True)
class Writer:
    """What a library writes.

    Attributes:
        refuses: Tensors with shards of unequal size that it cannot save or load, and what it says of them.
        content_metadata: Whether its save takes ``content_metadata``.
        flattened: Whether it saves flattened optimizer shards; those that do not cannot read them either.
        own_classes: Whether its ``.metadata`` is a pickle of classes of its own, which nobody reads without it.
    """

    refuses: dict[str, str] = field(default_factory=dict)
    content_metadata: bool = True
    flattened: bool = False
    own_classes: bool = False

    @property
    def uneven(self) -> tuple[str, ...]:
        """Tensors with shards of unequal size that it can describe."""
        return tuple(key for key in UNEVEN if key not in self.refuses)


_NONE, _WITHOUT_LAYERS = dict.fromkeys(UNEVEN, _GRID), {"layers.uneven": _BOXES}

WRITERS = {
    "shardckpt": Writer(),
    "0.9.0": Writer(_NONE, content_metadata=False, flattened=True),
    "0.12.3": Writer(_NONE, content_metadata=False, flattened=True, own_classes=True),
    "0.13.1": Writer(_NONE, flattened=True, own_classes=True),
    "0.15.3": Writer(_WITHOUT_LAYERS, flattened=True, own_classes=True),
    "0.16.1": Writer(_WITHOUT_LAYERS),
}

__all__ = ["WRITERS", "Writer"]
