"""List the checkpoints in a folder: step, age, size on disk, strategy, and whether each is whole or why not.

The fingerprint is of all tensors together, where the save has stored fingerprints: equal for equal keys and values.

Those of other libraries are recognised by content, files of torch.save and safetensors in the folder among them. JSON
files, indexes and sizes are looked at, of DeepSpeed's files and torch.save's their directories and pickles; tensors
are not compared: verify does that, and what verify --mark has found is said, as are the leases and pins that keep a
checkpoint from removal.

Of the metrics that CheckpointManager.save was given, that of its best_metric is shown, or else the first that most
have, with a star at the best of the whole ones. The links latest and best are said of the steps that they lead to. What
all rows say alike is said below them, and columns that no row has anything in are left out; on a terminal, names that
are too long lose their middle. Exit code: 1 if a checkpoint is damaged or incomplete, is marked as failed, or cannot be
read here.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output
from shardckpt.cli.table import fit_table
from shardckpt.errors import CheckpointingException, escape_text, name_known

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.cli.colour import Style
    from shardckpt.engine import PruneResult
    from shardckpt.manager import CheckpointSummary


#: The formats of ours that are read, as their plugins register them, by backend and version.
FORMATS = frozenset({(name, 1) for name in ("ep", "safetensors", "torch_checkpointing", "torch_dist", "zarr")})
#: Of a fingerprint's 32 digits, those that are shown: enough for an eye that compares rows.
_DIGITS = 12


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "ls", help="list the checkpoints in a folder, and whether they are whole", description=__doc__
    )
    parser.add_argument("folder", nargs="?", default=".", help="directory or URL (default: here)")
    parser.add_argument("-r", "--recursive", action="store_true", help="look into the folders in it, too")
    parser.add_argument(
        "--metric",
        type=_parse_metric,
        metavar="NAME[:min|max]",
        help="the metric to show, and whether the smallest (min) or the largest value is the best",
    )
    parser.set_defaults(reads=("folder",), run=run)


def run(options: Any) -> Output:
    """Return a row per directory, and what they are together.

    Raises:
        CheckpointingException: no checkpoint has the metric that is asked for.
    """
    found = list_folder(options.folder, recursive=options.recursive)
    metric, mode = _choose_metric(options.metric, found)
    fine = all(each.state in ("whole", "other") and not each.has_failed for each in found)
    return Output(lambda: found, lambda: _describe(options.folder, found, metric, mode), FINE if fine else FOUND)


def _describe(folder: str, found: Sequence[CheckpointSummary], metric: str, mode: str) -> list[str]:
    best = _find_best(found, metric, mode)
    lines = _make_table(found, metric, best) if found else []
    lines += _summarize(folder, found)
    if best is not None:
        least, other, most = ("smallest", "max", "largest") if mode == "min" else ("largest", "min", "smallest")
        name = escape_text(metric)
        lines.append(f"*: the {least} {name} of what is whole; --metric {name}:{other} shows the {most}")
    return lines


def list_folder(folder: str, *, recursive: bool = False) -> list[CheckpointSummary]:
    """Return the summaries; torch, which takes seconds to import, is only needed where they are not all of ours."""
    from shardckpt.manager import list_plain

    found = list_plain(folder, FORMATS, recursive=recursive)
    if found is None:
        from shardckpt.manager import list_checkpoints

        found = list_checkpoints(folder, recursive=recursive)
    return found


def describe_leftovers(folder: str, found: Sequence[CheckpointSummary]) -> list[str]:
    """Return a line for a folder, and for each folder of checkpoints in it, where killed saves have left something."""
    from shardckpt.cli.amounts import format_bytes

    lines: list[str] = []
    seen: set[Path] = set()  # what is beside a folder is in the one around it, too
    inner = {each.name if each.inside else each.name.rpartition("/")[0] for each in found} - {""}
    for name in ("", *sorted(inner)):
        place = f"{folder.rstrip('/') or '/'}/{name}" if name else folder
        left = [each for each in _find_leftovers(place) if each.path not in seen]
        if not left:
            continue
        seen.update(each.path for each in left)
        used = sum(bool(each.kept) for each in left)
        size = format_bytes(sum(each.nbytes for each in left))
        hidden = "directory" if len(left) == 1 else "directories"
        where = f"in {escape_text(name)}" if name else "beside them"
        lines.append(
            f"{where} {len(left)} hidden {hidden} of saves and removals, {size}, of which {used} may be in use: "
            f"`shardckpt prune {escape_text(place)} --dry-run` names them"
        )
    return lines


def _find_leftovers(folder: str) -> list[PruneResult]:
    """Return what killed saves have left in a folder or beside a checkpoint; beside a file and at a URL, nothing."""
    from shardckpt.commit import find_leftovers_of
    from shardckpt.engine import find_local

    place = find_local(folder)
    if place is None or place.is_file() or not find_leftovers_of(place):
        return []
    from shardckpt.engine import prune_leftovers  # it imports pydantic

    return prune_leftovers(folder, dry_run=True)


def _parse_metric(text: str) -> tuple[str, str]:
    """Parse ``NAME[:min|max]``; a name may have colons."""
    name, _, mode = text.rpartition(":")
    return (name, mode) if name and mode in ("min", "max") else (text, "min")


def _choose_metric(wanted: tuple[str, str] | None, found: Sequence[CheckpointSummary]) -> tuple[str, str]:
    """Return the metric to show, ``""`` for none, and which of its values is the best.

    Raises:
        CheckpointingException: No checkpoint has the one that is wanted.
    """
    many = Counter(name for each in found for name in each.metrics)
    if wanted is None:
        named = [each.ranking for each in found if each.ranking is not None and each.ranking[0] in many]
        return named[-1] if named else (max(many, key=many.__getitem__, default=""), "min")
    if wanted[0] not in many:
        raise CheckpointingException(
            f"no checkpoint here has the metric {wanted[0]!r} {name_known(wanted[0], many, 'metrics')}"
        )
    return wanted


def _find_best(found: Sequence[CheckpointSummary], metric: str, mode: str) -> CheckpointSummary | None:
    """Return the checkpoint with the best value among those that are whole and not marked as failed."""
    from shardckpt.manager import rank_steps

    # by their places: a step may be there twice
    sound = {n: each.metrics for n, each in enumerate(found) if each.state == "whole" and not each.has_failed}
    ranked = rank_steps(sound, metric, mode)
    return found[ranked[0]] if ranked else None


def _make_table(found: Sequence[CheckpointSummary], metric: str, best: CheckpointSummary | None) -> list[str]:
    """Return the table; who wrote the checkpoints is left to the last lines if it is the same of all."""
    alike = _find_writer(found)
    rows = [
        (*cells, _show_metric(each, metric, best), "-" if alike else _name_writer(each), *rest)
        for each in found
        for cells, rest in [_row(each)]
    ]
    names = ("checkpoint", "step", "age", "size", "strategy", escape_text(metric), "written by", "fingerprint", "state")
    return fit_table(names, rows, [*map(_find_style, found)], optional=("fingerprint", "written by", "strategy"))


def _find_style(found: CheckpointSummary) -> Style:
    if found.has_failed:
        return "bad"
    states: dict[str, Style] = {"whole": "good", "incomplete": "partial", "other": ""}
    return states.get(found.state, "bad")


def _show_metric(found: CheckpointSummary, metric: str, best: CheckpointSummary | None) -> str:
    from shardckpt.cli.amounts import format_metric

    if metric not in found.metrics:
        return "-"
    return format_metric(found.metrics[metric]) + " *" * (found is best)


def _name_writer(found: CheckpointSummary) -> str:
    return found.writer.partition(",")[0] or found.library or ("another library" if found.strategy else "-")


def _find_writer(found: Sequence[CheckpointSummary]) -> str:
    """Return who wrote all that is there; ``""`` if several did, or nobody knows."""
    writers = {_name_writer(each) for each in found} - {"-"}
    return writers.pop() if len(writers) == 1 else ""


def _row(found: CheckpointSummary) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the cells before the metric and the writer, and those behind them."""
    from shardckpt.cli.amounts import format_bytes, format_seconds

    state, reason = ", ".join((_name_state(found), *found.links)), found.reason.removeprefix("is ")
    state = reason if found.inside or found.is_refused else f"{state}: {reason}" if reason else state
    cells = (
        found.name,
        "-" if found.step is None else found.step,
        "-" if found.saved_at is None else format_seconds(time.time() - found.saved_at),
        format_bytes(found.nbytes),
        found.strategy or "-",
    )
    return cells, (
        found.fingerprint[:_DIGITS] or "-",
        ", ".join((state, *filter(None, [found.mark]), *found.held)),
    )


def _name_state(found: CheckpointSummary) -> str:
    if found.inside:
        return "folders of checkpoints"
    return "no checkpoint" if found.state == "other" else found.state


def _summarize(folder: str, found: Sequence[CheckpointSummary]) -> list[str]:
    """Return the last lines: how many checkpoints there are, and what killed saves have left beside them."""
    from shardckpt.cli.amounts import format_bytes, format_many
    from shardckpt.maintenance import FILE_SUFFIXES

    rows = len(found)
    found = [*{each.path: each for each in found}.values()]  # a link to what is there, too, is nothing more
    checkpoints = [each for each in found if each.is_checkpoint]
    whole = [each.has_failed for each in checkpoints if each.state == "whole"]
    failed = f", {sum(whole)} marked as failed" if any(whole) else ""
    many = format_many(len(checkpoints), "checkpoint")
    by = f", written by {escape_text(writer)}" if (writer := _find_writer(found)) else ""
    folders = [each for each in found if each.inside]
    summary = f"{many}, {whole.count(False)} whole{failed}, {format_bytes(sum(e.nbytes for e in checkpoints))}{by}"
    # the row of a folder counts all of these, by the names of files
    none = sum(each.state == "other" and each.name.endswith(FILE_SUFFIXES) for each in found)
    summary += f"; {format_many(none, 'file')} beside them: no checkpoint" if none else ""
    summary += f"; {format_many(rows - len(found), 'row')} of the same by another path" if rows > len(found) else ""
    lines = [summary] if checkpoints or not folders else []
    if folders:
        inside = sum(each.inside for each in folders)
        more = f"{inside} more" if checkpoints else format_many(inside, "checkpoint")
        lines.append(f"{more} in {format_many(len(folders), 'folder')}: `shardckpt ls -r {folder}` lists them")
    sums: dict[str, int] = {}
    for each in found:
        sums[_name_state(each)] = sums.get(_name_state(each), 0) + each.nbytes
    if len(sums) > 1:
        by_state = ", ".join(f"{state} {format_bytes(nbytes)}" for state, nbytes in sums.items())
        lines.append(f"on disk: {format_bytes(sum(sums.values()))}: {by_state}")
    if bad := _count_bad_steps(folder, found):
        lines.append(
            f"{format_many(bad, 'step')} damaged, incomplete or marked as failed: `shardckpt prune {folder} --damaged "
            "--dry-run` says which may go"
        )
    return lines + describe_leftovers(folder, found)


def _count_bad_steps(folder: str, found: Sequence[CheckpointSummary]) -> int:
    """Return how many steps in the folder itself are not as they should be."""
    from shardckpt.engine import find_local
    from shardckpt.manager import parse_step

    own = str(find_local(folder) or folder.rstrip("/"))  # a checkpoint itself is listed, too
    steps = [e for e in found if "/" not in e.name and parse_step(e.name) is not None and e.path != own]
    return sum(each.has_failed or each.state in ("damaged", "incomplete") for each in steps)
