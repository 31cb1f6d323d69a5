"""Between checkpoints of any strategy and plain state dicts: in memory, or in a file of ``torch.save``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.distributed import Comm
from shardckpt.engine import LoadOptions, locate, open_checkpoint
from shardckpt.errors import KeyMismatchError
from shardckpt.huggingface.small_file import replacing, write_pickled
from shardckpt.huggingface.torch_file import read_torch_file
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.plugins import host
from shardckpt.storage import retry_if_replaced

if TYPE_CHECKING:
    import os

    from shardckpt.dist_checkpointing import SaveChoice
    from shardckpt.engine import OpenCheckpoint
    from shardckpt.mapping import ShardedBase, StateDict

    PathLike = str | os.PathLike[str]

_CONTENT = "content_metadata"
#: Under which content_metadata has the nest that was converted, with the keys of tensors in the place of tensors.
_FORM, _TENSOR = "form of the state dict", "key of the tensor"


def dcp_to_torch_state_dict(checkpoint_dir: PathLike, *, prefix: str = "") -> StateDict:
    """A whole checkpoint as a plain state dict on the CPU of the process that calls; needs no other rank.

    Each tensor is read into its own memory, and no second copy is made.

    Args:
        checkpoint_dir: A checkpoint of any strategy, or a plain one of torch.distributed.checkpoint; or its URL.
        prefix: Only tensors whose keys begin with it, and their keys without it.

    Returns:
        What :func:`torch_save_to_dcp` was given, if the checkpoint is from there. Else tensors and objects by key, and
        the common state. With a prefix, tensors by key.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint.
        CheckpointingException: any other failure, such as a prefix that no key has.
    """
    return retry_if_replaced(lambda: _state_dict(locate(checkpoint_dir, host()), prefix), checkpoint_dir)


def _state_dict(directory: Path, prefix: str) -> StateDict:
    with open_checkpoint(directory, Comm(alone=True), host(), LoadOptions()) as checkpoint:
        index = checkpoint.index()
        if prefix:
            return _under(prefix, index, checkpoint)
        values = dict(zip(map(_name, index), checkpoint.values(index), strict=True))
        common = checkpoint.common()
    form = (common.get(_CONTENT) or {}).get(_FORM)
    return _filled(form, values) if form is not None else {**common, **values}


def dcp_to_torch_save(checkpoint_dir: PathLike, file: PathLike, *, prefix: str = "") -> None:
    """Write a checkpoint as a file that ``torch.load`` reads; takes as much memory as the state dict.

    Args:
        checkpoint_dir: As for :func:`dcp_to_torch_state_dict`.
        file: Replaced when all is written.
        prefix: As for :func:`dcp_to_torch_state_dict`.

    Raises:
        CheckpointingException: as :func:`dcp_to_torch_state_dict`; or the file cannot be written.
    """
    state_dict = dcp_to_torch_state_dict(checkpoint_dir, prefix=prefix)
    with replacing(Path(file)) as staged:
        write_pickled(staged, state_dict)


def torch_save_to_dcp(
    file: PathLike, checkpoint_dir: PathLike, sharded_strategy: SaveChoice = None, *, overwrite: bool = False
) -> None:
    """Save what a file of ``torch.save`` holds as a checkpoint, whose keys are the paths in it, joined by dots.

    The file's tensors are mapped, not read into memory (in the format since torch 1.6). Nothing in the file is run:
    it may hold tensors and plain values.

    Args:
        file: Holds a state dict: a nest of dicts and lists. Where there are ranks, all call, and all see it.
        checkpoint_dir: As for :func:`shardckpt.dist_checkpointing.save`.
        sharded_strategy: As for :func:`shardckpt.dist_checkpointing.save`.
        overwrite: As for :func:`shardckpt.dist_checkpointing.save`.

    Raises:
        UnsafePickleError: the file holds more than tensors and plain values.
        CheckpointingException: any other failure; nothing at ``checkpoint_dir`` has changed.
    """
    comm = Comm()
    with comm.collective_phase("reading the file"):
        state_dict = read_torch_file(Path(file))
        described = to_sharded_state_dict(state_dict, check_replicas=False)
        content = {_FORM: _form(state_dict, "")}
    dist_checkpointing.save(described, checkpoint_dir, sharded_strategy, content_metadata=content, overwrite=overwrite)


def _under(prefix: str, index: list[ShardedBase], checkpoint: OpenCheckpoint) -> StateDict:
    """The tensors whose keys begin with a prefix."""
    tensors: list[ShardedBase] = [s for s in index if isinstance(s, ShardedTensor) and s.key.startswith(prefix)]
    if not tensors:
        keys = sorted(shard.key for shard in index)[:8]
        raise KeyMismatchError(f"no tensor is stored whose key begins with {prefix!r}; the first keys are {keys}")
    values = checkpoint.values(tensors)
    return {shard.key[len(prefix) :]: value for shard, value in zip(tensors, values, strict=True)}


def _name(shard: ShardedBase) -> str:
    """What a shard is called in a plain state dict: its key, unless it is one object of several."""
    is_one_of_many = isinstance(shard, ShardedObject) and shard.global_shape != (1,)
    return shard.unique_key if is_one_of_many and isinstance(shard, ShardedObject) else shard.key


def _form(value: Any, key: str) -> Any:
    """A nest with the key of every tensor in its place."""
    if isinstance(value, dict):
        return {name: _form(inner, f"{key}.{name}" if key else f"{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_form(inner, f"{key}.{number}") for number, inner in enumerate(value)]
    return {_TENSOR: key} if isinstance(value, torch.Tensor) else value


def _filled(form: Any, values: dict[str, Any]) -> Any:
    """The nest with the tensors back in their places."""
    if isinstance(form, dict) and form.keys() == {_TENSOR}:
        return values[form[_TENSOR]]
    if isinstance(form, dict):
        return {name: _filled(inner, values) for name, inner in form.items()}
    return [_filled(inner, values) for inner in form] if isinstance(form, list) else form


__all__ = ["dcp_to_torch_save", "dcp_to_torch_state_dict", "torch_save_to_dcp"]
