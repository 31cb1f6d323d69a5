"""A rank's part of a global tensor."""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch

from shardckpt.errors import ShardingError, show_given
from shardckpt.mapping.base import ReplicaId, Replicated, ShardedBase, find_name_fault, make_plain_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class BlockScales(NamedTuple):
    """The scales of a block-scaled tensor (MXFP8, NVFP4, float8 by blocks): in a tensor of their own.

    Element ``i`` of the tensor is scaled by element ``i // block``, along each axis.

    Example:
        ::

            codes = ShardedTensor.from_rank_offsets("w.codes", codes, block_scales=BlockScales("w.scales", (1, 32)))
            scales = ShardedTensor.from_rank_offsets("w.scales", scales)

    Attributes:
        key: The key of the scales' tensor, which has ceil(size / block) elements along each axis.
        block: A block's size along each axis of the global tensor, in elements. The shapes of
            ``torch.float4_e2m1fn_x2`` count pairs, its block sizes single elements along the last axis.
    """

    key: str
    block: tuple[int, ...]


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor and its place in a global tensor.

    Example:
        Rank ``r`` of ``n`` has equal blocks of rows of a weight, and a bias that every rank has::

            ShardedTensor.from_rank_offsets("decoder.weight", weight, (0, r, n))
            ShardedTensor.from_rank_offsets("decoder.bias", bias, replica_id=r)

    Args:
        key: Name of the global tensor; the same on every rank that has a shard of it.
        data: The local tensor, or None where only the description is wanted.
        dtype: Its dtype.
        local_shape: Shape of the local tensor, without the prepended axes.
        global_shape: Shape of the global tensor, prepended axes included.
        global_offset: Where the local tensor starts in the global tensor: an index per axis, in elements.
        axis_fragmentations: Number of equal shards along each axis (a regular grid), or None (shards of any size).
        replica_id: 0 or a tuple of zeros for the copy that is written, anything else for the others.
        prepend_axis_num: Leading global axes that the local tensor lacks; its extent along them is 1.
        allow_shape_mismatch: Whether the stored global shape may be another (padded vocabularies): a load fills the
            region that both have, and sets the rest to zero.
        flattened_range: Legacy (Megatron 0.6 to 0.15): ``data`` is this slice of the row-major flattened local
            block of shape ``local_shape``.
        replicated: True: all ranks that describe this shard have the same values, and the lowest of them has the main
            replica; ``replica_id`` is ignored, and a save that validates compares the values. ``"unchecked"``: without
            the comparison. ``"sampled"``: of tensors of two and more axes, a few elements are compared, and most
            must be the same on all ranks.
        block_scales: The block scales of the tensor, if another tensor has them. Formats that have a place for them
            store them; no value changes by it.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    replicated: Replicated = False
    block_scales: BlockScales | None = None

    #: The result of :meth:`list_fields`, if the maker of the description has promised not to change it: a save that
    #: compares it with an earlier one's need not look at each field. Copies do not have it.
    fixed_fields: ClassVar[tuple[Any, ...] | None] = None

    def __post_init__(self) -> None:
        self.key = make_plain_key(self.key)
        self.validate_metadata_integrity()

    @classmethod
    def from_global_shape(cls, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> ShardedTensor:
        """Return the description, without data, of a global tensor of this shape and dtype in one shard.

        Raises:
            ShardingError: ``shape`` is a number.
        """
        made = cls.__new__(cls)  # not validated, as nothing can contradict the rest: an index may have 300,000 of these
        made.key, made.data, made.dtype = key, None, dtype
        made.local_shape = made.global_shape = shape
        try:
            made.global_offset, made.axis_fragmentations = (0,) * len(shape), (1,) * len(shape)
        except TypeError as exc:
            raise ShardingError(f"{key!r}: the shape {shape!r} is no tuple: pass ({shape!r},) for one axis") from exc
        made.replica_id, made.prepend_axis_num = 0, 0
        made.allow_shape_mismatch, made.flattened_range, made.replicated = False, None, False
        made.block_scales = None
        return made

    @classmethod
    def from_box(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        grid: tuple[int, ...] | None,
        replica_id: ReplicaId = 0,
        *,
        replicated: Replicated = False,
    ) -> ShardedTensor:
        """Describe a local tensor that is known to be a box of its global tensor.

        Args:
            key: Name of the global tensor.
            data: The local tensor.
            global_shape: Shape of the global tensor.
            offset: Where the box begins.
            grid: Number of equal parts along every axis, or None.
            replica_id: See the class.
            replicated: See the class.

        Returns:
            The description, with ``data``; nothing of it is checked.
        """
        made = cls.__new__(cls)  # a model has 20,000 of these, and every save describes them: checks are half of it
        made.key, made.data, made.dtype = key, data, data.dtype
        made.local_shape, made.global_shape = tuple(data.shape), global_shape
        made.global_offset, made.axis_fragmentations = offset, grid
        made.replica_id, made.prepend_axis_num = replica_id, 0
        made.allow_shape_mismatch, made.flattened_range, made.replicated = False, None, replicated
        made.block_scales = None
        return made

    #: An earlier name, for strategies that were written with it.
    whole = from_global_shape

    @property
    def has_regular_grid(self) -> bool:
        """Whether the shards of all ranks are equal cells of a grid."""
        return self.axis_fragmentations is not None

    def validate_metadata_integrity(self) -> None:
        """Raise :class:`ShardingError` if shapes, offsets, dtype and data do not fit each other."""
        try:
            fault = (
                find_name_fault(self)
                or _box_fault(self)
                or _flat_fault(self)
                or _data_fault(self)
                or _scales_fault(self)
            )
        except (TypeError, AttributeError) as exc:
            fault = f"a shape, the offset or another field is of another type than the class says ({exc})"
        if fault:
            raise ShardingError(f"ShardedTensor {self.key!r}: {fault} in {self!r}")

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the cell of the regular grid that this shard fills: an index per axis.

        Raises:
            ShardingError: the grid is not regular.
        """
        if self.axis_fragmentations is None:
            raise ShardingError(f"ShardedTensor {self.key!r} has an irregular grid: it has no cell index")
        lengths = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        return tuple(off // max(length, 1) for off, length in zip(self.global_offset, lengths, strict=True))

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of this shard in the global tensor: an int per prepended axis, a slice per other axis."""
        prepended, offsets = self.prepend_axis_num, self.global_offset
        spans = zip(offsets[prepended:], self.local_shape, strict=True)
        return (*offsets[:prepended], *(slice(off, off + length) for off, length in spans))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the extent of a cell of the regular grid along every axis, in elements.

        Raises:
            ShardingError: the grid is not regular, or does not divide the global shape.
        """
        if self.axis_fragmentations is None:
            raise ShardingError(f"ShardedTensor {self.key!r} has an irregular grid: its cells have no one extent")
        pairs = list(zip(self.global_shape, self.axis_fragmentations, strict=True))
        if not self.allow_shape_mismatch and any(size % count for size, count in pairs):
            raise ShardingError(
                f"ShardedTensor {self.key!r}: global_shape {self.global_shape} is not divisible by axis_fragmentations "
                f"{self.axis_fragmentations}"
            )
        return tuple(size // count for size, count in pairs)

    def list_fields(self) -> tuple[Any, ...]:
        """Return all fields except ``data`` and ``flattened_range``, to be compared with other descriptions."""
        scales = self.block_scales
        return (
            self.key,
            self.global_shape,
            self.global_offset,
            self.replica_id,
            self.replicated,
            self.dtype,
            self.local_shape,
            self.axis_fragmentations,
            self.prepend_axis_num,
            self.allow_shape_mismatch,
            scales and (scales.key, *scales.block),
        )

    def fix_fields(self) -> None:
        """Promise that no field but ``data`` changes from now on."""
        self.fixed_fields = self.list_fields()  # type: ignore[misc]

    def __copy__(self) -> ShardedTensor:
        """Return a description with the same values, and without the promise: whoever copies one may change the copy.

        ``data`` is shared.
        """
        made = type(self).__new__(type(self))
        if type(self) is not ShardedTensor:
            vars(made).update(vars(self))
            vars(made).pop("fixed_fields", None)
            return made
        # One by one: Python 3.11 reads the fields of an object in a third of the time until its __dict__ is asked for,
        # and each save reads the fields of the caller's descriptions.
        made.key, made.data, made.dtype = self.key, self.data, self.dtype
        made.local_shape, made.global_shape = self.local_shape, self.global_shape
        made.global_offset, made.axis_fragmentations = self.global_offset, self.axis_fragmentations
        made.replica_id, made.prepend_axis_num = self.replica_id, self.prepend_axis_num
        made.allow_shape_mismatch, made.flattened_range = self.allow_shape_mismatch, self.flattened_range
        made.replicated, made.block_scales = self.replicated, self.block_scales
        return made

    def without_data(self) -> ShardedTensor:
        """Return the same description with ``data=None``."""
        return dataclasses.replace(self, data=None)

    def init_data(self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Allocate ``data`` on ``device`` by ``init_fn(shape, dtype=, device=)`` if there is none yet."""
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape that ``data`` has: ``local_shape``, or one axis for a flattened shard."""
        if self.flattened_range is None:
            return tuple(self.local_shape)
        return (self.flattened_range.stop - self.flattened_range.start,)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Return the shard that remains when every rank narrows its local tensor along ``dim`` in the same way.

        Args:
            dim: Axis of the local tensor; a negative one counts from the last.
            start: First local index kept; a negative one counts from the end.
            length: Number of local indices kept.

        Returns:
            A list with the one shard, as Megatron returns it; its ``data`` is a view of this one's.

        Raises:
            ShardingError: the grid is not regular, the shard is flattened, or it has no such axis or indices.
        """
        if self.axis_fragmentations is None or self.flattened_range is not None:
            raise ShardingError(f"ShardedTensor {self.key!r}: narrow needs a regular grid and no flattened_range")
        axes = len(self.local_shape)
        given = start
        if start < 0 and -axes <= dim < axes:
            start += self.local_shape[dim]
        if not -axes <= dim < axes or not 0 <= start <= start + length <= self.local_shape[dim]:
            raise ShardingError(
                f"ShardedTensor {self.key!r}: narrow({dim}, {given}, {length}) keeps indices that the local shape "
                f"{tuple(self.local_shape)} does not have"
            )
        dim %= axes
        axis = dim + self.prepend_axis_num
        local_shape = _replace_at(self.local_shape, dim, length)
        cell = self.global_offset[axis] // max(self.local_shape[dim], 1)
        return [
            dataclasses.replace(
                self,
                data=None if self.data is None else self.data.narrow(dim, start, length),
                local_shape=local_shape,
                global_shape=_replace_at(self.global_shape, axis, length * self.axis_fragmentations[axis]),
                global_offset=_replace_at(self.global_offset, axis, length * cell),
            )
        ]

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Describe a cell of a regular grid: "I am shard ``i`` of ``n`` along ``axis``".

        Args:
            key: Name of the global tensor.
            data: The local tensor.
            rank_offsets: Tuples (axis, i, n); prepended axes are counted; an axis without a tuple is not sharded.
            replica_id: See the class.
            prepend_axis_num: See the class.
            flattened_range: Must be None here; see :meth:`from_rank_offsets_flat`.
            **init_kwargs: More fields of the class.

        Returns:
            The description, with ``data`` itself and not a copy.

        Raises:
            ShardingError: an axis is named twice or does not exist, or there is no shard ``i`` of ``n``.
        """
        if flattened_range is not None:
            raise ShardingError(f"ShardedTensor {key!r}: use from_rank_offsets_flat for a flattened_range")
        if fault := _arguments_fault(key, data, rank_offsets, prepend_axis_num):
            raise ShardingError(f"ShardedTensor {key!r}: {fault}")
        prepend_axis_num = operator.index(prepend_axis_num)
        shape = tuple(data.shape)
        offsets, global_shape, fragments = _grid_geometry(key, shape, rank_offsets, prepend_axis_num)
        return cls(
            key,
            data,
            data.dtype,
            shape,
            global_shape,
            offsets,
            fragments,
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: Sequence[int],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Describe a slice of a flattened grid cell, as Megatron's distributed optimizer did until 0.15.

        Args:
            key: Name of the global tensor.
            data: One axis: elements ``flattened_range`` of the row-major flattened cell.
            non_flat_local_shape: Shape of the cell before it was flattened.
            rank_offsets: Where the cell lies; see :meth:`from_rank_offsets`.
            flattened_range: Start and stop in the flattened cell.
            prepend_axis_num: See the class.
            **init_kwargs: More fields of the class.

        Returns:
            The description, with ``flattened_range`` set and ``data`` itself, not a copy.
        """
        if fault := _arguments_fault(key, data, rank_offsets, prepend_axis_num):
            raise ShardingError(f"ShardedTensor {key!r}: {fault}")
        try:
            shape = tuple(map(operator.index, non_flat_local_shape))
        except TypeError:
            raise ShardingError(
                f"ShardedTensor {key!r}: non_flat_local_shape is {show_given(non_flat_local_shape)}, expected the "
                "shape of the cell before it was flattened, a tuple of integers"
            ) from None
        if not isinstance(flattened_range, slice):
            raise ShardingError(
                f"ShardedTensor {key!r}: flattened_range is {show_given(flattened_range)}, expected slice(start, stop)"
            )
        cell = torch.empty(shape, dtype=data.dtype, device="meta")
        described = cls.from_rank_offsets(key, cell, *rank_offsets, prepend_axis_num=prepend_axis_num, **init_kwargs)
        return dataclasses.replace(described, data=data, flattened_range=flattened_range)


def _arguments_fault(key: Any, data: Any, rank_offsets: Sequence[Any], prepend_axis_num: Any) -> str:
    """Return which argument of ``from_rank_offsets`` is wrong, and the expected value; ``""`` if all are right."""
    if not isinstance(key, str):
        return f"key is {show_given(key)}, expected the name of the global tensor"
    if not isinstance(data, torch.Tensor):
        return (
            f"data is {show_given(data)}, expected the local tensor; a description without data is "
            "from_rank_offsets(key, torch.empty(shape, dtype=dtype, device='meta'), ...).without_data()"
        )
    if not hasattr(prepend_axis_num, "__index__") or prepend_axis_num < 0:
        return f"prepend_axis_num is {show_given(prepend_axis_num)}, expected a number of axes, 0 or more"
    for given in rank_offsets:
        is_triple = isinstance(given, (tuple, list)) and len(given) == 3  # noqa: PLR2004 - axis, i, n
        if not is_triple or not all(hasattr(number, "__index__") for number in given):
            shown = repr(given) if isinstance(given, (tuple, list)) else show_given(given)
            return f"the rank offset {shown:.100} is no tuple (axis, i, n) of integers: shard i of n along an axis"
        if given[2] < 1:
            return f"the rank offset {given!r} has {given[2]} shards along axis {given[0]}, expected 1 or more"
    return ""


def _grid_geometry(
    key: str, shape: tuple[int, ...], rank_offsets: Iterable[tuple[int, int, int]], prepend_axis_num: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return offset, global shape and fragmentation of the grid cell that ``rank_offsets`` names."""
    local = (1,) * prepend_axis_num + shape
    cells, fragments = [0] * len(local), [1] * len(local)
    named: set[int] = set()
    for offset in rank_offsets:
        axis, cell, count = map(operator.index, offset)  # numpy's and a tensor's become Python's
        if axis in named:
            raise ShardingError(f"ShardedTensor {key!r}: axis {axis} is named twice, give one offset for it")
        if not 0 <= axis < len(local):
            raise ShardingError(f"ShardedTensor {key!r}: there is no axis {axis}: the {len(local)} axes count from 0")
        if not 0 <= cell < count:
            raise ShardingError(f"ShardedTensor {key!r}: shard {cell} of {count} along axis {axis} does not exist")
        named.add(axis)
        cells[axis], fragments[axis] = cell, count
    offsets = tuple(cell * length for cell, length in zip(cells, local, strict=True))
    global_shape = tuple(count * length for count, length in zip(fragments, local, strict=True))
    return offsets, global_shape, tuple(fragments)


def _axes_fault(shard: ShardedTensor, extents: tuple[int, ...]) -> str:
    """Return the fault of the numbers of axes; ``""`` if there is none."""
    shape, offset, grid = shard.global_shape, shard.global_offset, shard.axis_fragmentations
    if len(shape) != len(offset):
        return f"global_shape {shape} and global_offset {offset} differ in length"
    if isinstance(sum((*shape, *offset, *extents)), float):  # of a division by /
        return f"global_shape {shape}, global_offset {offset} or local_shape {shard.local_shape} has a float in it"
    if len(extents) != len(shape):
        return (
            f"local_shape {shard.local_shape} with {shard.prepend_axis_num} prepended axes does not have the "
            f"{len(shape)} axes of global_shape {shape}"
        )
    if grid is not None and (len(grid) != len(extents) or 0 in grid):
        return f"axis_fragmentations {grid} does not have {len(extents)} axes of 1 shard or more"
    return ""


def _box_fault(shard: ShardedTensor) -> str:
    """Return the fault of a shard's place in the global tensor; ``""`` if there is none.

    Every shard of every save and load is checked here, so it is one loop without calls.
    """
    extents = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    if fault := _axes_fault(shard, extents):
        return fault
    is_grid = shard.axis_fragmentations is not None
    for off, length, size in zip(shard.global_offset, extents, shard.global_shape, strict=True):
        if off < 0 or length < 0:
            return "offsets and extents must not be negative"
        if off + length > size:
            return f"offset {shard.global_offset} plus extent {extents} leaves the global shape {shard.global_shape}"
        if is_grid and length and off % length:
            return f"offset {shard.global_offset} is not a multiple of the extent {extents}: not a regular grid"
    return ""


def _flat_fault(shard: ShardedTensor) -> str:
    part = shard.flattened_range
    if part is None:
        return ""
    volume = math.prod(shard.local_shape)
    if part.step not in (None, 1) or part.start is None or part.stop is None:
        return f"flattened_range {part} must have a start, a stop and no step"
    if not 0 <= part.start <= part.stop <= volume:
        return f"flattened_range {part} leaves the flattened local block of {volume} elements"
    return ""


def _data_fault(shard: ShardedTensor) -> str:
    data, dtype = shard.data, cast("object", shard.dtype)
    if not isinstance(dtype, torch.dtype):
        return f"dtype is {show_given(dtype)}, expected one such as torch.float32"
    if data is None:
        return ""
    if data.dtype != shard.dtype:
        return f"data has dtype {data.dtype}, the description says {shard.dtype}"
    if data.shape != shard.data_shape:
        return f"data has shape {tuple(data.shape)}, the description says {shard.data_shape}"
    return ""


def _scales_fault(shard: ShardedTensor) -> str:
    found: Any = shard.block_scales
    if found is None:
        return ""
    if not isinstance(found, BlockScales):
        return f"block_scales is a {type(found).__name__}, expected a BlockScales"
    key, block = found
    axes = len(shard.global_shape)
    if type(key) is not str or key == shard.key:
        return f"block_scales name the tensor {key!r} as the scales"
    if type(block) is not tuple or len(block) != axes or not all(type(size) is int and size > 0 for size in block):
        return f"block_scales with the block {block!r}, expected a tuple of {axes} sizes, none below 1"
    return ""


def _replace_at(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
