"""Loading every dialect of (torch_dist, 1), and plain DCP directories."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME
from shardckpt.mapping import ShardedTensor
from shardckpt.storage.memory import synchronize_devices
from shardckpt.strategy import LoadStrategy
from shardckpt_torch_dist.archive import load_bytes
from shardckpt_torch_dist.dialects import METADATA_FILE, read_index
from shardckpt_torch_dist.load_planner import ShardedLoadPlanner
from shardckpt_torch_dist.regions import Source, read_chunk, read_object
from shardckpt_torch_dist.remove import leave_out
from shardckpt_torch_dist.runs import Run, runs
from shardckpt_torch_dist.stored import COMMON_FILE, Item, StoredIndex

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage.reader import CheckpointReader
    from shardckpt.strategy import LoadContext, Removal


class TorchDistLoadShardedStrategy(LoadStrategy):
    """Reads what Megatron-Core 0.9 to 0.20, torch.distributed.checkpoint and shardckpt write."""

    backend = "torch_dist"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Plan, and once every rank has a sound plan, read into the destinations."""
        index = read_index(context.reader)
        planner = ShardedLoadPlanner(flatten_state_dict=False, allow_globals=context.allow_globals)
        with context.comm.phase("planning the load"):
            _check_sizes(wanted, index, context.reader)
            leaves = {str(number): shard for number, shard in enumerate(wanted)}
            planner.set_up_planner(leaves, index.metadata(), context.comm.is_main)
            plan = planner.create_local_plan()
        with context.comm.phase("reading shards"):
            planner.finish_plan(plan)
            synchronize_devices(s.data for s in wanted if isinstance(s, ShardedTensor) and s.data is not None)
            ordered = sorted(plan.items, key=lambda item: _place(item, index))
            context.reader.map(
                lambda run: _read_run(run, planner, index, context.reader),
                runs(planner.units(ordered), lambda item: _place(item, index)),
                size=lambda run: 0 if run.small else run.span.length,  # small ones cost Python's time, not the disk's
            )
        return [_value(shard) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """The common state, from wherever the dialect keeps it."""
        reader = context.reader
        index = read_index(reader)
        if index.common is not None:
            found = load_bytes(read_object(reader, index.common, "common state"), "common state", context.allow_globals)
            return found[0]  # type: ignore[no-any-return]
        if reader.has(COMMON_FILE):
            source = str(reader.directory / COMMON_FILE)
            return load_bytes(reader.read(COMMON_FILE), source, context.allow_globals)  # type: ignore[no-any-return]
        return _loose_state(index, context)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Tensors at their true global shapes, and objects."""
        return read_index(context.reader).shards()

    def recognises(self, directory: Path) -> int | None:
        """Plain DCP directories: ``.metadata`` without Megatron's marker."""
        return self.version if (directory / METADATA_FILE).is_file() else None

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """What changes without some keys, in any dialect."""
        return leave_out(prefix, reader)

    def owned_files(self, directory: Path) -> set[str]:
        """The files that any dialect writes."""
        named = {METADATA_FILE, COMMON_FILE, MARKER_NAME, INTEGRITY_NAME}
        return {path.name for path in directory.iterdir() if path.name in named or path.suffix == ".distcp"}


def _check_sizes(wanted: Sequence[ShardedBase], index: StoredIndex, reader: CheckpointReader) -> None:
    """Whether the files have the bytes of the tensors that memory is to be allocated for."""
    without_data = (shard.key for shard in wanted if isinstance(shard, ShardedTensor) and shard.data is None)
    for key in dict.fromkeys(key for key in without_data if key in index.tensors):
        for chunk in index.tensors[key].chunks.values():
            file, offset, length = chunk.item
            if offset < 0 or offset + length > reader.size(file):
                raise CorruptCheckpointError(
                    f"{key}: bytes {offset} to {offset + length} are outside {reader.directory / file} of "
                    f"{reader.size(file)} bytes"
                )


def _read_run(run: Run, planner: ShardedLoadPlanner, index: StoredIndex, reader: CheckpointReader) -> None:
    source = run.source(reader)
    for item in run.items:
        _read(item, planner, index, source)


def _read(item: ReadItem, planner: ShardedLoadPlanner, index: StoredIndex, reader: Source) -> None:
    key = item.storage_index.fqn
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(read_object(reader, index.objects[key], key)))
        return
    tensor = index.tensors[key]
    chunk = tensor.chunks[tuple(item.storage_index.offset or ())]
    target = planner.resolve_tensor(item)
    read_chunk(reader, chunk, tuple(item.storage_offsets), target, tensor.dtype, key)
    if target.device.type != "cpu":
        synchronize_devices([target])  # this thread's stream is not the caller's
    planner.commit_tensor(item, target)


def _place(item: ReadItem, index: StoredIndex) -> Item:
    """Where an item's archive is; places sort by file and offset, to read files from front to back."""
    key = item.storage_index.fqn
    if item.type == LoadItemType.BYTE_IO:
        return index.objects[key]
    return index.tensors[key].chunks[tuple(item.storage_index.offset or ())].item


def _value(shard: ShardedBase) -> Any:
    if isinstance(shard, ShardedTensor):
        shard.init_data("cpu")
    return shard.data


def _loose_state(index: StoredIndex, context: LoadContext) -> StateDict:
    """The values that plain DCP stored one by one, as the nest that they were saved from."""
    state: Any = {}
    for path, item in sorted(index.loose.items(), key=lambda entry: tuple(map(str, entry[0]))):
        name = ".".join(map(str, path))
        value = load_bytes(read_object(context.reader, item, name), f"object {name!r}", context.allow_globals)
        place = state
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return _with_lists(state)  # type: ignore[no-any-return]


def _with_lists(nest: Any) -> Any:
    """Dicts whose keys are 0, 1, 2 ... back as lists."""
    if not isinstance(nest, dict):
        return nest
    values = {key: _with_lists(value) for key, value in nest.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values


__all__ = ["TorchDistLoadShardedStrategy"]
