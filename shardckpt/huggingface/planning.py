"""What an export writes: the folder's tensors, where their elements are stored, and which file each goes to."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException, KeyMismatchError, ShardingError, listed
from shardckpt.huggingface.dtypes import cast_to, refuse_unknown
from shardckpt.huggingface.hub_tensor import HubTensor, Part
from shardckpt.huggingface.names import SAFETENSORS, file_names
from shardckpt.huggingface.splitting import split
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import find_hole, find_overlap
from shardckpt.plugins import links_of
from shardckpt.validation import stored_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

    from shardckpt.mapping import ShardedBase
    from shardckpt.plugins import KeyMapping

logger = logging.getLogger(__name__)

_NUMBERS = re.compile(r"(\d+)")
#: Where adapters.to_sharded_state_dict puts a model that it describes with its optimizers, and these.
_MODEL, _OPTIMIZER = "model.", "optimizer."
#: Endings of scales beside weights of 8 bits and less: to cast them would change the weights.
_SCALES = ("_scale_inv", "_scale")


class Choice(NamedTuple):
    """What a caller wants to have written.

    Attributes:
        prefix: Of the keys; None leaves it to :func:`model_prefix`.
        mapping: Of the keys without it.
        dtype: Of floating-point tensors; None keeps theirs.
        limit: Bytes of tensors in a file.
        form: Of the files.
        leave_out: Names in the folder that are not written.
    """

    prefix: str | None
    mapping: KeyMapping
    dtype: torch.dtype | None
    limit: int
    form: str
    leave_out: frozenset[str]


class Plan(NamedTuple):
    """The files of an export: name and tensors of each."""

    form: str
    files: list[tuple[str, list[HubTensor]]]

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensors in self.files for tensor in tensors)


def plan_export(index: Iterable[ShardedBase], choice: Choice, source: str) -> Plan:
    """Decide what is written where; it depends on what is stored, not on how that is cut.

    Args:
        index: What is stored.
        choice: What is wanted of it.
        source: The checkpoint, for errors.

    Raises:
        CheckpointingException: nothing is left to write, or something cannot be.
    """
    stored = list(index)
    prefix = model_prefix(stored) if choice.prefix is None else choice.prefix
    chosen = [shard for shard in stored if stored_key(shard).startswith(prefix)]
    tensors = _tensors(chosen, len(prefix), choice)
    if not tensors:
        keys = listed([repr(stored_key(shard)) for shard in stored]) or "nothing"
        raise KeyMismatchError(f"{source} has no tensor to export whose key begins with {prefix!r}; it has {keys}")
    if choice.form == SAFETENSORS:
        refuse_unknown((tensor.name, tensor.dtype) for tensor in tensors.values())
    files = split(((tensor.name, tensor.nbytes) for tensor in tensors.values()), choice.limit)
    names = file_names(len(files), choice.form)
    contents = ([tensors[name] for name in members] for members in files)
    return Plan(choice.form, list(zip(names, contents, strict=True)))


def model_prefix(stored: Iterable[ShardedBase]) -> str:
    """``model.`` where the keys are those of a model with its optimizers, else nothing."""
    keys = [stored_key(shard) for shard in stored]
    has_both = any(key.startswith(_MODEL) for key in keys) and any(key.startswith(_OPTIMIZER) for key in keys)
    return _MODEL if has_both else ""


def _tensors(chosen: Sequence[ShardedBase], cut: int, choice: Choice) -> dict[str, HubTensor]:
    """The folder's tensors by name, in the order of the stored keys, layer 2 before layer 10."""
    parts: dict[str, list[Part]] = {}
    unplaced = []
    for shard in sorted(chosen, key=lambda shard: _natural(stored_key(shard))):
        found = _parts(shard, cut, choice) if isinstance(shard, ShardedTensor) else []
        for part in found:
            parts.setdefault(part.link.name, []).append(part)
        if not found:
            unplaced.append(stored_key(shard))
    _warn(unplaced)
    _refuse_absent(choice.leave_out - parts.keys())
    dtypes = {shard.key: shard.dtype for shard in chosen if isinstance(shard, ShardedTensor)}
    made = {name: _hub_tensor(name, found, dtypes) for name, found in parts.items()}
    return {n: _cast(tensor, made, choice.dtype) for n, tensor in made.items() if n not in choice.leave_out}


def _parts(shard: ShardedTensor, cut: int, choice: Choice) -> list[Part]:
    shape = tuple(shard.global_shape)
    return [Part(shard.key, shape, link) for link in links_of(choice.mapping, shard.key[cut:], shape)]


def _hub_tensor(name: str, parts: list[Part], dtypes: Mapping[str, torch.dtype]) -> HubTensor:
    """A tensor of the folder, every element of which is stored once."""
    shape, dtype = parts[0].link.shape, dtypes[parts[0].key]
    kinds = {(part.link.shape, str(dtypes[part.key])) for part in parts}
    if len(kinds) > 1:
        raise ShardingError(f"{name!r} is of several shapes and dtypes, {sorted(kinds)}, by {_names(parts)}")
    boxes = [part.link.hub_box for part in parts]
    twice, hole = find_overlap(boxes), None
    if twice is not None or (hole := find_hole(shape, boxes)) is not None:
        what = "stored twice" if twice is not None else f"not stored from {hole.offset if hole else ()} on"
        raise ShardingError(f"{name!r} of shape {shape} is {what}, by {_names(parts)}: is it the right mapping?")
    return HubTensor(name, dtype, shape, tuple(parts))


def _cast(tensor: HubTensor, all_of_them: Mapping[str, HubTensor], wanted: torch.dtype | None) -> HubTensor:
    for ending in _SCALES:
        weight = all_of_them.get(tensor.name.removesuffix(ending)) if tensor.name.endswith(ending) else None
        if weight is not None and weight.dtype.itemsize == 1:
            return tensor
    return tensor._replace(dtype=cast_to(tensor.dtype, wanted))


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts numbers in names as numbers."""
    texts = _NUMBERS.split(key)  # text and number by turns
    return [(int(text) if number % 2 else 0, text) for number, text in enumerate(texts)]


def _warn(unplaced: list[str]) -> None:
    if unplaced:
        logger.warning(
            "not exported, for the folder has no place for it (objects, and what the mapping leaves out): %s",
            listed(unplaced),
        )


def _refuse_absent(names: Collection[str]) -> None:
    if names:
        raise CheckpointingException(f"leave_out={sorted(names)}: no tensors of these names would be written")


def _names(parts: Iterable[Part]) -> str:
    return ", ".join(sorted({repr(part.key) for part in parts}))


__all__ = ["Choice", "Plan", "model_prefix", "plan_export"]
