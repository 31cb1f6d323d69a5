"""Convert checkpoints of any strategy to plain state dicts and back: in memory, or in a file of ``torch.save``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.adapters.state import to_sharded_state_dict
from shardckpt.distributed.comm import Comm
from shardckpt.engine.locations import locate, locate_file, refuse_overlap
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.engine.saving import SaveOptions, save_checkpoint
from shardckpt.errors import cut_prefix, prefix_error
from shardckpt.huggingface.small_file import refuse_other_file, replace_file, write_pickled
from shardckpt.huggingface.structure import make_structure, nest_stored, plain_name
from shardckpt.huggingface.torch_file import read_torch_file
from shardckpt.huggingface.torch_strategy import TorchFileLoadStrategy
from shardckpt.manifest.models import Manifest
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import check_policy
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.strategy import SaveStrategy

    PathLike = str | os.PathLike[str]
    SaveChoice = str | tuple[str, int] | SaveStrategy | None


def dcp_to_torch_state_dict(checkpoint_dir: PathLike, *, prefix: str = "") -> StateDict:
    """Load all of a checkpoint as a plain state dict of this process.

    Needs no other rank. Each tensor is read into its own memory, without a second copy.

    Args:
        checkpoint_dir: A checkpoint of any strategy, or one of torch.distributed.checkpoint: a directory or a URL.
        prefix: If given, only tensors whose keys begin with it are loaded, under their keys without it.

    Returns:
        The state dict, with full tensors on the CPU:

        - with a prefix: the tensors by key;
        - of a checkpoint of :func:`torch_save_to_dcp`: the state dict in that file;
        - of a checkpoint of ``dcp.save``: the nested dicts and lists that were saved, as of torch's own converter;
        - of any other: the entries of the common state, and the tensors and objects by key.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint.
        CheckpointingException: any other failure, such as a prefix that no key begins with.
    """
    check_annotated(dcp_to_torch_state_dict, locals())
    return retry_if_replaced(
        lambda: _load_state_dict(locate(checkpoint_dir, get_plugin_manager()), prefix), checkpoint_dir
    )


def _load_state_dict(directory: Path, prefix: str) -> StateDict:
    with open_checkpoint(directory, Comm(alone=True), get_plugin_manager(), LoadOptions()) as checkpoint:
        index = checkpoint.index()
        if prefix:
            tensors: list[ShardedBase] = [s for s in index if isinstance(s, ShardedTensor) and s.key.startswith(prefix)]
            if not tensors:
                keys = [shard.key for shard in index if isinstance(shard, ShardedTensor)]
                raise prefix_error(f"{directory}: no tensor", prefix, keys)
            return {cut_prefix(s.key, prefix): v for s, v in zip(tensors, checkpoint.values(tensors), strict=True)}
        values = dict(zip(map(plain_name, index), checkpoint.values(index), strict=True))
        return nest_stored(checkpoint, checkpoint.common(), values)


def dcp_to_torch_save(checkpoint_dir: PathLike, file: PathLike, *, prefix: str = "") -> None:
    """Write a checkpoint as a file that ``torch.load`` reads; takes as much memory as the state dict.

    Args:
        checkpoint_dir: As for :func:`dcp_to_torch_state_dict`.
        file: The file; an existing one of ``torch.save`` is replaced when all bytes are durable.
        prefix: As for :func:`dcp_to_torch_state_dict`.

    Raises:
        CheckpointingException: as :func:`dcp_to_torch_state_dict`; or the file cannot be written, or exists
            and is of another kind.
    """
    check_annotated(dcp_to_torch_save, locals())
    target = locate_file(file, "write a file of torch.save to")
    refuse_overlap([locate(checkpoint_dir, get_plugin_manager())], target)
    refuse_other_file(target, "torch.save")
    state_dict = dcp_to_torch_state_dict(checkpoint_dir, prefix=prefix)
    with replace_file(target) as staged:
        write_pickled(staged, state_dict)


def torch_save_to_dcp(
    file: PathLike, checkpoint_dir: PathLike, sharded_strategy: SaveChoice = None, *, overwrite: bool = False
) -> None:
    """Collective: save the state dict in a file of ``torch.save`` as a checkpoint.

    Keys are the paths in the state dict, joined by dots. Tensors are memory-mapped, not read into memory (in the format
    since torch 1.6). No code in the file is run: it may hold tensors and plain values only.

    Args:
        file: Holds a state dict: nested dicts and lists. All ranks must see it.
        checkpoint_dir: As for :func:`shardckpt.dist_checkpointing.save`.
        sharded_strategy: As for :func:`shardckpt.dist_checkpointing.save`.
        overwrite: As for :func:`shardckpt.dist_checkpointing.save`.

    Raises:
        UnsafePickleError: the file holds more than tensors and plain values.
        CheckpointingException: any other failure; ``checkpoint_dir`` does not change.
    """
    comm = Comm()
    with comm.collective_phase("reading the file"):
        check_annotated(torch_save_to_dcp, locals())
        path = locate_file(file, "read a file of torch.save from")
        check_policy(path, Manifest(backend=TorchFileLoadStrategy.backend, version=TorchFileLoadStrategy.version))
        state_dict = read_torch_file(path)
        # all ranks have read the same file: their values need no comparison
        described = to_sharded_state_dict(state_dict, check_replicas=False)
        plugins = get_plugin_manager()
        target = locate(checkpoint_dir, plugins)
        refuse_overlap([path], target)
        options = SaveOptions(content_metadata=make_structure(state_dict), overwrite=overwrite)
    save_checkpoint(described, target, sharded_strategy, comm, plugins, options)
