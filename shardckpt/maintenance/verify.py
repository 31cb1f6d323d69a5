"""Checking every file of a checkpoint: by digests where it has them, else by what its index says of the files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardckpt.engine import find_faults, is_damage, list_digested_files, locate
from shardckpt.errors import CannotLoadError, CheckpointingException
from shardckpt.manifest import INTEGRITY_NAME, MARKER_NAME, RECORD_NAME
from shardckpt.plugins import choose_reader, hold_checkpoint, host
from shardckpt.storage import CheckpointReader, file_size, naming, retry_if_replaced
from shardckpt.strategy import ChecksFiles

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.manifest import Manifest

#: What ``shardckpt verify`` exits with.
WHOLE, DAMAGED, NO_ANSWER, WHOLE_WITHOUT_DIGESTS = 0, 1, 2, 3


@dataclass(frozen=True)
class FileResult:
    """A file in a checkpoint's directory.

    Attributes:
        name: Its name in the directory.
        nbytes: Its size, as it was written where that is known; 0 for a foreign file, and for one that is not there.
        fault: What is wrong with it, or why it could not be read; ``""`` for nothing, and for a foreign file, which is
            not read.
        foreign: Whether it is not a file of the checkpoint.
        checked: What the result is by: ``digests``, of all bytes; ``structure``, where there is no digest of it; or
            ``nothing``, where it could not be read, or is foreign.
    """

    name: str
    nbytes: int
    fault: str
    foreign: bool = False
    checked: Literal["digests", "structure", "nothing"] = "nothing"


def verify_checkpoint(directory: str | os.PathLike[str]) -> list[FileResult]:
    """Check every file of a checkpoint, as far as it can be.

    Where ``shardckpt.json`` or ``integrity.json`` has digests, every byte is read and compared, in parallel. Of a
    checkpoint that another library wrote, the structure of the files without digests is checked: that they are there,
    that the places which the index names lie in them and nothing behind, and that what is there is of the kind that the
    index says. No value is checked by that. Files that are not the checkpoint's are listed as foreign, no fault.

    Args:
        directory: The checkpoint, or its URL.

    Returns:
        A result for every file; :func:`verdict_of` says what they mean together.

    Raises:
        CannotLoadError: there is no checkpoint, or one that nothing installed reads and that has no digests.
        CorruptCheckpointError: a file that names the others is missing or damaged.
        CheckpointingException: there is no answer: no digests, and a reader that cannot tell without; or a file that
            names the others cannot be read.
    """
    return retry_if_replaced(lambda: _verified(locate(directory, host())), directory)


def _verified(directory: Path) -> list[FileResult]:
    path, manifest = hold_checkpoint(directory, host())
    digested = list_digested_files(path, manifest)
    found: dict[str, FileResult] = {}
    if digested is not None:
        for file, error in zip(digested, find_faults(path, manifest, digested), strict=True):
            found[file.name] = _result(file.name, file.nbytes, error, "digests")
    if manifest.record is None and not any(result.fault for result in found.values()):
        for result in _structure(path, manifest, has_digests=digested is not None):
            before = found.get(result.name)
            if before is None or result.fault:
                found[result.name] = result
    known = {MARKER_NAME, RECORD_NAME, INTEGRITY_NAME, *found}
    with naming("list", path):
        extra = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    return [
        *(found[name] for name in sorted(found)),
        *(FileResult(name, 0, "", foreign=True) for name in extra),
    ]


def verdict_of(results: Sequence[FileResult]) -> int:
    """What the results mean together: one of the exit codes of ``shardckpt verify``."""
    own = [result for result in results if not result.foreign]
    if any(result.fault and result.checked != "nothing" for result in own):
        return DAMAGED
    if any(result.fault for result in own):
        return NO_ANSWER
    return WHOLE if all(result.checked == "digests" for result in own) else WHOLE_WITHOUT_DIGESTS


def _structure(path: Path, manifest: Manifest, *, has_digests: bool) -> list[FileResult]:
    """What the strategy says of the files, by their structure; where it cannot, digests alone count."""
    try:
        strategy = choose_reader(path, manifest, host())
    except CannotLoadError:
        if has_digests:
            return []
        raise
    if not isinstance(strategy, ChecksFiles):
        if has_digests:
            return []
        raise CheckpointingException(
            f"{path} was saved without digests: it has neither {RECORD_NAME} nor {INTEGRITY_NAME}, and its reader, "
            f"{type(strategy).__name__}, cannot judge files without; load it and save it again"
        )
    with CheckpointReader(path, manifest, verify=True) as reader:
        errors = strategy.check_files(reader)
    if manifest.recognised_as is None:
        errors[MARKER_NAME] = None
    return [_result(name, _size(path / name), error, "structure") for name, error in errors.items()]


def _result(
    name: str, nbytes: int, error: CheckpointingException | None, by: Literal["digests", "structure"]
) -> FileResult:
    if error is None:
        return FileResult(name, nbytes, "", checked=by)
    return FileResult(name, nbytes, str(error), checked=by if is_damage(error) else "nothing")


def _size(path: Path) -> int:
    try:
        return file_size(path)
    except OSError:
        return 0


__all__ = [
    "DAMAGED",
    "NO_ANSWER",
    "WHOLE",
    "WHOLE_WITHOUT_DIGESTS",
    "FileResult",
    "verdict_of",
    "verify_checkpoint",
]
