"""Loading every dialect of (torch_dist, 1), and plain DCP directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import replaced_error
from shardckpt.strategy import LoadStrategy
from shardckpt_torch_dist.archive import load_bytes
from shardckpt_torch_dist.check import check_files, list_files
from shardckpt_torch_dist.dialects import (
    COMMON_FILE,
    INDEX_FILE,
    METADATA_FILE,
    StoredIndex,
    needs_common_file,
    read_index,
)
from shardckpt_torch_dist.plan import LoadPlan, read_object
from shardckpt_torch_dist.remove import leave_out

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext, Removal, StoredFile


class TorchDistLoadShardedStrategy(LoadStrategy):
    """Reads what Megatron-Core 0.9 to 0.20, torch.distributed.checkpoint and shardckpt write."""

    backend = "torch_dist"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Plan, and once every rank has a sound plan, read into the destinations."""
        index = read_index(context.reader)
        with context.comm.local_phase("planning the load"):
            plan = LoadPlan(wanted, index, context.reader, context.allow_globals)
        if not context.comm.all_alike(index.save.encode()):  # all have planned, too
            with context.comm.local_phase("comparing the metadata that the ranks have read"):
                raise replaced_error(context.reader.directory, "the ranks have read different metadata")
        with context.comm.local_phase("reading shards"):
            plan.read()
        return [_value(shard) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """The common state, from wherever the dialect keeps it."""
        reader = context.reader
        index = read_index(reader)
        if index.common is not None:
            found = load_bytes(read_object(reader, index.common, "common state"), "common state", context.allow_globals)
            return found[0]  # type: ignore[no-any-return]
        if reader.has(COMMON_FILE):
            source = f"{reader.directory}/{COMMON_FILE}"
            return load_bytes(reader.read(COMMON_FILE), source, context.allow_globals)  # type: ignore[no-any-return]
        if needs_common_file(reader.manifest, index):
            path = f"{reader.directory}/{COMMON_FILE}"
            raise CorruptCheckpointError(
                f"{path} is missing, and it has the common state: copy it from where the checkpoint came from. "
                "Without it, open_checkpoint reads the tensors alone; for a checkpoint that never had any common "
                f"state, torch.save({{}}, {path!r}) makes an empty one"
            )
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

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """The files that the checkpoint must have, in any dialect."""
        return list_files(reader)

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """What is wrong with them, as far as that shows without digests."""
        return check_files(reader)

    def owned_files(self, directory: Path) -> set[str]:
        """The files that any dialect writes."""
        named = {METADATA_FILE, INDEX_FILE, COMMON_FILE, MARKER_NAME, INTEGRITY_NAME}
        return {path.name for path in directory.iterdir() if path.name in named or path.suffix == ".distcp"}


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
