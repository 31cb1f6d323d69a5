"""Several open checkpoints that are read as one: the merge of their tensors, computed as it is read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from shardckpt.engine.opening import OpenCheckpoint
from shardckpt.engine.operation import Operation
from shardckpt.engine.optimizer_keys import is_optimizer_key
from shardckpt.engine.patterns import is_below
from shardckpt.engine.streaming import TensorBox, make_memory, read_boxes
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShapeMismatchError, listed, name_known
from shardckpt.huggingface.structure import forget_structure, plain_name
from shardckpt.maintenance.combine import Angle, Combination, combine, make_average
from shardckpt.maintenance.content import forget_metrics
from shardckpt.maintenance.merge_weights import have_sum
from shardckpt.maintenance.suggested_renames import suggest_renames
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.planning.boxes import Box, cut_box, part_view, shard_parts
from shardckpt.state_dict import have_equal_bits
from shardckpt.strategy import LoadStrategy
from shardckpt.validation.keys import stored_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.mapping.sharded_object import PlainObject
    from shardckpt.mapping.sharded_tensor import BlockScales
    from shardckpt.strategy import LoadContext

#: Choices for the optimizer's state: merged like the model, not written, or that of the base.
Optimizer = Literal["average", "drop", "base"]
#: Choices for a tensor that not all sources have: an error, not written, or merged from those that have it.
Missing = Literal["error", "drop", "available"]
#: Elements that are read at a time for an angle: a constant, so that the sum does not depend on the memory.
_ANGLE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class MergeRules:
    """The rules by which sources are merged.

    Attributes:
        weights: A weight for each source; averages are divided by the sum of those that have the tensor.
        base: The number of the source that objects and common state are from.
        slerp: How far to go from the first source to the second along the sphere; None for a weighted average.
        accumulate: The dtype in which sums are computed; float64 for float64 tensors.
        optimizer: See :data:`Optimizer`.
        missing: See :data:`Missing`.
        leave_out: Keys of tensors that are not merged.
        memory: Bytes of values of all sources in memory at a time.
    """

    weights: tuple[float, ...]
    base: int
    slerp: float | None
    accumulate: torch.dtype
    optimizer: Optimizer
    missing: Missing
    leave_out: frozenset[str]
    memory: int


class MergedTensor(NamedTuple):
    """A tensor of the merge: its global shape, and the dtype that holds the values of all sources.

    ``sources`` are those that it is made of: number, and description of the tensor there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[tuple[int, ShardedTensor], ...]

    @property
    def is_averaged(self) -> bool:
        """Whether values are added up; others must be equal, since 8-bit floats mean nothing without their scales."""
        floats = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return len(self.sources) > 1 and (floats or self.dtype.is_complex)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in all sources, and in the merge."""
        return sum(tensor.dtype.itemsize for _, tensor in self.sources) + self.dtype.itemsize


class _Read(NamedTuple):
    """A box of a tensor, and the memory that its merged values go to."""

    key: str
    box: Box
    target: torch.Tensor


@dataclass
class MergedLoadStrategy(LoadStrategy):
    """Reads several open checkpoints as one.

    Attributes:
        names: The name of each in errors.
        left_out: Keys that the sources have and the merge has not, once its index was read.
    """

    backend = "merge"
    version = 1

    checkpoints: Sequence[OpenCheckpoint]
    names: Sequence[str]
    rules: MergeRules
    left_out: list[str] = field(default_factory=list)
    _tensors: dict[str, MergedTensor] = field(default_factory=dict)
    _angles: dict[str, Combination] = field(default_factory=dict)
    #: A writer has several threads, and the memory is for one.
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def base(self) -> OpenCheckpoint:
        """The source that objects and common state are from."""
        return self.checkpoints[self.rules.base]

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the base's, without the keys that the merge leaves out."""
        index, common = self.load_index(context), self.base.common()
        self.left_out += [key for key in common if self._is_left_out(key)]
        kept = forget_metrics({key: value for key, value in common.items() if not self._is_left_out(key)})
        is_same = {stored_key(shard) for shard in index} == {stored_key(shard) for shard in self.base.index()}
        return kept if is_same else forget_structure(kept)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:  # noqa: ARG002 - the sources have their own
        """Return the merged tensors and the base's objects; it is an error if not all sources have the same tensors."""
        self.left_out.clear()
        base = self.base.index()
        objects = [shard for shard in base if not isinstance(shard, ShardedTensor)]
        found: dict[str, list[tuple[int, ShardedTensor]]] = {}
        # the base first: the order of keys is that of its index
        for number in sorted(range(len(self.checkpoints)), key=lambda number: number != self.rules.base):
            for shard in self.checkpoints[number].index():
                if isinstance(shard, ShardedTensor):
                    found.setdefault(shard.key, []).append((number, shard))
        self._check_names({*found, *map(plain_name, objects)})
        missing = self._choose(found)
        if missing:
            raise KeyMismatchError(
                f"not all sources have the same tensors: {missing}. Read one by other names "
                f"({_suggest_rename(found, len(self.names))}, rename=[None, {{old: new}}]; Hub folders together "
                "with Megatron's checkpoints by --mapping megatron, mapping='megatron'), leave them out (--leave-out, "
                "leave_out=...), or say what becomes of them (--missing, missing='drop' or 'available')"
            )
        self.left_out += [stored_key(shard) for shard in objects if self._is_left_out(plain_name(shard))]
        merged: list[ShardedBase] = [
            replace(
                ShardedTensor.from_global_shape(key, tensor.dtype, tensor.shape), block_scales=self._find_scales(tensor)
            )
            for key, tensor in self._tensors.items()
        ]
        return [*merged, *(shard for shard in objects if not self._is_left_out(plain_name(shard)))]

    def list_averaged_steps(self) -> list[str]:
        """Return the keys of the optimizer's averaged step counts, one a parameter, once the index was read."""
        return [
            key
            for key, tensor in self._tensors.items()
            if tensor.is_averaged and tensor.shape == () and "step" in key.split(".") and is_optimizer_key(key)
        ]

    def _is_left_out(self, name: str) -> bool:
        return is_below(name, self.rules.leave_out) or (self.rules.optimizer == "drop" and is_optimizer_key(name))

    def _check_names(self, names: set[str]) -> None:
        """Raise unless all that is to be left out is there."""
        absent = {each for each in self.rules.leave_out if not any(is_below(name, {each}) for name in names)}
        if absent and (absent := absent - self.base.common().keys()):
            raise KeyMismatchError(
                f"leave_out: no source has a tensor, object or entry named {listed([*map(repr, sorted(absent))])} "
                f"{name_known(min(absent), {*names, *self.base.common()}, 'names')}"
            )

    def _choose(self, found: dict[str, list[tuple[int, ShardedTensor]]]) -> str:
        """Note which tensors are merged from which sources; return how many each source lacks, with names of some."""
        rules = self.rules
        missing: dict[int, list[str]] = {}
        everyone = set(range(len(self.checkpoints)))
        for key, unsorted in found.items():
            of_base = rules.optimizer == "base" and is_optimizer_key(key)
            sources = sorted(unsorted, key=lambda source: source[0])
            lacking = everyone - {number for number, _ in sources}
            if of_base:
                sources = [source for source in sources if source[0] == rules.base]
            if self._is_left_out(key) or not sources or (lacking and not of_base and rules.missing == "drop"):
                self.left_out.append(key)
                continue
            if lacking and not of_base and rules.missing == "error":
                for number in lacking:
                    missing.setdefault(number, []).append(repr(key))
                continue
            self._tensors[key] = self._describe(key, sources)
        said = (
            f"{len(keys)} of {len(found)} are not in {self.names[number]} ({listed(keys, limit=2)})"
            for number, keys in sorted(missing.items())
        )
        return "; ".join(said)

    def _describe(self, key: str, sources: list[tuple[int, ShardedTensor]]) -> MergedTensor:
        shapes = {tuple(tensor.global_shape) for _, tensor in sources}
        kinds = {tensor.dtype for _, tensor in sources}
        numbers = [(kind.is_floating_point and kind.itemsize > 1) or kind.is_complex for kind in kinds]
        if len(shapes) > 1 or (len(kinds) > 1 and not all(numbers)):
            places = listed([f"{t.dtype} {list(t.global_shape)} in {self.names[number]}" for number, t in sources])
            raise ShapeMismatchError(
                f"{key!r} is {places}: only tensors of one shape, and of floating-point dtypes or the same one, can be "
                "merged; leave it out (leave_out=..., --leave-out), or convert the sources first"
            )
        dtype = kinds.pop()
        for kind in kinds:
            dtype = torch.promote_types(dtype, kind)
        merged = MergedTensor(shapes.pop(), dtype, tuple(sources))
        weights = [self.rules.weights[number] for number, _ in sources]
        if merged.is_averaged and not have_sum(weights):
            raise CheckpointingException(
                f"{key!r} is in {listed([self.names[number] for number, _ in sources])} alone, whose weights {weights} "
                "are divided by their sum, which must not be 0: give others, or leave it out (leave_out=..., "
                "--leave-out)"
            )
        return merged

    def _find_scales(self, tensor: MergedTensor) -> BlockScales | None:
        """Return a tensor's scales, by the first source that names any that the merge has, too."""
        stated = (described.block_scales for _, described in tensor.sources)
        return next((scales for scales in stated if scales is not None and scales.key in self._tensors), None)

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Read from all sources, and merge into the shards' data, or into new tensors; see the base."""
        if not self._tensors:
            self.load_index(context)
        objects = [shard for shard in wanted if not isinstance(shard, ShardedTensor)]
        values = iter(self.base.values(objects)) if objects else iter(())
        filled = [self._with_memory(shard) if isinstance(shard, ShardedTensor) else None for shard in wanted]
        reads = [read for shard in filled if shard is not None for read in self._cut(shard)]
        with self._lock:
            for batch in batch_by_bytes(reads, self._count_bytes, self.rules.memory):
                self._merge(batch)
        return [next(values) if shard is None else shard.data for shard in filled]

    def read_plain_objects(self, context: LoadContext) -> list[PlainObject]:  # noqa: ARG002 - the base has its own
        """Return the base's."""
        return self.base.read_plain_objects()

    def list_plain_objects(self, context: LoadContext) -> list[str]:  # noqa: ARG002 - the base has its own
        """Return the keys of the base's."""
        return self.base.list_plain_objects()

    def _with_memory(self, shard: ShardedTensor) -> ShardedTensor:
        if shard.data is not None:
            return shard
        found = shard.without_data()
        found.data = make_memory(shard.dtype, shard.data_shape)
        return found

    def _cut(self, shard: ShardedTensor) -> list[_Read]:
        reads = []
        itemsize = self._tensors[shard.key].itemsize
        for part in shard_parts(shard):
            view = part_view(shard, part)
            boxes = cut_box(part.box, itemsize, self.rules.memory)
            reads += [_Read(shard.key, box, view[box.within(part.box)]) for box in boxes]
        return reads

    def _count_bytes(self, read: _Read) -> int:
        return read.box.volume * self._tensors[read.key].itemsize

    def _merge(self, batch: Sequence[_Read]) -> None:
        """Fill the memory of some boxes."""
        found: list[list[torch.Tensor]] = [[] for _ in batch]
        for number, checkpoint in enumerate(self.checkpoints):
            places, boxes = [], []
            for place, read in enumerate(batch):
                tensor = dict(self._tensors[read.key].sources).get(number)
                if tensor is not None:
                    places.append(place)
                    boxes.append(TensorBox(tensor, read.box))
            for place, values in zip(places, read_boxes(checkpoint, boxes) if boxes else (), strict=True):
                found[place].append(values)
            # after the values and before they are used: the merge may not be of two saves
            checkpoint.context.reader.check_unchanged()
        for read, parts in zip(batch, found, strict=True):
            merged = self._tensors[read.key]
            if merged.is_averaged:
                # with a cast, too, values are rounded once: to the dtype that is written
                is_wide = bool({torch.float64, torch.complex128} & {merged.dtype, read.target.dtype})
                kind = torch.float64 if is_wide else self.rules.accumulate
                combine(parts, self._find_combination(read.key), read.target, kind)
            else:
                self._check_equal(read.key, parts)
                read.target.copy_(parts[0])

    def _find_combination(self, key: str) -> Combination:
        numbers = [number for number, _ in self._tensors[key].sources]
        # moments of an optimizer are no directions
        if self.rules.slerp is None or is_optimizer_key(key):
            return make_average([self.rules.weights[number] for number in numbers])
        if key not in self._angles:
            self._angles[key] = self._measure_angle(key).interpolate(self.rules.slerp, key)
        return self._angles[key]

    def _measure_angle(self, key: str) -> Angle:
        """Read a tensor of two sources once more, before its values are combined."""
        tensor, angle = self._tensors[key], Angle()
        (one, first), (other, second) = tensor.sources
        for box in cut_box(Box.from_shape(tensor.shape), 1, _ANGLE_ELEMENTS):
            (low,), (high,) = (
                read_boxes(self.checkpoints[number], [TensorBox(described, box)])
                for number, described in ((one, first), (other, second))
            )
            angle.add(low, high)
        return angle

    def _check_equal(self, key: str, values: Sequence[torch.Tensor]) -> None:
        sources = self._tensors[key].sources
        for (number, tensor), other in zip(sources[1:], values[1:], strict=True):
            if not have_equal_bits(values[0], other):
                is_float = tensor.dtype.is_floating_point
                why = "8-bit floats mean nothing without their scales" if is_float else f"{tensor.dtype} has no average"
                raise CheckpointingException(
                    f"{key!r} has other values in {self.names[number]} than in {self.names[sources[0][0]]}, and "
                    f"{why}: leave it out (leave_out=[{key!r}], --leave-out {key})"
                )


def merge_opened(
    checkpoints: Sequence[OpenCheckpoint], names: Sequence[str], rules: MergeRules
) -> tuple[OpenCheckpoint, MergedLoadStrategy]:
    """Return several open checkpoints as one, which has the files of the base, and the strategy that reads it.

    The sources must stay open as long as the merge is read.
    """
    base = checkpoints[rules.base]
    strategy = MergedLoadStrategy(checkpoints, names, rules)
    # an operation of its own: reads of the base are not counted as reads of the merge
    operation = Operation("load", base.operation.directory, base.operation.comm, base.operation.plugins)
    return OpenCheckpoint(strategy, base.context, operation, names=base.names), strategy


def _suggest_rename(found: Mapping[str, Sequence[tuple[int, ShardedTensor]]], count: int) -> str:
    """Return how a source gets the names of the first, as an option has it, by equal ends of names, and shapes."""
    shapes: list[dict[str, Hashable]] = [{} for _ in range(count)]
    for key, sources in found.items():
        for number, tensor in sources:
            shapes[number][key] = tuple(tensor.global_shape)
    first = shapes[0]
    for number, own in enumerate(shapes[1:], 2):
        others = {key: shape for key, shape in first.items() if key not in own}
        renames = suggest_renames({key: shape for key, shape in own.items() if key not in first}, others)
        if renames:
            return " ".join(f"--rename {number}:{old}={new}" for old, new in renames.items())
    return "--rename 2:OLD=NEW"
