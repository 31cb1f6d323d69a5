"""Locate the values of each tensor in a checkpoint of DeepSpeed.

ZeRO flattens the parameters of a group one after the other, and pads the end. Stages 1 and 2 cut that row over the
ranks. Stage 3 cuts each parameter over the ranks, pads each part equally, and each rank's parts follow each other
in groups of its own. The moments of the optimizer are cut as the parameters are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive.lazy_reads import LazyReads, refuse_expanded
from shardckpt.archive.lazy_tensors import LazyTensor
from shardckpt.archive.writer import row_major_strides
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, format_many
from shardckpt.planning.boxes import Box, cut_flat_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardckpt.archive.payload import StoredPayload
    from shardckpt.planning.boxes import Ints

#: As adapters.to_sharded_state_dict names a model and its optimizer, so that it loads converted checkpoints.
MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
#: What is read of the optimizer: the moments of every Adam, and its count of steps.
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"
#: Entries of a file of model states for DeepSpeed itself, and not for the job.
_INTERNAL = {
    "module",
    "optimizer",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "ds_config",
}


class StoredTensorFile(NamedTuple):
    """A tensor in a file."""

    file: str
    payload: StoredPayload


class Chunk(NamedTuple):
    """A box of a tensor: a tensor of the box's shape in a file."""

    box: Box
    file: str
    payload: StoredPayload


class IndexedTensor(NamedTuple):
    """A tensor and its chunks."""

    shape: Ints
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """The content of a checkpoint.

    Attributes:
        tensors: By key.
        steps: The optimizer's count of steps by key, which no file has as a tensor of its own.
        objects: By key the optimizer's options for each parameter, and values of the module's state dict that are no
            tensors.
        common: The job's other values.
        files: The files besides the files of the model and the partitions.
        unread: The names of values of the optimizer that are not read.
    """

    tensors: dict[str, IndexedTensor] = field(default_factory=dict)
    steps: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def add_state(self, name: str, step: Any, options: Mapping[str, Any] | None) -> None:
        """Add the optimizer's count of steps and options of a parameter, as far as they are stored."""
        if step is None and options is not None:
            step = options.get("step")  # of DeepSpeed's FusedAdam
        if step is not None:
            if not isinstance(step, (int, float)) or not 0 <= step < 1 << 53:  # a pickle may have anything
                raise CorruptCheckpointError(f"{name!r}: the optimizer's count of its steps is not a number of steps")
            self.steps[f"{STATE}{name}.step"] = torch.as_tensor(step, dtype=torch.float32, device="cpu")
        if options is not None:
            self.objects[GROUPS + name] = {key: value for key, value in options.items() if key != "params"}


class ModelStates:
    """The files with names, shapes, buffers and frozen parameters.

    ``files`` has the content of the file of each rank, by name, with a LazyTensor for each tensor; nothing if there is
    no file.
    """

    def __init__(self, files: Mapping[str, Any], place: str, read: Callable[[StoredTensorFile], torch.Tensor]) -> None:
        self._files = list(files)
        self._states = [check_dict(state, f"{place}/{name}") for name, state in files.items()]
        self._first = self._states[0] if self._states else {}
        self._place = place
        self._values = LazyReads(lambda value, key: read(locate_tensor(value, self._files[0], f"{place}: {key!r}")))

    @property
    def is_cut(self) -> bool:
        """Whether each rank has a file of its own, as in stage 3."""
        return any(file.startswith("zero_pp_rank_") for file in self._files)

    @property
    def groups(self) -> list[dict[str, Ints]]:
        """The shapes of the trained parameters by name: a dict for each group, in the order in which they lie."""
        found = self._first.get("param_shapes") or []
        return [_check_shapes(group, self._place) for group in (found if isinstance(found, list) else [found])]

    def add_rest(self, index: Index, *, is_cut: bool) -> None:
        """Add untrained values: frozen parameters, buffers, extra state, names of tied weights, the job's values.

        ``is_cut`` says whether frozen parameters are cut over the ranks.
        """
        tied = self._take_dict(self._first, "shared_params")
        index.tensors.update({MODEL + name: tensor for name, tensor in self._list_frozen(is_cut=is_cut)})
        self._add_module(index, tied, is_cut=is_cut)
        for name, source in tied.items():
            if f"{MODEL}{source}" not in index.tensors:
                raise CorruptCheckpointError(f"{self._place}: {name!r} is tied to {source!r}, which is not there")
            index.tensors[f"{MODEL}{name}"] = index.tensors[f"{MODEL}{source}"]
        for key, value in self._first.items():
            if key not in _INTERNAL:
                index.common[key] = self._values.fill(value, str(key))

    def _list_frozen(self, *, is_cut: bool) -> Iterator[tuple[str, IndexedTensor]]:
        """Yield the frozen parameters, which stage 3 cuts over the ranks."""
        fragments = [self._take_dict(state, "frozen_param_fragments") for state in self._states]
        for name, shape in _check_shapes(self._take_dict(self._first, "frozen_param_shapes"), self._place).items():
            parts = [
                locate_tensor(own.get(name), file, f"{name} in {self._place}")
                for file, own in zip(self._files, fragments, strict=True)
            ]
            yield name, join_parts(name, shape, parts) if is_cut else make_whole(name, shape, parts[0])

    def _add_module(self, index: Index, tied: Mapping[Any, Any], *, is_cut: bool) -> None:
        """Add the values of the module's state dict that the index lacks: buffers, and extra state as objects."""
        module = self._take_dict(self._first, "module")
        # stage 3 has no values of parameters in it
        buffers = (self._first.get("buffer_names") or []) if is_cut else list(module)
        if not isinstance(buffers, list):
            raise CorruptCheckpointError(f"{self._place}: buffer_names is a {type(buffers).__name__}, not a list")
        for name, value in module.items():
            if MODEL + name in index.tensors or name in tied:
                continue
            if not isinstance(value, LazyTensor):
                index.objects[MODEL + name] = self._values.fill(value, name)
            elif name in buffers:
                found = locate_tensor(value, self._files[0], f"{name} in {self._place}")
                index.tensors[MODEL + name] = make_whole(name, found.payload.shape, found)

    def _take_dict(self, state: Mapping[str, Any], name: str) -> dict[Any, Any]:
        """Return a dict of a file; empty if it has none of that name."""
        found = state.get(name)
        values = {} if found is None else check_dict(found, f"{self._place}: {name}")
        for key in values:
            if not isinstance(key, str):
                raise CorruptCheckpointError(f"{self._place}: {name} has {key!r:.200}, which is no tensor's name")
        return values


def index_partitions(
    files: Mapping[str, Any], models: ModelStates, place: str, read: Callable[[StoredTensorFile], torch.Tensor]
) -> Index:
    """Return the index of a ZeRO checkpoint, of stage 1, 2 or 3.

    ``files`` has the content of the file of each rank's partition, in the order of ranks, with LazyTensors, by name.
    """
    ranks = [_Partition(name, state, place, read) for name, state in files.items()]
    first = ranks[0]
    count = first.count
    if count is not None and count != len(ranks):
        raise CorruptCheckpointError(
            f"{place} has partitions of {format_many(len(ranks), 'rank')}, and is of {count}: copy all of them"
        )
    if any(rank.is_cut_by_parameter != first.is_cut_by_parameter for rank in ranks):
        raise CorruptCheckpointError(f"{place} has files of two checkpoints: their ZeRO stages differ")
    index, groups = Index(), models.groups
    if not groups:
        raise CorruptCheckpointError(f"{place}: its model_states.pt has no param_shapes, so that no parameter is found")
    index.unread.update(first.list_unread())
    for kind in ("", *(moment for moment in MOMENTS if first.has(moment))):
        rows = [rank.list_rows(kind) for rank in ranks]
        if any(len(row) != len(rows[0]) or len(row) < len(groups) for row in rows):
            raise CorruptCheckpointError(
                f"{place}: its files have other numbers of groups of parameters than its model"
            )
        if first.is_cut_by_parameter:
            named = dict(chain.from_iterable(group.items() for group in groups))
            tensors = dict(_cut_by_parameter(named, rows))
        else:
            by_group = (_cut_by_group(group, [row[n] for row in rows]) for n, group in enumerate(groups))
            tensors = dict(chain.from_iterable(by_group))
        index.tensors.update({f"{STATE}{n}.{kind}" if kind else MODEL + n: tensor for n, tensor in tensors.items()})
    for number, group in enumerate(groups):
        for name in group:
            index.add_state(name, first.get_step(number), first.get_options(number))
    models.add_rest(index, is_cut=first.is_cut_by_parameter)
    return index


class _Partition:
    """One rank's stored part of the optimizer."""

    def __init__(self, name: str, state: Any, place: str, read: Callable[[StoredTensorFile], torch.Tensor]) -> None:
        self._name, self._path, self._read = name, f"{place}/{name}", read
        self._state = check_dict(check_dict(state, self._path).get("optimizer_state_dict"), self._path)
        #: Whether it is of stage 3.
        self.is_cut_by_parameter = "fp32_flat_groups" in self._state
        base = self._state.get("optimizer_state_dict" if self.is_cut_by_parameter else "base_optimizer_state")
        self._base = base if isinstance(base, dict) else {}
        moments = self._base.get("state")
        if not isinstance(moments, dict):
            raise CheckpointingException(
                f"{self._path} has no state of its optimizer by group, which is not read here: an elastic checkpoint "
                "(zero_elastic_checkpoint) or one without an optimizer. Gather its weights with DeepSpeed"
            )
        if any(type(group) is not int for group in moments):
            raise CorruptCheckpointError(f"{self._path}: the state of its optimizer is not by the numbers of groups")
        self._moments = {group: check_dict(values, self._path) for group, values in moments.items()}

    @property
    def count(self) -> int | None:
        """Of how many ranks it is; None if that is not stored."""
        found = self._state.get("partition_count")
        counts: list[Any] = found if isinstance(found, list) else [found]
        return max((count for count in counts if type(count) is int), default=None)

    def has(self, moment: str) -> bool:
        """Return whether the optimizer has such a moment."""
        return any(moment in group for group in self._moments.values())

    def list_unread(self) -> set[str]:
        """Return the names of the optimizer's values that are not read, as those of other optimizers than Adam."""
        values = (item for group in self._moments.values() for item in group.items())
        return {str(name) for name, value in values if value is not None and name not in (*MOMENTS, STEP)}

    def list_rows(self, moment: str) -> list[StoredTensorFile]:
        """Return the flat tensor of each group: of a moment, or, for ``""``, of the weights."""
        if moment:
            found: Any = [group.get(moment) for _, group in sorted(self._moments.items())]
        else:
            key = "fp32_flat_groups" if self.is_cut_by_parameter else "single_partition_of_fp32_groups"
            found = self._state.get(key)
            if not isinstance(found, (list, tuple)):
                raise CorruptCheckpointError(f"{self._path} has no {key}")
        return [_check_flat(locate_tensor(value, self._name, self._path), self._path) for value in found]

    def get_step(self, group: int) -> Any:
        """Return the count of steps of a group; None if it has none."""
        return read_step_count(self._moments.get(group, {}).get(STEP), self._name, self._read)

    def get_options(self, group: int) -> dict[str, Any] | None:
        """Return the options of a group; None if they are not known."""
        return pick_options(self._base.get("param_groups"), group, len(self._moments))


def pick_options(stored: Any, group: int, count: int) -> dict[str, Any] | None:
    """Return the optimizer's options for a group of parameters; None if it is not known which are the group's.

    ``count`` is the number of groups; stage 3 cuts a large group into smaller ones.
    """
    if not isinstance(stored, list) or len(stored) not in (1, count):
        return None
    found = stored[group if len(stored) == count else 0]
    return found if isinstance(found, dict) else None


def _cut_by_group(group: Mapping[str, Ints], row: Sequence[StoredTensorFile]) -> Iterator[tuple[str, IndexedTensor]]:
    """Yield the parameters of a group that stage 1 or 2 has cut over the ranks."""
    start = 0
    for name, shape in group.items():
        count = math.prod(shape)
        yield name, _make_tensor(name, shape, list(_take(name, row, start, count)))
        start += count


def _cut_by_parameter(
    named: Mapping[str, Ints], rows: Sequence[Sequence[StoredTensorFile]]
) -> Iterator[tuple[str, IndexedTensor]]:
    """Yield the parameters that stage 3 has cut, each over the ranks."""
    start = 0
    for name, shape in named.items():
        count = math.prod(shape)
        share = -(-count // len(rows))
        parts: list[StoredTensorFile] = []
        for rank, row in enumerate(rows):
            wanted = min(share, count - rank * share)
            parts += _take(name, row, start, wanted)
        yield name, _make_tensor(name, shape, parts)
        start += share


def join_parts(name: str, shape: Ints, parts: Sequence[StoredTensorFile]) -> IndexedTensor:
    """Return a tensor whose elements are flat parts one after the other; the last may be padded."""
    return _make_tensor(name, shape, list(_take(name, parts, 0, math.prod(shape))))


def make_whole(name: str, shape: Ints, found: StoredTensorFile) -> IndexedTensor:
    """Return a tensor that one file has as a whole."""
    if found.payload.shape != shape:
        raise CorruptCheckpointError(f"{name!r} in {found.file} has the shape {found.payload.shape}, not {shape}")
    chunk = Chunk(Box.from_shape(shape), found.file, found.payload)
    return IndexedTensor(shape, found.payload.dtype, (chunk,))


def _take(name: str, row: Sequence[StoredTensorFile], start: int, count: int) -> Iterator[StoredTensorFile]:
    """Yield the parts of a row of flat tensors that have its elements ``start`` to ``start + count``."""
    for file, payload in row:
        size = payload.shape[0]
        taken = max(0, min(count, size - start))
        if taken and start >= 0:
            yield StoredTensorFile(file, payload._replace(first=payload.first + start, shape=(taken,)))
            start, count = start + taken, count - taken
        start -= size
    if count > 0:
        raise CorruptCheckpointError(f"{row[0].file if row else 'no file'}: its partition ends within {name!r}")


def _make_tensor(name: str, shape: Ints, parts: Sequence[StoredTensorFile]) -> IndexedTensor:
    chunks, at = [], 0
    dtypes = {part.payload.dtype for part in parts}
    if len(dtypes) > 1:
        raise CorruptCheckpointError(f"{name!r} has parts of other dtypes: {', '.join(sorted(map(str, dtypes)))}")
    for file, payload in parts:
        count = payload.shape[0]
        for box, start in cut_flat_range(shape, at, at + count):
            own = payload._replace(first=payload.first + start, shape=box.shape, stride=row_major_strides(box.shape))
            chunks.append(Chunk(box, file, own))
        at += count
    return IndexedTensor(shape, dtypes.pop() if dtypes else torch.float32, tuple(chunks))


def locate_tensor(value: Any, file: str, what: str) -> StoredTensorFile:
    """Return where a value of a file is, which must be a tensor."""
    if not isinstance(value, LazyTensor) or value.spec is not None:
        raise CorruptCheckpointError(f"{what}: {file} has a {type(value).__name__} where a tensor should be")
    stored = value.payload
    refuse_expanded(stored, f"{what}: a tensor in {file}")
    last = sum((size - 1) * step for size, step in zip(stored.shape, stored.stride, strict=True))
    if 0 not in stored.shape and (stored.first + last + 1) * stored.dtype.itemsize > stored.nbytes:
        raise CorruptCheckpointError(f"{what}: a tensor in {file} is larger than its storage")
    return StoredTensorFile(file, stored)


def read_step_count(value: Any, file: str, read: Callable[[StoredTensorFile], torch.Tensor]) -> Any:
    """Return a count of steps: a number, or the only element of a tensor in a file; None if there is none."""
    if value is None or isinstance(value, (int, float)):
        return value
    found = locate_tensor(value, file, "the count of steps")
    if math.prod(found.payload.shape) != 1:
        raise CorruptCheckpointError(f"{file}: the count of steps has the shape {found.payload.shape}")
    return read(found).item()


def check_dict(value: Any, what: str) -> dict[Any, Any]:
    """Return a value that must be a dict."""
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{what} is not as DeepSpeed writes it: a {type(value).__name__}, not a dict")
    return value


def _check_flat(found: StoredTensorFile, path: str) -> StoredTensorFile:
    if len(found.payload.shape) != 1 or not found.payload.is_contiguous:
        raise CorruptCheckpointError(f"{path}: a partition has the shape {found.payload.shape}; it should be flat")
    return found


def _check_shapes(group: Any, place: str) -> dict[str, Ints]:
    found = check_dict(group, f"{place}: param_shapes")
    for name, shape in found.items():
        if not isinstance(shape, (tuple, list)) or not all(type(size) is int and size >= 0 for size in shape):
            raise CorruptCheckpointError(f"{place}: its param_shapes has a value for {name!r:.200} that is no shape")
    return {str(name): tuple(shape) for name, shape in found.items()}
