"""The steps that a folder has checkpoints of: which directories they are, and which of them count."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.engine import locate, named_files
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    StorageError,
    listed,
)
from shardckpt.plugins import choose_reader, hold_checkpoint
from shardckpt.storage import (
    ListsFolders,
    RemotePath,
    attempt,
    detect_replacement,
    file_size,
    has_local_files,
    naming,
    on_store,
    retry_if_replaced,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import Manifest
    from shardckpt.plugins import PluginHost

logger = logging.getLogger(__name__)

#: What of ``content_metadata`` is the manager's.
CONTENT_KEY = "shardckpt_manager"


@dataclass(frozen=True)
class StepNames:
    """How a trainer names the directory of a step; a name is one of these as a whole, or not at all.

    Attributes:
        prefix: What stands before the number.
        width: Digits that the number has at least, with zeros before it.
    """

    prefix: str
    width: int = 1

    def name(self, step: int) -> str:
        """The name of a step's directory."""
        if step < 0:
            raise CheckpointingException(f"step {step}: steps are counted from 0")
        return f"{self.prefix}{step:0{self.width}d}"

    def parse(self, name: str) -> int | None:
        """The step whose directory has exactly that name, if there is one."""
        digits = name.removeprefix(self.prefix)
        if not (digits.isascii() and digits.isdecimal()):
            return None
        return int(digits) if name == self.name(int(digits)) else None


#: The manager's own.
STEPS = StepNames("step-")


@dataclass(frozen=True)
class StepCheckpoint:
    """What stands in a step's directory, as far as that is known without reading its data.

    Attributes:
        step: The step.
        manifest: What it says of itself; None where that cannot be read.
        error: Why it is no whole checkpoint, if it is none: it was never committed, or is damaged.
        refusal: Why nothing installed reads it, if it is whole: another installation would.
    """

    step: int
    manifest: Manifest | None = None
    error: CheckpointingException | None = None
    refusal: CannotLoadError | None = None

    @property
    def counts(self) -> bool:
        """Whether it is committed, has all its files, and can be read."""
        return self.error is None and self.refusal is None

    @property
    def fault(self) -> str:
        """Why it is no whole checkpoint; ``""`` if it is one."""
        return "" if self.error is None else str(self.error)

    @property
    def is_damaged(self) -> bool:
        """Whether it was a checkpoint once; else what is wrong is that it never became one."""
        return self.error is not None and not isinstance(self.error, CannotLoadError)

    @property
    def content(self) -> dict[str, Any]:
        """The ``content_metadata`` that it was saved with; empty where there is none."""
        record = None if self.manifest is None else self.manifest.record
        content = None if record is None else record.content_metadata
        return content if isinstance(content, dict) else {}

    @property
    def metrics(self) -> dict[str, Any]:
        """What the manager was given as the step's metrics."""
        own = self.content.get(CONTENT_KEY)
        metrics = own.get("metrics") if isinstance(own, dict) else None
        return metrics if isinstance(metrics, dict) else {}


class StepFolder:
    """A directory or URL with a directory for each step; everything else in it is someone else's.

    Nothing here is collective: the main rank looks, and tells the others.

    Args:
        folder: A path or URL; it need not exist yet.
        host: The installed plugins.
        names: How the steps' directories are named.

    Raises:
        StorageError: no plugin serves the URL.
    """

    def __init__(self, folder: str | os.PathLike[str], host: PluginHost, names: StepNames = STEPS) -> None:
        #: The directory, or the store's folder.
        self.place = locate(folder, host)
        self.names = names
        #: The installed plugins.
        self.host = host

    def location(self, step: int) -> str:
        """A step's directory or URL, as it can be given to ``save`` and ``load`` (a URL with its password)."""
        path = self.place / self.names.name(step)
        remote = on_store(path)
        return str(path) if remote is None else remote.url

    def path(self, step: int) -> Path:
        """A step's directory or URL, with symbolic links resolved."""
        return locate(self.location(step), self.host)

    def directories(self) -> list[str]:
        """Names of all directories in the folder, those of steps and others; none where the folder is not there."""
        remote = on_store(self.place)
        return _directories(self.place) if remote is None else _folders(remote)

    def steps(self) -> list[int]:
        """All steps that have a directory, in ascending order, whatever is in it."""
        return sorted(step for step in map(self.names.parse, self.directories()) if step is not None)

    def look(self, step: int) -> StepCheckpoint:
        """What stands in a step's directory, by its JSON files and the sizes of the others.

        Raises:
            StorageError: the store does not answer, or other saves replace it again and again: that says nothing of
                the checkpoint.
        """
        directory = self.path(step)
        manifest: Manifest | None = None

        def check() -> Manifest:
            nonlocal manifest
            manifest = None  # what an attempt before has found is gone
            place, manifest = hold_checkpoint(directory, self.host)
            with detect_replacement(place):
                _check_files(place, manifest)
            return manifest

        try:
            with naming("look at", directory):
                found = retry_if_replaced(check, directory)
            choose_reader(directory, found, self.host)
        except (StorageError, CorruptCheckpointError) as exc:
            no_answer = not has_local_files(directory) and isinstance(exc, StorageError)
            if no_answer or isinstance(exc, CheckpointReplacedError):
                raise
            return StepCheckpoint(step, manifest, error=_copy(exc))
        except CannotLoadError as exc:
            if manifest is None:
                return StepCheckpoint(step, error=_copy(exc))
            return StepCheckpoint(step, manifest, refusal=_copy(exc))
        return StepCheckpoint(step, manifest)

    def committed(self) -> list[StepCheckpoint]:
        """The checkpoints that count, the newest last."""
        return [found for found in map(self.look, self.steps()) if found.counts]

    def __str__(self) -> str:
        return str(self.place)


def _directories(folder: Path) -> list[str]:
    """Names of the directories in a directory, links to directories too."""
    with naming("list", folder):
        try:
            with os.scandir(folder) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []


def _folders(place: RemotePath) -> list[str]:
    """Names of the folders below a URL."""
    folder = place.folder
    if not isinstance(folder, ListsFolders):
        raise StorageError(
            f"cannot look for checkpoints in {place}: the plugin that serves it cannot list folders "
            f"({type(folder).__name__} lacks what shardckpt.storage.remote.ListsFolders has); give a directory, or a "
            "URL that fsspec serves"
        )
    return attempt("list the folders of", place, folder.folders)


def _check_files(directory: Path, manifest: Manifest) -> None:
    """Whether all files are there that the checkpoint names, with the sizes that it has of them."""
    expected = named_files(directory, manifest)
    faults = [fault for name, size in expected.items() if (fault := _file_fault(directory / name, size))]
    if faults:
        raise CorruptCheckpointError(f"{directory}: of {len(expected)} files: {listed(faults, '; ', limit=6)}")


def _file_fault(path: Path, size: int | None) -> str:
    try:
        found = file_size(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    return f"{path.name} has {found} bytes, {size} were written" if size not in (None, found) else ""


def _copy(error: Any) -> Any:
    """The error without the frames that its traceback holds."""
    return type(error)(*error.args)


__all__ = ["CONTENT_KEY", "STEPS", "StepCheckpoint", "StepFolder", "StepNames"]
