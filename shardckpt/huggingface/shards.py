"""Write a state dict in memory to weight files: choose the file of each tensor, and write one file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.huggingface.dtypes import cast_to, get_dtype_size, parse_dtype, refuse_unknown
from shardckpt.huggingface.header import lay_out
from shardckpt.huggingface.names import BIN, SAFETENSORS, file_names, parse_size
from shardckpt.huggingface.small_file import replace_file, write_pickled
from shardckpt.huggingface.splitting import split_by_size
from shardckpt.huggingface.ties import find_ties
from shardckpt.storage import NewFile
from shardckpt.tensors import plain_cpu, tensor_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from shardckpt.planning import Ints


class _Tensor(NamedTuple):
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: Ints


def get_shard_info(
    state_dict: Mapping[str, torch.Tensor],
    save_dtype: torch.dtype | str | None = None,
    shard_size: int | str = "5GB",
    safe: bool = True,
) -> tuple[bool, int, dict[str, str]]:
    """Assign the tensors of a state dict to files of limited size, in their order.

    A tensor above the limit gets its own file. Tied tensors count once: safetensors files have only the first name
    (:func:`save_state_dict`), ``.bin`` files have all names.

    Args:
        state_dict: Tensors by name. A DTensor counts with its global size. No values are read.
        save_dtype: The dtype that floating-point tensors of 16 bits or more will be cast to; others keep theirs.
        shard_size: Bytes of tensors in a file: a number, or text such as ``"5GB"``.
        safe: Whether files are safetensors, else ``.bin``.

    Returns:
        Whether there are several files, the bytes of all tensors (the index's ``metadata.total_size``), and the file
        of every tensor that is written.

    Raises:
        CheckpointingException: ``save_dtype`` or ``shard_size`` is invalid, or a value is not a tensor.
    """
    dtype, limit = parse_dtype(save_dtype, "save_dtype"), parse_size(shard_size, "shard_size")
    _check_tensors(state_dict)
    ties = find_ties(state_dict)
    sizes = {name: _nbytes(tensor, dtype) for name, tensor in state_dict.items() if name not in ties}
    files = split_by_size(sizes.items(), limit)
    names = file_names(len(files), SAFETENSORS if safe else BIN)
    file_of = {name: file for file, members in zip(names, files, strict=True) for name in members}
    if not safe:
        file_of |= {name: file_of[other] for name, other in ties.items()}
    return len(files) > 1, sum(sizes.values()), {name: file_of[name] for name in state_dict if name in file_of}


def save_state_dict(state_dict: Mapping[str, torch.Tensor], path: str | os.PathLike[str], safe: bool = True) -> None:
    """Write tensors into one file, which replaces an existing one when all its bytes are durable.

    Of tied tensors, a safetensors file has the first, and its header's metadata has the other names; a ``.bin`` file
    has all. Of a view, only its own elements are written.

    Args:
        state_dict: Plain tensors by name, on any device.
        path: The file.
        safe: Whether to write safetensors, else a file for ``torch.load``.

    Raises:
        ShardingError: a tensor is not plain (a DTensor: pass its ``full_tensor()``, or save a checkpoint and export
            that).
        CheckpointingException: safetensors has no such dtype, or the file cannot be written.
    """
    _check_tensors(state_dict)
    with replace_file(Path(path)) as staged:
        (_write_safetensors if safe else _write_bin)(state_dict, staged)


def _write_safetensors(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    ties = find_ties(state_dict)
    tensors = [_Tensor(name, t.dtype, tuple(t.shape)) for name, t in state_dict.items() if name not in ties]
    refuse_unknown((tensor.name, tensor.dtype) for tensor in tensors)
    layout = lay_out(tensors, ties)
    file = NewFile(path)
    try:
        file.write(memoryview(layout.head), 0)
        for tensor, start, _ in layout.tensors:
            file.write(tensor_bytes(_plain(tensor.name, state_dict)), start, tensor.name)
        file.finish(layout.size)
    finally:
        file.close()


def _write_bin(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    ties = find_ties(state_dict)
    plain = {name: _in_own_memory(_plain(name, state_dict)) for name in state_dict if name not in ties}
    # tied names get one object, of which torch.save stores the elements once
    write_pickled(path, {name: plain[ties.get(name, name)] for name in state_dict})


def _plain(name: str, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    try:
        return plain_cpu(state_dict[name])
    except ShardingError as exc:
        raise ShardingError(
            f"{name!r} cannot be written: {exc} (of a DTensor, its full_tensor(); or save a checkpoint and export that)"
        ) from exc


def _in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in memory of its own size: of a view, torch.save would write the whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return math.prod(tensor.shape) * get_dtype_size(cast_to(tensor.dtype, dtype))


def _check_tensors(state_dict: Mapping[str, object]) -> None:
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointingException(
                f"{name!r} is a {type(value).__name__}, not a tensor: leave it out of the state dict"
            )


__all__ = ["get_shard_info", "save_state_dict"]
