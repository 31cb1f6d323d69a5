"""The version gate: which strategy reads a checkpoint, or exactly why none does and what to do about it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import (
    BrokenPluginError,
    CannotLoadError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    PluginError,
    RefusedByPolicyError,
    StrategyMismatchError,
    UnknownBackendError,
    VersionTooNewError,
    VersionTooOldError,
)
from shardckpt.manifest import MARKER_LIMIT, MARKER_NAME, RECORD_LIMIT, RECORD_NAME, Manifest, Marker, Record
from shardckpt.plugins.entries import Entry, StrategyAction
from shardckpt.plugins.registry import parse_key
from shardckpt.storage import (
    RelativePath,
    can_rename,
    detect_replacement,
    has_changed,
    is_of_save,
    is_staging,
    is_under_way,
    naming,
    open_directory,
    read_file,
    real_path,
    replaced_error,
    replaced_of,
    retry_if_replaced,
    staging_of,
    was_replaced,
)
from shardckpt.strategy import LoadStrategy, Recognises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.plugins.manager import PluginHost

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds to wait for the second of the two renames of an overwrite; one that was interrupted between them is an error.
_BETWEEN_RENAMES = (0.001, 0.01, 0.05, 0.2, 0.4)

#: Backends, or (backend, version) pairs, that a caller is willing to load.
Accept = Collection[str | tuple[str, int]]


def read_manifest(directory: Path, host: PluginHost, *, moved: bool = False) -> Manifest:
    """What the checkpoint says of itself; ``moved``: also of one that an overwrite has moved aside.

    Raises:
        NotACheckpointError: there is no checkpoint.
        IncompleteCheckpointError: there is a save that never ended.
        CorruptCheckpointError: its JSON files are damaged.
    """
    return retry_if_replaced(lambda: hold_checkpoint(directory, host, moved=moved)[1], directory)


def hold_checkpoint(directory: Path, host: PluginHost, *, moved: bool = False) -> tuple[Path, Manifest]:
    """What the checkpoint says of itself, and its directory, held open: what is read through that is of the same save.

    Raises:
        CheckpointReplacedError: another save came in between; :func:`~shardckpt.storage.directory.retry_if_replaced`
            begins again.
        CannotLoadError: as :func:`read_manifest`.
    """
    place = open_directory(directory)
    for pause in _BETWEEN_RENAMES:
        if not _is_set_aside(place):
            break
        time.sleep(pause)
        place = open_directory(directory)
    with detect_replacement(place, functools.partial(has_changed, place)), naming("look at", directory):
        manifest = _read_manifest(place, host, moved=moved)
    if manifest.record is None and was_replaced(place):  # its files are being removed: what is missing was there
        raise replaced_error(directory, f"it is not known whether {RECORD_NAME} was there")
    return place, manifest


def hold_same(directory: Path, manifest: Manifest) -> Path:
    """The checkpoint's directory, held open by another rank than the one that has read the manifest.

    Raises:
        CheckpointReplacedError: it is not of the same save.
    """
    place = open_directory(directory)
    if not can_rename(place):
        return place
    if _is_set_aside(place):
        raise replaced_error(directory, "nothing is there at this moment")
    with detect_replacement(place):
        is_same = not place.is_dir() or is_of_save(place, manifest.record)
    if not is_same:
        raise replaced_error(
            directory, "this rank finds another save there than the main rank, which must see the same file system"
        )
    return place


def _is_set_aside(place: Path) -> bool:
    """Whether nothing is at the path, and a checkpoint beside it: some file systems take two renames to overwrite."""
    if not can_rename(place) or isinstance(place, RelativePath):  # a directory that could be opened is there
        return False
    return not place.exists() and bool(replaced_of(place))


def _read_manifest(directory: Path, host: PluginHost, *, moved: bool) -> Manifest:
    if is_staging(directory) and not moved:
        raise IncompleteCheckpointError(
            f"{directory} is the staging directory of a save that was not committed, or of a checkpoint being removed"
        )
    marker_file, record_file = directory / MARKER_NAME, directory / RECORD_NAME
    if not marker_file.exists():
        if not directory.is_dir():
            raise _absent(real_path(directory))
        return _recognised(directory, host)
    marker = parse_file(Marker.model_validate_json, marker_file, MARKER_LIMIT)
    record = None
    if record_file.exists():
        record = parse_file(Record.parse, record_file, RECORD_LIMIT)
        if (record.backend, record.version) != (marker.sharded_backend, marker.sharded_backend_version):
            raise CorruptCheckpointError(
                f"{directory}: {MARKER_NAME} says {marker.sharded_backend!r} version {marker.sharded_backend_version}, "
                f"{RECORD_NAME} says {record.backend!r} version {record.version}: another save wrote into it"
            )
    return Manifest(backend=marker.sharded_backend, version=marker.sharded_backend_version, record=record)


def choose_reader(
    directory: Path, manifest: Manifest, host: PluginHost, wanted: Any = None, accept: Accept | None = None
) -> LoadStrategy:
    """The strategy that reads the checkpoint.

    Args:
        directory: For error texts.
        manifest: What the checkpoint says of itself.
        host: The installed plugins.
        wanted: The caller's strategy: an instance, a backend, or (backend, version); None leaves it to the registry.
        accept: What the caller is willing to load; None is everything.

    Raises:
        CannotLoadError: one of its subclasses for every case, with every candidate's reason.
    """
    _apply_policy(directory, manifest, accept)
    if isinstance(wanted, LoadStrategy):
        reason = wanted.cannot_load(_as_read_by(wanted, manifest, host))
        if reason is not None:
            raise StrategyMismatchError(f"{_shown(directory, manifest)}; the given {type(wanted).__name__} {reason}")
        return wanted
    if wanted is not None:
        backend, version = parse_key(wanted)
        if backend != manifest.backend or version not in (None, manifest.version):
            raise StrategyMismatchError(
                f"{_shown(directory, manifest)}, not {wanted!r} as sharded_strategy asks; leave sharded_strategy out "
                "to read what the checkpoint is"
            )
    reasons, faults = [], []
    for entry in host.registry.entries(StrategyAction.LOAD_SHARDED, manifest.backend):
        try:
            strategy: LoadStrategy = entry.create()
        except PluginError as exc:
            faults.append(str(exc))
            continue
        reason = strategy.cannot_load(manifest)
        if reason is None:
            return strategy
        reasons.append(f"{entry.name} of {entry.distribution}: {reason}")
    raise _refusal(directory, manifest, host, reasons, faults)


def _as_read_by(wanted: LoadStrategy, manifest: Manifest, host: PluginHost) -> Manifest:
    """The manifest under the strategy's own name, if the checkpoint's own reader says that its files are the same."""
    own = host.registry.find(StrategyAction.LOAD_SHARDED, manifest.backend, manifest.version)
    if own is None or (manifest.backend, manifest.version) == (wanted.backend, wanted.version):
        return manifest
    try:
        same_files = own.create().same_files
    except PluginError:  # it is the caller's strategy that reads the checkpoint, not this one
        return manifest
    if (wanted.backend, wanted.version) not in same_files:
        return manifest
    return manifest.model_copy(update={"backend": wanted.backend, "version": wanted.version})


def parse_file(parse: Callable[[bytes], _T], path: Path, limit: int) -> _T:
    """What one of a checkpoint's JSON files says; a file above ``limit`` bytes is not read."""
    raw = read_file(path, limit)
    try:
        return parse(raw)
    except (ValueError, RecursionError) as exc:  # pydantic's ValidationError is a ValueError
        detail = "; ".join(str(exc).splitlines()[:4])
        raise CorruptCheckpointError(f"{path} is damaged: {detail:.500}") from exc


def _recognised(directory: Path, host: PluginHost) -> Manifest:
    """A directory without ``metadata.json``: a layout that some strategy knows, or no checkpoint."""
    if is_under_way(directory):
        raise IncompleteCheckpointError(
            f"{directory}: the save to it has not ended, or never will: it has no {MARKER_NAME} yet. Save to another "
            "URL, or with overwrite=True, which deletes what is left there"
        )
    if (directory / RECORD_NAME).exists():
        raise CorruptCheckpointError(f"{directory} has {RECORD_NAME} and no {MARKER_NAME}: {MARKER_NAME} was lost")
    for entry in host.registry.entries(StrategyAction.LOAD_SHARDED):
        try:
            strategy = entry.create()
        except PluginError as exc:  # another backend's reader may still know the directory
            logger.warning("%s", exc)
            continue
        version = strategy.recognises(real_path(directory)) if isinstance(strategy, Recognises) else None
        if version is not None:
            return Manifest(backend=entry.backend, version=version, recognised_as=entry.backend)
    with naming("list", directory):
        names = sorted(path.name for path in directory.iterdir())
    if not names:
        raise NotACheckpointError(f"{directory} is an empty directory, not a checkpoint")
    raise IncompleteCheckpointError(
        f"{directory} has no {MARKER_NAME}: no checkpoint, or a save by another library that did not end "
        f"(found {', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"  # noqa: PLR2004 - a glance is enough
    )


def _absent(directory: Path) -> CannotLoadError:
    if not can_rename(directory):
        return NotACheckpointError(f"{directory} does not exist, or has no objects")
    replaced = replaced_of(directory)
    if replaced:
        return IncompleteCheckpointError(
            f"{directory}: an overwrite was interrupted; a whole checkpoint lies at {replaced[-1]}: rename it to "
            f"{directory.name}"
        )
    staging = staging_of(directory)
    if staging:
        return IncompleteCheckpointError(
            f"{directory}: the save to it did not end; what it wrote lies in {', '.join(map(str, staging))} and is "
            "not a checkpoint: save again"
        )
    return NotACheckpointError(f"{directory} does not exist or is not a directory")


def _apply_policy(directory: Path, manifest: Manifest, accept: Accept | None) -> None:
    if accept is None:
        return
    for choice in accept:
        backend, version = parse_key(choice)
        if backend == manifest.backend and version in (None, manifest.version):
            return
    allowed = ", ".join(repr(choice) for choice in accept) or "nothing"
    raise RefusedByPolicyError(f"{_shown(directory, manifest)}; the caller's accept= allows {allowed}")


def _refusal(
    directory: Path, manifest: Manifest, host: PluginHost, reasons: list[str], faults: list[str]
) -> CannotLoadError:
    """Why no installed strategy reads the checkpoint, the fitting case of it.

    Args:
        directory: The checkpoint.
        manifest: What it says of itself.
        host: The installed plugins.
        reasons: Why the readers of its backend do not read it.
        faults: What is wrong with those readers of its backend that do not work.
    """
    what = _shown(directory, manifest)
    tail = "".join(f"\n  {reason}" for reason in reasons) + _installed_text(host)
    faults = faults + [f"{p.name} of {p.distribution}: {p.fault}" for p in host.broken() if p.name == manifest.backend]
    if faults:
        return BrokenPluginError(f"{what}; its plugin is installed and does not work: {'; '.join(faults)}{tail}")
    readers = host.registry.entries(StrategyAction.LOAD_SHARDED, manifest.backend)
    if not readers:
        return UnknownBackendError(
            f"{what}; no installed plugin reads that backend. Install the distribution that provides it"
            f"{_reader_hint(manifest)}{tail}"
        )
    versions = [entry.version for entry in readers]
    if manifest.version in versions:
        return CannotLoadError(f"{what}, which the installed readers of that version refuse{tail}")
    if manifest.version > max(versions):
        return VersionTooNewError(
            f"{what}, newer than what is installed (version {max(versions)}). Upgrade{_reader_hint(manifest)}{tail}"
        )
    way_out = _way_out(directory, manifest, host, readers)
    return VersionTooOldError(f"{what}, older than what is installed reads. {way_out}{tail}")


def _way_out(directory: Path, manifest: Manifest, host: PluginHost, readers: list[Entry]) -> str:
    migrations = host.registry.migrations(manifest.backend, manifest.version)
    if migrations:
        return f"Rewrite it as version {migrations[0].to_version}: shardckpt migrate {directory} NEW"
    reader = manifest.record.reader if manifest.record else ""
    first = f" ({reader} was the first to read it)" if reader else ""
    return f"There is no migration: read it with an older release than {readers[0].distribution}{first}"


def _reader_hint(manifest: Manifest) -> str:
    reader = manifest.record.reader if manifest.record else ""
    return f": {reader} or newer reads it" if reader else ""


def _installed_text(host: PluginHost) -> str:
    entries = host.registry.entries(StrategyAction.LOAD_SHARDED)
    found = ", ".join(f"{entry.backend} {entry.version} ({entry.distribution})" for entry in entries) or "none"
    return f"\ninstalled readers: {found}{host.faults_text()}"


def _shown(directory: Path, manifest: Manifest) -> str:
    return f"{directory} is a {manifest.backend!r} checkpoint of version {manifest.version}"


__all__ = ["Accept", "choose_reader", "hold_checkpoint", "hold_same", "parse_file", "read_manifest"]
