"""Plan an export: the folder's tensors, where their elements are stored, and the file of each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine import is_optimizer_key
from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError, listed, name_known, name_prefixes
from shardckpt.huggingface.dtypes import cast_to
from shardckpt.huggingface.header import refuse_unknown
from shardckpt.huggingface.hub_tensor import HubTensor, StoredPart
from shardckpt.huggingface.megatron import MEGATRON_NAME
from shardckpt.huggingface.names import SAFETENSORS, assign_files, natural_order
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import find_hole, find_overlap
from shardckpt.plugins import Identity, KnowsKeys, get_key_map_entries
from shardckpt.tensors import get_outer_key
from shardckpt.validation import is_version_key, stored_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

    from shardckpt.mapping import ShardedBase
    from shardckpt.plugins import KeyMapEntry, KeyMapping

logger = logging.getLogger(__name__)

#: Prefixes that adapters.to_sharded_state_dict gives a model and its optimizers.
_MODEL, _OPTIMIZER = "model.", "optimizer."
#: Suffixes of the scales of weights of 8 bits and less: a cast of the scales would change the weights.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


class ExportOptions(NamedTuple):
    """What to export, and how.

    Attributes:
        prefix: Prefix of the keys to export; None for ``"model."`` if the keys are those of a model with its
            optimizers, else ``""``.
        mapping: Maps keys without the prefix to the folder's names.
        dtype: Target of the cast of floating-point tensors; None keeps their dtypes.
        limit: Bytes of tensors in a file.
        file_format: ``safetensors`` or ``bin``.
        leave_out: Names in the folder that are not written.
        strict: Whether a tensor that the mapping does not know is an error.
    """

    prefix: str | None
    mapping: KeyMapping
    dtype: torch.dtype | None
    limit: int
    file_format: str
    leave_out: frozenset[str]
    strict: bool = False


class ExportPlan(NamedTuple):
    """What an export writes, and what not.

    Attributes:
        file_format: Of the files.
        files: Name and tensors of each.
        unmatched: The keys of tensors that the mapping does not know.
        optimizer: The keys of tensors of the optimizer's state, which the mapping does not know and are not written.
        unmapped: The keys of objects, and of tensors that the mapping leaves out.
    """

    file_format: str
    files: list[tuple[str, list[HubTensor]]]
    unmatched: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensors in self.files for tensor in tensors)


def plan_export(index: Iterable[ShardedBase], options: ExportOptions, source: str) -> ExportPlan:
    """Return the files of an export of these stored shards, which have no data; ``source`` is named in errors.

    Raises:
        CheckpointingException: there is no tensor to write, or a tensor cannot be written.
    """
    # by the stored tensors alone, not by how they were sharded: the same files come out at any world size
    stored = sorted(index, key=lambda shard: natural_order(stored_key(shard)))
    prefix = find_model_prefix(stored) if options.prefix is None else options.prefix
    refuse_codes(key for shard in stored if (key := stored_key(shard)).startswith(prefix))
    tensors, unmapped, unmatched = plan_tensors(
        [shard for shard in stored if not _is_foreign_optimizer(shard, options.mapping)],
        options._replace(prefix=prefix),
    )
    optimizer = [stored_key(shard) for shard in stored if _is_foreign_optimizer(shard, options.mapping)]
    if not tensors:
        raise KeyMismatchError(
            f"{source} has no tensor to export whose key begins with {prefix!r} "
            f"{name_prefixes(prefix, map(stored_key, stored))}"
        )
    if isinstance(options.mapping, Identity) and MEGATRON_NAME in tensors:
        logger.warning("%r is Megatron's name: mapping='megatron' (--mapping megatron) gives the Hub's", MEGATRON_NAME)
    if options.file_format == SAFETENSORS:
        refuse_unknown((tensor.name, tensor.dtype) for tensor in tensors.values())
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files = assign_files(sizes, options.limit, options.file_format)
    planned = [(file, [tensors[name] for name in files[file]]) for file in files]
    return ExportPlan(options.file_format, planned, tuple(unmatched), tuple(optimizer), tuple(unmapped))


def find_model_prefix(stored: Iterable[ShardedBase]) -> str:
    """Return ``"model."`` if the keys are those of a model with its optimizers, else ``""``."""
    keys = [stored_key(shard) for shard in stored]
    has_both = any(key.startswith(_MODEL) for key in keys) and any(key.startswith(_OPTIMIZER) for key in keys)
    return _MODEL if has_both else ""


def _is_foreign_optimizer(shard: ShardedBase, mapping: KeyMapping) -> bool:
    """Return whether a tensor is of an optimizer's state by its key, which a mapping for a model does not know."""
    if not isinstance(mapping, KnowsKeys) or not isinstance(shard, ShardedTensor):
        return False
    return is_optimizer_key(shard.key) and not mapping.knows(shard.key)


def refuse_codes(keys: Iterable[str]) -> None:
    """Raise if the model has quantized parameters, stored as codes and scales: no class of the Hub has their names."""
    found = sorted({name for key in keys if (name := get_outer_key(key)) and not is_optimizer_key(key)})
    if found:
        raise CheckpointingException(
            f"quantized parameters are stored as their codes and scales, which a folder of the Hub cannot have: "
            f"{listed(found)}; save their values, by dequantize=True of to_sharded_state_dict or CheckpointConfig"
        )


class PlannedTensors(NamedTuple):
    """What shards become in a folder.

    Attributes:
        tensors: The tensors by name, in the order of the shards.
        unmapped: The keys of objects, and of tensors that the mapping leaves out, among the shards with the prefix.
        unmatched: The keys of tensors that the mapping does not know, which keep their names.
    """

    tensors: dict[str, HubTensor]
    unmapped: list[str]
    unmatched: list[str]


def plan_tensors(stored: Iterable[ShardedBase], options: ExportOptions, others: Collection[str] = ()) -> PlannedTensors:
    """Plan the tensors that these shards become under the prefix, the mapping, the dtype and the names left out.

    A warning names the tensors that the mapping does not know.

    Args:
        stored: Descriptions of all that is stored.
        options: What to write. A prefix of None is none.
        others: What may be left out beside tensors, for the error about a name that is neither.

    Raises:
        KeyMismatchError: the options are strict, and the mapping does not know a tensor.
        CheckpointingException: a tensor is not stored as a whole, or two are mapped to one.
    """
    prefix = options.prefix or ""
    cut = len(prefix)
    parts: dict[str, list[StoredPart]] = {}
    unmapped = []
    dtypes: dict[str, torch.dtype] = {}
    for shard in stored:
        if not stored_key(shard).startswith(prefix) or is_version_key(shard.key):  # no class loads it from a folder
            continue
        links: Sequence[KeyMapEntry] = ()
        if isinstance(shard, ShardedTensor):
            shape, dtypes[shard.key] = tuple(shard.global_shape), shard.dtype
            links = get_key_map_entries(options.mapping, shard.key[cut:], shape)
            for link in links:
                parts.setdefault(link.name, []).append(StoredPart(shard.key, shape, link))
        if not links:
            unmapped.append(stored_key(shard))
    unmatched = _find_unmatched(options, dtypes)
    absent = sorted(options.leave_out - parts.keys())
    if absent:
        raise CheckpointingException(
            f"leave_out={absent}: no tensors of these names would be written "
            f"{name_known(absent[0], [*parts, *others], 'names')}"
        )
    # the cast looks up weights by name: those that are left out too
    tensors = {name: _hub_tensor(name, found, dtypes) for name, found in parts.items()}
    kept = {n: _cast(tensor, tensors, options.dtype) for n, tensor in tensors.items() if n not in options.leave_out}
    return PlannedTensors(kept, unmapped, unmatched)


def _find_unmatched(options: ExportOptions, keys: Collection[str]) -> list[str]:
    """Return the keys that the mapping does not know, after a warning.

    Raises:
        KeyMismatchError: They are all, or the options are strict.
    """
    mapping, cut = options.mapping, len(options.prefix or "")
    if not isinstance(mapping, KnowsKeys):
        return []
    wanted = [key for key in keys if key[cut:] not in options.leave_out]
    unmatched = [key for key in wanted if not mapping.knows(key[cut:])]
    if not unmatched:
        return []
    unused = mapping.find_unused([key[cut:] for key in keys])
    what = f"{len(unmatched)} of {len(keys)} tensors matched no rule of the mapping: {listed(unmatched)}"
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


def _cast(tensor: HubTensor, tensors: Mapping[str, HubTensor], target: torch.dtype | None) -> HubTensor:
    """Return the tensor with its dtype after the cast; scales of 8-bit weights, and what a rule names, keep theirs."""
    if any(part.link.keep_dtype for part in tensor.parts):
        return tensor
    for suffix in _SCALE_SUFFIXES:
        weight = tensors.get(tensor.name.removesuffix(suffix)) if tensor.name.endswith(suffix) else None
        if weight is not None and weight.dtype.itemsize == 1:
            return tensor
    return tensor._replace(dtype=cast_to(tensor.dtype, target))


def _key_list(parts: Iterable[StoredPart]) -> str:
    return ", ".join(sorted({repr(part.key) for part in parts}))
