"""List the checkpoints in a folder: step, age, size on disk, strategy, and whether each is whole or why not.

The fingerprint is of all tensors together, where the save has stored fingerprints: equal for equal keys and values.

Those of other libraries are recognised by content, files of torch.save and safetensors in the folder among them. JSON
files, indexes and sizes are looked at, of DeepSpeed's files and torch.save's their directories and pickles; bytes of
tensors are not compared: verify does that, and what verify --mark has found is said, as are the leases and pins that
keep a checkpoint from removal. Exit code: 1 if a checkpoint is damaged or incomplete, is marked as failed, or cannot be
read here.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import say
from shardckpt.cli.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    parser.add_argument("--json", action="store_true", help="print a JSON list, with all that is known")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row per directory, and what they are together. Return the exit code."""
    found = _list(options.folder, recursive=options.recursive)
    if options.json:
        say(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    else:
        if found:
            say(
                table(
                    ("checkpoint", "step", "age", "size", "strategy", "written by", "fingerprint", "state"),
                    [_row(each) for each in found],
                )
            )
        for line in _summarize(options.folder, found):
            say(line)
    fine = all(each.state in ("whole", "other") and not each.has_failed for each in found)
    return FINE if fine else FOUND


def _list(folder: str, *, recursive: bool) -> list[CheckpointSummary]:
    """Return the summaries; torch, which takes seconds to import, is only needed where they are not all of ours."""
    from shardckpt.manager import list_plain

    found = list_plain(folder, FORMATS, recursive=recursive)
    if found is None:
        from shardckpt.manager import list_checkpoints

        found = list_checkpoints(folder, recursive=recursive)
    return found


def _find_leftovers(folder: str) -> list[PruneResult]:
    """Return what killed saves have left in a folder or beside a checkpoint; beside a file and at a URL, nothing."""
    from shardckpt.commit import find_leftovers_of
    from shardckpt.engine import find_local

    place = find_local(folder)
    if place is None or place.is_file() or not find_leftovers_of(place):
        return []
    from shardckpt.engine import prune_leftovers  # it imports pydantic

    return prune_leftovers(folder, dry_run=True)


def _row(found: CheckpointSummary) -> tuple[Any, ...]:
    from shardckpt.cli.amounts import format_bytes, format_seconds

    state = _name_state(found)
    state = found.reason if found.inside else f"{state}: {found.reason}" if found.reason else state
    return (
        found.name,
        "-" if found.step is None else found.step,
        "-" if found.saved_at is None else format_seconds(time.time() - found.saved_at),
        format_bytes(found.nbytes),
        found.strategy or "-",
        found.writer.partition(",")[0] or found.library or ("another library" if found.strategy else "-"),
        found.fingerprint[:_DIGITS] or "-",
        ", ".join((state, *filter(None, [found.mark]), *found.held)),
    )


def _name_state(found: CheckpointSummary) -> str:
    if found.inside:
        return "folders of checkpoints"
    return "no checkpoint" if found.state == "other" else found.state


def _summarize(folder: str, found: Sequence[CheckpointSummary]) -> list[str]:
    """Return the last lines: how many checkpoints there are, and what killed saves have left beside them."""
    from shardckpt.cli.amounts import format_bytes

    checkpoints = [each for each in found if each.is_checkpoint]
    whole = sum(each.state == "whole" for each in checkpoints)
    many = f"{len(checkpoints)} checkpoint{'s' * (len(checkpoints) != 1)}"
    lines = [f"{many}, {whole} whole, {format_bytes(sum(e.nbytes for e in checkpoints))}"]
    folders = [each for each in found if each.inside]
    if folders:
        more = sum(each.inside for each in folders)
        lines.append(
            f"{more} more in {len(folders)} folder{'s' * (len(folders) != 1)}: `shardckpt ls -r {folder}` lists them"
        )
    sums: dict[str, int] = {}
    for each in found:
        sums[_name_state(each)] = sums.get(_name_state(each), 0) + each.nbytes
    if len(sums) > 1:
        by_state = ", ".join(f"{state} {format_bytes(nbytes)}" for state, nbytes in sums.items())
        lines.append(f"on disk: {format_bytes(sum(sums.values()))}: {by_state}")
    if left := _find_leftovers(folder):
        used = sum(bool(each.kept) for each in left)
        size = format_bytes(sum(each.nbytes for each in left))
        hidden = "directory" if len(left) == 1 else "directories"
        lines.append(
            f"beside them {len(left)} hidden {hidden} of saves and removals, {size}, of which {used} may be in use: "
            f"`shardckpt prune {folder} --dry-run` names them"
        )
    return lines
