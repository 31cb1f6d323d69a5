"""The front door: save and load sharded state dicts with any number of ranks, by Megatron's names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.comm import Comm
from shardckpt.entries import StrategyAction
from shardckpt.errors import CheckpointingException
from shardckpt.loading import LoadOptions, load_checkpoint, open_checkpoint
from shardckpt.manifest import MARKER_LIMIT, MARKER_NAME, Marker
from shardckpt.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from shardckpt.plugins import host
from shardckpt.saving import SaveOptions, find_saver, save_checkpoint
from shardckpt.storage.filesystem import read_file
from shardckpt.validation import StrictHandling, parse_strict_flag, stored_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.gate import Accept
    from shardckpt.loading import OpenCheckpoint
    from shardckpt.mapping import CommonStateDict, ShardedStateDict, StateDict
    from shardckpt.strategy import LoadStrategy, SaveStrategy

    PathLike = str | os.PathLike[str]
    LoadChoice = str | tuple[str, int] | LoadStrategy | None
    SaveChoice = str | tuple[str, int] | SaveStrategy | None
    Preprocess = Callable[[CommonStateDict], CommonStateDict] | None


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: SaveChoice = None,
    validate_access_integrity: bool = True,
    *,
    async_sharded_save: bool = False,
    preprocess_common_before_consistency_check: Preprocess = None,
    preprocess_common_before_consistancy_check: Preprocess = None,
    content_metadata: dict[str, Any] | None = None,
    overwrite: bool = False,
    allow_globals: Iterable[Any] = (),
    process_group: ProcessGroup | None = None,
) -> None:
    """Save a sharded state dict; every rank of the group calls it with its own shards.

    The checkpoint is whole at ``checkpoint_dir`` when this returns, or nothing there has changed. The caller's dict,
    tensors and descriptions stay as they are.

    Args:
        sharded_state_dict: A nest of dicts and lists whose leaves are ShardedTensors, ShardedObjects, factories,
            LocalNonpersistentObjects (dropped) and common values (the main rank's are stored).
        checkpoint_dir: The checkpoint's directory: absent or empty, unless ``overwrite``.
        sharded_strategy: A backend (its newest version), (backend, version) or a SaveStrategy; by default the
            registry's default.
        validate_access_integrity: Check that the shards of all ranks cover every tensor exactly once.
        async_sharded_save: Must be False: saves in the background are not there yet.
        preprocess_common_before_consistency_check: Takes out of (a copy of) the common state what may differ between
            ranks, before a difference is warned of.
        preprocess_common_before_consistancy_check: The same, as Megatron spells it.
        content_metadata: Anything that describes the content; :func:`load_content_metadata` gives it back.
        overwrite: Replace what stands at ``checkpoint_dir`` in one step; files there that are not the old
            checkpoint's are kept.
        allow_globals: Classes and functions that objects and common values may name besides the plain ones; a load
            needs the same leave.
        process_group: The ranks that save; by default all, or this process alone without torch.distributed.

    Raises:
        CheckpointingException: the same on every rank; what stood at ``checkpoint_dir`` stands there still, unless
            the connection between ranks broke after the commit.
    """
    comm = Comm(process_group)
    with comm.phase("reading the arguments"):
        target = _directory(checkpoint_dir)
        if async_sharded_save:
            raise CheckpointingException("async_sharded_save=True: there are no background saves yet; pass False")
        options = SaveOptions(
            validate_access_integrity,
            overwrite,
            content_metadata,
            preprocess_common_before_consistency_check or preprocess_common_before_consistancy_check,
            tuple(allow_globals),
        )
    save_checkpoint(sharded_state_dict, target, sharded_strategy, comm, host(), options)


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: LoadChoice = None,
    validate_access_integrity: bool = True,
    strict: str | bool | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    accept: Accept | None = None,
    allow_globals: Iterable[Any] = (),
    process_group: ProcessGroup | None = None,
) -> Any:
    """Load what a sharded state dict describes, with any number of ranks and any sharding.

    Args:
        sharded_state_dict: As for :func:`save`; a ShardedTensor's ``data`` is filled in place where there is one.
        checkpoint_dir: The checkpoint.
        sharded_strategy: A backend, (backend, version) or a LoadStrategy that must fit; by default the one that
            the checkpoint names.
        validate_access_integrity: Check that the shards of all ranks cover every tensor exactly once.
        strict: What to do about keys that do not match: a :class:`StrictHandling`, its value, True (raise) or
            False (log).
        accept: Backends or (backend, version) pairs that the caller is willing to load; by default any.
        allow_globals: Classes and functions that legacy pickles in the checkpoint may name besides the plain ones.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.

    Returns:
        The state dict, with the checkpoint's common state in it; for the modes ``return_unexpected`` and
        ``return_all`` a tuple ``(state_dict, missing_keys, unexpected_keys)`` in Megatron's words.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint, or it may not be read.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.phase("reading the arguments"):
        directory, mode = _directory(checkpoint_dir), parse_strict_flag(strict)
        options = LoadOptions(sharded_strategy, accept, tuple(allow_globals))
    with open_checkpoint(directory, comm, host(), options) as checkpoint:
        state_dict, keys = load_checkpoint(
            sharded_state_dict, checkpoint, validate=validate_access_integrity, strict=mode
        )
    return (state_dict, set(keys.missing), set(keys.unexpected)) if mode.returns_keys else state_dict


def load_common_state_dict(checkpoint_dir: PathLike, *, allow_globals: Iterable[Any] = ()) -> CommonStateDict:
    """The part of a checkpoint that is not sharded; needs no other rank."""
    with _opened(checkpoint_dir, LoadOptions(allow_globals=tuple(allow_globals))) as checkpoint:
        return checkpoint.common()


def load_sharded_metadata(checkpoint_dir: PathLike, sharded_strategy: LoadChoice = None) -> dict[str, ShardedBase]:
    """What is stored, without data: ShardedTensors of the whole shape by key, ShardedObjects by unique key."""
    with _opened(checkpoint_dir, LoadOptions(sharded_strategy)) as checkpoint:
        return {stored_key(shard): shard for shard in checkpoint.index()}


def load_tensors_metadata(checkpoint_dir: PathLike, sharded_strategy: LoadChoice = None) -> dict[str, ShardedTensor]:
    """The stored tensors, without data: a ShardedTensor of the whole global shape by key."""
    stored = load_sharded_metadata(checkpoint_dir, sharded_strategy)
    return {key: shard for key, shard in stored.items() if isinstance(shard, ShardedTensor)}


def load_plain_tensors(checkpoint_dir: PathLike) -> dict[str, torch.Tensor]:
    """Every stored tensor, whole, on the CPU of every rank that calls; needs no other rank."""
    with _opened(checkpoint_dir, LoadOptions()) as checkpoint:
        tensors: list[ShardedBase] = [s for s in checkpoint.index() if isinstance(s, ShardedTensor)]
        return dict(zip((shard.key for shard in tensors), checkpoint.values(tensors), strict=True))


def load_content_metadata(
    checkpoint_dir: PathLike | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """What was saved as ``content_metadata``, or None.

    Args:
        checkpoint_dir: The checkpoint.
        preloaded_state_dict: Its common state, where it is loaded already.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise CheckpointingException("load_content_metadata needs a checkpoint_dir or a preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get("content_metadata")


def check_is_distributed_checkpoint(checkpoint_dir: PathLike) -> bool:
    """Whether the directory has a ``metadata.json`` that says which strategy reads it, as Megatron asks.

    Plain torch.distributed.checkpoint directories have none, and :func:`load` reads them all the same.
    """
    try:
        Marker.model_validate_json(read_file(_directory(checkpoint_dir) / MARKER_NAME, MARKER_LIMIT))
    except (CheckpointingException, ValueError):
        return False
    return True


def get_default_save_sharded_strategy(backend: str | None = None, version: int | None = None) -> SaveStrategy:
    """The strategy that :func:`save` uses for a backend and version; by default the registry's default."""
    if backend is None:
        return find_saver(None, host())
    return find_saver(backend if version is None else (backend, version), host())


def get_default_load_sharded_strategy(checkpoint_dir: PathLike) -> LoadStrategy:
    """The strategy that :func:`load` uses for a checkpoint."""
    with _opened(checkpoint_dir, LoadOptions()) as checkpoint:
        return checkpoint.strategy


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: SaveStrategy | LoadStrategy | type[Any]
) -> None:
    """Make a strategy the one for (backend, version) in this process; it replaces a plugin's, and stays.

    Args:
        action: Whether it saves or loads.
        backend: The backend that it serves.
        version: The version that it serves.
        strategy: A class (a fresh instance serves every operation) or an instance.
    """
    host().unfilled.put(action, backend, version, strategy)


def _directory(path: PathLike) -> Path:
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointingException(f"{text}: only local paths are supported")
    return Path(os.path.realpath(text))


def _opened(checkpoint_dir: PathLike, options: LoadOptions) -> AbstractContextManager[OpenCheckpoint]:
    """A checkpoint opened by this process alone."""
    return open_checkpoint(_directory(checkpoint_dir), Comm(alone=True), host(), options)


__all__ = [
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrategyAction",
    "StrictHandling",
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "register_default_strategy",
    "save",
]
