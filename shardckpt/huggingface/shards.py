"""Write a state dict in memory to weight files: choose the file of each tensor, and write one file."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from shardckpt.engine.locations import locate_file
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.huggingface.dtypes import is_castable, parse_dtype
from shardckpt.huggingface.header import lay_out, refuse_unknown
from shardckpt.huggingface.hub_tensor import HubTensor
from shardckpt.huggingface.names import BIN, SAFETENSORS, file_names
from shardckpt.huggingface.small_file import refuse_other_file, replace_file, write_pickled
from shardckpt.storage.memory_budget import parse_size
from shardckpt.storage.new_file import NewFile
from shardckpt.tensors.memory import plain_cpu, tensor_bytes, view_key
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from pathlib import Path


def get_shard_info(
    state_dict: Mapping[str, torch.Tensor],
    save_dtype: torch.dtype | str | None = None,
    shard_size: int | str = "5GB",
    safe_serialization: bool = True,
) -> tuple[bool, int, dict[str, str]]:
    """Assign the tensors of a state dict to files of limited size, in their order.

    Names of one file follow each other in the state dict: a loop may write a file whenever the next name has another.
    A tensor above the limit gets its own file. Of tied tensors in one file one is stored; those of other files have a
    copy there.

    Args:
        state_dict: Tensors by name. A DTensor counts with its global size. No values are read.
        save_dtype: The dtype that the caller will cast floating-point tensors of 16 bits or more to, 8-bit floats
            included; others keep theirs.
        shard_size: Bytes of tensors in a file: a number, or text such as ``"5GB"``.
        safe_serialization: Whether files are safetensors, else ``.bin``.

    Returns:
        Whether there are several files, the bytes of all files' tensors (the index's ``metadata.total_size``), and the
        file of every tensor.

    Raises:
        CheckpointingException: ``save_dtype`` or ``shard_size`` is invalid, or a value is not a tensor.
    """
    check_annotated(get_shard_info, locals())
    dtype, limit = parse_dtype(save_dtype, "save_dtype", bits=8), parse_size(shard_size, "shard_size")
    _check_tensors(state_dict)
    files: list[list[str]] = []
    total, filled, stored = 0, 0, set[Hashable]()
    for name, tensor in state_dict.items():
        written = dtype if dtype is not None and is_castable(tensor.dtype) else tensor.dtype
        nbytes = math.prod(tensor.shape) * written.itemsize
        memory = view_key(tensor) or id(tensor)
        added = 0 if memory in stored else nbytes
        # not as huggingface_hub does, whose file goes on behind a large tensor: MindSpeed's loop would write it twice
        if not files or filled + added > limit:
            files.append([])
            filled, stored, added = 0, set(), nbytes
        files[-1].append(name)
        stored.add(memory)
        filled += added
        total += added
    names = file_names(len(files), SAFETENSORS if safe_serialization else BIN)
    return len(files) > 1, total, {name: file for file, members in zip(names, files, strict=True) for name in members}


def save_state_dict(
    state_dict: Mapping[str, torch.Tensor], path_to_save: str | os.PathLike[str], safe_serialization: bool = True
) -> None:
    """Write tensors into one file, which replaces an existing one of its kind when all its bytes are durable.

    Of tied tensors, a safetensors file has the first, and its header's metadata has the other names; a ``.bin`` file
    has all. Of a view, only its own elements are written.

    Args:
        state_dict: Plain tensors by name, on any device.
        path_to_save: The file.
        safe_serialization: Whether to write safetensors, else a file for ``torch.load``.

    Raises:
        ShardingError: a tensor is not plain (a DTensor: pass its ``full_tensor()``, or save a checkpoint and export
            that).
        CheckpointingException: safetensors has no such dtype or name; or the file cannot be written, or is one of
            something else.
    """
    check_annotated(save_state_dict, locals())
    _check_tensors(state_dict)
    path = locate_file(path_to_save, "write tensors to")
    refuse_other_file(path, "safetensors" if safe_serialization else "torch.save")
    with replace_file(path) as staged:
        (_write_safetensors if safe_serialization else _write_bin)(state_dict, staged)


def _write_safetensors(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    ties = _find_ties(state_dict)
    tensors = [HubTensor(name, t.dtype, tuple(t.shape)) for name, t in state_dict.items() if name not in ties]
    refuse_unknown(tensors)
    layout = lay_out(tensors, ties)
    file = NewFile(path)
    try:
        file.write(memoryview(layout.frame[0].data), 0)
        for tensor, start, _ in layout.tensors:
            file.write(tensor_bytes(_plain(tensor.name, state_dict)), start, tensor.name)
        file.finish(layout.size)
    finally:
        file.close()


def _write_bin(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    ties = _find_ties(state_dict)
    plain = {name: _plain(name, state_dict) for name in state_dict if name not in ties}
    # of a view, torch.save would write the whole storage
    own = {n: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for n, t in plain.items()}
    # tied names get one object, whose elements torch.save stores once
    write_pickled(path, {name: own[ties.get(name, name)] for name in state_dict})


def _plain(name: str, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor:
    try:
        return plain_cpu(state_dict[name])
    except ShardingError as exc:
        raise ShardingError(
            f"{name!r} cannot be written: {exc} (of a DTensor, its full_tensor(); or save a checkpoint and export that)"
        ) from exc


def _check_tensors(state_dict: Mapping[str, object]) -> None:
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointingException(
                f"{name!r} is a {type(value).__name__}, not a tensor: leave it out of the state dict"
            )


def _find_ties(state_dict: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, by name, the earlier name of the same tensor; views that only overlap are not tied."""
    first: dict[Hashable, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in state_dict.items():
        other = first.setdefault(view_key(tensor) or id(tensor), name)
        if other != name:
            ties[name] = other
    return ties
