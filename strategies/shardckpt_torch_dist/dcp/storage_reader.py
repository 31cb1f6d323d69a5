"""A storage reader for plain ``dcp.load``: reads only the requested bytes, checks digests, fills tensors in place."""

from __future__ import annotations

import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardckpt.archive import describe
from shardckpt.distributed import replace_text
from shardckpt.engine import locate_checkpoint, open_reader, report_read
from shardckpt.errors import (
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    StrategyMismatchError,
)
from shardckpt.manifest import Manifest
from shardckpt.storage import CheckpointReader, open_directory, retry_if_replaced
from shardckpt_torch_dist.dialects import (
    MAX_PATH_LENGTH,
    METADATA_FILE,
    has_own_index,
    read_index,
    read_metadata,
)
from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
from shardckpt_torch_dist.plan import CheckedPlanner, make_dcp_metadata, plan_items, read_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from shardckpt_torch_dist.dialects import StoredIndex


class CheckpointStorageReader(StorageReader):
    """Reads directories of shardckpt, Megatron and stock DCP for ``dcp.load``.

    Digests are checked if the checkpoint has them. DCP's planner loads objects with torch.load, which runs the
    functions that their pickles name. So it gets an object only if our own reader accepts it.

    Args:
        path: The checkpoint's directory or URL.
        allow_globals: Classes and functions that objects may name, in addition to the plain ones; each by itself, or as
            (class or function, "module.name").
        allow_dtype_cast: As for :func:`shardckpt.dist_checkpointing.load`.

    Example::

        dcp.load(state, storage_reader=CheckpointStorageReader("step-1"))
    """

    def __init__(
        self, path: str | os.PathLike[str], *, allow_globals: Iterable[Any] = (), allow_dtype_cast: bool = False
    ) -> None:
        super().__init__()
        self._allow_cast = allow_dtype_cast
        self._path = os.fspath(path)
        self._allow = tuple(allow_globals)
        self._rank = 0
        self._opened: _OpenCheckpoint | None = None
        self._close: Callable[[], Any] = _nothing_open

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs."""
        return self._path

    @property
    def location(self) -> str | None:
        """The location that the engine opens; None for a subclass, whose own methods read."""
        return self._path if type(self) is CheckpointStorageReader else None

    @property
    def allowed_globals(self) -> tuple[Any, ...]:
        """The ``allow_globals``."""
        return self._allow

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another path if one is given."""
        self._path = os.fspath(checkpoint_id) if checkpoint_id else self._path
        self._opened = None
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """Read the metadata of the checkpoint.

        Args:
            *args: Ignored.
            **kwargs: ``rank``: read the checkpoint that this rank alone has saved (``use_collectives=False``), if there
                is no checkpoint of all ranks.

        Returns:
            DCP's metadata with the true global shapes, without storage locations.
        """
        return self._open(kwargs.get("rank")).metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's arguments
        """Note the rank."""
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the id of the save that this rank has opened, for the coordinator to compare."""
        if self._opened is None or not self._opened.stored.save or plan.storage_data is not None:
            return plan
        return dataclasses.replace(plan, storage_data=_SaveId(self._opened.stored.save))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, after a check that all ranks have opened the same save.

        The saves differ if the checkpoint is being overwritten: that is a CheckpointReplacedError.
        """
        saves = {plan.storage_data for plan in plans if isinstance(plan.storage_data, _SaveId)}
        if len(saves) > 1:
            raise CheckpointReplacedError(
                f"{self._path} is being overwritten: the ranks have opened {len(saves)} different saves; call dcp.load "
                "again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items into the destinations of the planner.

        Returns:
            A future that is already done.

        Raises:
            CheckpointReplacedError: Another save has replaced the checkpoint since it was planned: call ``dcp.load``
                again.
        """
        opened = self._opened or self._open(None)
        try:
            with report_read(opened.reader, self._rank, "reading"):
                allow_cast = self._allow_cast or getattr(planner, "allow_dtype_cast", False)
                destinations = CheckedPlanner(planner, opened.stored, self._allow, allow_cast=allow_cast)
                reads = plan_items(plan.items, destinations, opened.stored)  # all, before anything is read
                read_items(reads, destinations, opened.reader, opened.stored)
                opened.reader.check_unchanged()
        finally:
            self._opened = None
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is a directory, locally or in a store that a plugin serves."""
        try:
            return locate_checkpoint(checkpoint_id).is_dir()
        except CheckpointingException:
            return False

    def _open(self, rank: int | None) -> _OpenCheckpoint:
        """Open the checkpoint; it is closed when all is read, or when this reader is garbage collected."""
        self._close()
        self._opened = retry_if_replaced(lambda: _open_checkpoint(self._path, rank), self._path)
        self._close = weakref.finalize(self, self._opened.reader.close)
        return self._opened


class _SaveId(NamedTuple):
    """The id of the save that a rank has opened, on its way to the coordinator."""

    save: str


class _OpenCheckpoint(NamedTuple):
    """An open checkpoint whose metadata is read.

    ``stored`` is the index of its files; ``stored.save`` is empty if each rank has a checkpoint of its own.
    ``metadata`` is the same as DCP's metadata.
    """

    reader: CheckpointReader
    stored: StoredIndex
    metadata: Metadata


def _nothing_open() -> None:
    """Do nothing: no checkpoint is open."""


def _open_checkpoint(path: str, rank: int | None) -> _OpenCheckpoint:
    """Open a checkpoint and read its metadata; the metadata of one rank only if there is no other.

    DCP plans only once, and open files can be read even after another save has replaced them. So all files are opened
    here, if there are few.
    """
    strategy = TorchDistLoadShardedStrategy()
    # DCP without collectives writes ``__<rank>.metadata``, one checkpoint per rank.
    directory, name = locate_checkpoint(path), f"__{rank}{METADATA_FILE}"
    if rank is not None and not strategy.recognises(directory) and (directory / name).is_file():
        manifest = Manifest(backend=strategy.backend, version=strategy.version)
        reader = CheckpointReader(open_directory(directory), manifest)
    else:
        name = METADATA_FILE
        try:
            reader = open_reader(path, strategy)
        except StrategyMismatchError as exc:
            advice = "dcp.load reads that format only: load it with dist_checkpointing.load, which finds the strategy"
            raise replace_text(exc, f"{exc}; {advice}") from exc
    try:
        with report_read(reader, rank or 0, "reading the metadata"):
            stored, metadata = _read_metadata(reader, name)
            reader.open_files(stored.files)
    except BaseException:
        reader.close()
        raise
    stored = stored if name == METADATA_FILE else dataclasses.replace(stored, save="")
    return _OpenCheckpoint(reader, stored, metadata)


def _read_metadata(reader: CheckpointReader, name: str) -> tuple[StoredIndex, Metadata]:
    """Return the index of the checkpoint, and the same in DCP's classes."""
    if has_own_index(reader):
        index = read_index(reader)
        return index, make_dcp_metadata(index, {})
    raw, index = read_metadata(reader, name)
    reshaped = getattr(raw, "mcore_data", None) or {}  # Megatron's flattened shards: the index has their true shapes
    # The index lacks chunks that are listed but not stored. DCP gets them all: only reading such a chunk is an error.
    written = {key: entry for key, entry in raw.state_dict_metadata.items() if key not in reshaped}
    paths = _checked_paths(getattr(raw, "planner_data", None), f"{reader.directory}/{name}")
    return index, make_dcp_metadata(index, written, paths)


def _checked_paths(paths: Any, source: str) -> dict[str, tuple[str | int, ...]] | None:
    """Return the paths of keys in the saved state dict, if DCP can build nested dicts and lists from them."""
    if not isinstance(paths, dict):
        return None
    for key, path in paths.items():
        if (
            not isinstance(path, tuple)
            or len(path) > MAX_PATH_LENGTH
            or not all(isinstance(part, str) or (type(part) is int and 0 <= part < len(paths)) for part in path)
        ):
            raise CorruptCheckpointError(f"{source}: {key!r} cannot be at {describe(path)} of a state dict")
    return paths
