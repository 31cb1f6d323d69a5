"""Remove the hidden directories that killed saves, overwrites, exports and removals have left beside checkpoints.

With --keep-latest, --keep-every, --keep-near, --keep-hours, --keep-best or --keep-verified also the checkpoints of
steps that none of these keeps, as a CheckpointManager does: only complete ones, never the newest or the newest verified
one. What a living process may use is kept, and so is what may be the only copy of a checkpoint; its row says why.
Exit code: 2 if something could not be removed.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FAILED, FINE
from shardckpt.cli.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.engine import PruneResult
    from shardckpt.manager import StepResult


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "prune", help="remove what killed saves have left, and steps that are not kept", description=__doc__
    )
    parser.add_argument(
        "path", nargs="?", help="a folder of checkpoints, or one checkpoint; a URL only with --keep-..."
    )
    parser.add_argument(
        "--spool",
        nargs="?",
        const="",
        metavar="DIR",
        help="also remove what killed uploads to stores have left on this machine: in DIR, or by default in "
        "SHARDCKPT_SPOOL_DIR or the temporary directory",
    )
    parser.add_argument(
        "--older-than",
        type=float,
        metavar="HOURS",
        help="age from which to remove what other hosts have left, whose processes cannot be seen from here "
        "(default: SHARDCKPT_LEFTOVER_HOURS, or 24)",
    )
    parser.add_argument("--keep-latest", type=_parse_count, metavar="N", help="keep the N highest steps")
    parser.add_argument("--keep-every", type=_parse_count, metavar="N", help="keep the steps that are multiples of N")
    parser.add_argument("--keep-near", type=_parse_count, metavar="N", help="keep the steps closest to multiples of N")
    parser.add_argument("--keep-hours", type=_parse_hours, metavar="H", help="keep the steps of the last H hours")
    parser.add_argument(
        "--keep-verified",
        type=_parse_count,
        metavar="N",
        help="keep the N highest steps that are marked as verified",
    )
    parser.add_argument(
        "--keep-best",
        type=_parse_best,
        action="append",
        default=[],
        metavar="METRIC[:min|max[:COUNT]]",
        help="keep the steps with the best values of a metric that CheckpointManager.save was given, such as "
        "loss:min:2; may be repeated",
    )
    parser.add_argument(
        "--keep-step", type=int, action="append", default=[], metavar="STEP", help="keep a step; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    parser.set_defaults(run=run, parser=parser)


def run(options: Any) -> int:
    """Prune, and print a row per step and leftover. Return 0 if all that is not needed was removed, else 2."""
    from shardckpt.engine import prune_leftovers, prune_spools
    from shardckpt.manager import prune_steps

    if options.path is None and options.spool is None:
        options.parser.error("give a PATH, or --spool")
    policies = _make_policies(options)
    if options.path is None and policies:
        options.parser.error("options that keep steps, such as --keep-latest, need a PATH: the folder of the steps")
    if options.keep_step and not policies:
        options.parser.error("--keep-step keeps steps that a policy would remove: give one, such as --keep-latest 3")
    steps: list[StepResult] = []
    if policies:
        steps = prune_steps(options.path, policies, options.keep_step, dry_run=options.dry_run)
        _print_rows("checkpoint", steps, options)
        if not steps:
            print(f"{options.path} has no directory of a step")
    results: list[PruneResult] = []
    if options.path is not None and "://" not in options.path:
        results += prune_leftovers(options.path, options.older_than, dry_run=options.dry_run)
    elif options.path is not None and not policies:
        prune_leftovers(options.path)  # which says why a store has none
    if options.spool is not None:
        results += prune_spools(options.spool or None, options.older_than, dry_run=options.dry_run)
    _print_rows("leftover", results, options)
    everything: list[PruneResult | StepResult] = [*steps, *results]
    freed = sum(result.nbytes for result in everything if not result.kept and not result.error)
    print(f"{freed} bytes {'would be ' * options.dry_run}freed")
    return FAILED if any(result.error for result in everything) else FINE


def _print_rows(what: str, results: Sequence[PruneResult | StepResult], options: Any) -> None:
    if results:
        rows = [(r.path, r.nbytes, _describe(r.kept, r.error, options)) for r in results]
        print(table((what, "bytes", "result"), rows))


def _make_policies(options: Any) -> list[Any]:
    from shardckpt.manager import KeepBest, KeepEvery, KeepLatest, KeepNear, KeepRecent, KeepVerified

    policies: list[Any] = []
    for policy, given in (
        (KeepLatest, options.keep_latest),
        (KeepEvery, options.keep_every),
        (KeepNear, options.keep_near),
        (KeepRecent, options.keep_hours),
        (KeepVerified, options.keep_verified),
    ):
        if given is not None:
            policies.append(policy(given))
    for metric, mode, count in options.keep_best:
        policies.append(KeepBest(metric, count, mode))
    return policies


def _describe(kept: str, error: str, options: Any) -> str:
    if kept:
        return f"kept: {kept}"
    return error or ("would be removed" if options.dry_run else "removed")


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parse_hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours above 0")
    return hours


def _parse_best(text: str) -> tuple[str, str, int]:
    """Parse ``METRIC[:min|max[:COUNT]]``."""
    metric, *rest = text.split(":")
    mode, count = (*rest, *("min", "1")[len(rest) :])[:2]
    if not metric or len(rest) > 2 or mode not in ("min", "max"):  # noqa: PLR2004 - mode and count
        raise argparse.ArgumentTypeError(f"{text!r} is not METRIC[:min|max[:COUNT]], such as loss:min:2")
    return metric, mode, _parse_count(count)
