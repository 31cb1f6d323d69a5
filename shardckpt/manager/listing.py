"""List a folder of checkpoints, whoever wrote them: a summary of each, from JSON files, indexes and sizes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.commit.upload import is_under_way
from shardckpt.deepspeed.load import DeepSpeedLoadStrategy
from shardckpt.distributed.comm import Comm
from shardckpt.engine.integrity import find_incomplete_files, is_damage
from shardckpt.engine.locations import find_save_time, locate, measure, name_library
from shardckpt.errors import (
    UNPACK_MODULE,
    CannotLoadError,
    CheckpointingException,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsafePickleError,
    format_many,
    listed,
    name_call,
)
from shardckpt.huggingface.load import read_hub_folder
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.names import is_hub_folder
from shardckpt.maintenance.foreign import describe_foreign
from shardckpt.maintenance.inside import FILE_SUFFIXES, is_marked, list_local_names, list_stored_names
from shardckpt.maintenance.sources import find_cut_file, recognise_file, recognise_files
from shardckpt.manager.marks import find_mark, find_mark_of
from shardckpt.manager.step_names import MARKS_NAME, parse_step
from shardckpt.manager.steps import StepFolder
from shardckpt.manager.summaries import (
    CheckpointSummary,
    add_mark,
    add_record,
    arrange,
    count_inside,
    describe_other,
    expand,
    list_once,
)
from shardckpt.manager.trainer_steps import read_trainer_state
from shardckpt.manifest.hub import (
    TRAINER_STATE,
    explain_lost_model,
    explain_step_without_optimizer,
    explain_unfinished_step,
    find_trainer_parts,
)
from shardckpt.manifest.models import Manifest
from shardckpt.manifest.names import FINGERPRINTS_NAME, MARKER_NAME, RECORD_NAME
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import choose_reader, hold_checkpoint
from shardckpt.plugins.stores import ABSENT
from shardckpt.storage.abilities import has_local_files, lacks_directory, takes_requests
from shardckpt.storage.directory import open_directory, retry_if_replaced
from shardckpt.storage.filesystem import is_there, name_siblings, wrap_os_errors
from shardckpt.storage.fingerprint_file import combine_fingerprints, parse_fingerprints
from shardckpt.storage.places import (
    attach_listing,
    get_attached_listing,
    get_parent,
    get_url,
    list_by_folder,
    list_entries,
    read_listing,
)
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.remote import map_requests
from shardckpt.strategy import LoadContext, find_error
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.manager.summaries import State
    from shardckpt.plugins.manager import PluginManager


def list_checkpoints(folder: str | os.PathLike[str], *, recursive: bool = False) -> list[CheckpointSummary]:
    """Summarize the checkpoints in a folder, or one checkpoint. Not collective: one process calls.

    Return a summary of every directory in it, in ascending order of steps, those without a step last; also of files of
    ``torch.save`` and safetensors, which on a store are named and not read. Hidden directories are left out, also those
    of saves under way. With ``recursive``, in place of a directory that has checkpoints in it, a summary of each of
    these, by its path, folder by folder; also behind links that lead out of the folder. It is a StorageError if the
    folder does not exist (on a store: has no object).
    """
    check_annotated(list_checkpoints, locals())
    plugins = get_plugin_manager()
    place = locate(folder, plugins)
    if place.is_file():
        return [_summarize_file(place)]
    if lacks_directory(place):
        raise StorageError(
            f"{place} is no directory: give a folder of checkpoints, or a checkpoint {name_siblings(place)}".rstrip()
        )
    found = _list(folder, place, plugins, recursive=recursive, above=())
    if not found and read_listing(place) == {}:
        raise StorageError(f"{place} {ABSENT}")
    return found


def _list(
    folder: str | os.PathLike[str], place: Path, plugins: PluginManager, *, recursive: bool, above: tuple[str, ...]
) -> list[CheckpointSummary]:
    """Return the summaries of an existing folder; ``above`` are the real paths of the folders that led to it."""
    # of a store, one listing for all: 1,000 folders would take thousands of requests
    listings = list_by_folder(place)
    own = _summarize(attach_listing(place, listings), plugins)
    # a folder in another library's format may have checkpoints next to the files that the format is known by
    is_foreign = own.state == "unreadable" and not own.strategy and not is_there(place / MARKER_NAME)
    if own.state != "other" and not is_foreign and not own.inside:
        return [own]
    inside = StepFolder(folder, plugins)
    names = [name for name in inside.directories() if not name.startswith(".")]
    if own.is_checkpoint and own.inside:  # a model with the steps of its training next to it
        steps = [name for name in names if parse_step(name) is not None]
        found = _summarize_all(inside, steps, listings, plugins)
        rest = own.nbytes - sum(each.nbytes for each in found)
        return arrange([replace(own, name=".", nbytes=rest, inside=0, reason=""), *found], inside.holds.find())
    found = _summarize_all(inside, names, listings, plugins)
    found += _summarize_files(place, listings)
    if own.is_checkpoint and not any(each.is_checkpoint or each.inside for each in found):
        return [own]
    found = arrange(found, inside.holds.find())
    if not recursive:
        return found
    here = (*above, own.path)

    def list_folder(name: str) -> list[CheckpointSummary]:
        path = f"{os.fspath(folder).rstrip('/')}/{name}"
        return _list(path, locate(path, plugins), plugins, recursive=True, above=here)

    return expand(found, here, list_folder)


def summarize_step(folder: StepFolder, step: int) -> CheckpointSummary:
    """Return the summary of one step's directory, as :func:`list_checkpoints` has it."""
    return _summarize(folder.path(step), folder.plugins)


class FoundCheckpoints(NamedTuple):
    """The checkpoints that a path stands for.

    ``paths`` are theirs, or URLs, in the order of :func:`list_checkpoints`. ``skipped`` has the paths of
    all else in the folder: no checkpoints that can be read in place, or folders with others in them.
    """

    paths: list[str]
    skipped: list[CheckpointSummary]


def find_checkpoints(path: str, *, recursive: bool = False) -> FoundCheckpoints:
    """Return the checkpoints that a path stands for: those in it if it is a folder of checkpoints, else itself.

    A file of this machine that is one by its suffix, but of no known format, is among them. The path need
    not exist. It is a NotACheckpointError if only its folders have checkpoints.
    """
    place = locate(path, get_plugin_manager())
    if lacks_directory(place) or is_there(place / MARKER_NAME):
        return FoundCheckpoints([path], [])
    listed_ones = list_checkpoints(path, recursive=recursive)
    found = [each for each in listed_ones if each.is_checkpoint]
    if not found and (folders := [each for each in listed_ones if each.inside]):
        raise NotACheckpointError(
            f"{path} has {format_many(sum(each.inside for each in folders), 'checkpoint')} in its folders "
            f"{listed([each.name for each in folders], limit=6)}, and none itself: give one of them, or -r for all"
        )
    if not found or [each.path for each in found] == [str(place)]:
        return FoundCheckpoints([path], [])
    above = "" if path == "." else f"{path.rstrip('/')}/"
    read: list[CheckpointSummary] = []
    skipped: list[CheckpointSummary] = []
    for each in listed_ones:
        # .bin is a suffix of many other files; torch.save may have written one tensor, which is no checkpoint
        is_broken = not each.strategy and each.path.endswith((".pt", ".pth", ".ckpt", ".safetensors"))
        is_read = each.is_checkpoint or (is_broken and Path(each.path).is_file())
        if is_read:
            read.append(each)
        if not is_read or each.inside:
            skipped.append(replace(each, path=f"{above}{each.name}"))
    return FoundCheckpoints([f"{above}{each.name}" for each in list_once(read)], skipped)


def _summarize_all(
    inside: StepFolder, names: Sequence[str], listings: Mapping[str, dict[str, int]] | None, plugins: PluginManager
) -> list[CheckpointSummary]:
    """Return the summaries of the directories in a folder; on a store, several are inspected at a time."""
    if not takes_requests(inside.place):
        return [replace(_summarize(inside.find(name), plugins), name=name) for name in names]
    marks = attach_listing(inside.find(MARKS_NAME), listings, MARKS_NAME)

    def summarize(name: str) -> CheckpointSummary:
        found = _summarize(attach_listing(inside.find(name), listings, name), plugins, marks)
        # it may have been replaced or removed since the listing: then the listing is of another checkpoint
        is_sure = listings is None or found.state not in ("damaged", "unreadable")
        return found if is_sure else _summarize(inside.find(name), plugins, marks)

    return map_requests(summarize, names, "shardckpt-ls")


def _summarize(directory: Path, plugins: PluginManager, marks: Path | None = None) -> CheckpointSummary:
    """Return the summary of a directory; ``marks`` is the directory of its mark, if that is known."""
    summary = CheckpointSummary(str(directory), directory.name, "other", step=parse_step(directory.name))
    try:
        summary = replace(summary, nbytes=measure(directory), saved_at=find_save_time(directory))
        return retry_if_replaced(lambda: _inspect(directory, summary, plugins, marks), directory)
    except (NotACheckpointError, IncompleteCheckpointError) as exc:
        return _describe_unmarked(directory, summary, exc, plugins)
    except CannotLoadError as exc:
        return replace(summary, state="unreadable", reason=_shorten(exc, directory))
    except (CheckpointingException, OSError) as exc:
        return _add_failure(_add_unmarked(summary, directory, plugins), exc, directory)


def _add_unmarked(summary: CheckpointSummary, directory: Path, plugins: PluginManager) -> CheckpointSummary:
    """Return a summary with the facts in the record of a checkpoint of ours that has lost nothing but its marker."""
    try:
        manifest = hold_checkpoint(directory, plugins, unmarked=True)[1]
    except (CheckpointingException, OSError):
        return summary
    return summary if manifest.record is None else add_record(summary, manifest.record, manifest.lineage)


def _summarize_files(folder: Path, listings: Mapping[str, dict[str, int]] | None) -> list[CheckpointSummary]:
    """Return the summaries of files in a folder that may be checkpoints; on a store no verb reads one."""
    if not has_local_files(folder):
        reason = "a file on a store, where none is read: copy it to this machine"
        sizes = (listings or {}).get("", {})
        names = [name for name in sizes if "/" not in name and name.endswith(FILE_SUFFIXES) and name[0] != "."]
        return [
            CheckpointSummary(f"{folder}/{name}", name, "other", reason=reason, nbytes=sizes[name]) for name in names
        ]
    with wrap_os_errors("list", folder):
        found = sorted(path for path in folder.iterdir() if path.suffix in FILE_SUFFIXES and path.name[0] != ".")
        return [replace(_summarize_file(path), path=os.path.realpath(path)) for path in found if path.is_file()]


def _summarize_file(path: Path) -> CheckpointSummary:
    """Return the summary of a file by its header, or its directory and pickle: no tensor is read."""
    summary = CheckpointSummary(str(path), path.name, "other", step=parse_step(path.stem))
    try:
        with wrap_os_errors("access", path):
            info = path.stat()
            summary = replace(summary, nbytes=info.st_size, saved_at=info.st_mtime)
            real = path.resolve()  # a link is shown as its target, as the Hub's cache has its files
        place = open_directory(real.parent)
        if path.suffix == ".safetensors":
            summary = replace(summary, strategy="safetensors file", library="safetensors")
        strategy = recognise_file(real, place, suffix=path.suffix)
        if isinstance(strategy, HuggingFaceLoadStrategy):
            by = strategy.folder.library or "safetensors"
            return replace(summary, state="whole", strategy="safetensors file", library=by)
        summary = replace(summary, strategy=strategy.backend, library="torch.save")
        manifest = Manifest(backend=strategy.backend, version=strategy.version)
        with CheckpointReader(place, manifest, verify=False) as reader:
            error = find_error(strategy.list_files, reader)  # its pickle; no tensor is read
    except (CheckpointingException, OSError) as exc:
        error = exc if isinstance(exc, CheckpointingException) else StorageError(str(exc))
    if error is None:
        return replace(summary, state="whole")
    if isinstance(error, UnsafePickleError) and error.refused and not error.runs_code:
        return replace(summary, is_refused=True, reason=_describe_refusal(error, path, real))
    # A pickle that is no state dict, or that a load refuses, is no checkpoint to this package, and no fault of one.
    state: State = "damaged" if is_damage(error) else "other"
    return replace(summary, state=state, reason=_shorten(error, real))


def _describe_refusal(error: UnsafePickleError, path: Path, real: Path) -> str:
    """Return why a file that may be a checkpoint is not read, and what to do."""
    if not error.can_be_allowed:
        return _shorten(error, real)
    rest = f"{name_call('convert', path, 'NEW', '--leave-out', 'NAME')}, of each entry that has some, writes the rest"
    advice = UNPACK_MODULE.format(path=str(path), new="NEW.pt") if error.is_module else rest
    return (
        f"cannot be read here: it names {listed(error.refused, limit=3)}, and the command imports no classes; {advice}"
    )


def _inspect(
    directory: Path, summary: CheckpointSummary, plugins: PluginManager, marks: Path | None
) -> CheckpointSummary:
    """Return the summary of a checkpoint, as its manifest, and of another library's its index, describe it."""
    place, manifest = hold_checkpoint(directory, plugins)
    record = manifest.record
    summary = replace(summary, strategy=f"{manifest.backend}@{manifest.version}")
    if record is None:
        summary = replace(summary, library=name_library(place, manifest.backend))
    else:
        mark = find_mark_of(directory, record) if marks is None else find_mark(marks, directory.name, record)
        summary = add_mark(add_record(summary, record, manifest.lineage), mark)
    # before the files: a checkpoint that no strategy reads may be whole, which is unknown
    try:
        strategy = choose_reader(directory, manifest, plugins)
    except CannotLoadError as exc:
        return replace(summary, state="unreadable", reason=_shorten(exc, directory))
    with CheckpointReader(place, manifest, verify=False) as reader:
        # the index of a checkpoint of ours may be large, and its record has all sizes
        bad = find_incomplete_files(None if manifest.record is not None else strategy, reader)
        if not bad and manifest.record is not None and FINGERPRINTS_NAME in manifest.record.list_files():
            found = parse_fingerprints(reader.read(FINGERPRINTS_NAME), FINGERPRINTS_NAME)
            summary = replace(summary, fingerprint=combine_fingerprints(found))
    if any(file.name == RECORD_NAME for file in bad):
        summary = replace(summary, writer="shardckpt", library="")  # its release is in the record that was lost
    if bad:
        still = summary.mark if summary.has_failed else ""  # the files have changed since they were verified
        reason = listed([f"{file.name} {file.fault}" for file in bad], "; ", limit=3)
        return replace(summary, state="damaged", reason=reason, mark=still)
    return replace(summary, state="whole")


def _describe_unmarked(
    directory: Path, summary: CheckpointSummary, error: CannotLoadError, plugins: PluginManager
) -> CheckpointSummary:
    """Return the summary of a directory that no reader recognises: the Hub's, DeepSpeed's, a dead save, or any."""
    names = list_entries(directory) if directory.is_dir() else []
    if unfinished := explain_unfinished_step(directory.name, names):
        return replace(summary, state="incomplete", library="Hugging Face", reason=unfinished)
    parts = find_trainer_parts(names)
    if is_hub_folder(names) and is_marked(names):
        summary = _describe_hub_folder(directory, summary, names)
    elif lost := explain_lost_model(parts):
        return replace(summary, state="damaged", library="Hugging Face", reason=lost)
    elif parts:
        summary = replace(summary, state="whole", library="Hugging Face", reason=f"its model is in {parts[0]}")
    elif (described := _describe_torch_files(directory, summary, names)) is not None:
        summary = described
    else:
        return _describe_rest(directory, summary, names, error)
    return _add_training(summary, directory, names, plugins)


def _add_training(
    summary: CheckpointSummary, directory: Path, names: list[str], plugins: PluginManager
) -> CheckpointSummary:
    """Return the summary of a model with a Trainer's files next to it: metrics, and parts, which may be damaged."""
    if summary.state != "whole":
        return summary
    if not takes_requests(directory) and (cut := find_cut_file(directory)) is not None:
        return replace(summary, state="damaged", reason=_shorten(cut, directory))
    folders = [part for part in find_trainer_parts(names) if not part.endswith(FILE_SUFFIXES)]
    for part in folders:
        found = _summarize(locate(f"{get_url(directory)}/{part}", plugins), plugins)
        summary = replace(summary, strategy=summary.strategy or found.strategy)
        if found.state != "whole":
            return replace(summary, state=found.state, reason=f"{part}: {found.reason}")
    return replace(summary, metrics=read_trainer_state(directory).metrics) if TRAINER_STATE in names else summary


def _describe_hub_folder(directory: Path, summary: CheckpointSummary, names: list[str]) -> CheckpointSummary:
    """Return the summary of a folder of the Hub's layout, or a Trainer's step in it."""
    summary = replace(summary, strategy="huggingface", library="Hugging Face")
    try:
        found = read_hub_folder(get_url(directory))
    except CheckpointingException as exc:
        return replace(summary, state="damaged", reason=_shorten(exc, directory))
    if found.adapter is not None:
        summary = replace(summary, strategy="PEFT adapter")
    by, fingerprint = found.library or summary.library, found.origin.get("fingerprint", "")
    summary = replace(summary, state="whole", library=by, fingerprint=fingerprint, rescued=found.rescue.total)
    steps = [name for name in {*names} - {*find_trainer_parts(names)} if parse_step(name) is not None]
    if inside := sum((directory / name).is_dir() for name in steps):
        return replace(summary, inside=inside, reason=f"with {format_many(inside, 'step')} in its folders")
    return replace(summary, reason=explain_step_without_optimizer(directory.name, names))


def _describe_rest(
    directory: Path, summary: CheckpointSummary, names: list[str], error: CannotLoadError
) -> CheckpointSummary:
    """Return the summary of a directory that no reader reads: of a known format, a folder of others, a dead save."""
    if what := describe_foreign(directory, names):
        return replace(summary, state="unreadable", reason=what)
    is_data = is_under_way(directory) or is_marked(names)
    inside = 0 if is_data else _count_inside(directory)
    begun = is_data or summary.step is not None
    if names and begun and not inside:
        return replace(summary, state="incomplete", reason=_shorten(error, directory))
    return describe_other(summary, names, inside)


def _count_inside(directory: Path) -> int:
    """Return how many checkpoints there may be below a directory, as names say; of a store, by its listing, if any."""
    if takes_requests(directory):
        return count_inside(list_stored_names(get_attached_listing(directory)))
    return count_inside(list_local_names(directory, get_parent(directory)))


def _describe_torch_files(directory: Path, summary: CheckpointSummary, names: list[str]) -> CheckpointSummary | None:
    """Return the summary of a folder of files of ``torch.save``, DeepSpeed's or the Hub's; None if it is none.

    Their directories and pickles are read: nothing else says whether a file was cut.
    """
    place = open_directory(directory)
    try:
        strategy = recognise_files(place, names)
        if strategy is None:
            return None
        library = "DeepSpeed" if isinstance(strategy, DeepSpeedLoadStrategy) else "Hugging Face"
        summary = replace(summary, strategy=strategy.backend, library=library)
        manifest = Manifest(backend=strategy.backend, version=strategy.version)
        with CheckpointReader(place, manifest, verify=False) as reader:
            if isinstance(strategy, DeepSpeedLoadStrategy):
                step = strategy.read_step(LoadContext(reader, Comm(alone=True)))
                summary = replace(summary, step=summary.step if step is None else step)
            else:
                strategy.list_files(reader)
    except (CheckpointingException, OSError) as exc:
        return _add_failure(summary, exc, directory)
    return replace(summary, state="whole")


def _add_failure(summary: CheckpointSummary, error: Exception, directory: Path) -> CheckpointSummary:
    """Return a summary with why a checkpoint cannot be inspected: it is damaged, or only cannot be read."""
    damaged = isinstance(error, CheckpointingException) and is_damage(error)
    return replace(summary, state="damaged" if damaged else "unreadable", reason=_shorten(error, directory))


def _shorten(error: Exception, directory: Path) -> str:
    """Return the first line of an error, without the path, which stands in the same summary."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text.replace(f"{directory}/", "").removeprefix(f"{directory}: ").removeprefix(f"{directory} ")
