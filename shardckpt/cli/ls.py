"""List the checkpoints in a folder: step, age, size on disk, strategy, and whether each is whole or why not.

The fingerprint is of all tensors together, where the save has stored fingerprints: equal for equal keys and values.

Checkpoints of other libraries are recognised by content, and so are files of torch.save and safetensors in the folder.
JSON files, indexes and sizes are checked, and the directories and pickles of DeepSpeed's files and torch.save's.
Tensors are not compared: verify does that. The verdict of verify --mark is shown, and the leases and pins that keep a
checkpoint from removal.

Of the metrics that CheckpointManager.save was given, the best_metric is shown, or else the first that most checkpoints
in the folder have, with a star at the best whole one; with -r for each folder by itself. The links latest and best are
shown with the steps that they lead to. A value that all rows share is printed once below them, and empty columns are
left out; on a terminal, names that are too long stand above their rows. Exit code: 1 if a checkpoint is
damaged or incomplete, is marked as failed, or cannot be read here.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FAILED, FINE, FOUND
from shardckpt.cli.failure import print_error
from shardckpt.cli.output import Output
from shardckpt.cli.table import fit_table
from shardckpt.engine.amounts import format_bytes, format_metric, format_seconds
from shardckpt.errors import (
    CheckpointingException,
    NotACheckpointError,
    escape_text,
    format_many,
    listed,
    name_call,
    name_known,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.cli.colour import Style
    from shardckpt.engine.pruning import PruneResult
    from shardckpt.manager.summaries import CheckpointSummary


#: The formats of ours that are read, as their plugins register them, by backend and version.
FORMATS = frozenset({(name, 1) for name in ("ep", "safetensors", "torch_checkpointing", "torch_dist", "zarr")})
#: The name of the best value of a metric.
_BEST = {"min": "the smallest", "max": "the largest"}
#: The digits of a fingerprint's 32 that are shown: enough for an eye that compares rows.
_DIGITS = 12


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("folders", nargs="*", metavar="folder", default=["."], help="directory or URL (default: here)")
    parser.add_argument("-r", "--recursive", action="store_true", help="look into the folders in it, too")
    parser.add_argument(
        "--metric",
        type=_parse_metric,
        metavar="NAME[:min|max]",
        help="the metric to show, and whether the smallest (min) or the largest value is the best",
    )
    parser.set_defaults(reads=("folders",))


def run(options: Any) -> Output:
    """Return a row per directory, and their totals; for each of several folders.

    It is an error if no checkpoint has the metric that is asked for, or the only folder cannot be listed.
    """
    listings: dict[str, list[CheckpointSummary]] = {}
    for folder in dict.fromkeys(options.folders):
        try:
            listings[folder] = list_folder(folder, recursive=options.recursive)
            _refuse_other_file(folder, listings[folder])
        except CheckpointingException as exc:  # noqa: PERF203 - the others are listed all the same
            if len(options.folders) == 1:
                raise
            print_error(exc, options)
    found = [each for listing in listings.values() for each in listing]
    _refuse_unknown_metric(options.metric, found)
    if len(listings) < len({*options.folders}):
        code = FAILED
    else:
        code = FINE if all(each.state in ("whole", "other") and not each.has_failed for each in found) else FOUND
    return Output(lambda: found, lambda: _describe_each(options, listings), code)


def _describe_each(options: Any, listings: dict[str, list[CheckpointSummary]]) -> list[str]:
    """Return the lines of each folder, below its name if several were asked for, like a shell's ls."""
    lines: list[str] = []
    for folder, found in listings.items():
        if len(options.folders) > 1:
            lines += [*[""] * bool(lines), f"{escape_text(folder)}:"]
        lines += _describe(options, folder, found, _choose_metrics(options.metric, found))
    return lines


def _describe(
    options: Any, folder: str, found: Sequence[CheckpointSummary], metrics: dict[str, tuple[str, str]]
) -> list[str]:
    from shardckpt.commit.leftovers import walk_folders
    from shardckpt.engine.locations import find_local

    best = _find_best(found, metrics)
    lines = _make_table(found, metrics, best) if found else []
    lines += _summarize(folder, found, recursive=options.recursive)
    top = find_local(folder) if options.recursive else None
    walked = None if top is None else walk_folders(top)
    lines += describe_leftovers(folder, found, [] if walked is None else walked.with_leftovers)
    if top is not None and walked is not None and walked.broken:
        broken = [path.relative_to(top).as_posix() for path in walked.broken]
        lines.append(f"{format_many(len(broken), 'link')} leading nowhere: {listed(broken, limit=6)}")
    hidden = {name for each in found for name in each.metrics} - {name for name, _ in metrics.values()}
    if hidden and options.metric is None:
        lines.append(f"more metrics: {listed(sorted(hidden), limit=6)}: --metric NAME shows one")
    shown = sorted({metrics[folder] for folder in best})
    if len(shown) == 1:
        (metric, mode), each = shown[0], " in each folder" * (len(best) > 1)
        other, name = "max" if mode == "min" else "min", escape_text(metric)
        option = f"--metric {shlex.quote(f'{name}:{other}')}"
        lines.append(f"*: {_BEST[mode]} {name} of the whole checkpoints{each}; {option} shows {_BEST[other]}")
    elif shown:
        names = ", ".join(f"{_BEST[mode]} {escape_text(metric)}" for metric, mode in shown)
        lines.append(
            f"*: the best whole checkpoint of each folder, by its settings: {names}; --metric shows one of all"
        )
    return lines


def list_folder(folder: str, *, recursive: bool = False) -> list[CheckpointSummary]:
    """Return the summaries; torch, which takes seconds to import, is only needed where they are not all of ours."""
    from shardckpt.manager.summaries import list_plain

    found = list_plain(folder, FORMATS, recursive=recursive)
    if found is None:
        from shardckpt.manager.listing import list_checkpoints

        found = list_checkpoints(folder, recursive=recursive)
    return found


def _refuse_other_file(path: str, found: Sequence[CheckpointSummary]) -> None:
    """Raise if a path leads to a file which is no checkpoint: in a folder it is a row, alone a wrong argument."""
    from shardckpt.engine.locations import find_local

    place = find_local(path)
    if place is not None and place.is_file() and found[0].state == "other" and not found[0].is_refused:
        raise NotACheckpointError(f"{path} is no checkpoint: {found[0].reason.removeprefix('is ')}")


def describe_leftovers(folder: str, found: Sequence[CheckpointSummary], inside: Sequence[Path] = ()) -> list[str]:
    """Return a line for a folder, and for each folder of checkpoints in it, where killed saves have left something.

    ``inside`` are the real paths of other folders in it that have leftovers.
    """
    from shardckpt.engine.locations import find_local

    lines: list[str] = []
    seen: set[Path] = set()  # the entries next to a folder are in the one around it, too
    inner = {each.name if each.inside else each.name.rpartition("/")[0] for each in found} - {""}
    if inside and (top := find_local(folder)) is not None:
        inner |= {str(each.relative_to(top)) for each in inside if each != top}
    for name in ("", *sorted(inner)):
        place = f"{folder.rstrip('/') or '/'}/{name}" if name else folder
        left = [each for each in _find_leftovers(place, is_inner=bool(name)) if each.path not in seen]
        if not left:
            continue
        seen.update(each.path for each in left)
        used = sum(bool(each.kept) for each in left)
        size = format_bytes(sum(each.nbytes for each in left))
        hidden = "directory" if len(left) == 1 else "directories"
        where = f"in {escape_text(name)}" if name else "next to them"
        lines.append(
            f"{where} {len(left)} hidden {hidden} of saves and removals, {size}, {used} perhaps in use: "
            f"{name_call('prune', escape_text(place), '--dry-run')} names them"
        )
    return lines


def _find_leftovers(folder: str, *, is_inner: bool) -> list[PruneResult]:
    """Return the leftovers of killed saves in a folder or next to a checkpoint; none next to a file and at a URL.

    Those next to an inner folder are found in the one around it, which may have thousands of them.
    """
    from shardckpt.commit.leftovers import find_leftovers, find_leftovers_of
    from shardckpt.engine.locations import find_local

    place = find_local(folder)
    if place is None or place.is_file():
        return []
    if not (find_leftovers(place, lambda _: True) if is_inner else find_leftovers_of(place)):
        return []
    from shardckpt.engine.pruning import prune_leftovers  # it imports pydantic

    return prune_leftovers(folder, dry_run=True)


def _parse_metric(text: str) -> tuple[str, str]:
    """Parse ``NAME[:min|max]``; a name may have colons."""
    name, _, mode = text.rpartition(":")
    return (name, mode) if name and mode in ("min", "max") else (text, "min")


def _refuse_unknown_metric(wanted: tuple[str, str] | None, found: Sequence[CheckpointSummary]) -> None:
    known = {name for each in found for name in each.metrics}
    if wanted is not None and wanted[0] not in known:
        deeper = "; -r looks in folders, too" if any(each.inside for each in found) else ""
        raise CheckpointingException(
            f"no checkpoint here has the metric {wanted[0]!r} {name_known(wanted[0], known, 'metrics')}{deeper}"
        )


def _choose_metrics(wanted: tuple[str, str] | None, found: Sequence[CheckpointSummary]) -> dict[str, tuple[str, str]]:
    """Return for each folder the metric to show, ``""`` for none, and which of its values is the best."""
    folders: dict[str, list[CheckpointSummary]] = {}
    for each in found:
        folders.setdefault(_name_folder(each), []).append(each)
    return {folder: wanted or _choose_metric(inside) for folder, inside in folders.items()}


def _choose_metric(found: Sequence[CheckpointSummary]) -> tuple[str, str]:
    """Return the metric of one folder: the one in its manager's settings, or else the first that most have."""
    many = Counter(name for each in found for name in each.metrics)
    named = [each.ranking for each in found if each.ranking is not None and each.ranking[0] in many]
    return named[-1] if named else (max(many, key=many.__getitem__, default=""), "min")


def _name_folder(found: CheckpointSummary) -> str:
    return found.name.rpartition("/")[0]


def _find_best(found: Sequence[CheckpointSummary], metrics: dict[str, tuple[str, str]]) -> dict[str, CheckpointSummary]:
    """Return, for each folder, the checkpoint with the best value that is whole and not marked as failed."""
    from shardckpt.manager.metrics import rank_steps
    from shardckpt.manager.summaries import list_once

    sound = [each for each in list_once(found) if each.state == "whole" and not each.has_failed]
    folders: dict[str, dict[int, dict[str, float | None]]] = {}
    for place, each in enumerate(sound):  # not by their steps: one may be there twice
        folders.setdefault(_name_folder(each), {})[place] = each.metrics
    best = {}
    for folder, inside in folders.items():
        if ranked := rank_steps(inside, *metrics[folder]):
            best[folder] = sound[ranked[0]]
    return best


def _make_table(
    found: Sequence[CheckpointSummary], metrics: dict[str, tuple[str, str]], best: dict[str, CheckpointSummary]
) -> list[str]:
    """Return the table; who wrote the checkpoints is left to the last lines if it is the same of all."""
    common_writer, shown = _find_writer(found), {metric for metric, _ in metrics.values() if metric}
    head = escape_text(*shown) if len(shown) == 1 else "metric"
    rows = [
        (
            each.name,
            "-" if each.step is None else each.step,
            "-" if each.saved_at is None else format_seconds(time.time() - each.saved_at),
            format_bytes(each.nbytes),
            each.strategy or "-",
            _show_metric(each, metrics, best, named=len(shown) > 1),
            "-" if common_writer else _name_writer(each),
            each.fingerprint[:_DIGITS] or "-",
            _describe_state(each),
        )
        for each in found
    ]
    names = ("checkpoint", "step", "age", "size", "strategy", head, "written by", "fingerprint", "state")
    return fit_table(
        names, rows, [*map(_find_style, found)], optional=("fingerprint", "written by", "strategy"), copied=True
    )


def _find_style(found: CheckpointSummary) -> Style:
    if found.has_failed:
        return "bad"
    states: dict[str, Style] = {"whole": "good", "incomplete": "partial", "other": ""}
    return states.get(found.state, "bad")


def _show_metric(
    found: CheckpointSummary,
    metrics: dict[str, tuple[str, str]],
    best: dict[str, CheckpointSummary],
    *,
    named: bool,
) -> str:
    folder = _name_folder(found)
    metric = metrics[folder][0]
    if metric not in found.metrics:
        return "-"
    name = f"{escape_text(metric)} " * named
    return name + format_metric(found.metrics[metric]) + " *" * (found is best.get(folder))


def _name_writer(found: CheckpointSummary) -> str:
    return found.writer.partition(",")[0] or found.library or ("another library" if found.strategy else "-")


def _find_writer(found: Sequence[CheckpointSummary]) -> str:
    """Return the one writer of all checkpoints there; ``""`` if there are several, or it is unknown."""
    writers = {_name_writer(each) for each in found} - {"-"}
    return writers.pop() if len(writers) == 1 else ""


def _describe_state(found: CheckpointSummary) -> str:
    """Return the state with its reason, the verdict of ``verify --mark``, and the reasons to keep the checkpoint."""
    if not found.has_failed:
        names = [_name_state(found)]
    elif found.state == "whole":  # by its sizes; the verdict is about its bytes
        names = [found.mark]
    else:  # of a damaged one the reason below has the faults, and the verdict need not
        names = [found.mark.partition(": ")[0] if found.state == "damaged" else found.mark, _name_state(found)]
    if found.rescued:
        names.append(f"rescued: {format_many(found.rescued, 'key')} left out")
    state = ", ".join((*names, *found.links))
    if reason := found.reason.removeprefix("is "):
        is_other = found.is_refused or (found.inside and not found.is_checkpoint)
        state = reason if is_other else f"{state}: {reason}"
    passed = "" if found.has_failed else found.mark
    return ", ".join(filter(None, (state, passed, *found.held)))


def _name_state(found: CheckpointSummary) -> str:
    if found.inside and not found.is_checkpoint:
        return "folders of checkpoints"
    return "no checkpoint" if found.state == "other" else found.state


def _summarize(folder: str, found: Sequence[CheckpointSummary], *, recursive: bool = False) -> list[str]:
    """Return the number of checkpoints, their states, and their bytes on disk."""
    from shardckpt.maintenance.inside import FILE_SUFFIXES
    from shardckpt.manager.summaries import list_once

    rows = len(found)
    found = list_once(found)
    checkpoints = [each for each in found if each.is_checkpoint]
    whole = [each.has_failed for each in checkpoints if each.state == "whole"]
    failed = f", {sum(whole)} marked as failed" if any(whole) else ""
    many = format_many(len(checkpoints), "checkpoint")
    by = f", written by {escape_text(writer)}" if (writer := _find_writer(found)) else ""
    folders = [each for each in found if each.inside]
    summary = f"{many}, {whole.count(False)} whole{failed}, {format_bytes(sum(e.nbytes for e in checkpoints))}{by}"
    # the row of a folder counts all of these, by the names of files
    none = sum(each.state == "other" and each.name.endswith(FILE_SUFFIXES) for each in found)
    summary += f"; {none:,} more by the names of files: no checkpoint" if none else ""
    summary += f"; {format_many(rows - len(found), 'row')} of the same by another path" if rows > len(found) else ""
    lines = [summary] if checkpoints or not folders else []
    if folders:
        inside = sum(each.inside for each in folders)
        more = f"{inside} more" if checkpoints else format_many(inside, "checkpoint")
        where = f"in {format_many(len(folders), 'folder')}, by the names of files"
        lines.append(f"{more} {where}: {name_call('ls', '-r', folder)} lists them")
    sums: dict[str, int] = {}
    for each in found:
        sums[_name_state(each)] = sums.get(_name_state(each), 0) + each.nbytes
    if recursive:  # so that the sum equals the sum of the rows of folders
        sums["other files"] = _measure_others(folder, found)
    if len(sums := {state: nbytes for state, nbytes in sums.items() if nbytes}) > 1:
        by_state = ", ".join(f"{state} {format_bytes(nbytes)}" for state, nbytes in sums.items())
        lines.append(f"on disk: {format_bytes(sum(sums.values()))}: {by_state}")
    if bad := _count_bad_steps(folder, found):
        lines.append(
            f"{format_many(bad, 'step')} damaged, incomplete or marked as failed: "
            f"{name_call('prune', folder, '--damaged', '--dry-run')} says which may go"
        )
    return lines


def _measure_others(folder: str, found: Sequence[CheckpointSummary]) -> int:
    """Return the bytes in a folder of this machine, logs and leftovers of killed saves, that no row has."""
    from shardckpt.engine.locations import find_local, measure

    if (top := find_local(folder)) is None or not top.is_dir():
        return 0
    return max(0, measure(top) - sum(each.nbytes for each in found if each.path.startswith(f"{top}/")))


def _count_bad_steps(folder: str, found: Sequence[CheckpointSummary]) -> int:
    """Return how many steps in the folder itself are not as they should be."""
    from shardckpt.engine.locations import find_local
    from shardckpt.manager.step_names import parse_step

    own = str(find_local(folder) or folder.rstrip("/"))  # a checkpoint itself is listed, too
    steps = [e for e in found if "/" not in e.name and parse_step(e.name) is not None and e.path != own]
    return sum(each.has_failed or each.state in ("damaged", "incomplete") for each in steps)
