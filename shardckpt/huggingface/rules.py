"""Key mappings as lists of rules: patterns of names, and how tensors split into experts and fused parts."""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError, listed
from shardckpt.planning.boxes import Box
from shardckpt.plugins.key_mapping import Identity, KeyMapEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardckpt.planning.boxes import Ints
    from shardckpt.plugins.key_mapping import Padding

#: Fields that a stored name may lack: then they count along its leading axes, in this order.
_AXES = ("layer", "expert")
_FIELD = re.compile(r"\{([^\W\d]\w*)\}")


class HubConfig(NamedTuple):
    """The content of a model's ``config.json``, and the treatment of rows that pad the vocabulary."""

    values: Mapping[str, Any]
    padding: Padding


class Rows(NamedTuple):
    """Rows of a stored tensor that are rows of one of the folder.

    Attributes:
        name: The number of the folder's name in the rule.
        stored: The first row in the stored tensor.
        hub: The first row in the folder's.
        size: Number of rows.
    """

    name: int
    stored: int
    hub: int
    size: int


class StoredPlace(NamedTuple):
    """The location of a tensor of a folder.

    Attributes:
        key: The stored name.
        place: The indices along leading axes, of the layer and the expert.
        number: The number of its name in the rule.
        names: The names of all tensors of the folder that are there together.
    """

    key: str
    place: Ints
    number: int
    names: list[str]


@dataclass(frozen=True)
class Rule:
    """The names and splits of stored tensors of one kind in a Hugging Face folder.

    Names are patterns: a field such as ``{layer}`` stands for text without a dot, the same in all names of the rule. If
    the folder's names have ``{expert}`` and the stored one lacks it, the stored tensor's first axis counts the experts,
    and the folder has one tensor for each; likewise ``{layer}``, whose axis comes before the experts' axis.

    Example::

        Rule("layers.{layer}.experts.w", ("model.layers.{layer}.experts.{expert}.w",))  # split by expert
        Rule("layers.{layer}.gate_up", ("model.{layer}.gate", "model.{layer}.up"))  # split into two halves

    Attributes:
        stored: The stored tensor's name.
        hub: The folder's names. Several names are equal parts of the stored tensor, in order along its first axis after
            the experts' axis. If empty, tensors of this kind are not exported.
        transposed: Whether the last two axes are swapped in the folder.
        split: Returns which rows of a stored tensor are in which of the folder's, from the number of its rows and the
            model's config; by default the parts are equal.
        keep_dtype: Whether an export that casts leaves these tensors as they are.
        beside: A name in the folder, with the fields of the others, without which the rule is not used to go from the
            folder's names to stored ones; there the first rule that gives a name counts.

    Raises:
        ShardingError: A field is twice in the stored name, or in a name of the folder alone; or ``hub`` is a text.
    """

    stored: str
    hub: tuple[str, ...]
    transposed: bool = False
    split: Callable[[int, HubConfig | None], Sequence[Rows]] | None = None
    keep_dtype: bool = False
    beside: str = ""

    def __post_init__(self) -> None:
        hub: object = self.hub
        if isinstance(hub, str):  # its letters would be the names
            raise ShardingError(f"Rule({self.stored!r}): hub={hub!r} is no tuple of names: give ({hub!r},)")
        fields = _FIELD.findall(self.stored)
        twice = sorted({field for field in fields if fields.count(field) > 1})
        if twice:
            raise ShardingError(f"Rule({self.stored!r}): the field {twice[0]!r} is there twice: give each another name")
        for name in self.hub:
            unknown = sorted(set(_FIELD.findall(name)) - {*fields, *_AXES})
            if unknown:
                raise ShardingError(
                    f"Rule({self.stored!r}): the folder's name {name!r} has the field {unknown[0]!r}, which the stored "
                    "name lacks"
                )

    def links(self, key: str, shape: Ints, config: HubConfig | None = None) -> list[KeyMapEntry] | None:
        """Map a stored tensor by this rule.

        Args:
            key: The stored tensor's name.
            shape: Its global shape.
            config: The model's config, which some rules need.

        Returns:
            The key map entries; None if the name does not match.

        Raises:
            ShardingError: the shape cannot be split as the rule says.
        """
        found = _match(self.stored, key)
        if found is None or not self.hub:
            return None if found is None else []
        fields = found.groupdict()
        # where the stored name has the layer or the expert, it is of one
        axes = [axis for axis in _AXES if axis not in fields and any(axis in _FIELD.findall(name) for name in self.hub)]
        lead = len(axes)
        if len(shape) <= lead or (self.transposed and len(shape) < lead + 2):
            raise self._shape_error(key, shape)
        split = self._split(key, shape, shape[lead], config)
        totals = Counter[int]()
        for rows in split:
            totals[rows.name] += rows.size
        width = shape[lead + 1 :]
        entries = []
        for place in itertools.product(*map(range, shape[:lead])):
            filled = {**dict(zip(axes, map(str, place), strict=True)), **fields}
            names = [_fill(name, filled) for name in self.hub]
            for name, stored, hub, count in split:
                box = Box((*place, stored, *(0,) * len(width)), (*(1,) * lead, count, *width))
                hub_shape, offset = (totals[name], *width), (hub, *(0,) * len(width))
                if self.transposed:
                    hub_shape, offset = (*hub_shape[:-2], *hub_shape[:-3:-1]), (*offset[:-2], *offset[:-3:-1])
                entries.append(KeyMapEntry(names[name], hub_shape, offset, box, self.transposed, self.keep_dtype))
        return entries

    def locate(self, name: str, folder: Collection[str]) -> StoredPlace | None:
        """Return where a tensor of a folder with these names is stored; None if this rule does not give it its name."""
        for number, template in enumerate(self.hub):
            found = _match(template, name)
            if found is None:
                continue
            fields = found.groupdict()
            axes = [axis for axis in _AXES if axis in fields and axis not in _FIELD.findall(self.stored)]
            is_known = all(field in fields for field in _FIELD.findall(self.stored))
            if is_known and all(fields[axis].isdecimal() for axis in axes):
                if self.beside and _fill(self.beside, fields) not in folder:
                    continue
                place = tuple(int(fields[axis]) for axis in axes)
                return StoredPlace(_fill(self.stored, fields), place, number, [_fill(hub, fields) for hub in self.hub])
        return None

    def _split(self, key: str, shape: Ints, rows: int, config: HubConfig | None) -> Sequence[Rows]:
        """Return which rows are in which of the folder's tensors."""
        if self.split is not None:
            try:
                found = self.split(rows, config)
            except CheckpointingException as exc:
                raise type(exc)(f"{key!r} of shape {shape}: {exc}") from exc
            numbers = {part.name for part in found}
            if numbers != {*range(len(self.hub))}:  # a name without rows would be left out without a word
                raise ShardingError(
                    f"Rule({self.stored!r}): its split gives {len(numbers)} tensors, and it has {len(self.hub)} "
                    f"names in the folder, {', '.join(self.hub)}: give as many names"
                )
            return found
        parts = len(self.hub)
        if rows % parts:
            raise self._shape_error(key, shape)
        size = rows // parts
        return [Rows(number, number * size, 0, size) for number in range(parts)]

    def _shape_error(self, key: str, shape: Ints) -> ShardingError:
        return ShardingError(
            f"{key!r} has the shape {shape}, which cannot be split into {len(self.hub)} of {', '.join(self.hub)}: "
            "is it the mapping of another model?"
        )


class RuleMapping:
    """A key mapping by the first rule that matches a name; tensors that none matches keep their names.

    A tensor that has a rule's name in the folder already is known, too: it keeps its name without a word. Of others
    that no rule matches, an export warns, or fails if it is strict.

    Args:
        rules: The rules, in the order in which they are tried.
        config: The model's config, which some rules need.
    """

    def __init__(self, rules: Sequence[Rule], config: HubConfig | None = None) -> None:
        self._rules = tuple(rules)
        self._config = config
        self._by_stored = _RuleFinder([(rule.stored,) for rule in self._rules])
        self._by_hub = _RuleFinder([rule.hub for rule in self._rules])

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
        """Return the key map entries of a stored tensor of a global shape; none if it is not exported."""
        found = (self._rules[number].links(key, shape, self._config) for number in self._by_stored.find(key))
        return next((links for links in found if links is not None), Identity().links(key, shape))

    def with_config(self, config: Mapping[str, Any], padding: Padding) -> RuleMapping:
        """Return the same rules for a model with this content of ``config.json``."""
        made = copy.copy(self)
        made._config = HubConfig(config, padding)  # noqa: SLF001 - its own
        return made

    def find_stored_shapes(self, folder: Mapping[str, Ints]) -> tuple[dict[str, Ints], list[str]]:
        """Go from a folder's names to stored ones.

        Args:
            folder: The shape of each tensor of the folder, by name.

        Returns:
            The shape of each tensor that is stored, by key; and the names that no rule gives.

        Raises:
            KeyMismatchError: The folder lacks a part of a tensor that is stored.
        """
        parts: dict[str, dict[int, Ints]] = {}
        extents: dict[str, Ints] = {}
        unmatched = []
        for name, shape in folder.items():
            rules = [self._rules[number] for number in self._by_hub.find(name)] if shape else []
            found = ((rule, rule.locate(name, folder)) for rule in rules)
            rule, located = next((each for each in found if each[1] is not None), (None, None))
            if rule is None or located is None:
                unmatched.append(name)
                continue
            key, place, number, names = located
            if missing := [each for each in names if each not in folder]:
                raise KeyMismatchError(f"the folder lacks {listed(missing)}, which {key!r} also needs")
            parts.setdefault(key, {})[number] = (*shape[:-2], *shape[:-3:-1]) if rule.transposed else shape
            ends = tuple(index + 1 for index in place)
            extents[key] = tuple(map(max, extents.get(key, ends), ends))
        stored = {
            key: (*extents[key], sum(shape[0] for shape in shapes.values()), *next(iter(shapes.values()))[1:])
            for key, shapes in parts.items()
        }
        return stored, unmatched

    def knows(self, key: str) -> bool:
        """Return whether a rule matches a name, or gives it to a tensor of the folder."""
        stored = (self._rules[number].stored for number in self._by_stored.find(key))
        hub = (name for number in self._by_hub.find(key) for name in self._rules[number].hub)
        return any(_match(name, key) for name in itertools.chain(stored, hub))

    def find_unused(self, keys: Collection[str]) -> Sequence[str]:
        """Return the stored names of the rules that match none of these keys."""
        given = {*keys}
        unused = (rule.stored for rule in self._rules if rule.stored not in given)
        return [name for name in unused if not _FIELD.search(name) or not any(_match(name, key) for key in given)]


class _RuleFinder:
    """Finds the rules that may match a name: of thousands without a field, as of a table of names, only its own."""

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self._with_fields: list[int] = []
        self._by_name: dict[str, list[int]] = {}
        for number, templates in enumerate(names):
            if any(map(_FIELD.search, templates)):
                self._with_fields.append(number)
                continue
            for name in dict.fromkeys(templates):
                self._by_name.setdefault(name, []).append(number)

    def find(self, name: str) -> Iterator[int]:
        """Yield the numbers of the rules, in their order."""
        return heapq.merge(self._by_name.get(name, ()), self._with_fields)


def _fill(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda found: fields[found[1]], template)


def _match(template: str, key: str) -> re.Match[str] | None:
    """Match a name by a template; most of the tens of thousands of names of a folder end otherwise."""
    ending, pattern = _compile_pattern(template)
    return pattern.fullmatch(key) if key.endswith(ending) else None


@functools.cache
def _compile_pattern(template: str) -> tuple[str, re.Pattern[str]]:
    """Compile a template to the text after its last field, and a pattern with a named group for each field."""
    texts = _FIELD.split(template)  # text and field in turn
    parts = [rf"(?P<{text}>[^.]+)" if number % 2 else re.escape(text) for number, text in enumerate(texts)]
    return texts[-1], re.compile("".join(parts))
