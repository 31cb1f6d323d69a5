"""The structure of a plain state dict, kept in a checkpoint's content_metadata: its nesting, with keys for tensors.

Apart from the converters: a reader of files of ``torch.save`` needs it without the adapters, which import DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, listed
from shardckpt.manifest.names import CONTENT
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.state_dict import keep_counter
from shardckpt.strategy import NestsState

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.mapping.base import ShardedBase, StateDict

#: Entries of content_metadata, and so part of the format: the converted state dict with keys in place of tensors.
_STRUCTURE, _TENSOR = "form of the state dict", "key of the tensor"


def make_structure(state_dict: dict[Any, Any]) -> StateDict:
    """Return the ``content_metadata`` by which :func:`make_state_dict` restores a state dict: keys for its tensors."""
    return {_STRUCTURE: _replace_tensors(state_dict, "")}


def make_state_dict(common: StateDict, values: StateDict, source: Path) -> StateDict:
    """Return the plain state dict of a checkpoint, from its common state, and tensors and objects by their plain names.

    For a checkpoint with the structure of a state dict, it is that one with its tensors; else all by name. If two
    things have one name, it is a CheckpointingException, which names the checkpoint as ``source``.
    """
    structure = (common.get(CONTENT) or {}).get(_STRUCTURE)
    if structure is not None:
        found: StateDict = _insert_tensors(structure, values)
        return found
    # an empty dict takes no place: earlier steps of the manager have one for each state without tensors
    if twice := sorted(name for name in values.keys() & common.keys() if common[name] != {}):
        raise CheckpointingException(
            f"{source} has both a tensor or object and an entry of the common state of these names, for which a plain "
            f"state dict has one place: {listed(twice)}. dist_checkpointing.load loads both, a conversion "
            "to another format keeps both, and one with --leave-out or a prefix neither"
        )
    return {**common, **values}


def nest_stored(checkpoint: OpenCheckpoint, common: StateDict, values: StateDict) -> StateDict:
    """Return the plain state dict of an open checkpoint, nested as it was saved if the checkpoint says how.

    ``values`` are its tensors and objects by their plain names, or their placeholders.
    """
    strategy, nested = checkpoint.strategy, None
    if isinstance(strategy, NestsState):
        left_out = checkpoint.common().keys() - common.keys()

        def keeps(path: str) -> bool:
            return not any(f"{path}.".startswith(f"{name}.") for name in left_out)

        nested = strategy.nest_state(values, keeps, checkpoint.context)
    return make_state_dict(common, values, checkpoint.context.reader.directory) if nested is None else nested


def forget_structure(common: StateDict) -> StateDict:
    """Return the common state without the structure of a state dict, whose tensors get other names."""
    content = common.get(CONTENT)
    if not isinstance(content, dict) or _STRUCTURE not in content:
        return common
    rest = {key: value for key, value in content.items() if key != _STRUCTURE}
    others = {key: value for key, value in common.items() if key != CONTENT}
    return {**others, CONTENT: rest} if rest else others


def plain_name(shard: ShardedBase) -> str:
    """Return the name of a shard in a plain state dict: its key; for one object of a grid, its unique key."""
    return shard.unique_key if isinstance(shard, ShardedObject) and shard.global_shape != (1,) else shard.key


def _replace_tensors(value: Any, key: str) -> Any:
    """Return nested dicts and lists with every tensor replaced by its key."""
    if isinstance(value, dict):
        keys = {name: f"{key}.{name}" if key else f"{name}" for name in value}
        return keep_counter(value, {name: _replace_tensors(inner, keys[name]) for name, inner in value.items()})
    if isinstance(value, list):
        return [_replace_tensors(inner, f"{key}.{number}") for number, inner in enumerate(value)]
    return {_TENSOR: key} if isinstance(value, torch.Tensor) else value


def _insert_tensors(structure: Any, values: dict[str, Any]) -> Any:
    """Undo :func:`_replace_tensors`."""
    if isinstance(structure, dict) and structure.keys() == {_TENSOR}:
        key = structure[_TENSOR]
        if not isinstance(key, str) or key not in values:
            raise CorruptCheckpointError(
                f"content_metadata has the structure of a state dict with a tensor {key!r:.200}, which is not stored"
            )
        return values[key]
    if isinstance(structure, dict):
        return keep_counter(structure, {name: _insert_tensors(inner, values) for name, inner in structure.items()})
    return [_insert_tensors(inner, values) for inner in structure] if isinstance(structure, list) else structure
