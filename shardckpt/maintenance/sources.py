"""Open any checkpoint, folder or file that can be read, recognised by its content."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardckpt.archive.reader import Archive
from shardckpt.deepspeed.files import find_files
from shardckpt.deepspeed.load import DeepSpeedLoadStrategy
from shardckpt.distributed.comm import Comm
from shardckpt.engine.damage import hide_damaged
from shardckpt.engine.lazy import StoredCheckpoint
from shardckpt.engine.locations import locate
from shardckpt.engine.opening import OpenCheckpoint, lend_checkpoint
from shardckpt.engine.operation import Operation
from shardckpt.engine.progress import Progress
from shardckpt.engine.renaming import list_keys, list_names, rename_key, rename_stored
from shardckpt.errors import (
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    KeyMismatchError,
    NotACheckpointError,
    format_many,
    listed,
)
from shardckpt.huggingface.check import check_folder, check_weights
from shardckpt.huggingface.folder import CONFIG, read_folder_config, resolve_link
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.names import ADAPTER, ADAPTER_WEIGHTS
from shardckpt.huggingface.review import review_folder, review_others
from shardckpt.huggingface.torch_file import is_archive, is_torch_file
from shardckpt.huggingface.torch_strategy import TorchFileLoadStrategy, find_torch_weights
from shardckpt.huggingface.whole_folder import name_for_trainer, read_all_of_folder
from shardckpt.maintenance.foreign import describe_file, describe_folder
from shardckpt.maintenance.inside import is_marked
from shardckpt.maintenance.unmarked import hold_unmarked
from shardckpt.manifest.hub import (
    TRAINER_STATE,
    explain_lost_model,
    explain_step_without_optimizer,
    explain_unfinished_step,
    find_trainer_parts,
)
from shardckpt.manifest.models import Manifest
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import check_policy, find_reader, hold_checkpoint
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.directory import is_read_again, open_directory
from shardckpt.storage.filesystem import is_there, wrap_os_errors
from shardckpt.storage.input_file import open_existing
from shardckpt.storage.places import get_url, list_entries
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.safetensors_header import header_length
from shardckpt.strategy import ChecksFiles, LoadContext, find_error

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    import torch

    from shardckpt.huggingface.rules import RuleMapping
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.strategy import LoadStrategy


class Checked(NamedTuple):
    """The result of the check of a file.

    Attributes:
        error: The file's fault, or None.
        how: What was compared: the CRC-32 of its values, its structure alone, or nothing.
        note: Other remarks.
    """

    error: CheckpointingException | None
    how: Literal["crc32", "structure", "nothing"] = "structure"
    note: str = ""


class Reading(NamedTuple):
    """Options for reading a source.

    Attributes:
        allow_globals: Classes and functions that pickles may name, besides those that every load accepts.
        kept_bytes: As for :class:`~shardckpt.storage.CheckpointReader`.
        memory_budget: Bytes that reading may hold next to the tensors; None: as many as are fast.
        check: As for :func:`shardckpt.engine.open_checkpoint`.
        unmarked: As for :func:`~shardckpt.maintenance.unmarked.hold_unmarked`. With it, or with ``skip_damaged``, a
            Hugging Face folder may lack files; the index is without their tensors.
        rename: Prefixes of keys and of paths in the common state, each with the prefix that replaces it.
        skip_damaged: Whether tensors and objects that cannot be read are left out, and no error; all are read first.
        trainer: The mapping of a trainer's names to the Hub's; a Hugging Face folder is read by the trainer's names.
        dtype: As for :func:`shardckpt.huggingface.name_for_trainer`.
    """

    allow_globals: tuple[Any, ...] = ()
    kept_bytes: int = 0
    memory_budget: int | None = None
    check: bool = True
    unmarked: bool = False
    rename: Mapping[str, str] | None = None
    skip_damaged: bool = False
    trainer: RuleMapping | None = None
    dtype: torch.dtype | None = None


logger = logging.getLogger(__name__)

_AS_IT_IS = Reading()
#: Bytes of the length of a safetensors header.
_LENGTH = 8
#: Bytes of two files that are compared at a time.
_PART_BYTES = 8 << 20
#: Suffixes that nothing but a checkpoint has.
_OF_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors")
#: Suffixes of files of torch.save.
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
#: The upper half of that length, and the first byte of the header.
_HEADER = b"\0\0\0\0{"


@contextmanager
def open_source(location: Path, plugins: PluginManager, how: Reading = _AS_IT_IS) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint, a folder or file of another library that is read here, for the block. Not collective.

    All that is read is of one save.

    Args:
        location: As :func:`shardckpt.engine.locate` returned it.
        plugins: The plugins whose strategies may read it.
        how: The options.

    Raises:
        NotACheckpointError: It is something else, which the error describes.
        RefusedByPolicyError: ``SHARDCKPT_ACCEPT`` leaves out its format.
        KeyMismatchError: Nothing has a name that is to be renamed, or two items would have one name.
    """
    is_partial = how.unmarked or how.skip_damaged
    place, manifest, strategy = _recognise(location, plugins, unmarked=is_partial, skip_damaged=is_partial)
    check_policy(location, manifest)
    with _open(location, place, manifest, strategy, plugins, how) as opened:
        yield _hide_and_rename(opened, how)


def _hide_and_rename(opened: OpenCheckpoint, how: Reading) -> OpenCheckpoint:
    """Return the checkpoint without its damaged items, if they are to be skipped, and with its keys renamed."""
    names, strategy = how.rename or {}, opened.strategy
    lost: Collection[str] = ()
    if isinstance(strategy, HuggingFaceLoadStrategy):
        lost = strategy.folder.lost
    elif isinstance(strategy, TorchFileLoadStrategy):
        lost = strategy.lost
    if isinstance(strategy, HuggingFaceLoadStrategy) and how.trainer is not None:
        damaged = hide_damaged(opened, lost).damaged if how.skip_damaged else ()
        by_trainer = name_for_trainer(strategy, how.trainer, how.dtype, damaged)
        return replace(_rename(replace(opened, strategy=by_trainer), names), damaged=damaged)
    named = _rename(opened, names)
    return hide_damaged(named, [rename_key(name, names) for name in lost]) if how.skip_damaged else named


def _rename(opened: OpenCheckpoint, rename: Mapping[str, str]) -> OpenCheckpoint:
    """Rename keys and paths of the common state; keys alone where that cannot be read, if all names are keys'."""
    if not rename:
        return opened
    keys = list_keys(opened)
    try:
        names = list_names(opened)
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        try:
            return rename_stored(opened, rename, keys)
        except KeyMismatchError:
            raise exc from None  # the prefixes to rename may be in the common state
    return rename_stored(opened, rename, names)


def read_hub_config(location: Path, plugins: PluginManager) -> dict[str, Any] | None:
    """Return the ``config.json`` of a Hugging Face folder, empty without one; None for something else."""
    # a damaged file is an error when it is read, or none
    place, manifest, strategy = _recognise(location, plugins, skip_damaged=True)
    with _open(location, place, manifest, strategy, plugins, Reading(check=False, skip_damaged=True)):
        if isinstance(strategy, HuggingFaceLoadStrategy):
            return strategy.folder.config
        is_of_hub = isinstance(strategy, TorchFileLoadStrategy) and not location.is_file()
        return read_folder_config(place) if is_of_hub else None


@contextmanager
def open_staged(
    staging: Path, files: Path, plugins: PluginManager, how: Reading = _AS_IT_IS
) -> Iterator[OpenCheckpoint]:
    """Open a staged checkpoint that is not committed, for the block. Not collective.

    ``staging`` is the staging directory or file; of a checkpoint, it has the record and ``metadata.json``. ``files`` is
    where all other files of a checkpoint are: ``staging``, or a store folder, which has no marker yet.
    """
    place, manifest, strategy = _recognise(staging, plugins, is_staged=True)
    if files != staging:
        place = open_directory(files)
    with _open(files, place, manifest, strategy, plugins, how) as opened:
        yield opened


@contextmanager
def _open(
    location: Path, place: Path, manifest: Manifest, strategy: LoadStrategy, plugins: PluginManager, how: Reading
) -> Iterator[OpenCheckpoint]:
    comm = Comm(alone=True)
    operation = Operation("load", location, comm, plugins)
    operation.set_strategy(strategy)
    with CheckpointReader(
        place, manifest, verify=True, kept_bytes=how.kept_bytes, memory_budget=how.memory_budget, crcs="parts"
    ) as reader:
        if is_read_again() and manifest.record is not None and not how.skip_damaged:
            reader.open_files([file.name for file in manifest.record.files])  # as for a load: a save may replace them
        yield OpenCheckpoint(strategy, LoadContext(reader, comm, how.allow_globals), operation)
        if how.check:
            reader.check_unchanged()


@contextmanager
def open_any(
    place: str | os.PathLike[str], *, unmarked: bool = False, rename: Mapping[str, str] | None = None
) -> Iterator[StoredCheckpoint]:
    """Open a source like :func:`open_source`, as a mapping from key to tensor. Not collective.

    Its tensors are read when they are asked for. ``place`` is a path, or, except for files, a URL.
    """
    plugins = get_plugin_manager()
    opened = open_source(locate(place, plugins), plugins, Reading(unmarked=unmarked, rename=rename))
    with lend_checkpoint(opened) as checkpoint:
        yield StoredCheckpoint(checkpoint)


def identify_source(location: Path, opened: OpenCheckpoint) -> str:
    """Return the identity of the values of a source; ``""`` without one: a foreign folder on a store."""
    record = opened.context.reader.manifest.record
    if record is not None:
        return record.self_digest
    if not has_local_files(location):
        return ""
    paths = sorted(location.rglob("*")) if location.is_dir() else [location]
    with wrap_os_errors("access", location):
        found = [(str(path), path.stat()) for path in paths if path.exists()]  # a link may lead nowhere
    return repr([(path, info.st_ino, info.st_size, info.st_mtime_ns) for path, info in found])


def check_source(location: Path, plugins: PluginManager, error: CheckpointingException) -> dict[str, Checked]:
    """Check the files of a folder of Hugging Face or DeepSpeed, or a file, as far as that goes without digests.

    Return the fault of each file by its name, or None, and how it was checked. Anything else is a NotACheckpointError
    that describes it; if it is not recognised, ``error`` is raised. A damaged list of the files is an error, too.
    """
    if location.is_file():
        return _check_opened(location, plugins)
    place = open_directory(location)
    if not place.is_dir():
        raise error
    with suppress(NotACheckpointError):  # no folder of Hugging Face
        return _check_folder(place, location, plugins)
    try:
        found = _check_opened(location, plugins)
    except (NotACheckpointError, IncompleteCheckpointError):
        if not (parts := find_trainer_parts(list_entries(place))):
            raise
        lost = explain_lost_model(parts)
        found = {lost.partition(" ")[0]: Checked(CorruptCheckpointError(lost))} if lost else {}
    return _check_trainer_step(place, location, plugins, found)


def _check_opened(location: Path, plugins: PluginManager) -> dict[str, Checked]:
    """Check the files that a strategy reads."""
    with open_source(location, plugins) as opened:
        strategy, reader = opened.strategy, opened.context.reader
        return check_all_files(strategy, reader, location, plugins) if isinstance(strategy, ChecksFiles) else {}


def _check_part(url: str, plugins: PluginManager) -> dict[str, Checked]:
    """Check a checkpoint in the folder of a Trainer's step; its files are named from there."""
    location, name = locate(url, plugins), url.rpartition("/")[2]
    try:
        found = _check_opened(location, plugins)
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        return {name: Checked(exc)}
    return {f"{name}/{file}": each for file, each in found.items()}


def _check_folder(place: Path, location: Path, plugins: PluginManager) -> dict[str, Checked]:
    """Check a folder of Hugging Face: its files and, if they are sound, whether it is a model that engines load."""
    found = {name: Checked(error) for name, error in check_folder(place).items()}
    weights = {name for name in found if name.endswith(".safetensors")}
    found = _check_trainer_step(place, location, plugins, found)
    if any(found[name].error for name in weights):
        return found
    for name, note in review_others(place, weights).items():
        if name.endswith(".safetensors"):
            found[name] = Checked(_find_fault(check_weights, place / name, resolve_link(place, name)), note=note)
        else:
            found[name] = Checked(found[name].error if name in found else None, note=note)
    config = ADAPTER if ADAPTER_WEIGHTS in weights else CONFIG
    if config in found and found[config].error:
        return found
    try:
        with open_source(location, plugins) as opened:
            review = review_folder(location, opened)
    except CheckpointReplacedError:
        raise
    except CorruptCheckpointError as exc:  # no file of weights, which are sound
        return {**found, config: Checked(exc)}
    except CheckpointingException as exc:  # a dtype that this torch lacks
        return {**found, config: Checked(None, note=f"not compared with the weights: {exc}")}
    return {**found, review.file: Checked(review.fault, note=review.note)} if review.file else found


def _check_trainer_step(
    place: Path, location: Path, plugins: PluginManager, checked: dict[str, Checked]
) -> dict[str, Checked]:
    """Check files of transformers' Trainer next to a model: files of torch.save, and FSDP's and DeepSpeed's folders.

    Return the result of each file, those in ``checked`` among them, which are not read again.
    """
    names = list_entries(place)
    found = _check_archives(place, checked) | checked
    for part in find_trainer_parts(names):
        if part not in found:
            found |= _check_part(f"{get_url(location)}/{part}", plugins)
    if unfinished := explain_unfinished_step(location.name, names):
        found[TRAINER_STATE] = Checked(CorruptCheckpointError(unfinished))
    elif model_only := explain_step_without_optimizer(location.name, names):
        found[TRAINER_STATE] = Checked(None, note=model_only)
    return found


def list_unread_files(location: Path, checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Return the files of torch.save in a folder that its reader does not read: a Trainer's optimizer.

    Return the faults of these files by name, as far as their ends show any; ``""`` if there is none.
    """
    if location.is_file() or checkpoint.record is not None:  # a record names all files of its checkpoint
        return {}
    read = {file.name for file in checkpoint.list_files()}
    if not read:  # the strategy does not say
        return {}
    place = open_directory(location)
    unread = [name for name in list_torch_files(place) if name not in read]
    found = _check_archives(place, members=False) if unread else {}
    damaged = {name: str(each.error).replace(f"{place}/", "") for name, each in found.items() if _is_damaged(each)}
    return {name: damaged.get(name, "") for name in unread}


def have_same_bytes(one: Path, other: Path) -> bool:
    """Return whether two files, or objects of stores, have the same content."""
    with open_existing(one) as first, open_existing(other) as second:
        if first.size != second.size:
            return False
        for start in range(0, first.size, _PART_BYTES):
            parts = [bytearray(min(_PART_BYTES, first.size - start)) for _ in range(2)]
            first.read_into(memoryview(parts[0]), start)
            second.read_into(memoryview(parts[1]), start)
            if parts[0] != parts[1]:
                return False
    return True


def warn_of_unread_files(location: Path, opened: OpenCheckpoint) -> None:
    """Warn of the files in a source's folder that are not converted."""
    if files := list_unread_files(location, StoredCheckpoint(opened)):
        logger.warning("converting %s: %s: convert each by its path", location, describe_unread_files(files))
    if isinstance(opened.strategy, HuggingFaceLoadStrategy) and is_there(location / TRAINER_STATE):
        logger.warning("converting %s: %s is the training's, and is not copied", location, TRAINER_STATE)


def describe_unread_files(files: Mapping[str, str]) -> str:
    """Return a sentence with the names of files that are not read, and which are damaged; ``""`` if there are none."""
    are = "is" if len(files) == 1 else "are"
    many = format_many(len(files), "file")
    names = [f"{name} (damaged)" if fault else name for name, fault in files.items()]
    return f"{many} of torch.save next to the model {are} not read: {listed(names, limit=6)}" if files else ""


def list_torch_files(place: Path) -> list[str]:
    """Return the names of the files of torch.save in a folder."""
    with wrap_os_errors("list", place):
        found = [path for path in place.iterdir() if path.name.endswith(_OF_TORCH) and path.name[0] != "."]
        return sorted(path.name for path in found if not path.is_dir())  # Lightning has folders `*.ckpt`


def find_cut_file(place: Path) -> CheckpointingException | None:
    """Return the error of a file of torch.save next to a model that is empty or cut, or None; no pickle is read."""
    return next((each.error for each in _check_archives(place, members=False).values() if _is_damaged(each)), None)


def _is_damaged(checked: Checked) -> bool:
    """Return whether a file's content is at fault.

    One that cannot be opened may be a link, which other libraries follow; ``verify`` names one that leads nowhere.
    """
    return isinstance(checked.error, CorruptCheckpointError)


def _check_archives(place: Path, skipped: Collection[str] = (), *, members: bool = True) -> dict[str, Checked]:
    """Compare the archives of torch.save in a folder with their CRC-32, or look for their ends; no pickle is read.

    Files in ``skipped`` are not checked. Without ``members`` no value is compared: it looks for the ends alone.
    """
    manifest = Manifest(backend=TorchFileLoadStrategy.backend, version=TorchFileLoadStrategy.version)
    archives = set[str]()

    def check(link: Path, path: Path) -> None:
        folder = place if path == link else path.parent  # the Hub's cache has the file elsewhere
        with CheckpointReader(folder, manifest, verify=False, crcs="parts" if members else None) as reader:
            if not reader.size(path.name):
                raise CorruptCheckpointError(f"{link} is empty")
            if is_archive(reader, path.name):
                archives.add(link.name)
                archive = Archive.of_file(reader, path.name)
                if members:
                    archive.check_members(reader, path.name)

    found = {}
    for name in list_torch_files(place):
        if name in skipped:
            continue
        path = resolve_link(place, name)
        if path.is_symlink() and path.exists():  # readers of other libraries follow it: the file may be sound
            found[name] = Checked(None, "nothing", "not checked: it is a symbolic link")
            continue
        link = place / name
        error = _find_fault(partial(check, link), link, path)
        if error is not None or name in archives:
            found[name] = Checked(error, "crc32" if members and name in archives else "structure")
    return found


def _find_fault(check: Callable[[Path], None], link: Path, path: Path) -> CheckpointingException | None:
    """Return the error of a file's check, or None; of a file in the Hub's cache it names the link, not the blob."""
    error = find_error(check, path)
    if isinstance(error, CorruptCheckpointError) and path != link:
        return CorruptCheckpointError(str(error).replace(str(path), str(link)))
    return error


def check_all_files(
    strategy: ChecksFiles, reader: CheckpointReader, location: Path, plugins: PluginManager
) -> dict[str, Checked]:
    """Check the files that a checkpoint must have; return each one's fault, or None, and how it was checked.

    The reader compares the CRC-32 of archives if it is to, and plugins see the progress of that.
    """
    if reader.crcs == "none":
        errors = strategy.check_files(reader)
    else:
        progress = Progress("verify", location, _sum_sizes(strategy, reader), plugins)
        reader.count_checked = progress.add
        errors = strategy.check_files(reader)
        progress.end()
    return {
        name: Checked(error, "crc32" if reader.has_checked_crcs(name) else "structure")
        for name, error in errors.items()
    }


def _sum_sizes(strategy: ChecksFiles, reader: CheckpointReader) -> int:
    """Return the bytes of all files up to the first that is missing: the check of that file says so."""
    total = 0
    try:
        for file in strategy.list_files(reader):
            total += reader.size(file.name)
    except CheckpointReplacedError:
        raise
    except CheckpointingException:
        return total
    return total


def _recognise(
    location: Path,
    plugins: PluginManager,
    *,
    is_staged: bool = False,
    unmarked: bool = False,
    skip_damaged: bool = False,
) -> tuple[Path, Manifest, LoadStrategy]:
    """Return the directory of the files, the manifest and the strategy that reads them."""
    if location.is_file():
        place = open_directory(location.parent)
        strategy: LoadStrategy = recognise_file(location, place, skip_damaged=skip_damaged)
        return place, Manifest(backend=strategy.backend, version=strategy.version), strategy
    try:
        place, manifest = (
            hold_unmarked(location, plugins) if unmarked else hold_checkpoint(location, plugins, moved=is_staged)
        )
    except (NotACheckpointError, IncompleteCheckpointError) as exc:
        found = _open_folder(location, exc, skip_damaged=skip_damaged)
        if found is None:
            raise
        strategy, place = found
        return place, Manifest(backend=strategy.backend, version=strategy.version), strategy
    return place, manifest, find_reader(location, manifest, plugins)


def recognise_file(
    path: Path, place: Path, *, suffix: str = "", skip_damaged: bool = False
) -> TorchFileLoadStrategy | HuggingFaceLoadStrategy:
    """Return the reader of a file, by its first bytes.

    ``suffix`` is the suffix of a link to it, if it has none itself. A file that is cut, or empty, though its name is a
    checkpoint's, is a CorruptCheckpointError; anything else is a NotACheckpointError that describes it.
    """
    suffix = suffix or path.suffix
    with wrap_os_errors("open", path), path.open("rb") as file:
        first = file.read(_LENGTH + 1)
    is_zip = first.startswith(b"PK")
    if is_torch_file(path):
        if is_zip and (other := describe_file(path)):  # a TorchScript archive, say
            raise NotACheckpointError(f"{path} is {other}")
        return TorchFileLoadStrategy(path.name)
    if _is_safetensors(path, first):
        return read_all_of_folder(place, path.name, skip_damaged=skip_damaged)[0]
    what = describe_file(path) or "a zip archive that is cut short"
    if suffix in _OF_CHECKPOINTS and (is_zip or not any(first)):
        raise CorruptCheckpointError(f"{path} is {what}")
    raise NotACheckpointError(f"{path} is {what}")


def _is_safetensors(path: Path, first: bytes) -> bool:
    """Return whether a file begins as one of safetensors; CorruptCheckpointError if it does, and its header is cut."""
    try:
        header_length(first[:_LENGTH], path.stat().st_size, str(path))
    except CorruptCheckpointError:
        if first[_LENGTH // 2 :] == _HEADER:
            raise
        return False
    return first[_LENGTH:] == b"{"


def recognise_files(
    place: Path, names: Collection[str], *, skip_damaged: bool = False
) -> DeepSpeedLoadStrategy | TorchFileLoadStrategy | None:
    """Return the reader of a folder of files of ``torch.save``: DeepSpeed's, or a model of the Hub; None if it is none.

    With ``skip_damaged`` files of a model may be missing.
    """
    if (files := find_files(place, names)) is not None:
        return DeepSpeedLoadStrategy(files)
    # a lone pytorch_model.bin among other checkpoint files is one of them, and no model
    return find_torch_weights(place, names, skip_damaged=skip_damaged) if is_marked(names) else None


def _open_folder(
    location: Path, error: CheckpointingException, *, skip_damaged: bool
) -> tuple[LoadStrategy, Path] | None:
    """Return the reader of another library's folder; None if nothing recognises it: ``error`` is to be raised then."""
    place = open_directory(location)
    if not place.is_dir():
        return None
    try:
        return read_all_of_folder(place, skip_damaged=skip_damaged)
    except NotACheckpointError:
        names = {*list_entries(place)}
        if (found := recognise_files(place, names, skip_damaged=skip_damaged)) is not None:
            return found, place
        what = describe_folder(place, names)
        if not what:
            return None
        raise NotACheckpointError(f"{location} is {what}") from error
