"""Load every dialect of (torch_dist, 1), and plain DCP directories."""

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
from shardckpt_torch_dist.remove import plan_removal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext, Removal, StoredFile


class TorchDistLoadShardedStrategy(LoadStrategy):
    """Reads the checkpoints of Megatron-Core 0.9 to 0.20, torch.distributed.checkpoint and shardckpt."""

    backend = "torch_dist"
    version = 1

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: plan, and after all ranks have planned, read into the destinations.

        Args:
            wanted: This rank's shards; those with data are filled in place.
            context: The checkpoint's files, and the ranks that load together.

        Returns:
            A tensor for each ShardedTensor and an object for each ShardedObject, in order.

        Raises:
            CheckpointReplacedError: The ranks have read different saves, because the checkpoint is being overwritten.
            CheckpointingException: A shard does not match what is stored, or the checkpoint is damaged.
        """
        index = read_index(context.reader)
        with context.comm.local_phase("planning the load"):
            plan = LoadPlan(wanted, index, context.reader, context.allow_globals)
        # This collective also waits until every rank has planned: no destination changes if one cannot.
        if not context.comm.all_alike(index.save.encode()):
            with context.comm.local_phase("comparing the metadata that the ranks have read"):
                raise replaced_error(context.reader.directory, "the ranks have read different metadata")
        with context.comm.local_phase("reading shards"):
            plan.read()
        return [_loaded_value(shard) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """Read the common state, from where the dialect keeps it: an object, ``common.pt``, or single values.

        Args:
            context: The checkpoint's files.

        Returns:
            The common state, with its tensors on the CPU.

        Raises:
            CorruptCheckpointError: It is damaged, or the file that has it is missing.
            UnsafePickleError: Its pickle names a global outside the allow-list.
        """
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
                f"{path} is missing: it has the common state. Copy it from where the checkpoint came from. "
                "Without it, open_checkpoint reads the tensors alone; for a checkpoint that never had any common "
                f"state, torch.save({{}}, {path!r}) makes an empty one"
            )
        return _load_loose_values(index, context)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored tensors without data, unsharded with their true global shapes, and the stored objects."""
        return read_index(context.reader).shards()

    def recognises(self, directory: Path) -> int | None:
        """Return the version if the directory has ``.metadata``, as plain DCP directories do, or None."""
        return self.version if (directory / METADATA_FILE).is_file() else None

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """Plan the removal of the tensors and objects whose keys begin with a prefix, in any dialect.

        Args:
            prefix: The prefix of their keys.
            reader: The checkpoint's files.

        Returns:
            What changes in the directory; nothing is changed yet.
        """
        return plan_removal(prefix, reader)

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have, in any dialect."""
        return list_files(reader)

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each listed file by name, or None, as far as a check without digests finds one."""
        return check_files(reader)

    def owned_files(self, directory: Path) -> set[str]:
        """Return the names of the files in a directory that any dialect writes."""
        named = {METADATA_FILE, INDEX_FILE, COMMON_FILE, MARKER_NAME, INTEGRITY_NAME}
        return {path.name for path in directory.iterdir() if path.name in named or path.suffix == ".distcp"}


def _loaded_value(shard: ShardedBase) -> Any:
    if isinstance(shard, ShardedTensor):
        shard.init_data("cpu")
    return shard.data


def _load_loose_values(index: StoredIndex, context: LoadContext) -> StateDict:
    """Return the values that plain DCP stored one by one, as the nested dicts and lists that were saved."""
    state: Any = {}
    for path, item in sorted(index.loose.items(), key=lambda entry: tuple(map(str, entry[0]))):
        name = ".".join(map(str, path))
        value = load_bytes(read_object(context.reader, item, name), f"object {name!r}", context.allow_globals)
        node = state
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return _restore_lists(state)  # type: ignore[no-any-return]


def _restore_lists(node: Any) -> Any:
    """Turn dicts whose keys are all integers back into lists."""
    if not isinstance(node, dict):
        return node
    values = {key: _restore_lists(value) for key, value in node.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values


__all__ = ["TorchDistLoadShardedStrategy"]
