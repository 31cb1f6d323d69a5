"""Saving: every rank writes the chunks of its shards, the main rank the metadata."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import Box, part_view, shard_parts
from shardckpt.strategy import SaveStrategy
from shardckpt_zarr3.chunks import choose_chunks
from shardckpt_zarr3.group import ROOT, add_array, consolidate, new_group, pack, to_array
from shardckpt_zarr3.names import name_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import torch

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointWriter
    from shardckpt.strategy import SaveContext

#: Boxes of a tensor and their values, which are read when they are written.
Pieces = list[tuple[Box, "torch.Tensor"]]


class _Array(NamedTuple):
    """What all ranks know of a tensor: ``chunks`` is None where the main rank writes it."""

    path: str
    key: str
    dtype: torch.dtype
    shape: Ints
    chunks: Ints | None

    def files(self, values: Iterable[tuple[Box, np.ndarray[Any, Any]]]) -> dict[str, Any]:
        """The array's files, metadata among them, if it has these values."""
        group, files = new_group()
        whole = tuple(max(size, 1) for size in self.shape)
        array = add_array(group, self.path, self.key, self.dtype, self.shape, self.chunks or whole)
        for box, value in values:
            array[box.within(Box.from_shape(self.shape))] = value
        return files


class Zarr3SaveStrategy(SaveStrategy):
    """Writes (zarr3, 1)."""

    backend = "zarr3"
    version = 1
    reader = "shardckpt-zarr3 1.0"
    writes = "a zarr v3 group, an array for every tensor"

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Plan the chunks of all ranks, write this rank's, and on the main rank what nobody else can."""
        comm, writer = context.comm, context.writer
        with comm.collective_phase("listing shards"):
            stored = [shard for shard in shards if is_main_replica(shard.replica_id)]
            pieces, specs = _list_pieces(stored)
            objects = {
                shard.unique_key: pack(shard.data, f"object {shard.key!r}", context.allow_globals)
                for shard in stored
                if isinstance(shard, ShardedObject)
            }
            boxes = {key: [box for box, _ in held] for key, held in pieces.items()}
        arrays = _plan(comm.all_gather((specs, boxes)))
        with comm.collective_phase("writing chunks"):
            for array in arrays:
                if array.chunks is not None and pieces.get(array.key):
                    _write_chunks(writer, array.files((box, to_array(part)) for box, part in pieces[array.key]))
            writer.record_shards(stored)
        for array in arrays:
            if array.chunks is None:  # no chunk shape fits: one chunk, which the main rank puts together
                with comm.collective_phase(f"collecting {array.key!r}"):
                    mine = [(box, to_array(part)) for box, part in pieces.get(array.key, ())]
                everyone = comm.gather(mine)
                with comm.collective_phase(f"writing {array.key!r}"):
                    if comm.is_main:
                        _write_chunks(writer, array.files(piece for pieces in everyone for piece in pieces))
        everyones_objects = comm.gather(objects)
        with comm.collective_phase("writing metadata"):
            if comm.is_main:
                found = {key: value for part in everyones_objects for key, value in part.items()}
                packed = pack(common, "the common state", context.allow_globals)
                _write_metadata(writer, arrays, {"common": packed, "objects": found})


def _list_pieces(shards: Iterable[ShardedBase]) -> tuple[dict[str, Pieces], dict[str, tuple[torch.dtype, Ints]]]:
    """By key: the boxes that this rank has, and the dtype and global shape."""
    pieces: dict[str, Pieces] = defaultdict(list)
    specs = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            specs[shard.key] = (shard.dtype, tuple(shard.global_shape))
            for part in shard_parts(shard):  # several where the shard is a flattened one
                if part.box.volume:
                    pieces[shard.key].append((part.box, part_view(shard, part)))
    return pieces, specs


def _plan(everyone: Iterable[tuple[dict[str, tuple[torch.dtype, Ints]], dict[str, list[Box]]]]) -> list[_Array]:
    """The arrays of all ranks' tensors, in the order of their keys: the same on every rank."""
    specs: dict[str, tuple[torch.dtype, Ints]] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for their_specs, their_boxes in everyone:
        specs.update(their_specs)
        for key, held in their_boxes.items():
            boxes[key] += held
    paths = name_arrays(specs)
    return [
        _Array(paths[key], key, dtype, shape, choose_chunks(shape, boxes[key]) if boxes[key] else (1,) * len(shape))
        for key, (dtype, shape) in sorted(specs.items())
    ]


def _write_chunks(writer: CheckpointWriter, files: dict[str, Any]) -> None:
    for name, buffer in files.items():
        if not name.endswith(ROOT):  # the main rank writes the metadata
            writer.write(name, buffer.to_bytes())


def _write_metadata(writer: CheckpointWriter, arrays: Iterable[_Array], attributes: dict[str, Any]) -> None:
    group, files = new_group(attributes)
    for array in arrays:
        chunks = array.chunks or tuple(max(size, 1) for size in array.shape)
        add_array(group, array.path, array.key, array.dtype, array.shape, chunks)
    consolidate(group)
    for name, buffer in files.items():
        writer.write(name, buffer.to_bytes())
