"""Remove what killed saves, overwrites, exports and removals have left beside checkpoints, or on a store.

In a directory these are hidden directories, on a store the objects of a save that has not committed them, and the parts
of objects that it had not sent to the end (S3, with s3fs).

With --keep-latest, --keep-every, --keep-near, --keep-hours, --keep-best or --keep-verified also the checkpoints of
steps that none of these keeps, as a CheckpointManager does: only complete ones, never the newest or the newest verified
one. What a living process may use is kept, and so is what may be the only copy of a checkpoint; its row says why.

A step counts as complete if its files are there and have their sizes: what is left may be damaged. With --verify the
newest step that shardckpt wrote is read before anything is removed, and if it is not as it was written the next older
one, until one is intact, which is kept.
A metric that no step has, and a --keep-step that is not there, are errors, and nothing is removed.
A checkpoint that has nothing beside it is one, too: its folder was meant.
Exit code: 1 if --verify has found a damaged step; 2 if something could not be removed.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.cli.exit_codes import FAILED, FINE, FOUND
from shardckpt.cli.folders import refuse_checkpoint
from shardckpt.cli.output import Output
from shardckpt.cli.table import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.engine import PruneResult
    from shardckpt.manager import CheckpointSummary, StepResult


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "prune", help="remove what killed saves have left, and steps that are not kept", description=__doc__
    )
    parser.add_argument("path", nargs="?", help="a folder of checkpoints, or one checkpoint: a directory or a URL")
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
    parser.add_argument(
        "--names",
        metavar="PREFIX",
        help="what the names of the steps have before the number, such as model- (default: any that ends with a word "
        "such as step, iter, epoch, ckpt or checkpoint)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="first verify the newest steps until one is intact, and mark them as `shardckpt verify --mark` does, also "
        "with --dry-run; a step that is marked is not read again",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    parser.set_defaults(run=run, parser=parser)


def run(options: Any) -> Output:
    """Prune, and return a row per step and leftover."""
    from shardckpt.cli.progress import show_progress
    from shardckpt.engine import explain_unseen_uploads, prune_leftovers, prune_spools
    from shardckpt.manager import prune_steps

    policies = _make_policies(options)
    _refuse_wrong_calls(options, policies)
    verified: list[Verified] = []
    steps: list[StepResult] = []
    if options.verify:
        # refuses names before anything is marked
        prune_steps(options.path, policies, options.keep_step, names=options.names, dry_run=True)
        verified = _verify_newest(options)
    if policies:
        with show_progress("prune"):
            steps = prune_steps(options.path, policies, options.keep_step, names=options.names, dry_run=options.dry_run)
    if policies and not steps:
        refuse_checkpoint(options.path)
        _refuse_folder_of_runs(options.path)
    leftovers: list[PruneResult] = []
    with show_progress("prune"):
        if options.path is not None:
            leftovers += prune_leftovers(options.path, options.older_than, dry_run=options.dry_run)
        if options.spool is not None:
            leftovers += prune_spools(options.spool or None, options.older_than, dry_run=options.dry_run)
    if options.path is not None and not steps and not leftovers:
        refuse_checkpoint(options.path)
    unseen = "" if options.path is None else explain_unseen_uploads(options.path)
    found = Pruned(options.dry_run, verified, steps, leftovers, unseen)
    return Output(
        lambda: found._asdict() | {"freed": found.freed}, lambda: _describe(found, options, policies), found.code
    )


class Verified(NamedTuple):
    """A step that was read before others are removed: its path, and ``verified``, ``failed`` or ``no answer``.

    ``marked as failed``: it was read by an earlier call.
    """

    checkpoint: str
    verdict: str


class Pruned(NamedTuple):
    """What was verified, removed and kept, or with ``--dry-run`` would be, and which uploads cannot be seen."""

    dry_run: bool
    verified: Sequence[Verified]
    steps: Sequence[StepResult]
    leftovers: Sequence[PruneResult]
    unseen: str

    @property
    def everything(self) -> list[PruneResult | StepResult]:
        """Steps and leftovers."""
        return [*self.steps, *self.leftovers]

    @property
    def freed(self) -> int:
        """Bytes that the removals free."""
        return sum(result.nbytes for result in self.everything if not result.kept and not result.error)

    @property
    def code(self) -> int:
        """The exit code: what --verify has found is a finding, what could not be removed a failure."""
        if any(result.error for result in self.everything):
            return FAILED
        return FINE if all(verdict == "verified" for _, verdict in self.verified) else FOUND


def _describe(found: Pruned, options: Any, policies: Sequence[Any]) -> list[str]:
    lines = [table(("checkpoint", "verification"), found.verified)] if found.verified else []
    for what, results in (("checkpoint", found.steps), ("leftover", found.leftovers)):
        if what == "leftover" and policies and not found.steps:
            lines.append(f"{options.path} has no directory of a step")
        if results:
            rows = [(r.path, r.nbytes, _name_result(r.kept, r.error, options)) for r in results]
            lines.append(table((what, "bytes", "result"), rows))
    if found.unseen:
        lines.append(found.unseen)
    return [*lines, f"{found.freed:,} bytes {'would be ' * options.dry_run}freed"]


def _refuse_wrong_calls(options: Any, policies: list[Any]) -> None:
    """Exit with the parser's error if options do not go together."""
    if options.path is None and options.spool is None:
        options.parser.error("give a PATH, or --spool")
    if options.path is None and policies:
        options.parser.error("options that keep steps, such as --keep-latest, need a PATH: the folder of the steps")
    if options.keep_step and not policies:
        options.parser.error("--keep-step keeps steps that a policy would remove: give one, such as --keep-latest 3")
    if options.names is not None and not policies:
        options.parser.error("--names is for options that keep steps: give one, such as --keep-latest 3")
    if options.verify and not policies:
        options.parser.error("--verify is for options that keep steps: give one, such as --keep-latest 3")


def _refuse_folder_of_runs(path: str) -> None:
    """Raise if a folder without steps has checkpoints of other names, or folders of checkpoints: these were meant."""
    from shardckpt.errors import CheckpointingException, listed
    from shardckpt.manager import list_checkpoints

    found = list_checkpoints(path)
    numbered = [each.name for each in found if each.state == "whole" and each.name[-1].isdecimal()]
    if numbered:
        raise CheckpointingException(
            f"{path} has no directory of a step by these names, and nothing was removed: {listed(numbered, limit=6)}; "
            f"--names {numbered[-1].rstrip('0123456789')} says what stands before the number of a step"
        )
    runs = [each.name for each in found if each.inside]
    if runs:
        raise CheckpointingException(
            f"{path} has no directory of a step, and nothing was removed; checkpoints are in its folders "
            f"{listed(runs, limit=6)}: give one of these"
        )


def _verify_newest(options: Any) -> list[Verified]:
    """Mark the newest intact step of each way to name steps, and the newer ones that are not; return all of them."""
    from itertools import groupby

    from shardckpt.cli.failure import print_error
    from shardckpt.cli.progress import show_progress
    from shardckpt.cli.verify import check
    from shardckpt.engine import locate
    from shardckpt.errors import CheckpointingException
    from shardckpt.manager import list_checkpoints
    from shardckpt.plugins import get_plugin_manager

    def name_family(found: CheckpointSummary) -> str:
        return found.name.rstrip("0123456789")

    rows = []
    whole = [each for each in list_checkpoints(options.path) if each.state == "whole"]
    own = str(locate(options.path, get_plugin_manager()))  # a checkpoint itself is listed, and is no step to prune
    steps = [each for each in whole if _is_step(each.name, options.names) and each.path != own]
    for _, family in groupby(sorted(steps, key=name_family), name_family):
        newest = max(family, key=lambda each: (len(each.name), each.name))
        if not newest.writer:  # a mark names a save of ours
            raise CheckpointingException(
                f"--verify marks what shardckpt wrote, and the newest step, {newest.name}, is of "
                f"{newest.library or 'another library'}: nothing was removed. `shardckpt verify` reads it; then prune "
                "without --verify"
            )
    found = [each for each in steps if each.writer]
    with show_progress("verify"):
        for _, family in groupby(sorted(found, key=name_family), name_family):
            for each in sorted(family, key=lambda each: (len(each.name), each.name), reverse=True):
                if each.mark and not each.has_failed:
                    break
                path = f"{options.path.rstrip('/')}/{each.name}"
                if each.has_failed:
                    rows.append(Verified(path, "marked as failed"))
                    continue
                answer = check(path, mark=True)
                if answer.error is not None:
                    print_error(answer.error, options)
                verdict = "verified" if answer.exit_code == FINE else "failed" if answer.files else "no answer"
                rows.append(Verified(path, verdict))
                if answer.exit_code == FINE:
                    break
    return rows


def _is_step(name: str, prefix: str | None) -> bool:
    """Return whether a directory is one of a step, by the prefix of --names, or by the words that trainers use."""
    from shardckpt.manager import parse_step

    return parse_step(name) is not None if prefix is None else name.rstrip("0123456789") == prefix != name


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


def _name_result(kept: str, error: str, options: Any) -> str:
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
