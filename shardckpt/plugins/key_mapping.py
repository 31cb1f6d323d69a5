"""Two names for the same elements: tensors of a checkpoint, and tensors of a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from shardckpt.errors import PluginError
from shardckpt.planning import Box, Ints

if TYPE_CHECKING:
    from collections.abc import Sequence

_MATRIX = 2  # axes that can be swapped


class Link(NamedTuple):
    """Elements that a stored tensor and a tensor of a Hugging Face folder have in common.

    The box in the stored tensor may have more axes: those in front, along which its extent is 1 (one expert of many).

    Attributes:
        name: The folder's tensor.
        shape: Its whole shape.
        offset: Where the elements begin in it.
        box: Where they are in the stored tensor.
        transposed: Whether the last two axes are swapped.
    """

    name: str
    shape: Ints
    offset: Ints
    box: Box
    transposed: bool = False

    @property
    def dropped(self) -> int:
        """Axes of the stored tensor, in front, that the folder's tensor lacks."""
        return len(self.box.shape) - len(self.shape)

    @property
    def hub_box(self) -> Box:
        """Where the elements are in the folder's tensor."""
        return Box(self.offset, self._swapped(self.box.shape[self.dropped :]))

    def to_stored(self, part: Box) -> Box:
        """Where a part of :attr:`hub_box` is in the stored tensor."""
        lead = self.dropped
        place = self._swapped(tuple(index - base for index, base in zip(part.offset, self.offset, strict=True)))
        moved = Box((0,) * lead + place, (1,) * lead + self._swapped(part.shape))
        return moved.moved(self.box.offset)

    def to_hub(self, part: Box) -> Box:
        """Where a part of :attr:`box` is in the folder's tensor."""
        inner = tuple(index - base for index, base in zip(part.offset, self.box.offset, strict=True))[self.dropped :]
        return Box(self._swapped(inner), self._swapped(part.shape[self.dropped :])).moved(self.offset)

    def _swapped(self, values: Ints) -> Ints:
        return (*values[:-2], values[-1], values[-2]) if self.transposed else values


@runtime_checkable
class KeyMapping(Protocol):
    """What the tensors of a checkpoint are called, and how they are cut, in a Hugging Face folder."""

    def links(self, key: str, shape: Ints) -> Sequence[Link]:
        """The tensors of the folder that are a stored tensor's elements; none where the folder has no place for it.

        The same rule serves export and import: it depends on the arguments alone.

        Args:
            key: The stored tensor, without the prefix that the caller names.
            shape: Its global shape.

        Raises:
            ShardingError: a tensor of that name cannot have such a shape.
        """


class Identity:
    """The same names and shapes."""

    def links(self, key: str, shape: Ints) -> Sequence[Link]:
        """The tensor itself."""
        start = (0,) * len(shape)
        return (Link(key, shape, start, Box(start, shape)),)


def links_of(mapping: KeyMapping, key: str, shape: Ints) -> Sequence[Link]:
    """The links that a mapping gives, which must lie inside both tensors.

    Raises:
        PluginError: they do not.
    """
    links = mapping.links(key, shape)
    for link in links:
        if not _is_sound(link, shape):
            raise PluginError(f"{type(mapping).__name__} maps {key!r} of shape {shape} to {link}, which does not fit")
    return links


def _is_sound(link: Link, shape: Ints) -> bool:
    lead = link.dropped
    if not 0 <= lead <= len(shape) == len(link.box.shape) or len(link.offset) != len(link.shape):
        return False
    if any(size != 1 for size in link.box.shape[:lead]) or (link.transposed and len(link.shape) < _MATRIX):
        return False
    return _is_inside(link.box, shape) and _is_inside(link.hub_box, link.shape)


def _is_inside(box: Box, shape: Ints) -> bool:
    sides = zip(box.offset, box.end, shape, strict=True)
    return all(0 <= start <= stop <= size for start, stop, size in sides)


__all__ = ["Identity", "KeyMapping", "Link", "links_of"]
