"""Checking every file of a checkpoint: against digests if it has them, else against its index."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from shardckpt.commit.upload import is_under_way
from shardckpt.engine.integrity import find_faults, is_damage, list_digested_files, read_integrity
from shardckpt.engine.locations import locate
from shardckpt.engine.progress import Progress
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardckpt.huggingface.folder import resolve_link
from shardckpt.maintenance.inside import FILE_SUFFIXES
from shardckpt.maintenance.mending import explain_mendable
from shardckpt.maintenance.sources import Checked, check_all_files, check_source
from shardckpt.manifest.models import Manifest, Marker, Record
from shardckpt.manifest.names import (
    GENERATION,
    INTEGRITY_NAME,
    MARKER_LIMIT,
    MARKER_NAME,
    RECORD_LIMIT,
    RECORD_NAME,
    find_folders,
)
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.origin import name_origin
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint, parse_file
from shardckpt.storage.directory import (
    detect_replacement,
    open_directory,
    real_path,
    replaced_error,
    retry_if_replaced,
    was_replaced,
)
from shardckpt.storage.filesystem import find_size, is_there, put_file, refuse_linked_folders, wrap_os_errors
from shardckpt.storage.places import list_folders
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import ChecksFiles
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from shardckpt.storage.reader import Crcs

#: Exit codes of ``shardckpt verify``; the worst of several checkpoints is the highest.
INTACT, DAMAGED, NO_ANSWER = 0, 1, 2


@dataclass(frozen=True)
class FileResult:
    """A file in a checkpoint's directory.

    Attributes:
        name: Its name in the directory.
        nbytes: Its size in bytes, as recorded if it is; 0 for a foreign file, and for a missing one without a record.
        fault: Its fault, or why it could not be read; ``""`` if there is none. A foreign file is not read.
        foreign: Whether it is not a file of the checkpoint.
        checked: How it was checked: ``digests`` of all bytes; ``crc32`` of all values, which archives have where there
            are no digests; ``structure`` alone, where there is neither; or ``nothing``, if it could not be read, or is
            foreign.
        note: A remark that is no fault and may surprise: how engines treat a file of a Hugging Face folder.
    """

    name: str
    nbytes: int
    fault: str
    foreign: bool = False
    checked: Literal["digests", "crc32", "structure", "nothing"] = "nothing"
    note: str = ""


def verify_checkpoint(directory: str | os.PathLike[str], *, repair: bool = False) -> list[FileResult]:
    """Check every file of a checkpoint. Not collective: threads of this process share the work.

    Return a result for every file, sorted by name, foreign files last; :func:`get_exit_code` summarizes them.

    Files with a digest in ``shardckpt.json`` or ``integrity.json`` are read completely and compared with it. If none
    differs, the structure of all files is checked, where the strategy can: that each exists, contains the ranges that
    the index names and nothing after them, and has the described content there. Where there are no digests, archives of
    ``torch.save`` (plain DCP's, Megatron's, DeepSpeed's, ``.pt`` files) are read and compared with the CRC-32 that they
    have of each member, unless they were written without. Of other files no value is checked. Files that do not belong
    to the checkpoint are listed as foreign, which is no fault.

    A Hugging Face folder of safetensors and a file of it have no digests: their headers, their lengths and the index
    are compared. Of a folder, so are the weights with ``config.json``: vocabulary, quantization, dtype, tied pairs and,
    where transformers and accelerate are installed, names and shapes with the class that it names. Notes say how
    transformers, vLLM and SGLang treat files other than the model's.

    With ``repair`` a ``metadata.json`` that is lost, or cannot be parsed, is written back if all other files are as
    written, and its result says so: it has nothing that ``shardckpt.json`` does not say. It is a CannotLoadError if
    there is no checkpoint, or it has no digests and no installed strategy reads it; a CorruptCheckpointError if a file
    that lists the others is missing or damaged. It is an error, too, if such a file cannot be read, or if there are no
    digests and the strategy needs them.
    """
    check_annotated(verify_checkpoint, locals())
    return retry_if_replaced(lambda: _verify(locate(directory, get_plugin_manager()), repair=repair), directory)


def _verify(directory: Path, *, repair: bool) -> list[FileResult]:
    plugins = get_plugin_manager()
    try:
        path, manifest = hold_checkpoint(directory, plugins)
    except (NotACheckpointError, IncompleteCheckpointError) as exc:
        place = directory.parent if directory.is_file() else directory
        errors = check_source(directory, plugins, exc)
        results = [
            _make_result(name, find_size(resolve_link(place, name)), *found) for name, found in sorted(errors.items())
        ]
        return results + [FileResult(name, 0, "", foreign=True) for name in _list_other_files(directory, errors)]
    except CorruptCheckpointError as exc:
        if not repair:
            raise
        return _repair(directory, exc)
    found = _check_files(directory, path, manifest)
    if manifest.record is not None and (error := _check_marker(path, manifest.record)) is not None:
        found[MARKER_NAME] = _make_result(MARKER_NAME, find_size(path / MARKER_NAME), error, "structure")
    return _sort_results(path, manifest, found)


def _repair(directory: Path, error: CorruptCheckpointError) -> list[FileResult]:
    """Check a checkpoint by its record; if all other files are as written, write its lost or damaged marker back.

    ``error`` is why it cannot be opened; it is raised if this is not for its marker alone.
    """
    path = open_directory(directory)
    try:
        record = parse_file(Record.parse, path / RECORD_NAME, RECORD_LIMIT)
    except CheckpointingException:
        raise error from None
    # an overwrite at a URL leaves the record of the save before it next to its own folder for a while
    is_replaced = is_under_way(path) or any(re.match(GENERATION, name) for name in list_folders(directory))
    if is_replaced or _has_marker(path):
        raise error
    manifest = Manifest(backend=record.backend, version=record.version, record=record)
    found = _check_files(directory, path, manifest)
    found.pop(MARKER_NAME, None)
    if any(result.fault for result in found.values()):
        lost = CorruptCheckpointError(f"{MARKER_NAME} is lost or damaged, and is written back where nothing else is")
        found[MARKER_NAME] = _make_result(MARKER_NAME, 0, lost, "structure")
    else:
        size = _write_marker(path, record, error)
        note = f"it was lost or damaged, and was written back as {RECORD_NAME} says"
        found[MARKER_NAME] = _make_result(MARKER_NAME, size, None, "digests", note)  # the record has one of itself
    return _sort_results(path, manifest, found)


def _has_marker(path: Path) -> bool:
    """Return whether a directory has a marker that can be parsed, whatever it says."""
    if not is_there(path / MARKER_NAME):
        return False
    try:
        parse_file(Marker.parse, path / MARKER_NAME, MARKER_LIMIT)
    except CorruptCheckpointError:
        return False
    return True


def _write_marker(path: Path, record: Record, error: CorruptCheckpointError) -> int:
    """Write a marker as the save of a record did, and return its bytes; ``error`` if another one was written then."""
    marker = Marker(sharded_backend=record.backend, sharded_backend_version=record.version).dump()
    integrity = read_integrity(path)
    if integrity is not None and integrity.files.get(MARKER_NAME) != hashlib.sha256(marker).hexdigest():
        raise error
    if was_replaced(path):
        raise replaced_error(path, f"{MARKER_NAME} was to be written")
    target = real_path(path) / MARKER_NAME
    with wrap_os_errors("write", target):
        put_file(target, marker, f".{MARKER_NAME}.shardckpt-tmp")
    return len(marker)


def _check_files(directory: Path, path: Path, manifest: Manifest) -> dict[str, FileResult]:
    """Return the results of the files that have digests, or that the strategy checks, by name."""
    digested = list_digested_files(path, manifest)
    found: dict[str, FileResult] = {}
    if digested is not None:
        progress = Progress("verify", directory, sum(file.nbytes for file in digested), get_plugin_manager())
        for file, error in zip(digested, find_faults(path, manifest, digested, progress.add), strict=True):
            found[file.name] = _make_result(file.name, file.nbytes, error, "digests")
    # Files that their digests prove damaged are not parsed as well.
    if not any(result.fault for result in found.values()):
        for result in _check_structure(path, manifest, has_digests=digested is not None):
            # right digests do not make the content right; a record names every file
            if result.fault or (result.name not in found and manifest.record is None):
                found[result.name] = result
    damaged = [name for name, result in found.items() if result.fault]
    if damaged and manifest.record is not None and (way := explain_mendable(directory, get_plugin_manager(), damaged)):
        found |= {name: replace(found[name], note=way) for name in damaged}
    return found


def _sort_results(path: Path, manifest: Manifest, found: dict[str, FileResult]) -> list[FileResult]:
    """Return the results; entries of the directory that are no files of the checkpoint come last."""
    return [
        *(found[name] for name in sorted(found)),
        *(FileResult(name, 0, "", foreign=True) for name in _list_foreign(path, manifest, found)),
    ]


def _check_marker(path: Path, record: Record) -> CheckpointingException | None:
    """Return the fault of a marker that could be read: it has no digest, and the record has the written content."""
    try:
        with detect_replacement(path):  # its directory is held, but an overwrite removes its files
            parse_file(partial(Marker.check_written, record=record), path / MARKER_NAME, MARKER_LIMIT)
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        return exc
    return None


def _list_foreign(path: Path, manifest: Manifest, found: Collection[str]) -> list[str]:
    """Return the entries of the checkpoint's directory and its folders that are no files of it, sorted."""
    folders = find_folders(found)
    known = {MARKER_NAME, RECORD_NAME, INTEGRITY_NAME, *found, *folders}
    foreign = []
    with wrap_os_errors("list", path):
        # another library's own files in its own folders belong to it, whether it checks them or not
        for folder in ("", *folders) if manifest.record is not None else ("",):
            foreign += [name for name in _list_folder(path, folder) if name not in known]
    return sorted(foreign)


def _list_other_files(directory: Path, found: Collection[str]) -> list[str]:
    """Return the files of another library's folder that, by their suffix, may be checkpoints of their own."""
    if directory.is_file():
        return []
    names = [entry.name for entry in open_directory(directory).iterdir()]
    return sorted(name for name in names if name.endswith(FILE_SUFFIXES) and name not in found and name[0] != ".")


def _list_folder(path: Path, folder: str) -> list[str]:
    """Return the paths of the entries of a folder of the checkpoint; ``""`` is the checkpoint's directory."""
    if not folder:
        return [entry.name for entry in path.iterdir()]
    try:
        refuse_linked_folders(path, f"{folder}/")
    except StorageError:
        return []  # its files are not read, which is their fault already
    try:
        return [f"{folder}/{entry.name}" for entry in (path / folder).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []  # its files are missing


def get_exit_code(results: Sequence[FileResult], *, require_digests: bool = False) -> int:
    """Return the exit code of ``shardckpt verify``: ``INTACT``, ``DAMAGED`` if any file is, or ``NO_ANSWER``.

    The last is for a file that was not readable. With ``require_digests`` a file without a digest, whose values were
    not checked, counts as damaged.
    """
    own = [result for result in results if not result.foreign]
    if any(result.fault and result.checked != "nothing" for result in own):
        return DAMAGED
    if any(result.fault for result in own):
        return NO_ANSWER
    return DAMAGED if require_digests and not has_digests(own) else INTACT


def find_refusal(directory: str | os.PathLike[str]) -> str:
    """Return why no installed strategy reads a checkpoint, as ``ls`` says it; ``""`` if one does, or it has none."""
    plugins = get_plugin_manager()
    try:
        place = locate(directory, plugins)
        choose_reader(place, hold_checkpoint(place, plugins)[1], plugins)
    except (NotACheckpointError, IncompleteCheckpointError):  # another library's, which has been read
        return ""
    except CannotLoadError as exc:
        return str(exc).splitlines()[0].removeprefix(f"{place} ")
    return ""


def has_digests(results: Sequence[FileResult]) -> bool:
    """Return whether every file of the checkpoint was compared with a digest."""
    return all(result.checked == "digests" for result in results if not result.foreign)


def _check_structure(path: Path, manifest: Manifest, *, has_digests: bool) -> list[FileResult]:
    """Return the results of the strategy's check by structure; empty if it has none, but there are digests."""
    try:
        strategy = choose_reader(path, manifest, get_plugin_manager())
    except CannotLoadError:
        if has_digests:
            return []
        raise
    if not isinstance(strategy, ChecksFiles):
        if has_digests:
            return []
        raise CheckpointingException(
            f"{path} was saved without digests: it has neither {RECORD_NAME} nor {INTEGRITY_NAME}, and its reader, "
            f"{type(strategy).__name__}, cannot check files without; load it and save it again"
        )
    # verify=False: the digests, where there are any, have been checked, so that heads of items cost no more than that
    crcs: Crcs = "none" if has_digests else "parts"
    with (
        CheckpointReader(path, manifest, verify=False, crcs=crcs) as reader,
        name_origin(get_plugin_manager(), strategy),
    ):
        checked = check_all_files(strategy, reader, reader.directory, get_plugin_manager())
    if manifest.recognised_as is None:
        checked[MARKER_NAME] = Checked(None)
    return [_make_result(name, find_size(path / name), *found) for name, found in checked.items()]


def _make_result(
    name: str,
    nbytes: int,
    error: CheckpointingException | None,
    by: Literal["digests", "crc32", "structure", "nothing"],
    note: str = "",
) -> FileResult:
    if error is None:
        return FileResult(name, nbytes, "", checked=by, note=note)
    return FileResult(name, nbytes, str(error), checked=by if is_damage(error) else "nothing", note=note)
