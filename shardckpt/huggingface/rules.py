"""Key mappings as lists of rules, each a pattern of names and how the experts and halves of such tensors are cut."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import ShardingError
from shardckpt.planning import Box
from shardckpt.plugins import Identity, Link

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.planning import Ints

_EXPERT = "{expert}"
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """How stored tensors of one kind are called and cut in a Hugging Face folder.

    Names are patterns: ``{layer}`` and its like stand for text without a dot, the same in all of them. Where the
    folder's have ``{expert}``, the stored tensor's first axis counts the experts, and each is a tensor of its own.

    Attributes:
        stored: The stored tensor's name.
        hub: The folder's names: several are equal parts, one after the other along the stored tensor's first axis
            behind that of the experts; none if the folder has no place for it.
        transposed: Whether the folder has the last two axes swapped.
    """

    stored: str
    hub: tuple[str, ...]
    transposed: bool = False

    def links(self, key: str, shape: Ints) -> list[Link] | None:
        """The links of a stored tensor; None if its name is of another kind."""
        found = _pattern(self.stored).fullmatch(key)
        return None if found is None else list(self._links(found.groupdict(), key, shape))

    def _links(self, fields: Mapping[str, str], key: str, shape: Ints) -> Iterator[Link]:
        lead = int(any(_EXPERT in name for name in self.hub))
        parts = len(self.hub)
        if not parts:
            return
        if len(shape) <= lead or shape[lead] % parts or (self.transposed and len(shape) < lead + 2):
            raise ShardingError(
                f"{key!r} has the shape {shape}, which cannot be cut into {parts} of {', '.join(self.hub)}: "
                "is it the mapping of another model?"
            )
        rows = shape[lead] // parts
        extent = (rows, *shape[lead + 1 :])
        hub_shape = (*extent[:-2], extent[-1], extent[-2]) if self.transposed else extent
        for expert in range(shape[0] if lead else 1):
            for number, name in enumerate(self.hub):
                place = (expert,) * lead + (number * rows,) + (0,) * (len(extent) - 1)
                box = Box(place, (1,) * lead + extent)
                text = name.format(**fields, expert=expert)
                yield Link(text, hub_shape, (0,) * len(hub_shape), box, self.transposed)


class RuleMapping:
    """A mapping by the first rule that knows a name; other tensors keep their names.

    Args:
        rules: In the order in which they are asked.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)

    def links(self, key: str, shape: Ints) -> Sequence[Link]:
        """The tensors of the folder that are a stored tensor's elements."""
        for rule in self._rules:
            found = rule.links(key, shape)
            if found is not None:
                return found
        return Identity().links(key, shape)


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    """What matches the names that a template stands for."""
    texts = _FIELD.split(template)  # text and field by turns
    parts = [rf"(?P<{text}>[^.]+)" if number % 2 else re.escape(text) for number, text in enumerate(texts)]
    return re.compile("".join(parts))


__all__ = ["Rule", "RuleMapping"]
