"""Complete or absent: a save fills a staging directory next to its target, and one rename publishes it.

A single process writes ``with staging_directory(target) as staging: ...; commit_staging(staging, target, ...)``; the
ranks of a save call the parts (:mod:`shardckpt.engine.transaction`).

The order makes every moment of a power cut safe:

1. The writer of each file fsyncs it: a name must not become durable before its bytes.
2. The main rank writes and fsyncs the files that make the checkpoint valid: its record and ``metadata.json``.
3. The folders in the staging directory are fsynced, the innermost first, and then the directory itself: all entries
   must be durable before it has the checkpoint's name.
4. One rename publishes it, or one exchange with the old checkpoint. Before it a load sees the old, after it the new.
5. The parent directory is fsynced: without this a power cut may undo the rename, which leaves the old checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.commit.holds import find_holds_beside, hold_place
from shardckpt.commit.leftovers import remove_tree
from shardckpt.commit.owner import claim_name, release_name
from shardckpt.commit.staging_names import (
    REPLACED,
    STAGING,
    discarded_name,
    new_save_id,
    prefix,
    stem,
    temporary_name,
)
from shardckpt.errors import StorageError, listed
from shardckpt.manifest.names import MARKER_NAME, find_folders, list_parents
from shardckpt.storage.directory import replaced_error
from shardckpt.storage.filesystem import is_there, sync_directory, sync_file, sync_tree, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from shardckpt.commit.owner import Owner

logger = logging.getLogger(__name__)

#: Prefixes of files that an export replaces.
_OF_EXPORTS = ("config.json", "generation_config", "tokenizer", "adapter_", "pytorch_model")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def staging_path(target: Path, save_id: str, owner: Owner | None = None) -> Path:
    """Return the path of a save's staging directory, which has the same parent as the target.

    The same parent, because a rename is one step only inside one file system. The owner is the process that commits it,
    by default this one.
    """
    return target.with_name(temporary_name(target.name, STAGING, save_id, owner))


def create_staging(target: Path, save_id: str) -> Path:
    """Create the staging directory of a save that this process commits, and return its path (:func:`staging_path`)."""
    staging = staging_path(target, save_id)
    with wrap_os_errors("create the staging directory", staging):
        _make_directory(target.parent)
        claim_name(staging.name)  # before it exists: garbage collection in another thread removes unclaimed directories
        try:
            staging.mkdir()
        except BaseException:
            release_name(staging.name)
            raise
    return staging


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """Create a staging directory for the block, which fills and commits it; remove it if the block does not.

    The context manager gives its path. The block calls :func:`commit_staging`, :func:`publish_staging` or
    :func:`replace_target` with the same target.
    """
    staging = create_staging(target, new_save_id())
    try:
        yield staging
    finally:
        discard_staging(staging)  # if it is there still


def list_staging_directories(target: Path) -> list[Path]:
    """Return the staging directories of saves to ``target`` that are not committed, sorted by name."""
    return _siblings(target, STAGING)


def list_replaced_checkpoints(target: Path) -> list[Path]:
    """Return the checkpoints that unfinished overwrites of ``target`` have moved aside, sorted by name."""
    return _siblings(target, REPLACED)


def discard_staging(staging: Path) -> None:
    """Remove a staging directory, if it exists; log files that cannot be removed, and raise nothing."""
    gone = staging.with_name(discarded_name(staging.name))
    try:
        os.rename(staging, gone)  # first: a rank that still writes there by path fails, and adds no file during removal
    except OSError:
        gone = staging
    release_name(staging.name)  # after the rename: else garbage collection in another thread removes the same directory
    try:
        remove_tree(gone)
    except StorageError as exc:
        logger.warning("%s", exc)


def is_free(target: Path) -> bool:
    """Return whether a save may use the path: nothing is there, or an empty directory.

    It is a StorageError if a file is there, or the system does not say.
    """
    with wrap_os_errors("access", target):
        if not target.exists():
            return True
        if not target.is_dir():
            raise StorageError(f"{target} exists and is not a directory: give another path")
        return not any(target.iterdir())


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise an error if the target is not free and must not be overwritten, is held, or is where this process works.

    A lease or a pin is a CheckpointingException. A StorageError names the target and the remedy.
    """
    with wrap_os_errors("access", target):
        is_taken = target.exists()
    if overwrite and is_taken and (holds := find_holds_beside(target)) is not None:
        holds.refuse(target.name)
    if not overwrite and not is_free(target):
        with wrap_os_errors("access", target):
            names = sorted(path.name for path in target.iterdir())
        of_export = (
            ", but an export removes the files that a loader would load with its weights: adapters, other weights and, "
            "with assets (--assets), the old configuration and tokenizer"
        )
        # not the names of a checkpoint's files, which depend on how many ranks saved it
        what = "a checkpoint" if MARKER_NAME in names else listed(names, limit=4)
        raise StorageError(
            f"{target} is not empty: it has {what}. Give another directory, or pass overwrite=True "
            "(the command: --overwrite) to replace the checkpoint in it; other files in it stay"
            + of_export
            * any(name.startswith(_OF_EXPORTS) for name in names)
        )
    if is_taken:
        _refuse_current_directory(target)


def _refuse_current_directory(target: Path) -> None:
    with suppress(FileNotFoundError):  # it is gone
        here = Path.cwd()
        if target in (here, *here.parents):
            raise StorageError(
                f"{target} would be replaced as a whole, and this process works in it ({here}), in a directory that "
                "would then be gone: change to another directory first"
            )


def commit_staging(staging: Path, target: Path, list_owned: Callable[[], Collection[str]], *, overwrite: bool) -> None:
    """Publish a staging directory, whose files are all fsynced, as the target, or replace the target that exists.

    ``list_owned`` returns the ``owned`` names of :func:`replace_target`; it is called only if a target exists. One that
    must not be replaced is a StorageError.
    """
    if is_free(target):
        publish_staging(staging, target)
    else:
        check_target(target, overwrite=overwrite)  # another save may have committed since the first check
        replace_target(staging, target, list_owned())


def publish_staging(staging: Path, target: Path) -> None:
    """Rename a staging directory to the target, which must be absent or an empty directory.

    If a step fails, the text of the StorageError says whether the target is the new checkpoint already.
    """
    sync_tree(staging)
    with wrap_os_errors(f"rename {staging} to", target):
        os.rename(staging, target)
    release_name(staging.name)
    try:  # the commit is done: a later failure must not read as a save that failed
        sync_directory(target.parent)
    except StorageError as exc:
        raise StorageError(f"{exc}; {target} is the new checkpoint, complete, perhaps not yet durable") from exc


def replace_target(staging: Path, target: Path, owned: Collection[str], old: os.stat_result | None = None) -> None:
    """Exchange a staging directory with an existing target, and remove the old checkpoint.

    ``owned`` are the paths in ``target`` that belong to the old checkpoint, a folder with all that is in it; all others
    are kept, as hard links. ``old`` is the ``stat`` of the directory to replace, if no other directory may be replaced.

    An error leaves either the old directory at ``target`` and the new one at ``staging``, or the new one at ``target``
    and the old one, complete, at a ``.<name>.shardckpt-replaced-...`` with the same parent: never the old one at
    ``staging``, which callers discard. A StorageError says which directory holds which checkpoint. Nothing has changed
    if another save has replaced ``old`` (CheckpointReplacedError), or a lease or a pin holds the target
    (CheckpointingException).
    """
    # before the exchange, and durably: no crash loses a file that is not the checkpoint's
    with wrap_os_errors("keep the other files of", target):
        _keep_foreign(target, staging, owned)
    sync_tree(staging)
    aside = target.with_name(temporary_name(target.name, REPLACED, new_save_id()))
    with wrap_os_errors("access", staging):
        new = staging.stat()  # after an error the inode at the target tells how far the swap came
    claim_name(aside.name)
    try:
        with hold_place(target):
            if old is not None and not _is_directory(target, old):
                raise replaced_error(target, "the new checkpoint was made from another save than it would replace")
            with wrap_os_errors("replace", target):
                was_there = target.exists()  # else a removal that was under way has ended meanwhile
                if was_there:
                    _swap(staging, target, aside)
                else:
                    os.rename(staging, target)
        sync_directory(target.parent)
    except BaseException as exc:  # an interrupt, too: it may come between the two renames of the swap
        if not _is_directory(target, new):
            _undo_swap(staging, target, aside)
            raise
        state = f"{target} is the new checkpoint, perhaps not yet durable"
        state += f", and {aside} the complete old one" if aside.exists() else ""
        if isinstance(exc, StorageError):
            raise StorageError(f"{exc}; {state}") from exc
        logger.warning("interrupted: %s", state)
        raise
    else:
        if not was_there:
            release_name(staging.name)
            return
        try:
            os.rename(aside, staging)  # to the name of a staging directory: a crash may leave half of it
        except OSError as exc:
            logger.warning("cannot remove %s, which is no longer needed: %s", aside, exc)
        else:
            discard_staging(staging)
    finally:
        release_name(aside.name)


def _swap(staging: Path, target: Path, aside: Path) -> None:
    """Move ``staging`` to ``target``, and ``target`` to ``aside``.

    Without an exchange in one step there is a moment with no target: a crash then leaves the old one at ``aside``.
    """
    os.rename(staging, aside)  # so the exchange never puts the old checkpoint at `staging`, which is discarded
    if exchange(aside, target):
        return
    os.rename(aside, staging)
    os.rename(target, aside)
    os.rename(staging, target)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two directory entries in one step; return False if the system or file system has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    # ENOSYS: Linux before 3.15; EINVAL: NFS and other file systems that cannot; the caller then renames twice
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    with wrap_os_errors(f"exchange {a} with", b):
        raise OSError(code, os.strerror(code))


def _undo_swap(staging: Path, target: Path, aside: Path) -> None:
    """After an unfinished swap: move the old directory back to ``target``, the new one back to ``staging``."""
    with wrap_os_errors(f"rename {aside} back, while replacing", target):
        if not aside.exists():  # nothing was moved
            return
        if not target.exists():
            os.rename(aside, target)
        else:  # the target was not moved yet: `aside` is the new directory
            os.rename(aside, staging)


def _is_directory(path: Path, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), known)
    except OSError:
        return False


def _make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each entry durable in its parent."""
    # not mkdir(parents=True): a power cut could undo the parents' entries, and with them a save that was reported done
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as exc:  # a file: "exists" alone would not name the fault
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a directory") from exc
    sync_directory(path.parent)


def _siblings(target: Path, kind: str) -> list[Path]:
    """Return the target's temporary directories of a kind."""
    # the second: older releases did not cut long names
    begins = (prefix(stem(target.name), kind), prefix(target.name, kind))
    with wrap_os_errors("list", target.parent):
        if not target.parent.is_dir():
            return []
        return sorted(path for path in target.parent.iterdir() if path.name.startswith(begins))


def find_foreign(directory: Path, owned: Collection[str]) -> list[str]:
    """Return the paths in a local checkpoint's directory that are not the checkpoint's, folders first.

    They are relative to the directory. ``owned`` are the checkpoint's own paths; a folder counts with all that is in
    it. A folder with files of the checkpoint is not among the result, but its other files.
    """
    found: list[str] = []
    _add_foreign(directory, "", owned, find_folders(owned), found)
    return found


def _add_foreign(directory: Path, within: str, owned: Collection[str], shared: set[str], found: list[str]) -> None:
    for path in (directory / within).iterdir():
        name = within + path.name
        if name in owned:
            continue
        is_folder = path.is_dir() and not path.is_symlink()
        if not (is_folder and name in shared):
            found.append(name)
        if is_folder:
            _add_foreign(directory, f"{name}/", owned, shared, found)


def _keep_foreign(source: Path, staging: Path, owned: Collection[str]) -> None:
    """Link the files that are not the checkpoint's into the staging directory, where the new checkpoint's files win."""
    for name in find_foreign(source, owned):
        path, kept = source / name, staging / name
        if is_there(kept) or not _make_parents(staging, name):
            continue
        if path.is_dir() and not path.is_symlink():
            kept.mkdir()
            continue
        try:
            os.link(path, kept, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(path, kept, follow_symlinks=False)
            if not kept.is_symlink():
                sync_file(kept)


def _make_parents(staging: Path, name: str) -> bool:
    """Create the folders on the way to a name; return False if a file has the name of one."""
    for folder in list_parents(name):
        path = staging / folder
        if not is_there(path):
            path.mkdir()
        elif path.is_symlink() or not path.is_dir():
            return False
    return True
