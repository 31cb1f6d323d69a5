"""Open a folder or file of safetensors as a checkpoint with all its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.errors import (
    CheckpointingException,
    KeyMismatchError,
    ShardingError,
    format_many,
    listed,
)
from shardckpt.huggingface.folder import read_file_as_folder, read_folder
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.scaled import SCALE_ENDING
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.key_mapping import Identity, get_key_map_entries

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from shardckpt.huggingface.folder import Folder
    from shardckpt.huggingface.rules import RuleMapping
    from shardckpt.planning.boxes import Ints
    from shardckpt.plugins.key_mapping import KeyMapEntry


def read_all_of_folder(
    place: Path, file: str = "", *, skip_damaged: bool = False
) -> tuple[HuggingFaceLoadStrategy, Path]:
    """Return a strategy that reads every tensor of a folder under its own name and dtype, and the files' directory.

    ``file`` is the only one to read, of any name; by default the files of the folder's model are read. With
    ``skip_damaged`` tensors that are missing or cut are left out. A dtype that this torch lacks is a
    CorruptCheckpointError.
    """
    found = (
        read_file_as_folder(place, file, skip_damaged=skip_damaged)
        if file
        else read_folder(place, skip_damaged=skip_damaged)
    )
    wanted = [_describe(name, found) for name in found.tensors]
    strategy = HuggingFaceLoadStrategy(found, Identity(), "", wanted)
    return strategy, Path(found.directory) if found.directory else place


def name_for_trainer(
    strategy: HuggingFaceLoadStrategy, mapping: RuleMapping, dtype: torch.dtype | None, damaged: Collection[str] = ()
) -> HuggingFaceLoadStrategy:
    """Return a strategy that reads the same folder under a trainer's names, in a trainer's shapes.

    Tensors that no rule names keep their names. ``dtype`` is that in which weights of 8 bits with scales are read; such
    weights and no dtype are an error. A trainer's tensor that several of the folder make up is a KeyMismatchError if
    one of these is missing, and a ShardingError if they have several dtypes.
    """
    folder = strategy.folder
    folder = replace(folder, tensors={n: found for n, found in folder.tensors.items() if n not in damaged})
    scaled = {name for name in folder.tensors if name + SCALE_ENDING in folder.tensors}
    if scaled and dtype is None:
        raise CheckpointingException(
            f"scales belong to {format_many(len(scaled), 'weight')} of 8 bits, such as {min(scaled)!r}: give the "
            "dtype of these weights in the trainer (dtype='bfloat16', --dtype bfloat16)"
        )
    scales = {name + SCALE_ENDING for name in scaled}
    tensors = {name: _describe(name, folder) for name in folder.tensors if name not in scales}
    if dtype is not None:
        tensors |= {n: ShardedTensor.from_global_shape(n, dtype, tensors[n].global_shape) for n in scaled}
    shapes, unmatched = mapping.find_stored_shapes({n: tuple(tensor.global_shape) for n, tensor in tensors.items()})
    wanted = [tensors[name] for name in unmatched]
    for key, shape in shapes.items():
        names = [link.name for link in get_key_map_entries(mapping, key, shape)]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise KeyMismatchError(f"the folder lacks {listed(missing)}, which {key!r} also needs")
        if len({tensors[name].dtype for name in names}) > 1:
            raise ShardingError(f"{key!r} is made of tensors of several dtypes: {listed(names)}")
        wanted.append(ShardedTensor.from_global_shape(key, tensors[names[0]].dtype, shape))
    return HuggingFaceLoadStrategy(folder, mapping, "", wanted)


class TrainerNames(Identity):
    """Keeps a trainer's names, and the dtypes that the rules of its mapping keep in a cast.

    ``mapping`` maps the trainer's names to the names in a folder.
    """

    def __init__(self, mapping: RuleMapping) -> None:
        self._mapping = mapping

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
        """Return one entry: the tensor itself."""
        keeps = any(link.keep_dtype for link in self._mapping.links(key, shape))
        return [link._replace(keep_dtype=keeps) for link in super().links(key, shape)]

    def knows(self, key: str) -> bool:
        """Return whether a rule has this name."""
        return self._mapping.knows(key)

    def find_unused(self, keys: Collection[str]) -> Sequence[str]:
        """Return the stored names of rules that match none of these keys."""
        return self._mapping.find_unused(keys)


def _describe(name: str, folder: Folder) -> ShardedTensor:
    found = folder.tensors[name]
    return ShardedTensor.from_global_shape(name, found.find_dtype(name), found.shape)
