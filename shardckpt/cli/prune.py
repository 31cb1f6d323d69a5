"""Remove the leftovers of killed saves, overwrites, exports and removals, next to checkpoints or on a store.

In a directory these are hidden directories, on a store the objects of a save that has not committed them, and the parts
of objects that it had not sent to the end (S3, with s3fs).

With --keep-latest, --keep-every, --keep-near, --keep-hours, --keep-best or --keep-verified also the checkpoints of
steps that none of these keeps, as a CheckpointManager does: only complete ones, never the newest or the newest verified
one. Any directory counts that ls calls whole, whoever wrote it: DCP, Megatron, transformers' Trainer, DeepSpeed. Files
such as step_100.pt, and directories such as model-final, do not: these are named, and left. Files that a living process
may use are kept, and so is any that may be the only copy of a checkpoint; its row says why.

With --damaged the steps that ls calls damaged or incomplete, or that are marked as failed: alone, or with options
that keep steps, which then do not count these. One that was written to within the last hour (--older-than) is kept,
since a save or a copy may go on; so is one that lacks nothing but metadata.json or shardckpt.json, which can be written
again, and all of them where no other step can be loaded.

A step counts as complete if all its files exist and have their sizes: their bytes may be damaged. With --verify the
newest step that shardckpt wrote is read before anything is removed, and if it is damaged the next older one, until one
is intact, which is kept; with --damaged, too, all of them are read, and those that fail are removed.
A metric that no step has, and a --keep-step that is not there, are errors, and nothing is removed.
A checkpoint that is alone in its folder is one, too: its folder was meant.

With -r each folder below PATH that has steps, or only leftovers of killed saves, is pruned by itself, as each of
several PATHs is. What is an error for one of them is one for all, before anything is removed; with --skip-errors that
folder alone is left as it was, and the exit code is 2. The steps of one that lack the metric of --keep-best are left,
which is said, and no error where another has it. Links in PATH to folders elsewhere are not followed.
Exit code: 1 if --verify has found a damaged step; 2 if something could not be removed, or a folder was skipped.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.cli.cells import cut, measure
from shardckpt.cli.exit_codes import FAILED, FINE, FOUND
from shardckpt.cli.failure import print_error
from shardckpt.cli.folders import refuse_checkpoint, refuse_lost_link
from shardckpt.cli.ls import describe_leftovers, list_folder
from shardckpt.cli.output import Output, add_verbose, parse_count
from shardckpt.cli.table import fit_table
from shardckpt.engine.amounts import format_bytes
from shardckpt.errors import CheckpointingException, StorageError, format_many, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.engine.pruning import PruneResult
    from shardckpt.manager.marks import Mark
    from shardckpt.manager.retention import UnknownMetricError
    from shardckpt.manager.step_pruning import StepResult
    from shardckpt.manager.summaries import CheckpointSummary

#: Most terminal cells of the name of a removed entry: names of staging directories have two ids.
_LONGEST_NAME = 50


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "paths", nargs="*", metavar="path", help="a folder of checkpoints, or one checkpoint: a directory or a URL"
    )
    parser.add_argument(
        "-r",
        "--recursive",
        action="store_true",
        help="prune each folder of steps in PATH and in its folders; links are not followed",
    )
    parser.add_argument(
        "--skip-errors",
        action="store_true",
        help="of several folders: prune the others where an option is an error for one, such as a step that it lacks",
    )
    parser.add_argument(
        "--spool",
        nargs="?",
        const="",
        metavar="DIR",
        help="also remove the leftovers of killed uploads to stores on this machine: in DIR, or by default in "
        "SHARDCKPT_SPOOL_DIR or the temporary directory",
    )
    parser.add_argument(
        "--older-than",
        type=float,
        metavar="HOURS",
        help="age from which to remove leftovers of other hosts, whose processes cannot be seen from here "
        "(default: SHARDCKPT_LEFTOVER_HOURS, or 24); with --damaged, of these steps alone: hours since the last write "
        "to one (default: 1)",
    )
    parser.add_argument(
        "--damaged", action="store_true", help="also remove steps that are damaged, and saves that did not end"
    )
    parser.add_argument("--keep-latest", type=parse_count, metavar="N", help="keep the N highest steps")
    parser.add_argument("--keep-every", type=parse_count, metavar="N", help="keep the steps that are multiples of N")
    parser.add_argument("--keep-near", type=parse_count, metavar="N", help="keep the steps closest to multiples of N")
    parser.add_argument("--keep-hours", type=_parse_hours, metavar="H", help="keep the steps of the last H hours")
    parser.add_argument(
        "--keep-verified",
        type=parse_count,
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
        help="the part of a step's name before the number, such as model- (default: any that ends with a word "
        "such as step, iter, epoch, ckpt or checkpoint)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="before a step is removed, read and check the newest ones until one is intact (with --damaged all), "
        "and keep each verdict next to the steps, as `shardckpt verify --mark` does (but with --dry-run); a step "
        "that has a verdict already is not read again",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    add_verbose(parser, "with --damaged alone, name the sound steps, too")


def run(options: Any) -> Output:
    """Prune, and return a row per step and leftover."""
    from shardckpt.engine.pruning import explain_unseen_uploads, prune_spools

    # whoever removes damaged steps at once does not mean the running saves of other hosts
    options.leftover_age = None if options.damaged else options.older_than
    policies = _make_policies(options)
    _refuse_wrong_calls(options, policies)
    folders, links = _list_folders(options)
    plan = _plan_all(folders, policies)
    found = [_prune(each, policies, steps) for each, steps in zip(plan.folders, plan.steps, strict=True)]
    verified, steps, leftovers = (
        ([*chain.from_iterable(each)] for each in zip(*found, strict=True)) if found else ([], [], [])
    )
    leftovers += [left for each, _ in plan.lacking for left in _prune_leftovers(each)]
    leftovers = [*{each.path: each for each in leftovers}.values()]  # one next to a folder is in the one around it
    if options.spool is not None:
        leftovers += prune_spools(options.spool or None, options.leftover_age, dry_run=options.dry_run)
    for path in options.paths if not steps and not leftovers else []:
        refuse_checkpoint(path)
    unseen = "\n".join(filter(None, dict.fromkeys(map(explain_unseen_uploads, options.paths))))
    uncounted = [
        path
        for each, planned in zip(plan.folders, plan.steps, strict=True)
        if _chooses_steps(options, policies)
        for path in _find_uncounted(each.path, planned)
    ]
    lacking = [skipped for _, skipped in plan.lacking]
    answer = Pruned(options.dry_run, verified, steps, leftovers, unseen, links, plan.skipped, lacking, uncounted)
    return Output(
        lambda: answer._asdict() | {"freed": answer.freed}, lambda: _describe(answer, options, policies), answer.code
    )


def _find_uncounted(folder: str, steps: Sequence[StepResult]) -> list[str]:
    """Return the entries of a local folder that ls shows and no policy counts: files of steps, other directories."""
    from shardckpt.engine.locations import find_local
    from shardckpt.maintenance.inside import FILE_SUFFIXES, is_marked
    from shardckpt.manager.step_names import parse_step

    place = find_local(folder)
    if place is None or not place.is_dir():
        return []
    counted = {os.path.basename(each.path) for each in steps}  # noqa: PTH119 - of a path or a URL
    found = []
    for each in sorted(place.iterdir()):
        if each.is_dir():
            is_other = each.name not in counted and each.name[0] != "." and not each.is_symlink()
            if is_other and is_marked(inner.name for inner in each.iterdir()):
                found.append(each.name)
        elif each.suffix in FILE_SUFFIXES and parse_step(each.stem) is not None:
            found.append(each.name)
    return [f"{folder.rstrip('/')}/{name}" for name in found]


def _list_folders(options: Any) -> tuple[list[argparse.Namespace], list[str]]:
    """Return the options for each folder, once, and the links that were not followed; see :func:`_list_runs`."""
    folders: dict[str, argparse.Namespace] = {}
    unfollowed = []
    for path in options.paths:
        refuse_lost_link(path)
        found, links = _list_runs(argparse.Namespace(**{**vars(options), "path": path}))
        for each in found:
            folders.setdefault(each.path.rstrip("/"), each)
        unfollowed += links
    return [*folders.values()], unfollowed


def _list_runs(options: Any) -> tuple[list[argparse.Namespace], list[str]]:
    """Return the options for each folder: PATH, or with ``-r`` those in it that checkpoints or leftovers are in.

    And the links to folders of checkpoints elsewhere, which are left alone: these may be another user's.
    """
    from shardckpt.commit.leftovers import walk_folders
    from shardckpt.engine.locations import find_local
    from shardckpt.manager.listing import list_checkpoints

    if not options.recursive:
        return [options], []
    above = options.path.rstrip("/") or "/"
    inside = {each.name.rpartition("/")[0] for each in list_checkpoints(options.path, recursive=True)}
    links: set[str] = set()
    if (place := find_local(options.path)) is not None:
        used, ends, _ = ({path.relative_to(place).as_posix() for path in each} for each in walk_folders(place))
        links = {end for end in ends if any(f"{name}/".startswith(f"{end}/") for name in inside)}
        inside = {name for name in inside if not any(f"{name}/".startswith(f"{end}/") for end in links)}
        inside |= {"" if name == "." else name for name in used}  # a first save that was killed leaves nothing else
    unfollowed = [f"{above}/{name}" for name in sorted(links)]
    if not inside:
        texts = [f"{options.path} has no folder of checkpoints in it, and nothing was removed"]
        raise StorageError("; ".join([*texts, *filter(None, [_describe_links(unfollowed)])]))
    return [
        argparse.Namespace(**{**vars(options), "path": f"{above}/{name}" if name else options.path})
        for name in sorted(inside)
    ], unfollowed


def _describe_links(links: Sequence[str]) -> str:
    """Return a note that links were not followed; ``""`` if there are none."""
    many = format_many(len(links), "link")
    return f"not followed: {many} to other folders: {listed(links, limit=6)}" if links else ""


class Plan(NamedTuple):
    """The folders to prune, the planned results for the steps of each, and the folders that are left.

    Attributes:
        folders: The options for each.
        steps: Its steps.
        skipped: Those left with --skip-errors.
        lacking: The options for those whose steps are left, since none has the metric of a --keep-best that another
            folder has, and why.
    """

    folders: list[argparse.Namespace]
    steps: list[list[StepResult]]
    skipped: list[Skipped]
    lacking: list[tuple[argparse.Namespace, Skipped]]


def _plan_all(folders: Sequence[argparse.Namespace], policies: Sequence[Any]) -> Plan:
    """Return the plan for all folders, before anything is removed.

    A failure in a folder is an error; with --skip-errors, only if it fails in all of them.
    """
    from shardckpt.manager.retention import UnknownMetricError

    plan, unknown = Plan([], [], [], []), []
    for each in folders:
        try:
            plan.steps.append(_plan(each, policies, is_alone=len(folders) == 1))
            plan.folders.append(each)
        except UnknownMetricError as exc:  # noqa: PERF203 - another folder may have it
            unknown.append(exc)
            plan.lacking.append((each, Skipped(each.path, str(exc))))
        except CheckpointingException as exc:
            if not each.skip_errors or (each is folders[-1] and not plan.folders):
                raise
            print_error(exc, each)
            plan.skipped.append(Skipped(each.path, str(exc)))
    if unknown and not any(plan.steps):
        raise _join(unknown)
    if not plan.skipped:
        _refuse_empty(plan, policies)
    return plan


def _join(errors: Sequence[UnknownMetricError]) -> CheckpointingException:
    """Return the error of folders that all lack a metric that is asked for; it names the metrics of all."""
    from shardckpt.manager.retention import UnknownMetricError

    known = {name for error in errors for name in error.known}
    lacking = [error for error in errors if error.metric not in known]
    return UnknownMetricError(lacking[0].metric, known) if lacking and len(errors) > 1 else errors[0]


def _refuse_empty(plan: Plan, policies: Sequence[Any]) -> None:
    """Raise if steps are asked for, and a folder that was given has none, or with -r none has."""
    empty = [each for each, steps in zip(plan.folders, plan.steps, strict=True) if not steps]
    for each in empty:
        if _chooses_steps(each, policies) and not (each.recursive and any(plan.steps)):
            refuse_checkpoint(each.path)
            _refuse_folder_of_runs(each.path)


def _plan(options: Any, policies: Sequence[Any], *, is_alone: bool) -> list[StepResult]:
    """Return the planned results for the steps of one folder; a metric or step that an option names must be there."""
    from shardckpt.engine.pruning import prune_leftovers

    if not _chooses_steps(options, policies):
        if not is_alone:
            prune_leftovers(options.path, dry_run=True)  # the folder is there
        return []
    try:
        return _prune_steps(options, policies, dry_run=True)
    except CheckpointingException as exc:
        from shardckpt.distributed.error_report import replace_text

        if is_alone and not options.recursive:
            raise
        how = "" if options.skip_errors else "; --skip-errors prunes the other folders"
        raise replace_text(exc, f"{options.path}: {exc}{how}") from exc.__cause__


def _prune(
    options: Any, policies: Sequence[Any], planned: list[StepResult]
) -> tuple[list[Verified], list[StepResult], list[PruneResult]]:
    """Prune one folder: return the verified steps, and the results for its steps and for leftovers of killed saves."""
    from shardckpt.engine.display import show_progress

    verified, failed, unwritten = _verify_newest(options) if options.verify else ([], [], {})
    with show_progress("prune"):
        leftovers = _prune_leftovers(options)  # before the steps, whose removal takes theirs along
        if planned and (verified or not options.dry_run):  # steps that were read are marked, or in one of these
            planned = _prune_steps(options, policies, failed, unwritten, dry_run=options.dry_run)
    all_left_over = {(str(each.path), each.nbytes) for each in leftovers if each.is_removed}
    return verified, [each for each in planned if (each.path, each.nbytes) not in all_left_over], leftovers


def _prune_steps(
    options: Any,
    policies: Sequence[Any],
    failed: Sequence[str] = (),
    unwritten: Mapping[str, Mark] | None = None,
    *,
    dry_run: bool,
) -> list[StepResult]:
    """Remove the steps of one folder that are not kept; ``failed`` or ``unwritten`` have steps that were read."""
    from shardckpt.manager.step_pruning import prune_steps

    return prune_steps(
        options.path,
        policies,
        dict.fromkeys(options.keep_step, "--keep-step names it"),
        names=options.names,
        damaged=options.damaged,
        older_than=options.older_than,
        failed=failed,
        unwritten=unwritten,
        dry_run=dry_run,
    )


class Verified(NamedTuple):
    """A step that was read before others are removed: its path, and ``verified``, ``failed`` or ``no answer``.

    ``marked as verified`` and ``marked as failed``: it was read by an earlier call.
    """

    checkpoint: str
    verdict: str


def _prune_leftovers(options: Any) -> list[PruneResult]:
    from shardckpt.engine.pruning import prune_leftovers

    return prune_leftovers(options.path, options.leftover_age, dry_run=options.dry_run)


class Skipped(NamedTuple):
    """A folder that was left as it is, and why: the error of an option there."""

    path: str
    error: str


class Pruned(NamedTuple):
    """The steps that were verified, removed and kept, or with ``--dry-run`` would be, and the skipped paths."""

    dry_run: bool
    verified: Sequence[Verified]
    steps: Sequence[StepResult]
    leftovers: Sequence[PruneResult]
    unseen: str
    links: Sequence[str]
    skipped: Sequence[Skipped]
    lacking: Sequence[Skipped]
    uncounted: Sequence[str]

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
        """The exit code: damage that --verify has found is a finding, a removal that failed a failure."""
        if self.skipped or any(result.error for result in self.everything):
            return FAILED
        return FINE if all(verdict.endswith("verified") for _, verdict in self.verified) else FOUND


def _describe(found: Pruned, options: Any, policies: Sequence[Any]) -> list[str]:
    lines = fit_table(("checkpoint", "verification"), found.verified) if found.verified else []
    counts_sound = not policies and not options.verbose
    sound = [each for each in found.steps if each.kept and each.is_sound and counts_sound]
    lines += _make_table("checkpoint", [each for each in found.steps if each not in sound], options)
    if sound:
        stay = "1 step stays" if len(sound) == 1 else f"{len(sound)} steps stay"
        lines.append(f"{stay}, whole by the sizes of their files: -v names them")
    if _chooses_steps(options, policies) and not found.steps:
        lines.append(f"{_name_folders(options)} has no directory of a step")
    lines += _make_table("leftover", found.leftovers, options)
    lines += _describe_left(found, options)
    for path in options.paths if not found.everything else []:
        lines += describe_leftovers(path, list_folder(path))
    if all(result.kept for result in found.everything):
        return [*lines, "nothing was found to remove"]
    where = f" in {_name_folders(options)}" if options.paths else ""
    return [*lines, f"{found.freed:,} bytes {'would be ' * options.dry_run}freed{where}"]


def _make_table(what: str, results: Sequence[PruneResult | StepResult], options: Any) -> list[str]:
    rows = [(_name_row(r, options.paths), format_bytes(r.nbytes), _name_result(r, options)) for r in results]
    return fit_table((what, "size", "result"), rows) if rows else []


def _describe_left(found: Pruned, options: Any) -> list[str]:
    """Return a line for each kind of path that was skipped, or is left as a whole."""
    above = f"{options.paths[0].rstrip('/')}/" if len(options.paths) == 1 else ""
    lines = [found.unseen, _describe_links(found.links)]
    if found.uncounted:
        names = [path.removeprefix(above) for path in found.uncounted]
        lines.append(f"left, since no policy counts files, and directories of other names: {listed(names, limit=6)}")
    were = "it was" if len(found.skipped) == 1 else "they were"
    for what, folders in (
        (f"left as {were}, after an error", found.skipped),
        ("left with all steps, since none has the metric", found.lacking),
    ):
        if folders:
            many, names = format_many(len(folders), "folder"), [path for path, _ in folders]
            lines.append(f"{what}: {many}: {listed(names, limit=6)}")
    return [line for line in lines if line]


def _name_folders(options: Any) -> str:
    """Return the folder that was given, or how many were."""
    return str(options.paths[0]) if len(options.paths) == 1 else format_many(len(options.paths), "folder")


def _chooses_steps(options: Any, policies: Sequence[Any]) -> bool:
    """Return whether steps are to be removed, and not only leftovers next to them."""
    return bool(policies) or options.damaged


def _refuse_wrong_calls(options: Any, policies: list[Any]) -> None:
    """Exit with the parser's error if options do not go together."""
    if not options.paths and (options.spool is None or options.recursive):
        options.parser.error("give a PATH" + ", or --spool" * (not options.recursive))
    if options.skip_errors and not options.recursive and len(options.paths) < 2:  # noqa: PLR2004 - several
        options.parser.error("--skip-errors needs -r, or several folders: it leaves one of them as it is")
    if _chooses_steps(options, policies):
        if not options.paths:
            options.parser.error(
                "options that choose steps, such as --keep-latest, need a PATH: the folder of the steps"
            )
        return
    given = {"--keep-step": options.keep_step, "--names": options.names is not None, "--verify": options.verify}
    for option in (option for option, is_given in given.items() if is_given):
        options.parser.error(
            f"{option} alone chooses no step to remove, and nothing was done: give a rule, too, such as --keep-latest 3"
        )


def _refuse_folder_of_runs(path: str) -> None:
    """Raise if a folder without steps has checkpoints of other names, or folders of checkpoints: these were meant."""
    from shardckpt.manager.listing import list_checkpoints

    found = list_checkpoints(path)
    numbered = [each.name for each in found if each.is_checkpoint and each.name[-1].isdecimal()]
    if numbered:
        raise CheckpointingException(
            f"{path} has no directory of a step by these names, and nothing was removed: {listed(numbered, limit=6)}; "
            f"--names {numbered[-1].rstrip('0123456789')} names the part before the number of a step"
        )
    runs = [each.name for each in found if each.inside]
    if runs:
        raise CheckpointingException(
            f"{path} has no directory of a step, and nothing was removed; checkpoints are in its folders "
            f"{listed(runs, limit=6)}: give one of these, or -r for all"
        )
    files = [each.name for each in found if each.is_checkpoint and not each.name[-1].isdecimal()]
    if files:
        raise CheckpointingException(
            f"{path} has no directory of a step, and nothing was removed; no policy counts or removes checkpoints of "
            f"other names, and files: {listed(files, limit=6)}: remove these by hand"
        )


def _verify_newest(options: Any) -> tuple[list[Verified], list[str], dict[str, Mark]]:
    """Mark the newest intact step of each way to name steps, and the newer ones that are not; with --damaged, all.

    Steps of other libraries are read as well, and have no mark. Return a verdict for each step that was read or already
    has a mark; the names of damaged steps that cannot be marked; and by their names the marks that a dry run does not
    write.
    """
    from shardckpt.engine.display import show_progress

    rows, failed, unwritten = [], [], {}
    families = _find_families(options)
    with show_progress("verify"):
        for family in families:
            for each in family:
                path, mark = f"{options.path.rstrip('/')}/{each.name}", None
                if each.mark:
                    verdict = "marked as failed" if each.has_failed else "marked as verified"
                else:
                    verdict, mark = _verify(path, options)
                rows.append(Verified(path, verdict))
                if mark is not None and options.dry_run:
                    unwritten[each.name] = mark
                if verdict == "failed" and not each.writer:
                    failed.append(each.name)
                if verdict.endswith("verified") and not options.damaged:
                    break
    return rows, failed, unwritten


def _verify(path: str, options: Any) -> tuple[str, Mark | None]:
    """Read and mark a checkpoint, with --dry-run without a file, and return the verdict and its mark."""
    from shardckpt.cli.verify import check

    answer = check(path, mark=True, dry_run=options.dry_run)
    if answer.error is not None:
        print_error(answer.error, options)
    return {FINE: "verified", FOUND: "failed"}.get(answer.exit_code, "no answer"), answer.mark


def _find_families(options: Any) -> list[list[CheckpointSummary]]:
    """Return the whole steps, the newest first, for each way to name them."""
    from shardckpt.engine.locations import locate
    from shardckpt.manager.listing import list_checkpoints
    from shardckpt.plugins.manager import get_plugin_manager

    own = str(locate(options.path, get_plugin_manager()))  # a checkpoint itself is listed, and is no step to prune
    families: dict[str, list[CheckpointSummary]] = {}
    for each in list_checkpoints(options.path):
        if each.state == "whole" and _is_step(each.name, options.names) and each.path != own:
            families.setdefault(each.name.rstrip("0123456789"), []).append(each)
    for family in families.values():
        family.sort(key=lambda each: (len(each.name), each.name), reverse=True)
    return [*families.values()]


def _is_step(name: str, prefix: str | None) -> bool:
    """Return whether a directory is one of a step, by the prefix of --names, or by the words that trainers use."""
    from shardckpt.manager.step_names import parse_step

    return parse_step(name) is not None if prefix is None else name.rstrip("0123456789") == prefix != name


def _make_policies(options: Any) -> list[Any]:
    from shardckpt.manager.retention import KeepBest, KeepEvery, KeepLatest, KeepNear, KeepRecent, KeepVerified

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


def _name_row(result: PruneResult | StepResult, folders: Sequence[str]) -> str:
    """Return an entry's name in the folder, cut at the end if it is long and removed; an entry elsewhere by its path.

    With several folders, the name begins with the given one. An entry that stays is named in full: its result may ask
    for its removal by hand.
    """
    from shardckpt.engine.locations import locate
    from shardckpt.plugins.manager import get_plugin_manager

    path = name = str(result.path)
    for folder in folders:
        if (inside := path.removeprefix(f"{locate(folder, get_plugin_manager())}/")) != path:
            name = inside if len(folders) == 1 else f"{folder.rstrip('/')}/{inside}"
    is_long = name != path and not result.kept and measure(name) > _LONGEST_NAME
    return f"{cut(name, _LONGEST_NAME - 3)}..." if is_long else name


def _name_result(result: PruneResult | StepResult, options: Any) -> str:
    if result.kept:
        return f"kept: {result.kept.removeprefix(f'{result.path} is ')}"  # its path stands in the same row
    parts = [result.error or ("would be removed" if options.dry_run else "removed"), getattr(result, "fault", "")]
    then = "would be" if options.dry_run else "is now"
    parts += [f"{word} {then} {name or 'no step'}" for word, name in getattr(result, "moves", {}).items()]
    return ", ".join(filter(None, parts))


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
    return metric, mode, parse_count(count)
