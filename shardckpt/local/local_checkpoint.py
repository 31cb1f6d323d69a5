"""Local checkpoints: one rank's own part, in a directory of its own, for a restart with the same ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, SaveOptions, load_checkpoint, locate_local, open_checkpoint, save_checkpoint
from shardckpt.errors import CheckpointingException
from shardckpt.local.tensor_aware import TensorAwareStateDict
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedTensor
from shardckpt.plugins import host
from shardckpt.state_dict import dict_list_map_outplace, nested_values
from shardckpt.storage import retry_if_replaced
from shardckpt.validation import StrictHandling

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

_KINDS: dict[str, type[ShardedBase]] = {"tensor": ShardedTensor, "object": ShardedObject}


def save_local(
    state: TensorAwareStateDict,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    allow_globals: Iterable[Any] = (),
) -> None:
    """Save one rank's part; needs no other rank. It is whole at ``directory`` when this returns, or not there.

    Args:
        state: What to save, its tensors in place.
        directory: This rank's alone: absent or empty, unless ``overwrite``.
        overwrite: Replace what stands there in one step.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.save`.

    Raises:
        CheckpointingException: nothing has changed at ``directory``.
    """
    if state.is_hollow:
        raise CheckpointingException("save_local: the tensors are out; insert_tensors() puts them back")
    shards = list(nested_values(state.sharded_state_dict))
    numbers = itertools.count()
    content = {
        "common": state.common,
        "form": dict_list_map_outplace(lambda _: next(numbers), state.sharded_state_dict),
        "shards": [_description(shard) for shard in shards],
        "homes": list(state.homes),
    }
    values = {str(number): _stored(number, shard) for number, shard in enumerate(shards) if _is_kept(shard)}
    options = SaveOptions(validate=False, overwrite=overwrite, allow_globals=tuple(allow_globals))
    target = locate_local(directory, "save a local checkpoint to")
    save_checkpoint({"values": values, "local": content}, target, None, Comm(alone=True), host(), options)


def load_local(directory: str | os.PathLike[str], *, allow_globals: Iterable[Any] = ()) -> TensorAwareStateDict:
    """What :func:`save_local` saved, with its tensors on the CPU; needs no other rank.

    Args:
        directory: This rank's.
        allow_globals: As for :func:`shardckpt.dist_checkpointing.load`.

    Raises:
        CannotLoadError: there is no whole checkpoint.
        CorruptCheckpointError: its bytes are not those that were written.
    """
    options = LoadOptions(allow_globals=tuple(allow_globals))
    place = locate_local(directory, "load a local checkpoint from")
    return retry_if_replaced(lambda: _loaded(place, options), place)


def _loaded(directory: Path, options: LoadOptions) -> TensorAwareStateDict:
    with open_checkpoint(directory, Comm(alone=True), host(), options) as checkpoint:
        content = checkpoint.common().get("local")
        if not isinstance(content, dict):
            raise CheckpointingException(f"{directory} is no local checkpoint: dist_checkpointing.load() reads it")
        shards = [_described(description) for description in content["shards"]]
        wanted = {str(n): _stored(n, s) for n, s in enumerate(shards) if content["shards"][n]["kept"]}
        found, _ = load_checkpoint(
            {"values": wanted}, checkpoint, validate=False, strict=StrictHandling.ASSUME_OK_UNEXPECTED
        )
    for number, value in found.get("values", {}).items():
        shards[int(number)].data = value
    nest = dict_list_map_outplace(shards.__getitem__, content["form"])
    return TensorAwareStateDict(content["common"], nest, content["homes"])


def _is_kept(shard: ShardedBase) -> bool:
    return isinstance(shard, ShardedObject) or shard.data is not None


def _description(shard: ShardedBase) -> dict[str, Any]:
    """A shard without its data, as plain data."""
    kind = next((name for name, base in _KINDS.items() if type(shard) is base), None)
    if kind is None:
        raise CheckpointingException(f"save_local: {shard.key!r} is a {type(shard).__name__}, no shard")
    fields = {field.name: getattr(shard, field.name) for field in dataclasses.fields(_KINDS[kind])}  # type: ignore[arg-type]
    part = fields.pop("flattened_range", None)
    return {**fields, "data": None, "kind": kind, "kept": _is_kept(shard), "flat": part and (part.start, part.stop)}


def _described(description: dict[str, Any]) -> ShardedBase:
    fields = {name: value for name, value in description.items() if name not in ("kind", "kept", "flat")}
    if description["flat"] is not None:
        fields["flattened_range"] = slice(*description["flat"])
    return _KINDS[description["kind"]](**fields)


def _stored(number: int, shard: ShardedBase) -> ShardedBase:
    """A local shard under a key of its own: to this checkpoint it is all there is."""
    key = f"local.{number}"
    if isinstance(shard, ShardedTensor):
        shape = shard.data_shape
        return ShardedTensor(key, shard.data, shard.dtype, shape, shape, (0,) * len(shape), None)
    return ShardedObject(key, shard.data, (1,), (0,))


__all__ = ["load_local", "save_local"]
