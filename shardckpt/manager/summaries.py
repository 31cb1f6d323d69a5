"""Summaries of checkpoints. Of sound ones of ours they are made without torch, which takes seconds to import."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardckpt.commit.staging_names import HOLDS_NAME
from shardckpt.engine.locations import find_local, find_save_time, measure
from shardckpt.errors import CheckpointingException, format_many, listed
from shardckpt.maintenance.foreign import describe_foreign
from shardckpt.maintenance.inside import FILE_SUFFIXES, is_visible_in, list_inside, list_local_names
from shardckpt.manager.metrics import read_metrics, read_save_time, read_settings
from shardckpt.manager.step_names import MARKS_NAME, parse_step
from shardckpt.manifest.names import FINGERPRINTS_NAME, LINKS, MARKER_NAME, Rescue, find_generation
from shardckpt.plugins.outline import find_own_formats, open_with_record
from shardckpt.storage.filesystem import file_size, refuse_linked_folders
from shardckpt.storage.fingerprint_file import combine_fingerprints, parse_fingerprints
from shardckpt.storage.input_file import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from shardckpt.commit.holds import Hold
    from shardckpt.maintenance.inside import Names
    from shardckpt.manager.marks import Mark
    from shardckpt.manifest.models import Record
    from shardckpt.manifest.names import Lineage
    from shardckpt.manifest.plain import PlainRecord

#: The state of a directory, see :class:`CheckpointSummary`.
State = Literal["whole", "damaged", "unreadable", "incomplete", "other"]
#: The names of files that lie next to checkpoints: pointers, texts and TensorBoard's.
_LATEST = ("latest", "best")
_TEXTS = (".txt", ".log", ".out", ".err", ".yaml", ".yml", ".toml", ".csv", ".jsonl", ".md", ".sh", ".py")
_EVENTS = "events.out.tfevents."
#: Folders that may be a part of a checkpoint of another library.
_UNIVERSAL = "zero"


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint, or a directory that is none, as far as no data file need be read.

    Attributes:
        path: Its path or URL; a password is masked.
        name: The name of the directory, of the link to it, or of the file of ``torch.save`` or safetensors.
        state: ``whole``: all files are there and have their sizes; their bytes were not read. ``damaged``: not as it
            was written. ``unreadable``: complete, but no installed strategy reads it. ``incomplete``: a save that was
            never committed. ``other``: nothing shows that a checkpoint was ever there.
        reason: Why it is not whole.
        step: The step of the training, as stored, or else as the name says.
        saved_at: When it was committed, in seconds since 1970; on a store, when a manager saved it, else None.
        nbytes: Size on disk in bytes, other files in the directory included.
        strategy: ``backend@version``; ``""`` if it is not known.
        writer: The release that wrote it, such as ``shardckpt 0.1.0``, or ``shardckpt`` if its record was lost;
            ``""`` if another library did.
        library: The other library, such as ``Megatron-Core``, or the one whose layout it is; ``""`` if the files do not
            show which.
        fingerprint: The fingerprint of all tensors together, 32 hex digits, if the save has stored any; for an exported
            Hugging Face folder, the fingerprint of its checkpoint. Equal for equal keys and values, whatever the
            sharding and the format.
        held: The leases and pins that keep it from removal, for people.
        mark: The verdict of ``shardckpt verify --mark`` about this save, for people.
        has_failed: Whether that verdict is that it is damaged.
        metrics: Those that ``CheckpointManager.save`` was given for the step; None for NaN and infinity.
        ranking: The metric by which the manager that saved it chooses the best step, and ``min`` or ``max``.
        links: The links ``latest`` and ``best`` of the folder that lead to it.
        inside: How many checkpoints there are in its folders, as the names of files say, if it is none itself, or a
            model next to the steps of its training, as transformers' Trainer leaves it.
        rescued: How many keys the rescue that has written it (``convert --skip-damaged``) left out.
        is_refused: Whether it is a file that may be a checkpoint, and names classes that are not allowed.
    """

    path: str
    name: str
    state: State
    reason: str = ""
    step: int | None = None
    saved_at: float | None = None
    nbytes: int = 0
    strategy: str = ""
    writer: str = ""
    library: str = ""
    fingerprint: str = ""
    held: tuple[str, ...] = ()
    mark: str = ""
    has_failed: bool = False
    metrics: dict[str, float | None] = field(default_factory=dict)
    ranking: tuple[str, str] | None = None
    links: tuple[str, ...] = ()
    inside: int = 0
    rescued: int = 0
    is_refused: bool = False

    @property
    def is_checkpoint(self) -> bool:
        """Whether a checkpoint is there, or was to be."""
        return self.state != "other"


def list_plain(
    folder: str | os.PathLike[str], own: Collection[tuple[str, int]], *, recursive: bool = False
) -> list[CheckpointSummary] | None:
    """List like :func:`shardckpt.manager.list_checkpoints`, without torch: for sound checkpoints of this library.

    ``own`` has the formats of this distribution that are read, by backend and version, as its plugins register them. It
    returns None if anything needs a look by a reader: a URL, a checkpoint that is damaged or that another library
    wrote, a save that did not end, a file or a folder that may be one of these, a plugin of another distribution; and
    where nothing is a checkpoint.
    """
    formats = find_own_formats(own)
    if formats is None:
        return None
    try:
        return _list_folder(os.fspath(folder), formats, recursive=recursive)
    except (_NeedsReaderError, CheckpointingException, OSError):  # list_checkpoints has the better error
        return None


class _NeedsReaderError(Exception):
    """Only the readers of all formats can recognise a directory."""


def _list_folder(
    folder: str, formats: Collection[tuple[str, int]], *, recursive: bool, above: tuple[str, ...] = ()
) -> list[CheckpointSummary]:
    """Return the summaries of a folder, or of a checkpoint, as :func:`list_plain`, which has the errors, too.

    ``above`` are the real paths of the folders that led to it: a link to one of these has nothing new.
    """
    place = _find(folder)
    if (own := _summarize(place, formats)) is not None:
        return [own]
    directories = {name: _find(str(place / name)) for name in _list_names(place).folders}
    found = [
        replace(_summarize(each, formats) or _summarize_other(each), name=name) for name, each in directories.items()
    ]
    if not any(each.is_checkpoint or each.inside for each in found):
        raise _NeedsReaderError
    found = arrange(found, find_local_holds(place))
    if not recursive:
        return found
    here = (*above, str(place))
    return expand(found, here, lambda name: _list_folder(str(place / name), formats, recursive=True, above=here))


def _find(folder: str) -> Path:
    if (place := find_local(folder)) is None:
        raise _NeedsReaderError
    return place


def _summarize(directory: Path, formats: Collection[tuple[str, int]]) -> CheckpointSummary | None:
    """Return the summary of a sound checkpoint of ours; None if it has no marker of one."""
    if not (directory / MARKER_NAME).is_file():
        return None
    summary = _begin(directory)
    held = open_with_record(directory)
    if held is None or (held[1].backend, held[1].version) not in formats:
        raise _NeedsReaderError
    place, record = held
    sizes = record.list_files()
    for name, size in sizes.items():
        refuse_linked_folders(place, name)
        if file_size(place / name) != size:
            raise _NeedsReaderError
    summary = add_record(summary, record, record.lineage)
    if FINGERPRINTS_NAME in sizes:
        found = parse_fingerprints(read_file(place / FINGERPRINTS_NAME, sizes[FINGERPRINTS_NAME]), FINGERPRINTS_NAME)
        summary = replace(summary, fingerprint=combine_fingerprints(found))
    return replace(add_mark(summary, _find_mark(directory, record)), state="whole")


def _begin(directory: Path) -> CheckpointSummary:
    """Return the summary of a directory of any kind."""
    return CheckpointSummary(
        str(directory),
        directory.name,
        "other",
        step=parse_step(directory.name),
        nbytes=measure(directory),
        saved_at=find_save_time(directory),
    )


def _summarize_other(directory: Path) -> CheckpointSummary:
    """Return the summary of a directory that is a checkpoint to no reader, as all names in it say."""
    names = _list_names(directory)
    summary, inside = _begin(directory), count_inside(list_local_names(directory, str(directory.parent)))
    is_dead_save = bool(names.all) and not inside and summary.step is not None
    if is_dead_save or describe_foreign(directory, names.all):
        raise _NeedsReaderError
    return describe_other(summary, names.all, inside)


class _Names(NamedTuple):
    """The names of all that is in a directory, and of the folders that are looked into."""

    all: list[str]
    folders: list[str]


def _list_names(place: Path) -> _Names:
    """Return the names in a directory that are neither possible checkpoints nor parts of one."""
    names = _Names([], [])
    with os.scandir(place) as entries:
        for entry in entries:
            names.all.append(entry.name)
            is_folder = entry.is_dir()
            is_part = entry.name == _UNIVERSAL or bool(find_generation(f"{entry.name}/x"))
            if is_part if is_folder else not _is_aside(entry.name):
                raise _NeedsReaderError
            if is_folder and not entry.name.startswith("."):
                names.folders.append(entry.name)
    return names


def _is_aside(name: str) -> bool:
    """Return whether a file makes the directory that it is in a checkpoint to no reader of this distribution."""
    return name in _LATEST or name.endswith(_TEXTS) or name.startswith(_EVENTS)


def find_local_holds(place: Path) -> dict[str, list[Hold]]:
    """Return the leases and pins of a folder; their readers are imported only if there are any."""
    if not (place / HOLDS_NAME).exists():
        return {}
    from shardckpt.commit.holds import Holds

    return Holds(place / HOLDS_NAME).find()


def _find_mark(directory: Path, record: PlainRecord) -> Mark | None:
    """Return the mark of a checkpoint; the module that reads it is only imported where there are marks."""
    if not (directory.parent / MARKS_NAME).exists():
        return None
    from shardckpt.manager.marks import find_mark_of

    return find_mark_of(directory, record)


def add_record(summary: CheckpointSummary, record: PlainRecord | Record, lineage: Lineage) -> CheckpointSummary:
    """Return a summary with the facts in the record of a checkpoint of ours."""
    return replace(
        summary,
        step=summary.step if lineage.step is None else lineage.step,
        saved_at=read_save_time(record.content_metadata) if summary.saved_at is None else summary.saved_at,
        strategy=f"{record.backend}@{record.version}",
        writer=", ".join(f"{name} {version}" for name, version in record.writer.items()),
        metrics=read_metrics(record.content_metadata),
        ranking=read_settings(record.content_metadata).ranking,
        rescued=Rescue.from_content(record.content_metadata).total,
    )


def add_mark(summary: CheckpointSummary, mark: Mark | None) -> CheckpointSummary:
    """Return a summary with the verdict of a verification, if there is one."""
    return summary if mark is None else replace(summary, mark=str(mark), has_failed=mark.verdict == "failed")


def describe_other(summary: CheckpointSummary, names: Collection[str], inside: int) -> CheckpointSummary:
    """Return the summary of a directory that is no checkpoint."""
    if inside:
        return replace(summary, inside=inside, step=None, reason=f"a folder of {format_many(inside, 'checkpoint')}")
    return replace(summary, reason=f"it has {listed(sorted(names), limit=4)}" if names else "an empty directory")


def count_inside(list_names: Callable[[str], Names]) -> int:
    """Return how many checkpoints there may be in a folder, as names say; the argument is as for ``list_inside``."""
    return sum(1 for _ in list_inside(list_names, lambda name: parse_step(name) is not None))


def arrange(found: Iterable[CheckpointSummary], holds: Mapping[str, Collection[Hold]]) -> list[CheckpointSummary]:
    """Return summaries of one folder with its leases and pins, in ascending order of steps.

    The links ``latest`` and ``best`` are shown with their targets, if these are in the folder.
    """
    found = [*found]
    real = {each.path for each in found if each.path.endswith(f"/{each.name}")}
    links: dict[str, tuple[str, ...]] = {}
    rows = []
    for each in found:
        if each.name in LINKS and each.path in real and not each.path.endswith(f"/{each.name}"):
            links[each.path] = (*links.get(each.path, ()), each.name)
        else:
            rows.append(replace(each, held=tuple(map(str, holds.get(each.name, ())))))
    held = [
        replace(each, links=tuple(sorted(links.get(each.path, ())))) if each.path.endswith(f"/{each.name}") else each
        for each in rows
    ]
    return sorted(held, key=lambda each: (each.step is None, each.step, each.name))


def list_once(found: Iterable[CheckpointSummary]) -> list[CheckpointSummary]:
    """Return summaries without links to checkpoints that are among them by their own names, or by another link."""
    found = [*found]
    once = {each.path: each for each in found}
    once.update((each.path, each) for each in found if each.path.endswith(f"/{each.name}"))
    return [*once.values()]


def expand(
    found: Iterable[CheckpointSummary], above: tuple[str, ...], list_folder: Callable[[str], list[CheckpointSummary]]
) -> list[CheckpointSummary]:
    """Return summaries with the checkpoints in each folder in its place, by their paths from the listed one.

    ``above`` has the real paths of the folders that were entered, from the first to the one with these summaries. A
    folder that is reached by another path, around this one or behind a link, is left out. ``list_folder`` lists a
    folder by its name.
    """
    deep: list[CheckpointSummary] = []
    for each in found:
        is_link = each.path != f"{above[-1]}/{each.name}"
        if not each.inside:
            deep.append(each)
        elif each.path not in above and not (is_link and is_visible_in(each.path, above[0])):
            below = [one for one in list_folder(each.name) if one.is_checkpoint or one.name.endswith(FILE_SUFFIXES)]
            deep += [replace(one, name=f"{each.name}/{one.name}") for one in below]
    return deep
