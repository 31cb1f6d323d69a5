"""Key mappings: which tensors of a Hugging Face folder have the elements of a checkpoint's tensor, and where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from shardckpt.errors import PluginError
from shardckpt.planning.boxes import Box, Ints

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_MATRIX = 2  # axes that can be swapped
#: The treatment of rows of the embedding that the model's ``vocab_size`` does not count, with which trainers pad it:
#: they are refused, not written, or kept.
Padding = Literal["refuse", "cut", "keep"]


class KeyMapEntry(NamedTuple):
    """A key map entry: elements that a stored tensor and a tensor of a Hugging Face folder have in common.

    The stored tensor may have more axes than the folder's: leading ones, along which the box has extent 1 (one expert
    of many).

    Example:
        Expert 3 of a stored tensor of shape (8, 64, 32), which the folder has as a tensor of its own::

            KeyMapEntry("experts.3.weight", shape=(64, 32), offset=(0, 0), box=Box((3, 0, 0), (1, 64, 32)))

    Attributes:
        name: Name of the folder's tensor.
        shape: Its shape.
        offset: Where the elements start in it: an index per axis.
        box: The region of the stored tensor that has the elements.
        transposed: Whether the folder's tensor has the last two axes swapped.
        keep_dtype: Whether an export that casts leaves the folder's tensor as it is stored.
    """

    name: str
    shape: Ints
    offset: Ints
    box: Box
    transposed: bool = False
    keep_dtype: bool = False

    @property
    def dropped(self) -> int:
        """Number of leading axes of the stored tensor that the folder's tensor lacks."""
        return len(self.box.shape) - len(self.shape)

    @property
    def folder_box(self) -> Box:
        """The region of the folder's tensor that has the elements."""
        return Box(self.offset, self._swap_axes(self.box.shape[self.dropped :]))

    def to_stored(self, part: Box) -> Box:
        """Return the region of the stored tensor that corresponds to ``part``, a region within :attr:`folder_box`."""
        lead = self.dropped
        start = self._swap_axes(part.offset_in(self.folder_box))
        inner = Box((0,) * lead + start, (1,) * lead + self._swap_axes(part.shape))
        return inner.moved(self.box.offset)

    def to_folder(self, part: Box) -> Box:
        """Return the region of the folder's tensor that corresponds to ``part``, a region within :attr:`box`."""
        start = part.offset_in(self.box)[self.dropped :]
        return Box(self._swap_axes(start), self._swap_axes(part.shape[self.dropped :])).moved(self.offset)

    def _swap_axes(self, values: Ints) -> Ints:
        return (*values[:-2], values[-1], values[-2]) if self.transposed else values


@runtime_checkable
class KeyMapping(Protocol):
    """The names and splits of a checkpoint's tensors in a Hugging Face folder."""

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
        """Return the tensors of the folder that have a stored tensor's elements.

        Export and import use the same result: it depends on the arguments alone.

        Args:
            key: Name of the stored tensor, without the prefix that the caller names.
            shape: Its global shape.

        Returns:
            A key map entry per tensor of the folder; none if the folder has no such tensor.

        Raises:
            ShardingError: a tensor of that name cannot have such a shape.
        """


@runtime_checkable
class KnowsKeys(Protocol):
    """A key mapping that says which names it knows; with any other mapping, all names count as known."""

    def knows(self, key: str) -> bool:
        """Return whether a stored tensor's name, without the prefix, is one that the mapping is made for."""

    def find_unused(self, keys: Collection[str]) -> Sequence[str]:
        """Return the names, or patterns of names, of the mapping that none of these keys matches."""


@runtime_checkable
class UsesConfig(Protocol):
    """A key mapping that needs numbers of the model's ``config.json``, such as the number of heads."""

    def with_config(self, config: Mapping[str, Any], padding: Padding) -> KeyMapping:
        """Return the mapping for a model with this content of ``config.json``."""


@runtime_checkable
class MapsPart(Protocol):
    """A key mapping of folders with a part of a model, such as an adapter: a load leaves tensors without entries alone.

    A model may have several such parts, by names that their folders do not have.
    """

    def find_parts(self, keys: Iterable[str]) -> Collection[str]:
        """Return the names of the parts that these tensors of a model, by their names without the prefix, are of."""

    def for_folder(self, stored: Collection[str], parts: Collection[str]) -> KeyMapping:
        """Return the mapping for a load.

        Args:
            stored: The names of the folder's tensors.
            parts: The results of :meth:`find_parts` on all ranks.

        Raises:
            KeyMismatchError: they do not say which of them the folder has.
        """


class Identity:
    """The mapping that changes nothing: the same names and shapes."""

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
        """Return one entry: the tensor itself."""
        start = (0,) * len(shape)
        return (KeyMapEntry(key, shape, start, Box(start, shape)),)


def get_key_map_entries(mapping: KeyMapping, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
    """Return the key map entries that a mapping has for a stored tensor.

    Anything else in their place, and an entry whose regions are not inside both tensors, are a PluginError.
    """
    found: object = mapping.links(key, shape)
    # links may be a generator: that can be read only once, and is true without an entry
    entries = tuple(found) if isinstance(found, Iterable) else (found,)
    for entry in () if type(mapping) is Identity else entries:  # of 100,000 tensors the check takes a second
        if fault := _find_fault(entry, shape):
            raise PluginError(f"{type(mapping).__name__} maps {key!r} of shape {shape} to {entry!r}, {fault}")
    return entries


def _find_fault(entry: object, shape: Ints) -> str:
    """Return why an entry cannot be one of a stored tensor of this shape; ``""`` if it can."""
    if not isinstance(entry, KeyMapEntry):
        return "which is no KeyMapEntry: its links returns a list of them, an empty one where the folder has no tensor"
    name: object = entry.name
    box: object = entry.box
    if not isinstance(name, str) or not isinstance(box, Box):
        return "whose fields are not of the types of KeyMapEntry"
    try:
        dropped = entry.dropped
        is_dropped_once = dropped >= 0 and all(size == 1 for size in entry.box.shape[:dropped])
        can_be_transposed = not entry.transposed or len(entry.shape) >= _MATRIX
        is_sound = can_be_transposed and entry.box.fits(shape) and entry.folder_box.fits(entry.shape)
    except TypeError:  # None for a shape, a text among the numbers
        return "whose fields are not of the types of KeyMapEntry"
    return "" if is_sound and is_dropped_once else "which does not fit"
