"""Putting small items that follow each other in a file into runs, each of which is read at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt_torch_dist.regions import SMALL_ITEM, ReadAhead, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt_torch_dist.stored import Item

#: Bytes of a run at most, and between two items of it.
_RUN = 1 << 20
_GAP = 4 << 10


class Run(NamedTuple):
    """Items that are read one after the other by one thread; ``span`` is read ahead for them."""

    items: list[ReadItem]
    span: Item
    small: bool

    def source(self, reader: Source) -> Source:
        """What the items are read from."""
        return ReadAhead(reader, self.span) if self.small and len(self.items) > 1 else reader


def runs(units: Iterable[Sequence[ReadItem]], place: Callable[[ReadItem], Item]) -> list[Run]:
    """The units in their order, small ones that lie next to each other joined.

    Args:
        units: Items that belong together; single ones sorted by their places.
        place: Where an item's archive is.
    """
    found: list[Run] = []
    for unit in units:
        spot = place(unit[0])
        small = len(unit) == 1 and spot.length <= SMALL_ITEM
        last = found[-1] if found else None
        if small and last is not None and last.small and _joins(last.span, spot):
            last.items.append(unit[0])
            end = max(last.span.offset + last.span.length, spot.offset + spot.length)
            found[-1] = last._replace(span=spot._replace(offset=last.span.offset, length=end - last.span.offset))
        else:
            span = spot if len(unit) == 1 else spot._replace(length=sum(place(item).length for item in unit))
            found.append(Run(list(unit), span, small))
    return found


def _joins(span: Item, spot: Item) -> bool:
    gap = spot.offset - span.offset - span.length
    return span.file == spot.file and gap <= _GAP and spot.offset + spot.length - span.offset <= _RUN


__all__ = ["Run", "runs"]
