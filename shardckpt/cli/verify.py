"""Read every byte of checkpoints, and compare it with the digests in shardckpt.json and integrity.json.

Of files that have no digest (Megatron's, plain DCP's, DeepSpeed's and torch.save's) the archives are read and compared
with the CRC-32s that torch.save writes of their content, and with the index: files must exist, be complete, and have
the right dtypes and sizes.

Hugging Face folders and files of safetensors have neither: headers, lengths and the index are compared.

Files and bytes count only checked files; shardckpt.json and metadata.json, by which these are checked, count in ls
alone. Of several checkpoints, or a folder of them, only files with a fault are listed; the exit code is the highest of
all. Other folders in it are counted and named as skipped, also one of checkpoints, but with -r. A file with the suffix
of a checkpoint (.pt, .safetensors) that nothing reads is an error.

With --mark the verdict is kept next to the checkpoint: ls shows it, a CheckpointManager does not load a failed step,
and no retention policy removes the newest verified one. It is about this save: it ends when another replaces it.

With --repair a metadata.json that is lost or cut is written back, if shardckpt.json exists, which has its content, and
all other files match their digests. Nothing else can be repaired: no other file has the damaged bytes.

exit codes:
  0  intact: all bytes match their digests; or, unless --require-digests, by CRC-32 and structure where there are none
  1  damaged: a file is missing, or has changed since it was written; or incomplete: the save did not end
  2  not a checkpoint, or it cannot be checked: no installed strategy reads it, or a file cannot be read
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.cli.colour import paint
from shardckpt.cli.exit_codes import FAILED, FINE
from shardckpt.cli.failure import name_siblings, print_error
from shardckpt.cli.output import Output, without_logs
from shardckpt.cli.table import fit_table
from shardckpt.engine.amounts import format_bytes
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    IncompleteCheckpointError,
    StorageError,
    escape_text,
    format_many,
    join_lines,
    listed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.cli.colour import Style
    from shardckpt.maintenance.verify import FileResult
    from shardckpt.manager.marks import Mark
    from shardckpt.manager.summaries import CheckpointSummary

_STRUCTURE = "they exist, contain the ranges that the index names, and have a structure that agrees with it"


#: Loggers of readers of indexes, which warn of files whose loss is a row of the answer.
_OF_INDEXES = ("shardckpt_torch_dist.dialects.metadata", "shardckpt_safetensors.index")
#: The end of the verdict on a checkpoint that nothing here reads.
_UNREAD = " and unreadable here"
#: Names of checkpoints in a line about several of them.
_NAMES_SHOWN = 6
#: The text for a file without a fault.
_FINE = {
    "digests": "as written",
    "crc32": "it has the CRC-32 of its values; it has no digest",
    "structure": "its structure is valid; it has no digest",
    "nothing": "not checked",
}


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "paths", nargs="+", metavar="path", help="a checkpoint, or a folder of checkpoints: a directory or URL"
    )
    parser.add_argument(
        "--require-digests",
        action="store_true",
        help="exit with 1 if a file has no digest: its values cannot be checked",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--mark",
        action="store_true",
        help="keep the verdict, verified or failed, next to the checkpoint, in .shardckpt-marks; other libraries' "
        "checkpoints have none: exit code 2 where that leaves nothing to mark",
    )
    kept.add_argument(
        "--repair",
        action="store_true",
        help="write a lost or damaged metadata.json back, where all other files match their digests",
    )
    parser.add_argument("-r", "--recursive", action="store_true", help="also those in the folders of a folder")
    parser.set_defaults(reads=("paths",))


@dataclass(frozen=True)
class Answer:
    """The verdict on a checkpoint: its files, or the error that leaves none."""

    path: str
    files: Sequence[FileResult]
    exit_code: int
    error: CheckpointingException | None = None
    #: Why the verdict is not kept, though that was asked for; ``""`` if it is.
    unmarked: str = ""
    #: Whether that is since it could not be written: as on a full disk.
    is_unwritten: bool = False
    #: The verdict, if it was to be kept and could be.
    mark: Mark | None = None
    #: Why no installed strategy reads it, though its bytes are intact; ``""`` if one does.
    unread: str = ""


def run(options: Any) -> Output:
    """Return a row per file, and a summary; of several checkpoints rows of bad files."""
    from concurrent.futures import ThreadPoolExecutor

    from shardckpt import settings
    from shardckpt.engine.display import show_progress
    from shardckpt.huggingface.architecture import own_process
    from shardckpt.maintenance.verify import INTACT
    from shardckpt.manager.listing import find_checkpoints
    from shardckpt.manager.marked_links import follow_marks

    paths: dict[str, None] = {}
    skipped: dict[str, CheckpointSummary] = {}
    answers = []
    for path in options.paths:
        try:
            found = find_checkpoints(path, recursive=options.recursive)
        except CheckpointingException as exc:
            answers.append(Answer(path, (), FAILED, name_siblings(exc, options)))
            continue
        paths.update(dict.fromkeys(found.paths))
        skipped.update({each.path: each for each in found.skipped})
    threads = ThreadPoolExecutor(max(1, min(len(paths), settings.io_threads())))
    with show_progress("verify"), own_process(), without_logs(*_OF_INDEXES), threads:
        answers += threads.map(
            lambda path: check(path, mark=options.mark, require_digests=options.require_digests, repair=options.repair),
            paths,
        )
    if options.mark:
        follow_marks(paths)
    for answer in answers:
        if answer.error is not None and (answer.exit_code == FAILED or options.traceback):
            print_error(answer.error, options)  # the findings are in the answer
    passed = [*skipped.values()]
    is_in_vain = options.mark and not any(answer.mark for answer in answers)
    return Output(
        lambda: [
            *map(_make_row, answers),
            *(
                _make_row(Answer(each.path, (), INTACT)) | {"state": "skipped", "skipped": each.reason}
                for each in passed
            ),
        ],
        lambda: [*_describe(answers), *_describe_skipped(passed)],
        FAILED if is_in_vain else max(FAILED if answer.is_unwritten else answer.exit_code for answer in answers),
    )


def check(
    path: str, *, mark: bool = False, require_digests: bool = False, repair: bool = False, dry_run: bool = False
) -> Answer:
    """Verify a checkpoint, or a file, and with ``mark`` keep the verdict next to it.

    The findings are returned; an error of the checkpoint, or of a store, is among them. With ``require_digests`` a file
    without a digest counts as damaged, for the exit code. ``repair`` is as for
    :func:`shardckpt.maintenance.verify_checkpoint`. With ``dry_run`` the verdict is in the answer alone, as it would be
    kept.
    """
    from shardckpt.maintenance.verify import (
        INTACT,
        NO_ANSWER,
        find_refusal,
        get_exit_code,
        has_digests,
        verify_checkpoint,
    )
    from shardckpt.manager.marks import NotMarkedError, identify_save, mark_checkpoint

    try:
        save, unmarked, is_unwritten, verdict = None, "", False, None
        if mark:
            try:
                save = identify_save(path)
            except NotMarkedError as exc:
                unmarked = str(exc)
        files = verify_checkpoint(path, repair=repair)
        code = get_exit_code(files, require_digests=require_digests)
        found = get_exit_code(files)  # that a file has no digest is no fault of it
        if save is not None and found != NO_ANSWER:
            own = [file for file in files if not file.foreign]
            bad = [file for file in own if file.fault]
            try:
                verdict = mark_checkpoint(
                    path,
                    save,
                    "verified" if found == INTACT else "failed",
                    checked="digests" if has_digests(files) else "structure",
                    files=len(own),
                    faults=[file.fault if file.name in file.fault else f"{file.name}: {file.fault}" for file in bad],
                    damaged=[file.name for file in bad],
                    dry_run=dry_run,
                )
            except StorageError as exc:  # the findings about the bytes are true all the same
                unmarked, is_unwritten = str(exc), True
    except CheckpointingException as exc:
        return judge_error(exc, path)
    unread = find_refusal(path) if code == INTACT else ""
    return Answer(path, files, NO_ANSWER if unread else code, None, unmarked, is_unwritten, verdict, unread)


def judge_error(error: CheckpointingException, path: str) -> Answer:
    """Return the answer where an error is all that is known of a checkpoint: damaged, incomplete, or none."""
    from shardckpt.engine.integrity import is_damage
    from shardckpt.maintenance.verify import DAMAGED, NO_ANSWER

    return Answer(path, (), DAMAGED if is_damage(error) or _is_incomplete(error, path) else NO_ANSWER, error)


def _is_incomplete(error: CheckpointingException, path: str) -> bool:
    """Return whether an error is of a save that did not end, and not of a folder of other files, as ls tells them."""
    from shardckpt.manager.listing import list_checkpoints

    if not isinstance(error, IncompleteCheckpointError):
        return False
    try:
        return any(each.state == "incomplete" for each in list_checkpoints(path))
    except CheckpointingException:
        return True  # only the remains of its save are there


def _describe(answers: Sequence[Answer]) -> Iterator[str]:
    from shardckpt.manifest.names import MARKER_NAME

    several = len(answers) > 1
    for answer in answers:
        # the marker's note says that it was repaired
        shown = [r for r in answer.files if r.fault or not several or (r.note and r.name == MARKER_NAME)]
        lines = []
        if shown:
            rows = [(r.name, r.nbytes, _said(r, answer.path)) for r in shown]
            lines += fit_table(("file", "bytes", "result"), rows, [*map(_find_file_style, shown)])
        if answer.error is None and (shown or not several):
            unread = f"; nothing here reads it: {answer.unread}" if answer.unread else ""
            summary = paint(escape_text(f"{answer.path}: {_summary(answer.files)}{unread}"), _find_style(answer))
            # of several, each table has its checkpoint's name above it
            yield from [summary, *lines] if several else [*lines, summary]
        elif not several and answer.exit_code != FAILED:
            yield paint(f"{escape_text(answer.path)}: {escape_text(explain_verdict(answer))}", _find_style(answer))
    if several:
        verdicts: list[tuple[Any, ...]] = []
        for answer in answers:
            own = [file for file in answer.files if not file.foreign]
            size = format_bytes(sum(file.nbytes for file in own))
            checked = f"{format_many(len(own), 'file')}, {size}" if own else "-"
            verdicts.append((answer.path, checked, explain_verdict(answer)))
        yield from fit_table(("checkpoint", "checked", "result"), verdicts, [*map(_find_style, answers)])
        yield f"{format_many(len(answers), 'checkpoint')}: {_count_verdicts(answers)}"
    yield from _describe_marks(answers)


def _count_verdicts(answers: Sequence[Answer]) -> str:
    """Return how many checkpoints have each verdict, the good ones first; each counts once."""
    verdicts = [_name_verdict(answer) for answer in answers]
    intact = [verdict for verdict in verdicts if verdict.startswith("intact") and not verdict.endswith(_UNREAD)]
    bare = sum(verdict != "intact" for verdict in intact)
    said = [f"{len(intact)} intact" + f" ({bare} without digests)" * bool(bare)] if intact else []
    others = Counter(f"intact{_UNREAD}" if verdict.endswith(_UNREAD) else verdict for verdict in verdicts)
    order = (f"intact{_UNREAD}", "damaged", "incomplete", "unreadable")
    return ", ".join([*said, *(f"{others[verdict]} {verdict}" for verdict in order if others[verdict])])


def _describe_marks(answers: Sequence[Answer]) -> Iterator[str]:
    """List the marked checkpoints, and the unmarked ones, each reason once."""
    marked = Counter(answer.mark.verdict for answer in answers if answer.mark is not None)
    unmarked: dict[str, list[str]] = {}
    for answer in answers:
        if answer.unmarked:
            reason = _shorten_text(answer.unmarked, answer.path).removeprefix("cannot be marked: ")
            unmarked.setdefault(reason, []).append(answer.path)
    if marked:
        yield "marked: " + ", ".join(
            f"{marked[verdict]} {verdict}" for verdict in ("verified", "failed") if marked[verdict]
        )
    for reason, paths in unmarked.items():
        names = listed([*map(escape_text, paths)], limit=_NAMES_SHOWN)
        yield f"not marked: {len(paths)}: {names}: {escape_text(reason)}"
    if any(answer.unmarked and not answer.is_unwritten and answer.exit_code == FINE for answer in answers):
        yield "a copy of an intact one by `shardckpt convert` can be marked"


def _describe_skipped(skipped: Sequence[CheckpointSummary]) -> list[str]:
    """List the paths that were not verified, because they are no checkpoints."""
    if not skipped:
        return []
    deeper = "; -r verifies the checkpoints in folders" if any(each.inside for each in skipped) else ""
    said = listed([f"{each.name} ({each.reason.removeprefix('is ')})" for each in skipped])
    return [f"skipped: {len(skipped)}: {said}{deeper}"]


def _name_verdict(answer: Answer) -> str:
    from shardckpt.maintenance.verify import INTACT, get_exit_code, has_digests

    if answer.error is None and get_exit_code(answer.files) == INTACT:
        said = "intact" if has_digests(answer.files) else _name_checks(answer.files)
        return f"{said}{_UNREAD}" if answer.unread else said
    if answer.exit_code == FAILED:
        return "unreadable"
    return "incomplete" if isinstance(answer.error, IncompleteCheckpointError) else "damaged"


def explain_verdict(answer: Answer) -> str:
    """Return the verdict, and why there are no results of files, if so."""
    verdict = _name_verdict(answer)
    if answer.error is None:
        return f"{verdict}: {answer.unread}" if answer.unread else verdict
    return f"{verdict}: {_shorten_error(answer.error, answer.path)}"


def _find_style(answer: Answer) -> Style:
    if isinstance(answer.error, IncompleteCheckpointError) and answer.exit_code != FAILED:
        return "partial"
    return "good" if _name_verdict(answer).startswith("intact") and not answer.unread else "bad"


def _find_file_style(result: FileResult) -> Style:
    return "" if result.foreign else "bad" if result.fault else "" if result.note else "good"


def _make_row(answer: Answer) -> dict[str, Any]:
    return {
        "checkpoint": answer.path,
        "state": _name_verdict(answer).partition(" ")[0],
        "checked": _find_weakest_check(answer.files),
        "exit_code": answer.exit_code,
        "error": None if answer.error is None else str(answer.error),
        "unmarked": answer.unmarked,
        "unread": answer.unread,
        "skipped": "",
        "files": answer.files,
    }


def _find_weakest_check(files: Sequence[FileResult]) -> str:
    """Return the least that a file of a checkpoint was compared with, from ``digests`` down to ``nothing``."""
    ways = {file.checked for file in files if not file.foreign}
    return next((way for way in reversed(_FINE) if way in ways), "nothing")


def _said(result: FileResult, path: str) -> str:
    if result.foreign:
        return "not a file of this checkpoint"
    return "; ".join(filter(None, (_shorten_fault(result, path), result.note))) or _FINE[result.checked]


def _shorten_fault(result: FileResult, path: str) -> str:
    """Return a file's fault without the checkpoint's path, and without the file's name where it is the first word."""
    text = result.fault
    for place in _list_places(path):
        own = place if os.path.basename(place) == result.name else f"{place}/{result.name}"  # noqa: PTH119 - or a URL
        text = text.replace(own, result.name).replace(f"{place}/", "")
    text = text.removeprefix(f"{result.name}: ").removeprefix(f"{result.name} ")
    return join_lines(text)


def _shorten_error(error: CheckpointingException, path: str) -> str:
    """Return in one line why a checkpoint has no results of files, without its path."""
    # of a refusal as ls says it: its further lines are about each reader
    text = str(error).splitlines()[0] if isinstance(error, CannotLoadError) else join_lines(str(error))
    return _shorten_text(text, path).removeprefix("is ")


def _shorten_text(text: str, path: str) -> str:
    """Return a text about a checkpoint without its path."""
    for place in _list_places(path):
        text = text.removeprefix(f"{place}: ").removeprefix(f"{place} ").replace(f"{place}/", "")
    return text


def _list_places(path: str) -> Iterable[str]:
    """Return how errors name a checkpoint: by its absolute or its real path.

    To take a relative one out of an error would leave the path of another file.
    """
    from shardckpt.engine.locations import expand_home

    path = expand_home(path)
    named = path.rstrip("/") if "://" in path else os.path.abspath(path)  # noqa: PTH100 - links stay
    return dict.fromkeys((named, os.path.realpath(path)))


def _summary(results: Sequence[FileResult]) -> str:
    from shardckpt.maintenance.verify import DAMAGED, NO_ANSWER, get_exit_code, has_digests

    code = get_exit_code(results)
    own = [result for result in results if not result.foreign]
    bad = [result for result in own if result.fault]
    if not bad and has_digests(own):
        return f"intact: every byte of {format_many(len(own), 'file')} was read, and matches its digest"
    if code == NO_ANSWER:
        return f"cannot be checked: {len(bad)} of {format_many(len(own), 'file')} could not be read"
    if code == DAMAGED:
        rest = [result for result in own if not result.fault]
        how = _explain_checks(rest, " without a fault") if rest else ""
        return f"damaged: {len(bad)} of {format_many(len(own), 'file')}{how}"
    return f"{_name_checks(own)}{_explain_checks(own)}"


def _name_checks(files: Sequence[FileResult]) -> str:
    """Return the verdict on a checkpoint without a fault that has files without digests: how these were checked."""
    ways = {file.checked for file in files if not file.foreign}
    names = {"digests": "digests", "crc32": "CRC-32", "structure": "structure"}
    said = " and ".join(name for way, name in names.items() if way in ways) or "its index" * (not ways)
    without = " without digests" * ("digests" not in ways) + ", links not opened" * ("nothing" in ways)
    return f"intact{said and f' by {said}'}{without}"


def _explain_checks(own: Sequence[FileResult], which: str = "") -> str:
    """Return sentences on how files were checked, to follow another, and which they are; ``""`` if all have digests."""
    counts = Counter[str](result.checked for result in own)
    files = f"{format_many(len(own), 'file')}{which} {'was' if len(own) == 1 else 'were'}"
    compared = [
        f"{counts[how]} of {files} compared with {what}"
        for how, what in (("digests", "digests"), ("crc32", "the CRC-32s in their archives"))
        if counts[how]
    ]
    if counts["nothing"]:
        compared.append(f"{counts['nothing']} of {files} not opened")
    if counts["digests"] == len(own):
        return ""
    if not counts["structure"]:
        return f". {', '.join(compared)}"
    if not compared:
        return f". Checked{which and f' of the files{which}'}: {_STRUCTURE}. Not checked: their values"
    return f". {', '.join(compared)}; checked of the others: {_STRUCTURE}. Not checked: the values in those"
