"""Key mappings as lists of rules: patterns of names, and how tensors split into experts and fused parts."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardckpt.errors import ShardingError
from shardckpt.planning import Box
from shardckpt.plugins import Identity, KeyMapEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardckpt.planning import Ints

_EXPERT = "expert"
_FIELD = re.compile(r"\{([^\W\d]\w*)\}")


@dataclass(frozen=True)
class Rule:
    """How stored tensors of one kind are named and split in a Hugging Face folder.

    Names are patterns: a field such as ``{layer}`` stands for text without a dot, the same in all names of the rule. If
    the folder's names have ``{expert}`` and the stored one has not, the stored tensor's first axis counts the experts,
    and the folder has one tensor for each.

    Example::

        Rule("layers.{layer}.experts.w", ("model.layers.{layer}.experts.{expert}.w",))  # split by expert
        Rule("layers.{layer}.gate_up", ("model.{layer}.gate", "model.{layer}.up"))  # split into two halves

    Attributes:
        stored: The stored tensor's name.
        hub: The folder's names. Several names are equal parts of the stored tensor, in order along its first axis after
            that of the experts. If empty, tensors of this kind are not exported.
        transposed: Whether the last two axes are swapped in the folder.

    Raises:
        ShardingError: A field is twice in the stored name, or in a name of the folder alone; or ``hub`` is a text.
    """

    stored: str
    hub: tuple[str, ...]
    transposed: bool = False

    def __post_init__(self) -> None:
        hub: object = self.hub
        if isinstance(hub, str):  # its letters would be the names
            raise ShardingError(f"Rule({self.stored!r}): hub={hub!r} is no tuple of names: give ({hub!r},)")
        fields = _FIELD.findall(self.stored)
        twice = sorted({field for field in fields if fields.count(field) > 1})
        if twice:
            raise ShardingError(f"Rule({self.stored!r}): the field {twice[0]!r} is there twice: give each another name")
        for name in self.hub:
            unknown = sorted(set(_FIELD.findall(name)) - {*fields, _EXPERT})
            if unknown:
                raise ShardingError(
                    f"Rule({self.stored!r}): the folder's name {name!r} has the field {unknown[0]!r}, which the stored "
                    "name lacks"
                )

    def links(self, key: str, shape: Ints) -> list[KeyMapEntry] | None:
        """Map a stored tensor by this rule.

        Args:
            key: The stored tensor's name.
            shape: Its global shape.

        Returns:
            The key map entries; None if the name does not match.

        Raises:
            ShardingError: the shape cannot be split as the rule says.
        """
        found = _compile_pattern(self.stored).fullmatch(key)
        if found is None or not self.hub:
            return None if found is None else []
        fields = found.groupdict()
        # the axis of experts, if there is one, comes first; where the stored name has the expert, it is of one
        lead = int(_EXPERT not in fields and any(_EXPERT in _FIELD.findall(name) for name in self.hub))
        parts = len(self.hub)
        if len(shape) <= lead or shape[lead] % parts or (self.transposed and len(shape) < lead + 2):
            raise ShardingError(
                f"{key!r} has the shape {shape}, which cannot be split into {parts} of {', '.join(self.hub)}: "
                "is it the mapping of another model?"
            )
        rows = shape[lead] // parts
        extent = (rows, *shape[lead + 1 :])
        hub_shape = (*extent[:-2], extent[-1], extent[-2]) if self.transposed else extent
        entries = []
        for expert in range(shape[0] if lead else 1):
            for number, name in enumerate(self.hub):
                offset = (expert,) * lead + (number * rows,) + (0,) * (len(extent) - 1)
                box = Box(offset, (1,) * lead + extent)
                hub_name = _fill(name, {_EXPERT: str(expert), **fields})
                entries.append(KeyMapEntry(hub_name, hub_shape, (0,) * len(hub_shape), box, self.transposed))
        return entries


class RuleMapping:
    """A key mapping by the first rule that matches a name; tensors that none matches keep their names.

    A tensor that has a rule's name in the folder already is known, too: it keeps its name without a word. Of others
    that no rule matches, an export warns, or fails if it is strict.

    Args:
        rules: The rules, in the order in which they are tried.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
        """Return the key map entries of a stored tensor of a global shape; none if it is not exported."""
        found = (rule.links(key, shape) for rule in self._rules)
        return next((links for links in found if links is not None), Identity().links(key, shape))

    def knows(self, key: str) -> bool:
        """Return whether a rule matches a name, or gives it to a tensor of the folder."""
        return any(_is_match(name, key) for rule in self._rules for name in (rule.stored, *rule.hub))

    def find_unused(self, keys: Collection[str]) -> Sequence[str]:
        """Return the stored names of the rules that match none of these keys."""
        return [rule.stored for rule in self._rules if not any(_is_match(rule.stored, key) for key in keys)]


def _fill(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda found: fields[found[1]], template)


def _is_match(template: str, key: str) -> bool:
    return _compile_pattern(template).fullmatch(key) is not None


@functools.cache
def _compile_pattern(template: str) -> re.Pattern[str]:
    """Compile a template to a pattern with a named group for each field."""
    texts = _FIELD.split(template)  # text and field in turn
    parts = [rf"(?P<{text}>[^.]+)" if number % 2 else re.escape(text) for number, text in enumerate(texts)]
    return re.compile("".join(parts))
