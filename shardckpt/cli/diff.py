"""Compare two checkpoints, folders of the Hub, or files: keys, shapes, dtypes, then values, objects and common state.

Tensors with stored fingerprints in both checkpoints are compared by these; values are read of the others, and of
those that differ, in bounded memory. Exit code: 1 if a tensor differs by more than the tolerances, an object or the
common state differs, or only one of the checkpoints has it.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.cli.colour import paint
from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output, add_verbose
from shardckpt.cli.renames import add_rename_option, read_renames
from shardckpt.errors import escape_text, listed, name_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.cli.colour import Style
    from shardckpt.maintenance.diff_report import DiffReport, ObjectReport, TensorDifference

#: A list or dict with more differences than that, such as the state of a random generator, is one row.
_MOST_VALUES = 16
#: Rows of tensors that only one of the checkpoints has, for each of them.
_MOST_ALONE = 10


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("diff", help="compare two checkpoints", description=__doc__)
    parser.add_argument("first", help="directory or URL of a checkpoint or Hugging Face folder, or a file")
    parser.add_argument("second", help="the other")
    parser.add_argument("--rtol", type=float, default=0.0, help="tolerance relative to the second's values (0)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (0); without any, by bits")
    parser.add_argument(
        "--mapping",
        metavar="MODEL_TYPE|FILE",
        help="the second has Hugging Face's names of this model (qwen3_moe), or of rules: FILE.json, FILE.py:MAPPING",
    )
    parser.add_argument(
        "--prefix", default="", help="only keys of the first with this prefix, which names of the second lack"
    )
    parser.add_argument(
        "--cut-vocabulary",
        action="store_true",
        help="leave out rows with which Megatron pads the vocabulary in the first, beyond vocab_size of config.json",
    )
    add_rename_option(parser, "the first")
    parser.add_argument(
        "--read", action="store_true", help="read all values, also where the stored fingerprints are equal"
    )
    parser.add_argument(
        "--ignore-dtype", action="store_true", help="tensors of two dtypes are equal where their values are"
    )
    parser.add_argument(
        "--tensors-only", action="store_true", help="leave out objects and common state, as with --mapping and --prefix"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures of both, and of what differs")
    add_verbose(
        parser,
        f"a row for each tensor, also of more than {_MOST_ALONE} that only one of them has, and for each value, also "
        f"of lists and dicts with more than {_MOST_VALUES} that differ, as in --json",
    )
    parser.set_defaults(reads=("first", "second"), run=run)


def run(options: Any) -> Output:
    """Return a row for each tensor and value that differs, and a summary."""
    from shardckpt.engine.gc_pause import pause_gc

    with pause_gc():  # the rows of 100,000 tensors all stay
        report = _compare_without_torch(options) or _compare(options)
    written = []
    if options.html:
        from shardckpt.cli.html import write_difference_page

        written.append(write_difference_page(report, options))
    return Output(
        lambda: {"same": report.are_same, **vars(report)},
        lambda: [*written, *_describe(report, options)],
        FINE if report.are_same else FOUND,
    )


def _compare_without_torch(options: Any) -> DiffReport | None:
    """Return the report if stored fingerprints suffice for it; to import torch takes longer than to compare them."""
    from shardckpt.cli.inspect import OUTLINES
    from shardckpt.maintenance.fingerprint_diff import diff_by_fingerprints

    if options.rtol or options.atol or options.mapping or options.prefix or options.rename or options.read:
        return None
    return diff_by_fingerprints(options.first, options.second, OUTLINES, tensors_only=options.tensors_only)


def _compare(options: Any) -> DiffReport:
    from shardckpt.cli.progress import show_progress
    from shardckpt.engine.locations import locate
    from shardckpt.huggingface.config import read_config
    from shardckpt.huggingface.models import find_mapping
    from shardckpt.maintenance.diff import diff_checkpoints
    from shardckpt.plugins.manager import get_plugin_manager

    config = partial(read_config, (), locate(options.second, get_plugin_manager()))
    with show_progress("diff"):
        return diff_checkpoints(
            options.first,
            options.second,
            rtol=options.rtol,
            atol=options.atol,
            mapping=find_mapping(options.mapping, config, "cut" if options.cut_vocabulary else "keep"),
            prefix=options.prefix,
            read_values=options.read,
            tensors_only=options.tensors_only,
            rename=read_renames(options),
            ignore_dtype=options.ignore_dtype,
        )


def _describe(report: DiffReport, options: Any) -> list[str]:
    from shardckpt.cli.amounts import format_many
    from shardckpt.cli.table import fit_table

    total = report.equal + sum(difference.kind != "only in second" for difference in report.differences)
    how = ""
    if report.by_fingerprint:
        how = f", {report.by_fingerprint} of them by their stored fingerprints (--read compares the values)"
    if report.of_other_dtype:
        how += f", {report.of_other_dtype} of them of another dtype"
    of_all = f"{report.equal} of {format_many(total, 'tensor')} {'is' if total == 1 else 'are'}"
    summary = f"{options.first}, {options.second}: {of_all} equal{how}"
    lines = []
    if report.differences:
        shown = [*report.differences] if options.verbose else _cut_alone(report.differences)
        rows = [*map(_list_cells, shown)]
        # where nothing is in the second column, all have their dtype and shape in both
        first = "both" if all(row[3] == "-" for row in rows) else "first"
        names = ("tensor", "differs in", first, "second", "elements", "max abs", "max rel", "first at")
        styles = [_find_style(difference.kind) for difference in shown]
        lines += fit_table(names, rows, styles, 1, optional=("first at", "max rel", "both", "max abs"))
        hidden = Counter(each.kind for each in report.differences) - Counter(each.kind for each in shown)
        lines += [
            f"... and {many:,} more {kind}: --verbose or --json lists them" for kind, many in sorted(hidden.items())
        ]
    if report.objects is not None:
        equal = f"{report.objects.equal:,} {'entry is' if report.objects.equal == 1 else 'entries are'}"
        different = report.objects.differences
        if different:
            rows = [*different] if options.verbose else _fold_values(report.objects)
            styles = [_find_style(row[1]) for row in rows]
            lines += fit_table(("object", "differs in", "first", "second"), rows, styles, 1)
        summary += f"; objects and common state: {equal} equal, {_count_different(len(different))}"
    lines.append(paint(summary, "good" if report.are_same else "bad"))
    more = (_describe_left_out, _describe_unread, _advise_names, _advise_rows, _advise_objects)
    return [*lines, *filter(None, (describe(report, options) for describe in more))]


def _cut_alone(differences: Sequence[TensorDifference]) -> list[TensorDifference]:
    """Return them with the first of the tensors that only one of the checkpoints has, and all of the others."""
    seen: Counter[str] = Counter()
    shown = []
    for each in differences:
        seen[each.kind] += 1
        if seen[each.kind] <= _MOST_ALONE or not each.kind.startswith("only in"):
            shown.append(each)
    return shown


def _count_different(count: int) -> str:
    from shardckpt.cli.amounts import format_many

    return f"{format_many(count, 'value')} {'differs' if count == 1 else 'differ'}" if count else "none differs"


def _fold_values(report: ObjectReport) -> list[tuple[str, ...]]:
    """Return the rows of values, with one for each outermost list or dict that differs in many places."""
    within = {
        key: [key[:at] for at, letter in enumerate(key) if letter == "[" and key[:at] in report.containers]
        for key, *_ in report.differences
    }
    places: dict[str, set[str]] = {}
    for key, containers in within.items():
        for container, place in zip(containers, [*containers[1:], key][: len(containers)], strict=True):
            places.setdefault(container, set()).add(place)
    rows: dict[str, tuple[str, ...]] = {}
    for each in report.differences:
        name = next((name for name in within[each.key] if len(places[name]) > _MOST_VALUES), "")
        many = (name, f"{len(places.get(name, ()))} of {report.containers.get(name, 0)} places", "-", "-")
        rows[name or each.key] = many if name else each
    return [*rows.values()]


def _describe_left_out(report: DiffReport, _: Any) -> str:
    """Return what was not compared, since a folder of the Hub has no optimizer's state; ``""`` if nothing was."""
    from shardckpt.cli.amounts import format_many

    count = len(report.left_out)
    return f"not compared: {format_many(count, 'tensor')} of the optimizer's state" if count else ""


def _describe_unread(report: DiffReport, _: Any) -> str:
    """Return which files in the folders were not read, and which of them differ; ``""`` if there are none."""
    if not report.unread_files:
        return ""
    from shardckpt.maintenance.sources import describe_unread_files  # it imports torch

    said = describe_unread_files(report.unread_files)
    if report.different_files:
        said += f"; those of both that have other bytes: {listed(report.different_files, limit=6)}"
    return f"{escape_text(said)}: diff each by its path"


def _find_style(kind: str) -> Style:
    return "partial" if kind.startswith("only in") else "bad"


def _advise_names(report: DiffReport, options: Any) -> str:
    """Return the call that compares checkpoints without a common name of a tensor; ``""`` if there is one."""
    # the shape behind the dtype, which a cast changes
    shapes = [
        {
            each.key: getattr(each, place).partition(" ")[2]
            for each in report.differences
            if each.kind == f"only in {place}"
        }
        for place in ("first", "second")
    ]
    first, second = map(set, shapes)
    if report.equal or options.mapping or not (first and second) or len(first) + len(second) < len(report.differences):
        return ""
    if options.prefix:
        from shardckpt.cli.amounts import format_many

        common = format_many(len(first & second), "tensor")
        return f"without --prefix {options.prefix}, {common} with the same name" if first & second else ""
    from shardckpt.huggingface.megatron import MEGATRON_NAME
    from shardckpt.maintenance.suggested_renames import suggest_renames

    places = options.first, options.second
    calls = ((_find_prefix(first, second), *places), (_find_prefix(second, first), *reversed(places)))
    for prefix, one, other in calls:
        if prefix:
            return (
                f"no name is in both, but those of {other} are in {one} behind {prefix!r}: "
                f"{_show_call(options, one, other, '--prefix', prefix)}"
            )
    for names, hub, one, other in ((first, second, *places), (second, first, *reversed(places))):
        if MEGATRON_NAME in names and "model.embed_tokens.weight" in hub:
            call = _show_call(options, one, other, "--mapping", "megatron")
            return f"no name is in both, since {one} has Megatron's: {call}"
    renames = suggest_renames(*shapes)
    if renames:
        given = [word for old, new in renames.items() for word in ("--rename", f"{old}={new}")]
        return f"no name is in both, but some have the same end: {_show_call(options, *places, *given)}"
    one, other = (escape_text(min(names)) for names in (first, second))
    return (
        f"no name is in both (the first has {one}, the second {other}): --rename OLD=NEW reads names of the first as "
        f"others, --prefix {one.partition('.')[0]}. takes only names behind it, and --mapping MODEL_TYPE compares with "
        "the Hub's names"
    )


def _show_call(options: Any, first: str, second: str, *more: str) -> str:
    """Return the call that compares two checkpoints with more options than those that were given."""
    words = ["diff", first, second, *more]
    if first == options.first:
        words += [word for old, new in options.rename for word in ("--rename", f"{old}={new}")]
    for option, value in (("--rtol", options.rtol), ("--atol", options.atol), ("--html", options.html)):
        words += [option, str(value)] if value else []
    is_narrower = options.tensors_only and not {"--prefix", "--mapping"} & {*more}  # these compare tensors alone
    for option, is_given in (("--read", options.read), ("--tensors-only", is_narrower)):
        words += [option] if is_given else []
    return escape_text(name_call(*words))


def _advise_rows(report: DiffReport, options: Any) -> str:
    """Return which option compares where a folder of the Hub may lack padding; ``""`` if no mapped shape differs."""
    shapes = [difference.key for difference in report.differences if difference.kind == "shape"]
    if not options.mapping or options.cut_vocabulary or not shapes:
        return ""
    return "where the first has more rows of the vocabulary, Megatron has padded it: --cut-vocabulary leaves these out"


def _advise_objects(report: DiffReport, options: Any) -> str:
    """Return which options show more or less of the objects and the common state; ``""`` if these are equal."""
    if report.objects is None or not report.objects.differences:
        return ""
    is_folded = not options.verbose and len(_fold_values(report.objects)) < len(report.objects.differences)
    return f"{'--verbose lists each value; ' * is_folded}--tensors-only leaves out objects and common state"


def _find_prefix(longer: set[str], shorter: set[str]) -> str:
    """Return what stands before names of the second set in the first, for at least half of the second; else ``""``.

    What stands before an optimizer's state, which may have the names of the model, is not meant.
    """
    from shardckpt.engine.optimizer_keys import is_optimizer_key

    some = max(shorter, key=len)  # the longest name is the end of the fewest others
    prefixes = {key.removesuffix(some) for key in longer if key.endswith(some)}
    counts = {
        prefix: sum(f"{prefix}{key}" in longer for key in shorter)
        for prefix in prefixes
        if not is_optimizer_key(prefix)
    }
    best = max(counts, key=lambda prefix: (counts[prefix], prefix), default="")
    return best if best and 2 * counts[best] >= len(shorter) else ""


def _list_cells(difference: TensorDifference) -> tuple[str, ...]:
    some = "all" if difference.different == difference.elements else f"{difference.different:,} of"
    compared = f"{some} {difference.elements:,}" if difference.elements else "-"
    # "-" where it is as in the first; empty where only one has the tensor
    second = "-" if difference.second == difference.first else difference.second
    index = "-" if difference.index is None else str(list(difference.index))
    return (
        *(difference.key, difference.kind, difference.first, second, compared),
        *(_format(value) for value in (difference.max_absolute, difference.max_relative)),
        index,
    )


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
