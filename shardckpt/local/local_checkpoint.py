"""Save and load one rank's part in a directory of its own, for a restart with the same number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.engine.loading import load_checkpoint
from shardckpt.engine.locations import locate_local
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.engine.saving import SaveOptions, save_checkpoint
from shardckpt.errors import CheckpointingException, parse_globals, show_given
from shardckpt.local.tensor_aware import TensorAwareStateDict
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import BlockScales, ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.state_dict import dict_list_map_outplace, nested_values
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.validation.arguments import check_annotated
from shardckpt.validation.keys import StrictHandling

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

    from shardckpt.mapping.base import ShardedBase

#: What :func:`save_local` stores beside the values.
_CONTENT = frozenset(("common", "form", "shards", "homes"))

_KINDS: dict[str, type[ShardedBase]] = {"tensor": ShardedTensor, "object": ShardedObject}


def save_local(
    state: TensorAwareStateDict,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    allow_globals: Iterable[Any] = (),
) -> None:
    """Save one rank's part; other ranks take no part in this.

    Example:
        ::

            state, cache = TensorAwareStateDict.from_state_dict(sharded_state_dict)
            save_local(state, f"/local/checkpoint/{rank}", overwrite=True)

    Args:
        state: The part to save, with its tensors in place.
        directory: Of this rank alone: absent or empty, unless ``overwrite``. When this returns, the complete checkpoint
            is there.
        overwrite: Replace the checkpoint in the directory, in one step.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save`.

    Raises:
        CheckpointingException: the save failed; ``directory`` is unchanged.
    """
    check_part(state)
    check_annotated(save_local, locals())
    if state.is_hollow:
        raise CheckpointingException("save_local: the tensors are out; insert_tensors() puts them back")
    shards = list(nested_values(state.sharded_state_dict))
    numbers = itertools.count()
    content = {
        "common": state.common,
        "form": dict_list_map_outplace(lambda _: next(numbers), state.sharded_state_dict),
        "shards": [_describe(shard) for shard in shards],
        "homes": list(state.homes),
        "has_keys": True,
    }
    values = {str(number): _make_global(number, shard) for number, shard in enumerate(shards) if _is_kept(shard)}
    # not validated: the shards of one rank do not fill the global tensors
    options = SaveOptions(validate=False, overwrite=overwrite, allow_globals=parse_globals(allow_globals))
    target = locate_local(directory, "save a local checkpoint to")
    save_checkpoint({"values": values, "local": content}, target, None, Comm(alone=True), get_plugin_manager(), options)


def load_local(directory: str | os.PathLike[str], *, allow_globals: Iterable[Any] = ()) -> TensorAwareStateDict:
    """Load a part that :func:`save_local` saved; other ranks take no part in this.

    Args:
        directory: This rank's.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.load`.

    Returns:
        This rank's part, its tensors on the CPU.

    Raises:
        CannotLoadError: there is no complete checkpoint.
        CorruptCheckpointError: the bytes differ from those that were written.
    """
    options = LoadOptions(allow_globals=parse_globals(allow_globals))
    place = locate_local(directory, "load a local checkpoint from")
    return retry_if_replaced(lambda: _load(place, options), place)


def check_part(state: object) -> None:
    """Raise CheckpointingException unless a caller's state is a rank's part."""
    if not isinstance(state, TensorAwareStateDict):
        raise CheckpointingException(
            f"expected a TensorAwareStateDict, got {show_given(state)}: pass the first of the two values that "
            "TensorAwareStateDict.from_state_dict returns"
        )


def _load(directory: Path, options: LoadOptions) -> TensorAwareStateDict:
    with open_checkpoint(directory, Comm(alone=True), get_plugin_manager(), options) as checkpoint:
        content = checkpoint.common().get("local")
        if not isinstance(content, dict) or not content.keys() >= _CONTENT:  # a state may have such a key, too
            raise CheckpointingException(f"{directory} is not a local checkpoint: dist_checkpointing.load() reads it")
        shards = [_make_shard(description) for description in content["shards"]]
        has_keys = content.get("has_keys", False)  # older copies lack it
        kept = [n for n, description in enumerate(content["shards"]) if description["kept"]]
        wanted = {str(n): _make_global(n, shards[n], has_key=has_keys) for n in kept}
        found, _ = load_checkpoint(
            {"values": wanted}, checkpoint, validate=False, strict=StrictHandling.ASSUME_OK_UNEXPECTED
        )
    for number, value in found.get("values", {}).items():
        shards[int(number)].data = value
    sharded = dict_list_map_outplace(shards.__getitem__, content["form"])
    return TensorAwareStateDict(content["common"], sharded, content["homes"])


def _is_kept(shard: ShardedBase) -> bool:
    return isinstance(shard, ShardedObject) or shard.data is not None


def _describe(shard: ShardedBase) -> dict[str, Any]:
    """Return a shard without its data as a dict of plain values, which :func:`_make_shard` reads."""
    # type(): a subclass may have fields that _make_shard does not restore
    kind = next((name for name, base in _KINDS.items() if type(shard) is base), None)
    if kind is None:
        raise CheckpointingException(
            f"save_local: {shard.key!r} is a {type(shard).__name__}, which load_local could not make again: give a "
            f"{' or '.join(base.__name__ for base in _KINDS.values())} itself"
        )
    fields = {field.name: getattr(shard, field.name) for field in dataclasses.fields(_KINDS[kind])}  # type: ignore[arg-type]
    part, scales = fields.pop("flattened_range", None), fields.pop("block_scales", None)
    flat, scaled = part and (part.start, part.stop), scales and (*scales,)
    return {**fields, "data": None, "kind": kind, "kept": _is_kept(shard), "flat": flat, "scaled": scaled}


def _make_shard(description: dict[str, Any]) -> ShardedBase:
    fields = {name: value for name, value in description.items() if name not in ("kind", "kept", "flat", "scaled")}
    if description["flat"] is not None:
        fields["flattened_range"] = slice(*description["flat"])
    if (scaled := description.get("scaled")) is not None:  # older copies lack it
        fields["block_scales"] = BlockScales(*scaled)
    return _KINDS[description["kind"]](**fields)


def _make_global(number: int, shard: ShardedBase, *, has_key: bool = True) -> ShardedBase:
    """Return a shard as a global tensor or object with a key of its own: this checkpoint has one rank's shards only.

    Its key has the shard's own for errors. In checkpoints of older releases it has not.
    """
    key = f"local.{number}.{shard.key}" if has_key else f"local.{number}"
    if isinstance(shard, ShardedTensor):
        shape = shard.data_shape
        return ShardedTensor(key, shard.data, shard.dtype, shape, shape, (0,) * len(shape), None)
    return ShardedObject(key, shard.data, (1,), (0,))
