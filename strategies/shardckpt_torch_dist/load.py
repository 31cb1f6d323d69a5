"""Load every dialect of (torch_dist, 1), and plain DCP directories."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.archive import decode_object
from shardckpt.chunks import ObjectRead, describe_columns
from shardckpt.errors import CorruptCheckpointError, KeyMismatchError, listed
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.state_dict import nest_values
from shardckpt.strategy import LoadStrategy
from shardckpt_torch_dist.check import check_files, list_files
from shardckpt_torch_dist.dialects import (
    COMMON_FILE,
    COMMON_KEY,
    INDEX_FILE,
    METADATA_FILE,
    NestedState,
    StoredIndex,
    needs_common_file,
    parse_object_key,
    read_index,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardckpt.chunks import Item
    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader
    from shardckpt.strategy import LoadContext, Removal, StoredBox, StoredColumns, StoredFile
    from shardckpt_torch_dist.plan import ShardedLoadPlanner

logger = logging.getLogger(__name__)


class TorchDistLoadShardedStrategy(LoadStrategy):
    """Reads the checkpoints of Megatron-Core 0.9 to 0.20, torch.distributed.checkpoint and shardckpt.

    Args:
        planner: A :class:`ShardedLoadPlanner`, or a subclass of it, that plans instead of the strategy. A class is made
            for each load, with ``flatten_state_dict=False``; an instance serves one load after another. Every rank
            passes one of the same class. Its methods are called as ``dcp.load`` calls them: ``set_up_planner`` with the
            shards by their keys, ``create_local_plan``, ``create_global_plan`` on the main rank, ``finish_plan``; then
            for each item ``load_bytes``, or ``resolve_tensor`` and ``commit_tensor``, by one thread.

            A planner may choose the stored boxes that fill a shard, and change values when they are committed. It must
            plan items for every shard. Keys, shapes and dtypes have been compared before it is asked, and
            ``allow_globals`` and ``allow_dtype_cast`` of the load hold for it, too. Objects that plain DCP stored value
            by value, and the common state, are not its own.

    Example::

        dist_checkpointing.load(state, path, TorchDistLoadShardedStrategy(planner=Planner))
    """

    backend = "torch_dist"
    version = 1
    #: Also of subclasses that do not call our __init__.
    _planner: ShardedLoadPlanner | type[ShardedLoadPlanner] | None = None

    def __init__(self, *, planner: ShardedLoadPlanner | type[ShardedLoadPlanner] | None = None) -> None:
        if planner is not None:
            from shardckpt_torch_dist.plan import ShardedLoadPlanner, check_planner

            check_planner(planner, ShardedLoadPlanner)
            self._planner = planner

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: plan, and after all ranks have planned, read into the destinations; see the base.

        If the checkpoint is being overwritten, and ranks have read different saves, that is a CheckpointReplacedError.
        """
        # for loads alone: listings do without them
        from shardckpt.chunks import LoadPlan
        from shardckpt_torch_dist.plan import ArchiveReader

        index = read_index(context.reader)
        with context.comm.local_phase("planning the load"):
            others = ((n, shard) for n, shard in enumerate(wanted) if type(shard) is not ShardedTensor)
            objects = {n: shard for n, shard in others if isinstance(shard, ShardedObject)}
            absent = {n: shard for n, shard in objects.items() if shard.unique_key not in index.objects}
            nested = _read_nested_state(index, context) if absent else NestedState((), {}, str)
            built = {n: shard for n, shard in absent.items() if nested.has(shard.key)}
            stored = [shard for n, shard in enumerate(wanted) if n not in built]
            parts = {key: index.tensor_of(key) for shard in built.values() for key in nested.tensors(shard.key)}
            by_planner = name = None
            if self._planner is not None:
                from shardckpt_torch_dist.plan import PlannedLoad, make_planner, name_planner  # with torch's planners

                name = name_planner(self._planner)
                by_planner = PlannedLoad(make_planner(self._planner), stored, index, context)
                stored = []
            elif lost := absent.keys() - built.keys():
                raise KeyMismatchError(f"not in the checkpoint: {listed(sorted(absent[n].unique_key for n in lost))}")
            find_object = partial(_find_object, index, context.allow_globals)
            plan = LoadPlan([*stored, *parts.values()], ArchiveReader(context.reader, index), find_object)
        # ranks with different planners would call different collectives
        context.require_same_save(index.save.encode(), "metadata", planner=name)
        if by_planner is not None:
            by_planner.share()
        with context.comm.local_phase("reading shards"):
            if by_planner is not None:
                by_planner.read()
            plan.read()
            tensors = {key: part.data for key, part in parts.items()}
            values = {n: nested.build(shard.key, tensors) for n, shard in built.items()}
        return [values[n] if n in built else shard.data for n, shard in enumerate(wanted)]

    def can_build(self, wanted: Sequence[ShardedObject], context: LoadContext) -> list[bool]:
        """Return for each object whether a plain DCP directory has its values, stored one by one below its key.

        :meth:`load_index` does not list these objects.
        """
        nested = _read_nested_state(read_index(context.reader), context)
        return [nested.has(shard.key) for shard in wanted]

    def nest_state(
        self, tensors: Mapping[str, Any], keeps: Callable[[str], bool], context: LoadContext
    ) -> StateDict | None:
        """Return the state dict that plain DCP flattened; None for other dialects, which store no paths.

        ``tensors`` are values by key, or their placeholders. ``keeps`` says of a path, joined by dots, whether a value
        that is no tensor is wanted.
        """
        index = read_index(context.reader)
        return _read_nested_state(index, context).build_all(tensors, keeps) if index.by_megatron is False else None

    def load_common(self, context: LoadContext) -> StateDict:
        """Read the common state, with its tensors on the CPU: from an object, ``common.pt``, or single values."""
        common = _read_common(context)
        if not isinstance(common, dict):
            raise CorruptCheckpointError(
                f"{context.reader.directory}: its common state is a {type(common).__name__}, and a save writes a dict: "
                "another program has written it, or it is damaged"
            )
        return common

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored tensors without data, unsharded with their true global shapes, and the stored objects."""
        return describe_columns(self.list_columns(context))

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the keys, dtypes and shapes of the stored tensors, and the keys of the stored objects."""
        return read_index(context.reader).columns()

    def read_plain_objects(self, context: LoadContext) -> list[PlainObject]:
        """Return the objects that are stored under plain keys, also in plain DCP directories.

        An object under several keys is listed once, with all of them.
        """
        keys: dict[Item, list[str]] = {}  # one archive may be listed under several keys
        for key, item in _list_plain(read_index(context.reader)).items():
            keys.setdefault(item, []).append(key)
        found = []
        for item, (first, *others) in keys.items():
            data = context.reader.read_range(*item, first)
            value = decode_object(data, f"object {first!r}", context.allow_globals)
            found.append(PlainObject(first, value, keys=(first, *others) if others else ()))
        return found

    def list_plain_objects(self, context: LoadContext) -> list[str]:
        """Return the keys of these objects, without reading them; none if the common state is made of them.

        Of an object that several readers find by keys of their own, all of these are there.
        """
        index = read_index(context.reader)
        is_common = index.common is None and not context.reader.has(COMMON_FILE)  # as plain DCP stores it
        return [] if is_common else [*_list_plain(index)]

    def recognises(self, directory: Path) -> int | None:
        """Return 1 if the directory has ``.metadata``, as plain DCP directories do, or None."""
        # not self.version: plain DCP writes a dialect of version 1, also where a subclass is a later version
        return 1 if (directory / METADATA_FILE).is_file() else None

    def remove(self, prefix: str, reader: CheckpointReader) -> Removal:
        """Plan the removal of the keys that begin with a prefix, in any dialect; nothing is changed yet."""
        from shardckpt_torch_dist.remove import plan_removal  # it imports torch's planners, too

        return plan_removal(prefix, reader)

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files that the checkpoint must have, in any dialect."""
        return list_files(reader)

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Return which file holds which box of each tensor."""
        return read_index(reader).list_boxes()

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each listed file by name, or None, as far as a check without digests finds one."""
        return check_files(reader)

    def owned_files(self, directory: Path) -> set[str]:
        """Return the names of the files in a directory that any dialect writes."""
        named = {METADATA_FILE, INDEX_FILE, COMMON_FILE, MARKER_NAME, INTEGRITY_NAME}
        return {path.name for path in directory.iterdir() if path.name in named or path.suffix == ".distcp"}


def _read_common(context: LoadContext) -> Any:
    """Return what is stored as the common state: in an object, in ``common.pt``, or value by value."""
    reader = context.reader
    index = read_index(reader)
    if index.common is not None:
        return _decode_first(reader.read_range(*index.common, "common state"), "common state", context.allow_globals)
    path = f"{reader.directory}/{COMMON_FILE}"
    if reader.has(COMMON_FILE):
        if reader.manifest.recognised_as is not None:
            logger.warning(
                "%s has Megatron's %s and no metadata.json, which Megatron writes last and does not load without: "
                "the save did not end, or the file was lost; the rest is loaded (`shardckpt verify` reads it)",
                reader.directory,
                COMMON_FILE,
            )
        data = reader.read(COMMON_FILE, "the common state")
        return decode_object(data, path, context.allow_globals)
    if needs_common_file(reader.manifest, index):
        raise CorruptCheckpointError(
            f"{path} is missing: it has the common state. Copy it from where the checkpoint came from. "
            "Without it, open_checkpoint reads the tensors alone; for a checkpoint that never had any common "
            f"state, torch.save({{}}, {path!r}) makes an empty one"
        )
    return _build_loose_state(index, context)


def _decode_first(data: bytes, what: str, allow_globals: tuple[Any, ...]) -> Any:
    """Return the object in an archive; of several, which Megatron stores as a list if they share a key, the first."""
    loaded = decode_object(data, what, allow_globals)
    return loaded[0] if isinstance(loaded, list) and loaded else loaded


def _read_nested_state(index: StoredIndex, context: LoadContext) -> NestedState:
    """Return the values that a plain DCP directory stored one by one; none for any other dialect."""
    values = _read_loose_values(index, context)
    return context.reader.parsed("nested state", lambda: NestedState(values, index.tensor_paths, values.__getitem__))


def _find_object(index: StoredIndex, allow_globals: tuple[Any, ...], shard: ShardedObject) -> ObjectRead:
    """Return how an object is read, by the allow-list and the caller's additions."""
    what = f"object {shard.unique_key!r}"

    def load(data: bytes) -> None:
        shard.data = _decode_first(data, what, allow_globals)

    return ObjectRead(index.objects[shard.unique_key], what, load)


def _list_plain(index: StoredIndex) -> dict[str, Item]:
    """Return the objects under plain keys, and where each is."""
    return {key: item for key, item in index.named.items() if parse_object_key(key) is None and key != COMMON_KEY}


def _build_loose_state(index: StoredIndex, context: LoadContext) -> StateDict:
    """Return the values that plain DCP stored one by one, as the nested dicts and lists that were saved."""
    values = _read_loose_values(index, context)
    paths = sorted(values, key=lambda path: tuple(map(str, path)))
    return nest_values((path, deepcopy(values[path])) for path in paths)  # type: ignore[no-any-return]


def _read_loose_values(index: StoredIndex, context: LoadContext) -> dict[tuple[Any, ...], Any]:
    """Return the values by path; they are read once, and kept with the reader."""

    def read(path: tuple[Any, ...]) -> Any:
        name = ".".join(map(str, path))
        data = context.reader.read_range(*index.loose[path], name)
        return decode_object(data, f"object {name!r}", context.allow_globals)

    # values, not functions: a value that the reader keeps must not refer to the reader, or its directory stays open
    return context.reader.parsed("loose values", lambda: {path: read(path) for path in index.loose})
