"""Megatron's conversions of its shards to torch's and back, for code that calls ``dcp.save`` and ``dcp.load`` itself.

The strategies here need none of them: they plan ShardedTensors as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardckpt.adapters.stored_values import nest
from shardckpt.archive.objects import make_archive
from shardckpt.compat.torch_private import make_sharded_tensor
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import part_view, shard_parts
from shardckpt.state_dict import flatten_as_dcp
from shardckpt.tensors.torch_private import is_sharded_tensor, new_wrapper
from shardckpt.validation.keys import stored_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.mapping.base import ShardedBase, ShardedStateDict, StateDict
    from shardckpt.planning.boxes import FlatPart

#: A path in a state dict: keys of dicts as texts, and indices of lists.
_Path = tuple["str | int", ...]


@dataclass
class MCoreMetadata(Metadata):
    """DCP's metadata with Megatron 0.15's additional data for each key; reading needs no such class here."""

    mcore_data: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    """DCP's plan with additional data for each key, as Megatron until 0.15 has it; reading needs no such class here."""

    mcore_data: dict[str, dict[str, Any]] | None = None


class _Checkpointable(torch.Tensor):
    """Shards of one key as a tensor of the global shape, which ``dcp.save`` and ``dcp.load`` take.

    It has no memory of its own: compute with the data of the shards.
    """

    _shards: list[ShardedTensor]

    def __create_write_items__(self, fqn: str, _: Any, index: int | None = None) -> list[WriteItem]:
        """Return DCP's item for each box of the shards."""
        first = 0 if index is None else index
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(part.box.offset), number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _to_chunk(part), TensorProperties(dtype=shard.dtype), torch.Size(shard.global_shape)
                ),
            )
            for number, (shard, part) in enumerate(self._parts(), first)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes of the shards."""
        return [_to_chunk(part) for _, part in self._parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the view of the box at an offset."""
        for shard, part in self._parts():
            if index.offset is None or tuple(index.offset) == tuple(part.box.offset):
                return part_view(shard, part)
        raise ShardingError(f"{index.fqn!r} has no box at {tuple(index.offset or ())} on this rank")

    def _parts(self) -> Iterator[tuple[ShardedTensor, FlatPart]]:
        return ((shard, part) for shard in self._shards for part in shard_parts(shard))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute."""
        raise CheckpointingException(f"{cls.__name__} has no memory of its own: use the data of its shards for {func}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._shards!r})"


class CheckpointableShardedTensor(_Checkpointable):
    """A ShardedTensor as a tensor of its global shape, for ``dcp.save`` and ``dcp.load``.

    Unlike Megatron's, it takes prepended axes and flattened ranges.

    Args:
        data: The shard's data.
        sh_ten: The shard.

    Example::

        dcp.save({"w": CheckpointableShardedTensor.from_sh_ten(shard)}, checkpoint_id=path)
    """

    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> Any:  # noqa: ARG004
        """Return a tensor without memory of the shard's global shape."""
        return new_wrapper(cls, tuple(sh_ten.global_shape), sh_ten.dtype)

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data = data
        self._sh_ten = sh_ten
        self._shards = [sh_ten]

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Return a ShardedTensor, which has data, as a tensor."""
        if sh_ten.data is None:
            raise ShardingError(f"ShardedTensor {sh_ten.key!r} has no data")
        return cls(sh_ten.data, sh_ten)


class LocalShardsContainer(_Checkpointable):
    """Several shards of one key on this rank as one tensor: DCP takes one value a key.

    Args:
        local_shards: The shards, at least one.
    """

    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor]) -> Any:
        """Return a tensor without memory of the shards' global shape."""
        if not local_shards:
            raise ShardingError("a LocalShardsContainer of no shards has no shape")
        return new_wrapper(cls, tuple(local_shards[0].size()), local_shards[0].dtype)

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._local_shards = list(local_shards)
        self._shards = [each._sh_ten for each in self._local_shards]  # noqa: SLF001 - the class above


def sharded_tensor_to_torch_sharded_tensor(
    sh_tens: Sequence[ShardedTensor],
    rank: int | None = None,
    load_legacy_1d_flatten_tensors: bool = False,
) -> Any:
    """Convert this rank's shards of one key to a ShardedTensor of torch's, as FSDP1 has them.

    It shares the memory of contiguous shards, and lists the whole grid of shards: to save or load by DCP,
    :func:`mcore_to_pyt_state_dict` costs less. torch needs a process group for it.

    Args:
        sh_tens: The shards, with data, of a regular grid. They do not change.
        rank: This rank; by default that in the default process group.
        load_legacy_1d_flatten_tensors: False: flattened shards are stored at their true shape here.

    Returns:
        The ShardedTensor, whose shards have the prepended axes with size 1. Its ``mcore_sh_ten`` is a shard without
        data, for :func:`_unwrap_pyt_sharded_tensor`.

    Raises:
        ShardingError: the grid is not regular, or a shard is flattened or has no data.
    """
    first = sh_tens[0]
    grid = first.axis_fragmentations
    if load_legacy_1d_flatten_tensors or grid is None or any(shard.flattened_range is not None for shard in sh_tens):
        raise ShardingError(f"{first.key!r} is no regular grid of shards: use mcore_to_pyt_state_dict, which takes any")
    own = dist.get_rank() if rank is None else rank
    local = []
    for shard in sh_tens:
        (part,) = shard_parts(shard)
        if shard.data is None:
            raise ShardingError(f"ShardedTensor {shard.key!r} has no data")
        local.append((part_view(shard, part).contiguous(), tuple(part.box.offset)))
    shape = tuple(local[0][0].shape)
    cells = (
        tuple(cell * size for cell, size in zip(number, shape, strict=True)) for number in product(*map(range, grid))
    )
    mine = {offset for _, offset in local}
    others = [(offset, shape) for offset in cells if offset not in mine]
    made = make_sharded_tensor(local, others, tuple(first.global_shape), own, (own + 1) % dist.get_world_size())
    made.mcore_sh_ten = first.without_data()
    made.key = first.key
    return made


def mcore_to_pyt_state_dict(
    state_dict: Mapping[str, Sequence[ShardedBase]],
    is_loading: bool = False,
    init_device: torch.device | str = "cpu",
    load_legacy_1d_flatten_tensors: bool = False,  # noqa: ARG001 - flattened shards are stored at their true shape
) -> dict[str, Any]:
    """Convert shards by key to values that ``dcp.save`` and ``dcp.load`` take.

    Args:
        state_dict: This rank's shards of each key, as :func:`_replace_state_dict_keys_with_sharded_keys` groups them.
            For a load, tensors without data get memory, and those with ``allow_shape_mismatch`` are zeroed.
        is_loading: Whether the values are to be loaded.
        init_device: Where tensors without data get memory.
        load_legacy_1d_flatten_tensors: Ignored.

    Returns:
        A :class:`CheckpointableShardedTensor` for a key with one tensor, a :class:`LocalShardsContainer` for one with
        several, a BytesIO with the list of its values for objects.

    Raises:
        ShardingError: a tensor has no data to save, or an object cannot be pickled.
    """
    converted: dict[str, Any] = {}
    for key, shards in state_dict.items():
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        if not tensors:
            converted[key] = make_archive([shard.data for shard in shards], f"object {key!r}")
            continue
        for shard in tensors:
            if is_loading:
                shard.init_data(init_device)
                if shard.allow_shape_mismatch and shard.data is not None:
                    shard.data.detach().zero_()
        wrapped = [CheckpointableShardedTensor.from_sh_ten(shard) for shard in tensors]
        converted[key] = wrapped[0] if len(wrapped) == 1 else LocalShardsContainer(wrapped)
    return converted


def _unwrap_pyt_sharded_tensor(sh_ten: Any) -> Any:
    """Return a list of this rank's tensors, without prepended axes, for a tensor of this module; else the value."""
    if isinstance(sh_ten, _Checkpointable):
        return [shard.data for shard in sh_ten._shards]  # noqa: SLF001 - the class above
    if not is_sharded_tensor(sh_ten):
        return sh_ten
    prepended = sh_ten.mcore_sh_ten.prepend_axis_num
    return [shard.tensor[(0,) * prepended] for shard in sh_ten.local_shards()]


def flatten_state_dict(state_dict: ShardedStateDict) -> tuple[dict[str, Any], dict[str, _Path]]:
    """Flatten nested dicts and lists as torch does; shards are leaves, too.

    Returns:
        The leaves by path, joined by dots; and the path of each as a tuple of texts, and of indices of lists. A list
        without dicts, tensors and shards is a leaf itself.

    Raises:
        ValueError: two paths join to one key.
    """
    leaves: dict[str, Any] = {}
    paths: dict[str, _Path] = {}
    for path, value in flatten_as_dcp(state_dict):
        name = ".".join(map(str, path))
        if name in leaves:
            raise ValueError(f"{paths[name]} and {path} are both {name!r}: rename one of them")
        leaves[name], paths[name] = value, path
    return leaves, paths


def _replace_state_dict_keys_with_sharded_keys(
    sharded_state_dict: ShardedStateDict, keep_only_main_replica: bool = False
) -> tuple[dict[str, list[ShardedBase]], dict[str, _Path], dict[str, list[str]]]:
    """Group shards by their keys; objects by their unique keys.

    Args:
        sharded_state_dict: Nested dicts and lists of shards.
        keep_only_main_replica: Whether to leave out all other replicas.

    Returns:
        The shards by key; the path of each flattened name; and the flattened names of each key, in the same order.
    """
    leaves, paths = flatten_state_dict(sharded_state_dict)
    shards: dict[str, list[ShardedBase]] = {}
    names: dict[str, list[str]] = {}
    for name, shard in leaves.items():
        if not isinstance(shard, (ShardedTensor, ShardedObject)):
            raise ShardingError(f"{name} is a {type(shard).__name__}: give ShardedTensors and ShardedObjects alone")
        if is_main_replica(shard.replica_id) or not keep_only_main_replica:
            shards.setdefault(stored_key(shard), []).append(shard)
            names.setdefault(stored_key(shard), []).append(name)
    return shards, paths, names


def _replace_sharded_keys_with_state_dict_keys(
    state_dict: Mapping[str, Sequence[Any]],
    flat_mapping: Mapping[str, _Path],
    rename_mapping: Mapping[str, Sequence[str]],
) -> StateDict:
    """Return values by key in the structure that :func:`_replace_state_dict_keys_with_sharded_keys` flattened."""
    found: dict[_Path, Any] = {}
    for key, values in state_dict.items():
        names = rename_mapping[key]
        count = len(values) if isinstance(values, list) else 0
        if count != len(names):
            raise CheckpointingException(f"{key!r} has {count} values for {len(names)} names: {', '.join(names)}")
        found |= {flat_mapping[name]: value for name, value in zip(names, values, strict=True)}
    return {key: _with_lists(value) for key, value in nest(found).items()}


def _restore_dict_types(x: Any, keys_template: Any) -> None:
    """Replace keys that flattening made texts by the keys of a state dict of the same structure, in place."""
    if isinstance(keys_template, (dict, list)) and not isinstance(x, type(keys_template)):
        raise CheckpointingException(f"a {type(x).__name__} has not the structure of a {type(keys_template).__name__}")
    if isinstance(keys_template, dict):
        restored = {key: x[str(key)] if str(key) in x else x[key] for key in keys_template}
        rest = {key: value for key, value in x.items() if key not in {*map(str, keys_template), *keys_template}}
        x.clear()
        x.update(restored | rest)
        for key, template in keys_template.items():
            _restore_dict_types(x[key], template)
    elif isinstance(keys_template, list):
        for value, template in zip(x, keys_template, strict=False):
            _restore_dict_types(value, template)


def _to_chunk(part: FlatPart) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape))


def _with_lists(value: Any) -> Any:
    """Return nested dicts with those whose keys are indices as lists; None stands where a list has no value."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    if not inner or not all(isinstance(key, int) for key in inner):
        return inner
    return [inner.get(number) for number in range(max(inner) + 1)]


__all__ = [
    "CheckpointableShardedTensor",
    "LocalShardsContainer",
    "MCoreMetadata",
    "MCoreSavePlan",
    "_replace_sharded_keys_with_state_dict_keys",
    "_replace_state_dict_keys_with_sharded_keys",
    "_restore_dict_types",
    "_unwrap_pyt_sharded_tensor",
    "flatten_state_dict",
    "mcore_to_pyt_state_dict",
    "sharded_tensor_to_torch_sharded_tensor",
]
