"""Whole or absent: a save fills a staging directory beside its target, and one rename publishes it.

One process does it all in ``with staging_directory(target) as staging: ...; commit_staging(staging, target, ...)``; the
ranks of a save use its parts (:mod:`shardckpt.engine.transaction`).

The steps, in the order that a power cut asks for: every file fsynced by who wrote it; then the files that make the
checkpoint valid; then the staging directory; then the rename, or the exchange with what stood there; then the parent.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.storage.directory import replaced_error
from shardckpt.storage.filesystem import exchange, naming, sync_directory, sync_file
from shardckpt.storage.leftovers import remove_tree
from shardckpt.storage.owner import claim, release
from shardckpt.storage.staging_names import (
    REPLACED,
    STAGING,
    discarded_name,
    is_temporary,
    new_save_id,
    prefix,
    stem,
    temporary_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from shardckpt.storage.owner import Owner

logger = logging.getLogger(__name__)


def staging_path(target: Path, save_id: str, owner: Owner | None = None) -> Path:
    """The staging directory of a save to ``target``, beside it.

    Args:
        target: The checkpoint's directory.
        save_id: The save's own name.
        owner: The process that commits it; by default this one.
    """
    return target.with_name(temporary_name(target.name, STAGING, save_id, owner))


def create_staging(target: Path, save_id: str) -> Path:
    """Make the staging directory of a save that this process commits, where :func:`staging_path` says."""
    staging = staging_path(target, save_id)
    with naming("create the staging directory", staging):
        _make_directory(target.parent)
        claim(staging.name)  # first: garbage collection in another thread removes what is not claimed
        try:
            staging.mkdir()
        except BaseException:
            release(staging.name)
            raise
    return staging


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """A new staging directory, which the block fills and commits; if it does not, nothing of it remains.

    Args:
        target: What :func:`commit_staging`, :func:`publish_staging` or :func:`replace_target` makes of it.
    """
    staging = create_staging(target, new_save_id())
    try:
        yield staging
    finally:
        if staging.exists():
            discard_staging(staging)


def staging_of(target: Path) -> list[Path]:
    """Staging directories of saves to ``target`` that were not committed (yet)."""
    return _siblings(target, STAGING)


def replaced_of(target: Path) -> list[Path]:
    """Checkpoints moved aside by an overwrite of ``target`` that did not end."""
    return _siblings(target, REPLACED)


def is_staging(path: Path) -> bool:
    """Whether a directory is a save's or a removal's own, not a checkpoint to load."""
    return is_temporary(path.name)


def discard_staging(staging: Path) -> None:
    """Remove a staging directory after a failed save; what cannot be removed is reported, not raised."""
    gone = staging.with_name(discarded_name(staging.name))
    try:
        os.rename(staging, gone)  # who still writes there finds no directory, and cannot add to it while it is emptied
    except OSError:
        gone = staging
    release(staging.name)  # not before: garbage collection in another thread would take it meanwhile
    try:
        remove_tree(gone)
    except StorageError as exc:
        logger.warning("%s", exc)


def is_free(target: Path) -> bool:
    """Whether a save may take the path: nothing there, or an empty directory."""
    with naming("look at", target):
        if not target.exists():
            return True
        if not target.is_dir():
            raise StorageError(f"{target} exists and is not a directory: give another path")
        return not any(target.iterdir())


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that is not free, unless it may be overwritten.

    Raises:
        StorageError: it names the target and the way out.
    """
    if not overwrite and not is_free(target):
        raise StorageError(
            f"{target} is not empty: give another directory, or pass overwrite=True to replace the checkpoint in it; "
            "other files in it stay"
        )


def commit_staging(staging: Path, target: Path, list_owned: Callable[[], Collection[str]], *, overwrite: bool) -> None:
    """Make a staging directory the target, whatever stands there.

    Args:
        staging: All its files are durable.
        target: The checkpoint's directory.
        list_owned: Lists what of an existing target is replaced; see :func:`replace_target`.
        overwrite: Whether an existing target may be replaced.

    Raises:
        StorageError: it may not, or a step fails.
    """
    if is_free(target):
        publish_staging(staging, target)
    else:
        check_target(target, overwrite=overwrite)  # another save may have come since the first look
        replace_target(staging, target, list_owned())


def publish_staging(staging: Path, target: Path) -> None:
    """Make a staging directory the target, which must be absent or an empty directory."""
    sync_directory(staging)
    with naming(f"rename {staging} to", target):
        os.rename(staging, target)
    release(staging.name)
    try:
        sync_directory(target.parent)
    except StorageError as exc:
        raise StorageError(f"{exc}; {target} is the new checkpoint, whole, perhaps not yet durable") from exc


def replace_target(staging: Path, target: Path, owned: Collection[str], old: os.stat_result | None = None) -> None:
    """Put a staging directory in the place of an existing one, and remove the old.

    An error leaves either the old directory at ``target`` and the new one at ``staging``, or the new one at ``target``
    and the old one, whole, at a ``.<name>.shardckpt-replaced-...`` beside it: never the old one at ``staging``, which
    callers discard.

    Args:
        staging: The new checkpoint.
        target: The directory to replace.
        owned: Names in ``target`` that are the old checkpoint's; all others are kept, as hard links.
        old: The directory that is to be replaced, where no other may be.

    Raises:
        CheckpointReplacedError: another save has replaced the old directory; its own is as it was.
    """
    with naming("keep the other files of", target):
        _keep_foreign(target, staging, owned)
    sync_directory(staging)
    if old is not None and not _is_directory(target, old):
        raise replaced_error(target, "what would take its place was made from another save than what is there")
    aside = target.with_name(temporary_name(target.name, REPLACED, new_save_id()))
    new = staging.stat()
    claim(aside.name)
    try:
        with naming("replace", target):
            _swap(staging, target, aside)
        sync_directory(target.parent)
    except BaseException as exc:
        if not _is_directory(target, new):
            _undo_swap(staging, target, aside)
            raise
        state = f"{target} is the new checkpoint, perhaps not yet durable, and {aside} the one before it, whole"
        if isinstance(exc, StorageError):
            raise StorageError(f"{exc}; {state}") from exc
        logger.warning("interrupted: %s", state)
        raise
    else:
        _remove_replaced(aside, staging)
    finally:
        release(aside.name)


def _swap(staging: Path, target: Path, aside: Path) -> None:
    """Let ``target`` be what was ``staging``, and ``aside`` what was ``target``."""
    os.rename(staging, aside)  # before the exchange: at no moment is the old checkpoint at a path that is discarded
    if exchange(aside, target):
        return
    os.rename(aside, staging)
    os.rename(target, aside)
    os.rename(staging, target)


def _undo_swap(staging: Path, target: Path, aside: Path) -> None:
    """After a swap that did not end: the old directory back at ``target``, the new one back at ``staging``."""
    with naming(f"rename {aside} back, while replacing", target):
        if not target.exists():
            os.rename(aside, target)
        elif aside.exists():
            os.rename(aside, staging)


def _is_directory(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), known)
    except OSError:
        return False


def _remove_replaced(aside: Path, staging: Path) -> None:
    """Remove the old checkpoint, under a name that does not promise a whole one while it is removed."""
    try:
        os.rename(aside, staging)
    except OSError as exc:
        logger.warning("cannot remove %s, which is no longer needed: %s", aside, exc)
        return
    discard_staging(staging)


def _make_directory(path: Path) -> None:
    """Make a directory and those above it, each durable in the one that holds it."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def _siblings(target: Path, kind: str) -> list[Path]:
    """The target's temporary directories of a kind; older releases did not cut long names."""
    if not target.parent.is_dir():
        return []
    begins = (prefix(stem(target.name), kind), prefix(target.name, kind))
    return sorted(path for path in target.parent.iterdir() if path.name.startswith(begins))


def _keep_foreign(source: Path, staging: Path, owned: Collection[str]) -> None:
    for path in source.iterdir():
        kept = staging / path.name
        if path.name in owned or os.path.lexists(kept):
            continue
        if path.is_dir() and not path.is_symlink():
            kept.mkdir()
            _keep_foreign(path, kept, ())
            sync_directory(kept)
        else:
            _link_or_copy(path, kept)


def _link_or_copy(path: Path, kept: Path) -> None:
    try:
        os.link(path, kept, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(path, kept, follow_symlinks=False)
        if not kept.is_symlink():
            sync_file(kept)


__all__ = [
    "check_target",
    "commit_staging",
    "create_staging",
    "discard_staging",
    "is_free",
    "is_staging",
    "publish_staging",
    "replace_target",
    "replaced_of",
    "staging_directory",
    "staging_of",
    "staging_path",
]
