"""Saves and loads of the engine by strategies of Megatron's kind, which write to a path and read from one themselves.

Such a strategy writes plain files into the staging directory, in folders or not. All of them are digested and
recorded, and committed with the common state, and the objects that the strategy does not take. A load checks all files
of the checkpoint first, since it cannot check the strategy's own reads.

Of Megatron's kind are its base classes, and, since 0.19 has none, any object with ``save`` or ``async_save``, or with
``load``, that takes a state dict and a directory.
"""

from __future__ import annotations

import copy
import inspect
import logging
import stat
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field

from shardckpt import settings
from shardckpt.archive.objects import decode_object, encode_object
from shardckpt.background.request import AsyncRequest, RequestFields
from shardckpt.commit.commit import find_foreign
from shardckpt.commit.staging_names import is_temporary
from shardckpt.compat.megatron.base_classes import AsyncSaveShardedStrategy, LoadShardedStrategy, SaveShardedStrategy
from shardckpt.engine.integrity import verify_integrity
from shardckpt.errors import CorruptCheckpointError, PluginError, StorageError, listed
from shardckpt.manifest.names import NAME_RULE, is_file_name
from shardckpt.manifest.strict_json import parse_json
from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.shard_copies import assign_holders
from shardckpt.state_dict import build_copy
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.directory import replaced_error, was_replaced
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.strategy import AsyncSaveStrategy, LoadStrategy, PreparedSave, SaveStrategy
from shardckpt.validation.keys import stored_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import CommonStateDict, ShardedBase, StateDict
    from shardckpt.storage.reader import CheckpointReader
    from shardckpt.storage.writer import CheckpointWriter
    from shardckpt.strategy import LoadContext, PlanContext, SaveContext

logger = logging.getLogger(__name__)

#: Megatron's name and format of the common state's file.
_COMMON = "common.pt"
#: The format of a save strategy whose caller and base class name none: Megatron has no other since 0.19.
_DEFAULT_FORMAT = ("torch_dist", 1)
#: Methods of a load strategy that list the stored items.
_LISTINGS = ("load_sharded_metadata", "load_tensors_metadata")
#: Lists the stored shards, which a strategy of Megatron's kind need not be able to.
_INDEX = "shardckpt_index.json"


class _StoredTensor(BaseModel):
    """A stored tensor: its global shape, and its dtype without ``torch.``."""

    model_config = ConfigDict(strict=True)

    shape: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 53)], ...], Field(strict=False)]  # JSON has lists
    dtype: str


class _Index(BaseModel):
    """``shardckpt_index.json``.

    ``objects`` has by unique key the file that has the object, ``""`` if the strategy stores it.
    """

    model_config = ConfigDict(strict=True)

    tensors: dict[str, _StoredTensor] = {}
    objects: dict[str, str] = {}


class PathSaver(SaveStrategy):
    """Saves by a strategy of Megatron's kind.

    The engine cannot see the items that such a strategy stores: it is trusted to store all shards that it is given. One
    with a base of Megatron's that has no backend or version is a PluginError.

    Args:
        strategy: Writes to a path. One without a base of Megatron's gets objects, too, unless its
            ``can_handle_sharded_objects`` is false.
        backend: The backend that it is registered for, which a strategy without a base may leave out; ``""`` if it is
            not registered: then missing attributes are taken from ("torch_dist", 1), and each save warns.
        version: The version that it is registered for.
    """

    def __init__(self, strategy: Any, backend: str = "", version: int = 0) -> None:
        self.strategy = strategy
        self.writes = f"the files that {_name(strategy)} writes to a path, as Megatron's do"  # type: ignore[misc]
        has_base = isinstance(strategy, SaveShardedStrategy)
        missing = [name for name in ("backend", "version") if getattr(strategy, name, None) is None]
        if missing and has_base:
            raise PluginError(f"{_name(strategy)} has no {missing[0]}: call super().__init__(backend, version)")
        #: The attributes that neither the strategy nor the registry says.
        self._assumed = [] if backend else missing
        default: Any = (backend, version) if backend else _DEFAULT_FORMAT
        found = dict(zip(("backend", "version"), default, strict=True))
        found.update({name: getattr(strategy, name) for name in found if name not in missing})
        self.backend, self.version = found["backend"], found["version"]  # type: ignore[misc]

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Collective: let the strategy write to the staging directory, and record its files."""
        finish = self._plan_rest(shards, common, context)
        # at the end of the phase all ranks have written
        with context.comm.collective_phase(f"saving by {_name(self.strategy)}"):
            self.strategy.save(_name_shards(self._select(shards)), context.writer.directory)
        finish((), context)

    @property
    def _takes_objects(self) -> bool:
        return bool(getattr(self.strategy, "can_handle_sharded_objects", True))

    def _select(self, shards: Sequence[ShardedBase]) -> list[ShardedBase]:
        """Return copies of the shards that the strategy stores."""
        takes_objects = self._takes_objects
        return [build_copy(shard) for shard in shards if takes_objects or isinstance(shard, ShardedTensor)]

    def _plan_rest(
        self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> Callable[[Sequence[Any], SaveContext], None]:
        """Collective: pickle shards that the strategy leaves out, and return the function that finishes the save."""
        comm, allowed = context.comm, context.allow_globals
        if self._assumed and comm.is_main:
            logger.warning(
                "%s has no %s: the checkpoint is recorded as (%r, %d), and is loaded as that; set both on the "
                "strategy, or register it for its format",
                _name(self.strategy),
                " and no ".join(self._assumed),
                self.backend,
                self.version,
            )
        with comm.collective_phase("pickling the common state"):
            # for a URL it is a folder of this rank alone, next to which no target lies
            if context.staging is not None and not is_temporary(context.staging.name):
                raise StorageError(
                    f"{_name(self.strategy)} writes to a path: save to a directory, not to a URL, and copy it there"
                )
            files = {_COMMON: encode_object(common, "the common state", allowed)} if comm.is_main else {}
            index = _Index()
            objects: dict[str, Any] = {}
            for shard in shards:
                if isinstance(shard, ShardedTensor):
                    dtype = str(shard.dtype).removeprefix("torch.")
                    shape = tuple(map(int, shard.global_shape))  # of numpy's integers, where ranks are
                    index.tensors[shard.key] = _StoredTensor(shape=shape, dtype=dtype)
                elif self._takes_objects:
                    index.objects[stored_key(shard)] = ""
                elif is_main_replica(shard.replica_id):
                    objects[stored_key(shard)] = cast("ShardedObject", shard).data
            if objects:
                name = f"objects_{comm.rank}.pt"
                files[name] = encode_object(objects, "objects", allowed)
                index.objects.update(dict.fromkeys(objects, name))
            recorded = [shard.without_data() for shard in shards]
        return partial(_record, files=files, index=index, shards=recorded, author=self._author())

    def _author(self) -> str:
        """Return the strategy as errors name it."""
        kind = type(self.strategy)
        return f"({self.backend!r}, {self.version}) {kind.__module__}.{kind.__qualname__}"


class AsyncPathSaver(PathSaver, AsyncSaveStrategy):
    """Saves in the background by a strategy of Megatron's kind that can.

    The strategy gets copies of the tensors in CPU memory, made when the save is planned.
    """

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Collective: save in the foreground, among the ranks of the context alone."""
        if getattr(type(self.strategy), "save", None) in (None, AsyncSaveShardedStrategy.save):
            # the save that the strategy inherits would finalize with all ranks of the job
            AsyncSaveStrategy.save(self, shards, common, context)
        else:
            super().save(shards, common, context)

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: let the strategy plan the save; return the plan, with its data staged."""
        finish_rest = self._plan_rest(shards, common, context)
        with context.comm.collective_phase(f"planning by {_name(self.strategy)}"):
            given = self._select(shards)
            for shard in given:
                _detach_from_training(shard)
            request = self.strategy.async_save(_name_shards(given), context.staging)
            if not isinstance(request, RequestFields):
                raise PluginError(
                    f"{_name(self.strategy)}.async_save returned {request!r}, no AsyncRequest, which has async_fn, "
                    "async_fn_args and finalize_fns"
                )
            staged = AsyncRequest.of(request).staged()
            finalize_fns = list(staged.finalize_fns)

        def finish(results: Sequence[Any], context: SaveContext) -> None:
            # ranks may have different numbers of them
            for number in range(*context.comm.largest(len(finalize_fns))):
                with context.comm.collective_phase("finalizing a background save"):
                    if number < len(finalize_fns):
                        finalize_fns[number]()
            finish_rest(results, context)

        return PreparedSave(_RequestWork(staged), finish)


class _RequestWork:
    """Writes by the function of an AsyncRequest; the tensors are among its arguments, staged already."""

    def __init__(self, request: AsyncRequest) -> None:
        self.tensors: list[torch.Tensor] = []
        self.keys: list[str] = []
        # a worker process gets it as a pickle, and the functions that stay in this process may have none
        self._request = AsyncRequest(request.async_fn, request.async_fn_args, [], request.async_fn_kwargs)

    def write(self, writer: CheckpointWriter) -> None:  # noqa: ARG002 - the function knows its directory
        """Write this rank's files."""
        self._request.run()


class PathLoader(LoadStrategy):
    """Loads by a strategy of Megatron's kind.

    Args:
        strategy: Reads from a path.
        backend: The backend that it is registered for; ``""``: the strategy decides which checkpoints it reads, by its
            checks, or, without a base of Megatron's, by its ``backend`` and ``version``; by default it reads any that
            it is given.
        version: The version that it is registered for.
    """

    backend = ""
    version = 0

    def __init__(self, strategy: Any, backend: str = "", version: int = 0) -> None:
        self.strategy = strategy
        self.reads = f"the files that {_name(strategy)} reads from a path, as Megatron's do"  # type: ignore[misc]
        if not backend and not isinstance(strategy, LoadShardedStrategy) and hasattr(strategy, "backend"):
            backend, version = strategy.backend, getattr(strategy, "version", _DEFAULT_FORMAT[1])
        self.backend = backend  # type: ignore[misc]
        self.version = version  # type: ignore[misc]

    def cannot_load(self, manifest: Manifest) -> str | None:
        """Return the objection of the registry or of the strategy's own checks to the checkpoint, or None."""
        reason = super().cannot_load(manifest) if self.backend else None
        if reason is not None:
            return f"({_name(self.strategy)}) {reason}"
        checks: dict[str, Any] = {
            "check_backend_compatibility": manifest.backend,
            "check_version_compatibility": manifest.version,
        }
        try:
            for name, value in checks.items():
                if hasattr(self.strategy, name):
                    getattr(self.strategy, name)(value)
        except Exception as exc:  # noqa: BLE001 - whatever it raises is its reason
            return f"({_name(self.strategy)}) refuses it: {type(exc).__name__}: {exc}"
        return None

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: check all files, and return the strategy's value of each shard: a tensor or an object."""
        comm, reader, name = context.comm, context.reader, _name(self.strategy)
        with comm.local_phase("checking the files"):
            directory = _local_directory(reader, name)
            index = _read_index(reader)
        if reader.manifest.record is not None and settings.verify_reads():
            verify_integrity(reader.place, reader.manifest, comm)
        context.require_same_save(reader.manifest.save_id.encode(), "record")
        with comm.collective_phase(f"loading by {name}"):
            files = {} if index is None else index.objects
            stored_apart = {key: files[key] for shard in wanted if files.get(key := stored_key(shard))}
            objects = _read_objects(stored_apart, reader, context.allow_globals)
            asked = _name_shards([build_copy(shard) for shard in wanted if stored_key(shard) not in objects])
            loaded: Any = self.strategy.load(dict(asked), directory)
            if was_replaced(reader.place):
                raise replaced_error(directory, f"{name} may have read files of two saves")
            if not isinstance(loaded, dict):
                raise PluginError(f"{name}.load did not return a dict")
            if absent := [repr(key) for key in asked if key not in loaded]:
                raise PluginError(f"{name}.load did not return {listed(absent)}")
        values = iter([loaded[key] for key in asked])  # in the order of the shards that are not among the objects
        return [objects[key] if (key := stored_key(shard)) in objects else next(values) for shard in wanted]

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the common state, as this module or Megatron has stored it; ``{}`` if there is none."""
        reader = context.reader
        if not reader.has(_COMMON):
            return {}
        return decode_object(reader.read(_COMMON), _COMMON, context.allow_globals)  # type: ignore[no-any-return]

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored shards by the index; without one, as Megatron saves, by the strategy's own methods."""
        index = _read_index(context.reader)
        if index is not None:
            tensors = [
                ShardedTensor.from_global_shape(key, _parse_dtype(found.dtype), found.shape)
                for key, found in index.tensors.items()
            ]
            return [*tensors, *map(ShardedObject.empty_from_unique_key, index.objects)]
        name = _name(self.strategy)
        listing = next((each for each in _LISTINGS if hasattr(self.strategy, each)), None)
        if listing is None:
            raise PluginError(
                f"{context.reader.directory} has no {_INDEX}, since shardckpt did not save it, and {name} has none of "
                f"{', '.join(_LISTINGS)}: add one that returns the stored shards by key"
            )
        found = getattr(self.strategy, listing)(_local_directory(context.reader, name))
        if not isinstance(found, dict):
            raise PluginError(
                f"{context.reader.directory} has no {_INDEX}, since shardckpt did not save it, and "
                f"{name}.{listing} returned {found!r}: return the stored shards by key"
            )
        return list(found.values())


def adapt_saver(strategy: Any, backend: str = "", version: int = 0) -> Any:
    """Return an adapter for a save strategy of Megatron's kind; anything else unchanged.

    ``backend`` and ``version`` are as for :class:`PathSaver`.
    """
    _refuse_class(strategy, SaveStrategy, ("save", "async_save"))
    if isinstance(strategy, SaveStrategy) or not _takes_path(strategy, ("save", "async_save")):
        return strategy
    adapter = AsyncPathSaver if _takes_path(strategy, ("async_save",)) else PathSaver
    return adapter(strategy, backend, version)


def adapt_loader(strategy: Any, backend: str = "", version: int = 0) -> Any:
    """Return an adapter for a load strategy of Megatron's kind; anything else unchanged.

    ``backend`` and ``version`` are as for :class:`PathLoader`.
    """
    _refuse_class(strategy, LoadStrategy, ("load",))
    if isinstance(strategy, LoadStrategy) or not _takes_path(strategy, ("load",)):
        return strategy
    return PathLoader(strategy, backend, version)


def _record(
    results: Sequence[Any],  # noqa: ARG001 - a function that finishes a save
    context: SaveContext,
    *,
    files: dict[str, bytes],
    index: _Index,
    shards: list[ShardedBase],
    author: str,
) -> None:
    """Collective: digest and record the files of all ranks' strategies, and write the shards that they do not store."""
    comm, writer = context.comm, context.writer
    written = comm.main_runs("listing the written files", lambda: _list_files(writer.directory, author))
    owners = assign_holders([tuple(range(comm.world_size))] * len(written), list(written.values()))
    with comm.local_phase("recording the written files"):
        if taken := [name for name in (*files, _INDEX) if name in written]:
            raise PluginError(
                f"{author} wrote {listed(taken)}, where the common state, objects or their index are stored: give the "
                "file another name"
            )
        for name, owner in zip(written, owners, strict=True):
            if owner == comm.rank:
                writer.adopt(name, keys=0)
        for name, data in files.items():
            writer.write(name, data)
        writer.record_shards(shards)
    everyone = comm.gather(index)
    with comm.local_phase("writing the index"):
        if comm.is_main:
            together = _Index()
            for part in everyone:
                together.tensors.update(part.tensors)
                together.objects.update(part.objects)
            if not written and (together.tensors or "" in together.objects.values()):
                raise PluginError(
                    f"{author} has written no file to the directory that it was given, {writer.directory}, on any "
                    "rank, and was given shards: write there before save returns, or, behind the training, before "
                    "async_fn and the finalize functions have ended"
                )
            writer.write(_INDEX, together.model_dump_json().encode(), keys=0)


def _list_files(directory: Path, author: str) -> dict[str, int]:
    """Return the sizes of the files in a staging directory, at any depth, by path, sorted.

    A link, an empty folder or the like, and a file with a name that no checkpoint can have, are a PluginError.
    """
    files: dict[str, int] = {}
    refused: list[str] = []
    with wrap_os_errors("list", directory):
        for name in find_foreign(directory, ()):
            info = (directory / name).lstat()
            if stat.S_ISREG(info.st_mode):
                files[name] = info.st_size
            elif not stat.S_ISDIR(info.st_mode):
                refused.append(repr(name))
            elif not any((directory / name).iterdir()):
                refused.append(f"{name!r} (an empty folder)")
    if refused:
        raise PluginError(
            f"{directory}: {author} wrote entries that are no regular files: {listed(sorted(refused))}; a "
            "checkpoint has no links and no empty folders"
        )
    bad = [repr(name) for name in files if not is_file_name(name)]
    if bad:
        raise PluginError(
            f"{directory}: {author} wrote files that a checkpoint cannot have: {listed(bad)}; {NAME_RULE}"
        )
    return dict(sorted(files.items()))


def _name_shards(shards: Sequence[ShardedBase]) -> dict[str, ShardedBase]:
    """Return shards by the names under which they are stored; each further one of a name gets a number."""
    named: dict[str, ShardedBase] = {}
    for number, shard in enumerate(shards):
        name = stored_key(shard)
        while name in named:
            name = f"{name}#{number}"
        named[name] = shard
    return named


def _detach_from_training(shard: ShardedBase) -> None:
    """Copy the shard's data: the training goes on, and changes its own."""
    if isinstance(shard, ShardedTensor):
        if shard.data is not None:
            shard.data = shard.data.detach().to("cpu", copy=True)
    elif isinstance(shard, ShardedObject):
        shard.data = copy.deepcopy(shard.data)


def _local_directory(reader: CheckpointReader, name: str) -> Path:
    if not has_local_files(reader.directory):
        raise StorageError(f"{name} reads from a path: copy {reader.directory} to a directory, and load that")
    return reader.directory


def _read_index(reader: CheckpointReader) -> _Index | None:
    """Return the index; None if there is none: Megatron saved the checkpoint."""
    if not reader.has(_INDEX):
        return None
    try:
        return _Index.model_validate(parse_json(reader.read(_INDEX)))
    except ValueError as exc:  # pydantic's ValidationError, too
        raise CorruptCheckpointError(f"{reader.directory / _INDEX} is damaged: {exc}") from exc


def _read_objects(stored: dict[str, str], reader: CheckpointReader, allow_globals: tuple[Any, ...]) -> dict[str, Any]:
    """Return the objects that the strategy does not store by their keys; ``stored`` has the file of each."""
    content = {file: decode_object(reader.read(file), file, allow_globals) for file in sorted({*stored.values()})}
    for key, file in stored.items():
        if not isinstance(content[file], dict) or key not in content[file]:
            raise CorruptCheckpointError(f"{reader.directory / file} lacks {key!r}, which {_INDEX} names there")
    return {key: content[file][key] for key, file in stored.items()}


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"{_INDEX} names the dtype {name!r}, which this release of torch does not have")
    return dtype


def _takes_path(strategy: Any, methods: Sequence[str], given: int = 2) -> bool:
    """Return whether an object has one of the methods, and that can be called with a state dict and a directory."""
    for method in methods:
        function = getattr(strategy, method, None)
        if callable(function):
            try:
                inspect.signature(function).bind(*range(given))
            except (TypeError, ValueError):
                continue
            return True
    return False


def _refuse_class(strategy: Any, ours: type[Any], methods: Sequence[str]) -> None:
    """Raise for a class in the place of an instance: its arguments are unknown here."""
    if isinstance(strategy, type) and not issubclass(strategy, ours) and _takes_path(strategy, methods, 3):
        raise PluginError(f"{strategy.__qualname__} is a class: give an instance of it, as for Megatron")


def _name(strategy: Any) -> str:
    return type(strategy).__qualname__
