"""Reports of the differences of two checkpoints."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.planning.boxes import Ints

Kind = Literal["only in first", "only in second", "shape", "dtype", "values"]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two checkpoints.

    Attributes:
        key: Its key in the first checkpoint, or, if only the second has it, there.
        kind: The kind of difference; the first that applies. Values of tensors with different shapes are not compared.
        first: Dtype and shape in the first checkpoint; ``""`` if it has no such tensor.
        second: The same in the second.
        elements: Number of elements that were compared.
        different: How many of them differ.
        max_absolute: The largest absolute difference, infinite where one value is not a number; None if no values were
            compared, or the dtype has none that can be subtracted.
        max_relative: The largest difference relative to the second checkpoint's value.
        index: The global index, in the first checkpoint, of the first element that differs; None if none does.
        relative_norm: ``norm(first - second) / norm(first)`` over all elements: how much the tensor has changed as a
            whole, which one value near 0 does not hide; infinite where a value is not a number or all of the first
            are 0; None as of ``max_absolute``.
    """

    key: str
    kind: Kind
    first: str
    second: str
    elements: int = 0
    different: int = 0
    max_absolute: float | None = None
    max_relative: float | None = None
    index: Ints | None = None
    relative_norm: float | None = None


class ObjectDifference(NamedTuple):
    """A value of an object or of the common state that differs between two checkpoints.

    Attributes:
        key: The object's unique key, or ``"common"``, with the places within it: ``"common['args']['lr']"``.
        kind: The kind of difference; the first that applies.
        first: The class and the value in the first checkpoint, cut if it is long; ``""`` if it has none.
        second: The same in the second.
    """

    key: str
    kind: Literal["only in first", "only in second", "type", "value"]
    first: str
    second: str


class ObjectReport(NamedTuple):
    """The differences of the objects and the common state of two checkpoints.

    Attributes:
        equal: Number of objects, and of entries of the common state, that are equal in both.
        differences: The values that differ, sorted by key.
        containers: How many places each list, tuple or dict has that differences are in, by its key.
        different_plain: A key of each PlainObject, which only readers of other libraries look up, that differs.
        unpaired_plain: Keys of PlainObjects that one checkpoint alone has, as after a conversion to a format without
            them; they are no difference.
    """

    equal: int = 0
    differences: tuple[ObjectDifference, ...] = ()
    containers: Mapping[str, int] = types.MappingProxyType({})
    different_plain: tuple[str, ...] = ()
    unpaired_plain: tuple[str, ...] = ()

    @property
    def differing(self) -> int:
        """How many values differ."""
        return len(self.differences) + len(self.different_plain)


@dataclass(frozen=True)
class DiffReport:
    """The differences of two checkpoints.

    Attributes:
        equal: Number of tensors that are equal in both.
        by_fingerprint: How many of these were compared by stored fingerprints alone.
        differences: The tensors that differ, sorted by key.
        objects: None if objects and common state were not compared.
        left_out: Keys of the optimizer's state of the first checkpoint, which the other side of a mapping lacks.
        of_other_dtype: How many of ``equal`` have another dtype in the second, with ``ignore_dtype``.
        unread_files: Files of ``torch.save`` in either folder that were not read, such as those of transformers'
            Trainer with its optimizer: their faults, by name.
        different_files: The unread files that both folders have, with other bytes; none if only tensors were compared.
    """

    equal: int
    by_fingerprint: int
    differences: tuple[TensorDifference, ...] = ()
    objects: ObjectReport | None = None
    left_out: tuple[str, ...] = ()
    of_other_dtype: int = 0
    unread_files: Mapping[str, str] = field(default_factory=dict)
    different_files: tuple[str, ...] = ()

    @property
    def are_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.differences or self.different_files or (self.objects and self.objects.differing))
