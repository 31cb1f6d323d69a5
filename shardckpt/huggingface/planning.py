"""Plan an export: the folder's tensors, where their elements are stored, and the file of each."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.optimizer_keys import is_optimizer_key
from shardckpt.errors import (
    CheckpointingException,
    KeyMismatchError,
    ShardingError,
    cut_prefix,
    format_many,
    listed,
    name_known,
    natural_order,
    prefix_error,
)
from shardckpt.huggingface.adapters import AdapterNames, find_adapter_key
from shardckpt.huggingface.casts import find_model_dtype
from shardckpt.huggingface.header import refuse_unknown
from shardckpt.huggingface.hub_tensor import HubTensor, StoredPart
from shardckpt.huggingface.megatron import MEGATRON_NAME
from shardckpt.huggingface.names import ADAPTER_WEIGHTS, SAFETENSORS, assign_files
from shardckpt.huggingface.sections import find_sections
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.coverage import find_hole, find_overlap
from shardckpt.plugins.key_mapping import Identity, KnowsKeys, get_key_map_entries
from shardckpt.tensors.inner import get_outer_key
from shardckpt.validation.keys import is_version_key, stored_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

    from shardckpt.huggingface.options import ExportOptions
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.plugins.key_mapping import KeyMapEntry

logger = logging.getLogger(__name__)

#: Suffixes of the scales of weights of 8 bits and less: a cast of the scales would change the weights.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


class LeftOut(NamedTuple):
    """Keys that are stored and not written to a folder.

    ``optimizer`` are of tensors of an optimizer's state, ``outside`` of other tensors that are not the model's, unless
    the caller has named its prefix, and ``unmapped`` of objects, and of tensors that the mapping leaves out.
    """

    optimizer: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()

    def warn(self) -> None:
        """Log the items that are not written, and why."""
        if self.optimizer:
            logger.warning(
                "not exported (%s of the optimizer's state): %s",
                format_many(len(self.optimizer), "tensor"),
                listed(self.optimizer, limit=3),
            )
        if self.outside:
            logger.warning(
                "not exported (%s outside the model): %s; --prefix (prefix=) exports others",
                format_many(len(self.outside), "tensor"),
                listed(self.outside),
            )
        if self.unmapped:
            logger.warning(
                "not exported (%d objects, or tensors that the mapping leaves out): %s",
                len(self.unmapped),
                listed(self.unmapped, limit=5),
            )


class PlannedTensors(NamedTuple):
    """The tensors of a folder that shards become.

    Attributes:
        tensors: The tensors by name, in the order of the shards.
        unmapped: The keys of objects, and of tensors that the mapping leaves out, among the shards with the prefix.
        unmatched: The keys of tensors that the mapping does not know, which keep their names.
        cast: The stored dtype of tensors that are cast, by name.
        kept: The names of tensors that would lose values by the cast, and keep their dtype.
    """

    tensors: dict[str, HubTensor]
    unmapped: list[str]
    unmatched: list[str]
    cast: dict[str, torch.dtype]
    kept: list[str]


class ExportPlan(NamedTuple):
    """The files of an export, each with its name and tensors, and the keys that are not written."""

    files: list[tuple[str, list[HubTensor]]]
    planned: PlannedTensors
    left_out: LeftOut

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[HubTensor]:
        """The tensors of all files."""
        return [tensor for _, tensors in self.files for tensor in tensors]


def plan_export(index: Iterable[ShardedBase], options: ExportOptions, source: str) -> ExportPlan:
    """Return the files of an export of these stored shards, which have no data; ``source`` is named in errors.

    It is an error if there is no tensor to write, or a tensor cannot be written.
    """
    # by the stored tensors alone, not by how they were sharded: the same files come out at any world size
    stored = sorted(index, key=lambda shard: natural_order(stored_key(shard)))
    prefix, chosen, left_out = choose_model(stored, options)
    if isinstance(options.mapping, AdapterNames):
        options.mapping.check_parts(options.mapping.find_parts(stored_key(shard)[len(prefix) :] for shard in chosen))
    planned = plan_tensors(chosen, options._replace(prefix=prefix))
    tensors, kept = planned.tensors, planned.kept
    if kept:
        logger.warning(
            "not cast (%s that would lose by it): %s", format_many(len(kept), "tensor"), listed(kept, limit=5)
        )
    if not tensors:
        raise prefix_error(f"{source}: no tensor to export", prefix, map(stored_key, stored))
    if isinstance(options.mapping, Identity) and MEGATRON_NAME in tensors:
        logger.warning("%r is Megatron's name: mapping='megatron' (--mapping megatron) gives the Hub's", MEGATRON_NAME)
    if isinstance(options.mapping, Identity) and (found := find_adapter_key(tensors)):
        logger.warning(
            "%r is PEFT's name of an adapter's tensor: mapping='peft' (--mapping peft) gives its folder", found
        )
    if options.file_format == SAFETENSORS:
        refuse_unknown(tensors.values())
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files = assign_files(sizes, options.limit, options.file_format)
    if isinstance(options.mapping, AdapterNames):
        if options.file_format != SAFETENSORS:
            raise CheckpointingException("an adapter is written in safetensors, not in .bin")
        files = {ADAPTER_WEIGHTS: [*tensors]}  # PEFT reads one file
    return ExportPlan(
        [(file, [tensors[name] for name in names]) for file, names in files.items()],
        planned,
        left_out._replace(unmapped=tuple(planned.unmapped)),
    )


def choose_model(
    stored: Sequence[ShardedBase], options: ExportOptions, *, optimizer: bool = False
) -> tuple[str, list[ShardedBase], LeftOut]:
    """Choose the model in a checkpoint; return its keys' prefix, its shards, and the keys of other tensors.

    The prefix of the options is the model's, if it is not None; keys that their mapping knows are the model's.
    Quantized parameters are an error.
    """
    keys = [stored_key(shard) for shard in stored]
    sections = find_sections(keys)
    prefix = sections.model if options.prefix is None else options.prefix
    known = options.mapping if isinstance(options.mapping, KnowsKeys) else None
    # a caller's prefix selects all keys that have it, except keys that a mapping of a model's names does not know
    takes_all = optimizer or (options.prefix is not None and known is None)
    cut = len(prefix)
    chosen: list[ShardedBase] = []
    left: dict[bool, list[str]] = {True: [], False: []}
    for shard, key in zip(stored, keys, strict=True):
        is_optimizer = not takes_all and sections.has_optimizer_key(key) and not (known and known.knows(key[cut:]))
        if key.startswith(prefix) and not is_optimizer:
            chosen.append(shard)
        elif isinstance(shard, ShardedTensor) and not is_version_key(key) and (is_optimizer or options.prefix is None):
            left[is_optimizer].append(key)
    adapter = options.mapping if isinstance(options.mapping, AdapterNames) else None
    # an adapter's folder has nothing of the base model, whose weights may be quantized
    refuse_codes(key for key in map(stored_key, chosen) if not (adapter and adapter.is_of_base(key[cut:])))
    return prefix, chosen, LeftOut(tuple(left[True]), tuple(left[False]))


def refuse_codes(keys: Iterable[str]) -> None:
    """Raise if the model has quantized parameters, stored as codes and scales: no class of the Hub has their names."""
    found = sorted({name for key in keys if (name := get_outer_key(key)) and not is_optimizer_key(key)})
    if found:
        raise CheckpointingException(
            f"quantized parameters are stored as their codes and scales, which a folder of the Hub cannot have: "
            f"{listed(found)}; save their values, by dequantize=True of to_sharded_state_dict or CheckpointConfig"
        )


def plan_tensors(shards: Iterable[ShardedBase], options: ExportOptions, others: Collection[str] = ()) -> PlannedTensors:
    """Plan the tensors that these shards become under the prefix, the mapping, the dtype and the names left out.

    A warning names the tensors that the mapping does not know; with strict options they are a KeyMismatchError. A
    prefix of None is none. ``others`` are the names of items that may be left out and are no tensors, for the error
    about a name that is neither. It is an error if a tensor is not stored as a whole, or two are mapped to one.
    """
    prefix = options.prefix or ""
    parts: dict[str, list[StoredPart]] = {}
    unmapped = []
    dtypes: dict[str, torch.dtype] = {}
    for shard in shards:
        if not stored_key(shard).startswith(prefix) or is_version_key(shard.key):  # no class loads it from a folder
            continue
        links: Sequence[KeyMapEntry] = ()
        if isinstance(shard, ShardedTensor):
            shape, dtypes[shard.key] = tuple(shard.global_shape), shard.dtype
            links = get_key_map_entries(options.mapping, cut_prefix(shard.key, prefix), shape)
            for link in links:
                parts.setdefault(link.name, []).append(StoredPart(shard.key, shape, link))
        if not links:
            unmapped.append(stored_key(shard))
    unmatched = _find_unmatched(options, dtypes)
    absent = sorted(options.leave_out - parts.keys())
    if absent:
        raise CheckpointingException(
            f"leave_out: no tensor named {listed([*map(repr, absent)])} would be written "
            f"{name_known(absent[0], [*parts, *others], 'names')}"
        )
    planned = {name: _hub_tensor(name, found, dtypes) for name, found in parts.items()}
    names = [name for name in planned if name not in options.leave_out]
    options.casts.check_patterns(names)
    weights = [planned[name] for name in names if not is_optimizer_key(name)] or planned.values()
    model = find_model_dtype((tensor.dtype, math.prod(tensor.shape)) for tensor in weights)
    found = PlannedTensors({}, unmapped, unmatched, {}, [])
    for name in names:
        stored = planned[name].dtype
        # a weight of scales is looked up by its name, though it is left out
        is_fixed = _has_fixed_dtype(planned[name], planned)
        dtype = stored if is_fixed else options.casts.choose(name, stored, model)
        found.tensors[name] = planned[name]._replace(dtype=dtype)
        if dtype != stored:
            found.cast[name] = stored
        elif options.casts.would_narrow(name, stored):
            found.kept.append(name)
    return found


def _find_unmatched(options: ExportOptions, keys: Collection[str]) -> list[str]:
    """Return the keys that the mapping does not know, after a warning.

    If they are all, or the options are strict, that is a KeyMismatchError.
    """
    mapping, cut = options.mapping, len(options.prefix or "")
    if not isinstance(mapping, KnowsKeys):
        return []
    wanted = [key for key in keys if key[cut:] not in options.leave_out]
    unmatched = [key for key in wanted if not mapping.knows(key[cut:])]
    if not unmatched:
        return []
    unused = mapping.find_unused([key[cut:] for key in keys])
    what = f"{len(unmatched)} of {format_many(len(keys), 'tensor')} matched no rule of the mapping: {listed(unmatched)}"
    what += f"; rules that matched no tensor: {listed(unused)}" if unused else ""
    if len(unmatched) == len(wanted):
        raise KeyMismatchError(
            f"{what}. The mapping is of another model, or the keys have another prefix (prefix=, --prefix): leave the "
            "mapping out to write them under their names"
        )
    if options.strict:
        raise KeyMismatchError(
            f"{what}. Add rules for them, or leave them out: by name (leave_out=, --leave-out), or by a rule without a "
            "name in the folder"
        )
    logger.warning("%s. They keep their names", what)
    return unmatched


def _hub_tensor(name: str, parts: list[StoredPart], dtypes: Mapping[str, torch.dtype]) -> HubTensor:
    """Return a tensor of the folder, after a check that every element of it is stored exactly once."""
    shape, dtype = parts[0].link.shape, dtypes[parts[0].key]
    kinds = {(part.link.shape, str(dtypes[part.key])) for part in parts}
    if len(kinds) > 1:
        raise ShardingError(f"{name!r} is of several shapes and dtypes, {sorted(kinds)}, by {_key_list(parts)}")
    boxes = [part.link.folder_box for part in parts]
    twice, hole = find_overlap(boxes), None
    if twice is not None or (hole := find_hole(shape, boxes)) is not None:
        # a hole would be written as whatever the memory held
        what = "stored twice" if twice is not None else f"not stored from {hole.offset if hole else ()} on"
        raise ShardingError(f"{name!r} of shape {shape} is {what}, by {_key_list(parts)}: is the mapping right?")
    return HubTensor(name, dtype, shape, tuple(parts))


def _has_fixed_dtype(tensor: HubTensor, tensors: Mapping[str, HubTensor]) -> bool:
    """Return whether no cast changes a tensor: a scale of 8-bit weights, or one whose rule says so."""
    if any(part.link.keep_dtype for part in tensor.parts):
        return True
    weights = [tensor.name.removesuffix(suffix) for suffix in _SCALE_SUFFIXES if tensor.name.endswith(suffix)]
    return any(weight in tensors and tensors[weight].dtype.itemsize == 1 for weight in weights)


def _key_list(parts: Iterable[StoredPart]) -> str:
    return ", ".join(sorted({repr(part.key) for part in parts}))
