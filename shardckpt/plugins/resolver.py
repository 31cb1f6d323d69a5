"""The resolver, or version gate: which strategy reads a checkpoint, or why none does, with advice."""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt import settings
from shardckpt.commit.commit import list_replaced_checkpoints, list_staging_directories
from shardckpt.commit.leftovers import explain_kept
from shardckpt.commit.removal import is_half_deleted
from shardckpt.commit.staging_names import is_temporary, parse_temporary
from shardckpt.commit.upload import is_under_way
from shardckpt.errors import (
    BrokenPluginError,
    CannotLoadError,
    CheckpointingException,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    PluginError,
    RefusedByPolicyError,
    StrategyMismatchError,
    UnknownBackendError,
    VersionTooNewError,
    VersionTooOldError,
    ask_nearest,
    describe_invalid,
    format_many,
    listed,
    name_call,
    natural_order,
)
from shardckpt.manifest.hub import HUB_FILES
from shardckpt.manifest.models import Manifest, Marker, Record
from shardckpt.manifest.names import MARKER_LIMIT, MARKER_NAME, RECORD_LIMIT, RECORD_NAME
from shardckpt.plugins.entries import StrategyAction, get_strategy_key
from shardckpt.plugins.legacy_megatron import describe_legacy_megatron
from shardckpt.plugins.origin import describe_origin, name_origin
from shardckpt.plugins.registry import parse_key, parse_keys
from shardckpt.plugins.stores import ABSENT, open_below
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.directory import (
    detect_replacement,
    open_directory,
    real_path,
    replaced_error,
    retry_if_replaced,
    was_replaced,
)
from shardckpt.storage.filesystem import name_siblings, wrap_os_errors
from shardckpt.storage.identity import has_changed, is_of_save
from shardckpt.storage.input_file import read_file
from shardckpt.storage.open_path import OpenPath
from shardckpt.storage.parse_cache import ParseCache
from shardckpt.strategy import LoadStrategy, Recognises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.plugins.manager import PluginManager

logger = logging.getLogger(__name__)

#: The description of a folder of the Hub.
_OF_HUB = (
    "a Hugging Face folder, which load_from_huggingface of shardckpt.huggingface loads, and "
    "CheckpointConfig(initial_load_path=..., initial_load_in_hf=True); `shardckpt convert` writes it in another format"
)
#: Advice for Megatron's backends that it has removed.
_RETIRED = {
    "tensorstore": "Megatron-Core 0.15, the last that reads it, saves it in its newer format",
}
#: Where the header of a safetensors file begins, behind its length.
_HEADER_AT = 8

_T = TypeVar("_T")

#: Seconds to wait for the second rename of an overwrite that takes two; an overwrite that died in between is an error.
_RENAME_PAUSES = (0.001, 0.01, 0.05, 0.2, 0.4)

_records = ParseCache[Record]()

#: Backends that are read without a registered strategy: folders and files of other libraries.
FOREIGN_BACKENDS = frozenset({"deepspeed", "huggingface", "torch_save"})
#: The formats that a caller accepts: a backend, "backend@version" or (backend, version), or several of these.
Accept = str | tuple[str, int] | Collection[str | tuple[str, int]]
#: Where that is given, for errors, by default.
CALLER = "the caller's accept="


def read_manifest(directory: Path, plugins: PluginManager, *, moved: bool = False) -> Manifest:
    """Return the manifest of a checkpoint: its backend, version and record, checked against the schemas of its files.

    With ``moved`` one that an overwrite has moved aside is accepted, too. A save that did not end is an
    IncompleteCheckpointError, a place without a checkpoint a NotACheckpointError, damaged JSON a
    CorruptCheckpointError.
    """
    return retry_if_replaced(lambda: hold_checkpoint(directory, plugins, moved=moved)[1], directory)


def hold_checkpoint(
    directory: Path, plugins: PluginManager, *, moved: bool = False, unmarked: bool = False
) -> tuple[Path, Manifest]:
    """Open a checkpoint's directory, and return it with the manifest: all that is read through it is of one save.

    The directory is one by an open file descriptor where the system can. With ``unmarked`` a checkpoint is accepted
    that has lost its ``metadata.json`` and has ``shardckpt.json``, to examine the rest of it. The other argument and
    the errors are as for :func:`read_manifest`. If another save replaces it meanwhile, it is a CheckpointReplacedError:
    :func:`~shardckpt.storage.retry_if_replaced` starts over.
    """
    place = open_directory(directory)
    for pause in _RENAME_PAUSES:
        if not _is_moved_aside(place):
            break
        time.sleep(pause)
        place = open_directory(directory)
    with detect_replacement(place, functools.partial(has_changed, place)), wrap_os_errors("access", directory):
        manifest = _read_manifest(place, plugins, moved=moved, unmarked=unmarked)
    if manifest.folder:
        return _hold_generation(place, manifest, plugins)
    # without a record the checkpoint would count as another library's; it may only be that its files are being removed
    if manifest.record is None and was_replaced(place):
        raise replaced_error(directory, f"it is not known whether it had {RECORD_NAME}")
    return place, manifest


def _hold_generation(place: Path, outer: Manifest, plugins: PluginManager) -> tuple[Path, Manifest]:
    """Open the generation that the marker at a URL names, or in a copy of it; as :func:`hold_checkpoint`.

    It is a CorruptCheckpointError if it is not complete, or not of the backend that the marker says, and a
    CheckpointReplacedError if another save has replaced it meanwhile.
    """
    inner = open_below(place, outer.folder, plugins)

    def is_replaced() -> bool:
        now = open_directory(real_path(place))
        try:
            return _parse_marker(now).shardckpt_generation != outer.folder
        except (CheckpointingException, OSError):
            return True  # it is being removed, or replaced

    where = f"{real_path(place) / MARKER_NAME} names {outer.folder}"
    with detect_replacement(inner, is_replaced), wrap_os_errors("access", inner):
        if not (inner / MARKER_NAME).exists():
            raise CorruptCheckpointError(f"{where}, and that has no {MARKER_NAME}: it was lost")
        manifest = _read_manifest(inner, plugins, moved=True)
        if manifest.folder or manifest.record is None:
            raise CorruptCheckpointError(f"{where}, and that is not the checkpoint of a save: it was written into")
        if (manifest.backend, manifest.version) != (outer.backend, outer.version):
            raise CorruptCheckpointError(
                f"{where} as {outer.backend!r} version {outer.version}, and that is {manifest.backend!r} version "
                f"{manifest.version}: another save wrote into it"
            )
    return inner, manifest.model_copy(update={"folder": outer.folder})


def hold_same(directory: Path, manifest: Manifest, plugins: PluginManager) -> Path:
    """Open and return a checkpoint's directory, as :func:`hold_checkpoint` does, by the main rank's manifest.

    If the directory has another save than that one, it is a CheckpointReplacedError.
    """
    place = open_directory(directory)
    if manifest.folder:
        place = open_below(place, manifest.folder, plugins)
    if takes_requests(place):  # the main rank has listed it
        return place
    if _is_moved_aside(place):
        raise replaced_error(directory, "an overwrite has moved it aside, and has not yet put the new one there")
    with detect_replacement(place):
        is_same = not place.is_dir() or is_of_save(place, manifest.record)
    if not is_same:
        raise replaced_error(
            directory, "this rank finds another save there than the main rank, which must see the same file system"
        )
    return place


def _is_moved_aside(place: Path) -> bool:
    """Return whether an overwrite has moved the checkpoint aside and not yet put the new one in its place.

    That is how directories are replaced on file systems that cannot exchange two in one step.
    """
    # a directory that could be opened exists
    return not isinstance(place, OpenPath) and not place.exists() and bool(list_replaced_checkpoints(place))


def _read_manifest(directory: Path, plugins: PluginManager, *, moved: bool, unmarked: bool = False) -> Manifest:
    if is_temporary(directory.name) and not moved:
        raise IncompleteCheckpointError(
            f"{directory} is the staging directory of a save that was not committed, or of a checkpoint being removed"
        )
    marker_file, record_file = directory / MARKER_NAME, directory / RECORD_NAME
    if not marker_file.exists():
        if not directory.is_dir():
            raise _absent_error(real_path(directory))
        if unmarked and record_file.exists() and not is_under_way(directory):
            kept = parse_file(Record.parse, record_file, RECORD_LIMIT)
            return Manifest(backend=kept.backend, version=kept.version, record=kept)
        return _recognise_directory(directory, plugins)
    marker, record = _parse_marker(directory), None
    if marker.shardckpt_generation is None and record_file.exists():
        try:
            record = parse_file(_parse_record, record_file, RECORD_LIMIT)
        except VersionTooNewError as exc:
            raise VersionTooNewError(f"{directory}: {exc}") from exc
        except CorruptCheckpointError as exc:
            raise CorruptCheckpointError(f"{exc}. {_advise_copy(directory, marker, plugins)}") from exc
        if (record.backend, record.version) != (marker.sharded_backend, marker.sharded_backend_version):
            raise CorruptCheckpointError(
                f"{directory}: {MARKER_NAME} says {marker.sharded_backend!r} version {marker.sharded_backend_version}, "
                f"{RECORD_NAME} says {record.backend!r} version {record.version}: another save wrote into it"
            )
    is_ours = record is not None or marker.shardckpt_generation is not None
    if is_ours and "sharded_backend_version" not in marker.model_fields_set:
        raise CorruptCheckpointError(f"{marker_file} is damaged: it has no 'sharded_backend_version'")
    return Manifest(
        backend=marker.sharded_backend,
        version=marker.sharded_backend_version,
        record=record,
        folder=marker.shardckpt_generation or "",
    )


def _advise_copy(directory: Path, marker: Marker, plugins: PluginManager) -> str:
    """Return advice about a record that is damaged."""
    try:
        find_reader(
            directory, Manifest(backend=marker.sharded_backend, version=marker.sharded_backend_version), plugins
        )
    except CannotLoadError:
        return "Restore it from a copy"
    return (
        f"Restore it from a copy, or move it away: then {name_call('convert', directory, 'NEW')} writes the rest anew, "
        "without a digest to check it by"
    )


def _parse_record(data: bytes) -> Record:
    """Return the record in bytes of ``shardckpt.json``, whose own digest is in them: equal bytes are parsed once."""
    record = _records.get(data, None, lambda: Record.parse(data))
    # the record is frozen, these two are not, and who gets them may change them
    own = {"writer": {**record.writer}, "content_metadata": copy.deepcopy(record.content_metadata)}
    return record.model_copy(update=own)


def _parse_marker(directory: Path) -> Marker:
    try:
        return parse_file(Marker.parse, directory / MARKER_NAME, MARKER_LIMIT)
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{exc}{_advise_repair(directory)}") from exc.__cause__


def choose_reader(
    directory: Path,
    manifest: Manifest,
    plugins: PluginManager,
    wanted: Any = None,
    accept: Accept | None = None,
    accept_of: str = CALLER,
) -> LoadStrategy:
    """Return the strategy that reads a checkpoint; this is the version gate.

    ``wanted`` is the caller's choice: an instance, which is returned, a backend, or (backend, version); None: any. The
    result is of the newest registered version that can read the checkpoint. If there is none, it is a
    CannotLoadError: a subclass for each case, with every candidate's reason.
    """
    check_policy(directory, manifest, accept, accept_of)
    return find_reader(directory, manifest, plugins, wanted)


def find_reader(directory: Path, manifest: Manifest, plugins: PluginManager, wanted: Any = None) -> LoadStrategy:
    """Return :func:`choose_reader`'s result under any policy: for files that this process has written itself."""
    if isinstance(wanted, LoadStrategy):
        get_strategy_key(wanted)
        reason = wanted.cannot_load(_rename_manifest(directory, wanted, manifest, plugins))
        if reason is not None:
            raise StrategyMismatchError(f"{_describe(directory, manifest)}; the given {type(wanted).__name__} {reason}")
        return wanted
    if wanted is not None:
        backend, version = parse_key(wanted)
        if backend != manifest.backend or version not in (None, manifest.version):
            raise StrategyMismatchError(
                f"{_describe(directory, manifest)}, not {wanted!r} as sharded_strategy asks; leave sharded_strategy "
                "out to read it with the strategy that it names"
            )
    reasons: list[str] = []
    faults: list[Exception] = []
    for entry in plugins.registry.entries(StrategyAction.LOAD_SHARDED, manifest.backend):
        try:
            strategy: LoadStrategy = entry.create()
            with name_origin(plugins, strategy):
                reason = strategy.cannot_load(manifest)
        except Exception as exc:  # noqa: BLE001 - a plugin may fail in any way, and another version may read it
            faults.append(exc)
            continue
        if reason is None:
            return strategy
        reasons.append(f"{entry.name} of {entry.distribution}: {reason}")
    broken = [plugin for plugin in plugins.broken() if plugin.name == manifest.backend]
    if any(plugin.is_disabled for plugin in broken):
        raise RefusedByPolicyError(
            f"{_describe(directory, manifest)}; its plugin is disabled: take {manifest.backend!r} out of "
            f"{settings.DISABLED_PLUGINS} to read it"
        )
    causes = [*faults, *(plugin.error for plugin in broken)]
    raise _refusal_error(directory, manifest, plugins, reasons, list(map(str, faults))) from next(iter(causes), None)


def _rename_manifest(directory: Path, wanted: LoadStrategy, manifest: Manifest, plugins: PluginManager) -> Manifest:
    """Return the manifest under the strategy's backend and version, if the checkpoint has the files of its format.

    The checkpoint's own reader lists the formats with the same files. Where that reader is not installed or is broken,
    the strategy that the caller passed looks at the files itself.
    """
    if (manifest.backend, manifest.version) == (wanted.backend, wanted.version):
        return manifest
    own = plugins.registry.find(StrategyAction.LOAD_SHARDED, manifest.backend, manifest.version)
    try:
        same_files = None if own is None else own.create().same_files
    except PluginError:
        same_files = None
    if same_files is None:
        is_same = isinstance(wanted, Recognises) and wanted.recognises(directory) == wanted.version
    else:
        is_same = (wanted.backend, wanted.version) in same_files
    return manifest.model_copy(update={"backend": wanted.backend, "version": wanted.version}) if is_same else manifest


def parse_file(parse: Callable[[bytes], _T], path: Path, limit: int) -> _T:
    """Read one of a checkpoint's JSON files, of at most ``limit`` bytes, and return the result of ``parse``.

    If ``parse`` raises ValueError or RecursionError, it is a CorruptCheckpointError.
    """
    raw = read_file(path, limit)
    try:
        return parse(raw)
    except (ValueError, RecursionError) as exc:  # pydantic's ValidationError is a ValueError
        raise CorruptCheckpointError(f"{path} is damaged: {describe_invalid(exc):.500}") from exc


def _advise_repair(directory: Path) -> str:
    """Return how to write ``metadata.json`` anew, which has nothing that the record does not say."""
    try:
        parse_file(Record.parse, directory / RECORD_NAME, RECORD_LIMIT)
    except CheckpointingException:
        return ""
    return f". If all other files match their digests, {name_call('verify', directory, '--repair')} writes it back"


def _recognise_directory(directory: Path, plugins: PluginManager) -> Manifest:
    """Return the manifest of a directory without ``metadata.json``, if a strategy recognises its content."""
    if not takes_requests(directory):
        with wrap_os_errors("list", directory):
            next(directory.iterdir(), None)  # before a strategy looks into one that may not be read
    if is_half_deleted(directory):
        raise IncompleteCheckpointError(
            f"{directory}: its removal is in progress, or was interrupted, and the rest of it is no checkpoint: "
            f"{name_call('prune', directory)} finishes it"
        )
    if is_under_way(directory):
        raise IncompleteCheckpointError(
            f"{directory}: a save to it is in progress or was interrupted: it has no {MARKER_NAME} yet. Wait for its "
            "end, or save again, by dist_checkpointing.save(..., overwrite=True) or by a CheckpointManager, which "
            "delete the files of an interrupted save"
        )
    if (directory / RECORD_NAME).exists():
        raise CorruptCheckpointError(
            f"{directory} has {RECORD_NAME} and no {MARKER_NAME}: {MARKER_NAME} was lost{_advise_repair(directory)}"
        )
    for entry in plugins.registry.entries(StrategyAction.LOAD_SHARDED):
        strategy = None
        try:
            strategy = entry.create()
            version = strategy.recognises(real_path(directory)) if isinstance(strategy, Recognises) else None
        except Exception as exc:  # another backend's reader may still know the directory
            if strategy is not None and isinstance(exc, CheckpointingException):  # the store does not answer
                raise
            origin = describe_origin(exc, plugins, strategy)
            logger.warning("%s%s", exc, origin and f" ({type(exc).__name__}, {origin})")
            continue
        if version is not None:
            return Manifest(backend=entry.backend, version=version, recognised_as=entry.backend)
    with wrap_os_errors("list", directory):
        names = sorted(path.name for path in directory.iterdir())
    raise _unrecognised_error(directory, names)


def _unrecognised_error(directory: Path, names: Collection[str]) -> CannotLoadError:
    """Return the error of a directory that no strategy recognises, with a description by the names of its files."""
    text = f"{directory} is not a distributed checkpoint"
    if not names:
        return NotACheckpointError(f"{text}: it is an empty directory")
    if not takes_requests(directory) and (inner := _list_checkpoints(directory)):
        return NotACheckpointError(
            f"{text}: it is a folder of {format_many(len(inner), 'checkpoint')}: give one, such as "
            f"{directory / max(inner, key=natural_order)}"
        )
    hidden = [name for name in names if is_temporary(name)]
    if hidden and all(name.startswith(".") for name in names):
        return IncompleteCheckpointError(
            f"{text}: it has only leftovers of saves or removals that did not end ({listed(hidden, limit=3)}): "
            f"{name_call('prune', directory, '--dry-run')} lists those that may be removed; without --dry-run, they are"
        )
    if other := describe_legacy_megatron(directory, names) or _OF_HUB * bool(HUB_FILES.intersection(names)):
        return IncompleteCheckpointError(f"{text}: it is {other}")
    return IncompleteCheckpointError(
        f"{text}, or a save to it did not end: it has no {MARKER_NAME}, nor another library's index, such as DCP's "
        f".metadata (found {listed(names, limit=3)}). If it was complete once, restore that file from a copy; where "
        "the index of its format and all data are left, `shardckpt convert --skip-damaged` writes it anew"
    )


def _list_checkpoints(directory: Path) -> list[str]:
    """Return the names of the directories in a local one that have a marker; none that may not be read."""
    with wrap_os_errors("list", directory), os.scandir(real_path(directory)) as entries:
        folders = [entry for entry in entries if entry.is_symlink() or entry.is_dir(follow_symlinks=False)]
        return [entry.name for entry in folders if os.path.isfile(f"{entry.path}/{MARKER_NAME}")]  # noqa: PTH113


def _absent_error(directory: Path) -> CannotLoadError:
    if takes_requests(directory):
        return NotACheckpointError(f"{directory} {ABSENT}")
    replaced = list_replaced_checkpoints(directory)
    if replaced:
        return IncompleteCheckpointError(
            f"{directory}: an overwrite was interrupted; a complete checkpoint is at {replaced[-1]}: rename it to "
            f"{directory.name}"
        )
    staging = list_staging_directories(directory)
    found = [leftover for path in staging if (leftover := parse_temporary(path)) is not None]
    if running := list(filter(None, map(explain_kept, found))):
        return IncompleteCheckpointError(
            f"{directory}: a save to it is running ({'; '.join(running)}), or was interrupted: it has written to "
            f"{', '.join(map(str, staging))}, which is not a checkpoint: wait for its end, else save again"
        )
    if staging:
        return IncompleteCheckpointError(
            f"{directory}: the save to it did not end; its files are in {', '.join(map(str, staging))}, which is "
            "not a checkpoint: save again"
        )
    if os.path.isfile(real_path(directory)):  # noqa: PTH113 - of a text
        what = (
            f"a file: {name_call('convert', directory, 'NEW')} writes a loadable checkpoint of its tensors"
            if _has_tensors(directory)
            else "a file that neither torch.save nor safetensors wrote; give the directory of a checkpoint"
        )
        return NotACheckpointError(f"{directory} is not a distributed checkpoint: it is {what}")
    return NotACheckpointError(
        f"checkpoint directory {directory} does not exist or is not a directory {name_siblings(directory)}".rstrip()
    )


def _has_tensors(path: Path) -> bool:
    """Return whether a file begins like a file of ``torch.save`` or of safetensors."""
    with wrap_os_errors("open", path), real_path(path).open("rb") as file:
        first = file.read(_HEADER_AT + 1)
    return first.startswith((b"PK\x03\x04", b"\x80")) or first[_HEADER_AT:] == b"{"


def check_policy(directory: Path, manifest: Manifest, accept: Accept | None = None, accept_of: str = CALLER) -> None:
    """Check that a checkpoint may be read: that both the caller and the job's ``SHARDCKPT_ACCEPT`` accept its format.

    If one of them leaves it out, it is a RefusedByPolicyError.
    """
    for source, given in ((accept_of, accept), (settings.ACCEPT, settings.accept())):
        if is_accepted(manifest.backend, manifest.version, given):
            continue
        accepted = parse_keys(given)
        allowed = ", ".join(
            repr(backend if version is None else f"{backend}@{version}") for backend, version in accepted
        )
        near = next((f": {near}" for backend, _ in accepted if (near := ask_nearest(backend, {manifest.backend}))), "")
        raise RefusedByPolicyError(
            f"{_describe(directory, manifest)}; {source} allows {allowed or 'nothing'}{near.rstrip()}"
        )


def is_accepted(backend: str, version: int, accept: Accept | None) -> bool:
    """Return whether an ``accept`` of a caller, or of ``SHARDCKPT_ACCEPT``, includes a format; None: everything."""
    return accept is None or any(name == backend and each in (None, version) for name, each in parse_keys(accept))


def list_unknown_accepted(accept: Accept | None, plugins: PluginManager) -> list[str]:
    """Return a text for each format to accept that nothing installed reads: a load would refuse the intended one.

    ``accept`` is the caller's, or from ``SHARDCKPT_ACCEPT``; None: everything.
    """
    read = {(entry.backend, entry.version) for entry in plugins.registry.entries(StrategyAction.LOAD_SHARDED)}
    read |= {(backend, 1) for backend in FOREIGN_BACKENDS}
    backends = {backend for backend, _ in read}
    faults = []
    for backend, version in parse_keys(accept) if accept is not None else ():
        if backend not in backends:
            near = ask_nearest(backend, backends)
            faults.append(f"no installed strategy reads {backend!r}: {near}there are {listed(sorted(backends))}")
        elif version is not None and (backend, version) not in read:
            known = listed([str(each) for name, each in sorted(read) if name == backend])
            faults.append(f"no installed strategy reads {backend!r} of version {version}: there are versions {known}")
    return faults


def _refusal_error(
    directory: Path, manifest: Manifest, plugins: PluginManager, reasons: list[str], faults: list[str]
) -> CannotLoadError:
    """Return the error for a checkpoint that no working (``reasons``) or broken (``faults``) reader reads."""
    what = _describe(directory, manifest)
    entries = plugins.registry.entries(StrategyAction.LOAD_SHARDED)
    installed = ", ".join(f"{entry.backend} {entry.version} ({entry.distribution})" for entry in entries) or "none"
    tail = "".join(f"\n  {reason}" for reason in reasons) + f"\ninstalled readers: {installed}{plugins.faults_text()}"
    faults = faults + [
        f"{p.name} of {p.distribution}: {p.fault}" for p in plugins.broken() if p.name == manifest.backend
    ]
    if faults:
        return BrokenPluginError(f"{what}; its plugin is installed and does not work: {'; '.join(faults)}{tail}")
    first_reader = manifest.record.reader if manifest.record else ""
    readers = [entry for entry in entries if entry.backend == manifest.backend]
    if not readers and manifest.backend in _RETIRED:
        return UnknownBackendError(f"{what}; no plugin reads that backend any more: {_RETIRED[manifest.backend]}{tail}")
    if not readers:
        provider = (
            f": {first_reader} or newer, which reads or migrates it"
            if first_reader
            else "; a strategy of your own is given as sharded_strategy=, or to "
            "dist_checkpointing.register_default_strategy; the command knows it by an entry point, or by "
            "SHARDCKPT_PLUGINS=MODULE, whose shardckpt_register registers it"
        )
        return UnknownBackendError(
            f"{what}; no installed plugin reads that backend. Install the distribution that provides it{provider}{tail}"
        )
    versions = [entry.version for entry in readers]
    if manifest.version in versions:
        return CannotLoadError(f"{what}, which the installed readers of that version refuse{tail}")
    if manifest.version > max(versions):
        owner = next(entry.distribution for entry in readers if entry.version == max(versions))
        unknown = f" {owner}, which is too old; the checkpoint does not say which release reads it"
        advice = f": {first_reader} or newer reads it" if first_reader else unknown
        return VersionTooNewError(
            f"{what}, newer than the installed readers (version {max(versions)}). Upgrade{advice}{tail}"
        )
    migrations = plugins.registry.migrations(manifest.backend, manifest.version)
    if migrations:
        advice = f"Rewrite it as version {migrations[0].to_version}: {name_call('migrate', directory, 'NEW')}"
    else:
        first = f" ({first_reader} was the first to read it)" if first_reader else ""
        advice = f"There is no migration: read it with an older release than {readers[0].distribution}{first}"
    return VersionTooOldError(f"{what}, older than the installed readers read. {advice}{tail}")


def _describe(directory: Path, manifest: Manifest) -> str:
    return f"{directory} is a {manifest.backend!r} checkpoint of version {manifest.version}"
