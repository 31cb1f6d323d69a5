"""Compare two checkpoints, folders of the Hub, or files: keys, shapes, dtypes, then values, objects and common state.

Tensors with stored fingerprints in both checkpoints are compared by fingerprint. Where fingerprints are missing or
differ, or with --read, the values are read, in bounded memory. Exit code: 1 if anything differs: the shape, dtype or,
by more than the tolerances, a value of a tensor; an object, the common state or a file that is not read; or if only one
of the two has it.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardckpt.cli.colour import paint
from shardckpt.cli.diff_advice import advise_names
from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output, add_verbose
from shardckpt.cli.renames import add_rename_option, read_renames
from shardckpt.cli.table import fit_table
from shardckpt.errors import escape_text, format_many, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.cli.colour import Style
    from shardckpt.maintenance.diff_report import DiffReport, ObjectReport, TensorDifference

#: A list or dict with more differences, such as the state of a random generator, is one row.
_MAX_VALUES = 16
#: Rows for the tensors that only the first has, and for those that only the second has.
_MAX_UNPAIRED = 10


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("first", help="directory or URL of a checkpoint or Hugging Face folder, or a file")
    parser.add_argument("second", help="the other: a directory, a URL or a file, as above")
    parser.add_argument("--rtol", type=float, default=0.0, help="tolerance relative to the second's values (0)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (0); without any, by bits")
    parser.add_argument(
        "--mapping",
        metavar="MODEL_TYPE|FILE",
        help="the second has Hugging Face's names of this model (qwen3_moe), or of rules: FILE.json, FILE.py:MAPPING",
    )
    parser.add_argument(
        "--prefix",
        default="",
        help="compare the keys of the first that have this prefix, which the second's keys do not have",
    )
    parser.add_argument(
        "--cut-vocabulary",
        action="store_true",
        help="leave out the first's rows beyond vocab_size of config.json, with which Megatron pads the vocabulary",
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
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures of both, and of the differences")
    add_verbose(
        parser,
        f"a row for each tensor, also of more than {_MAX_UNPAIRED} that only one of them has, and for each value, also "
        f"of lists and dicts with more than {_MAX_VALUES} that differ, as in --json",
    )
    parser.set_defaults(reads=("first", "second"))


def run(options: Any) -> Output:
    """Return a row for each tensor and value that differs, and a summary."""
    from shardckpt.engine.gc_pause import pause_gc

    with pause_gc():  # the rows of 100,000 tensors all stay
        report = _compare_without_torch(options) or _compare(options)
    page_line = []
    if options.html:
        from shardckpt.cli.html import write_difference_page

        page_line = [write_difference_page(report, options)]
    return Output(
        lambda: {"same": report.are_same, **vars(report)},
        lambda: [*page_line, *_describe(report, options)],
        FINE if report.are_same else FOUND,
    )


def _compare_without_torch(options: Any) -> DiffReport | None:
    """Return the report if stored fingerprints suffice for it; to import torch takes longer than to compare them."""
    from shardckpt.cli.inspect import OUTLINES
    from shardckpt.maintenance.fingerprint_diff import diff_by_fingerprints

    needs_values = options.rtol or options.atol or options.read
    renames_tensors = options.mapping or options.prefix or options.rename or options.cut_vocabulary
    if needs_values or renames_tensors:
        return None
    return diff_by_fingerprints(options.first, options.second, OUTLINES, tensors_only=options.tensors_only)


def _compare(options: Any) -> DiffReport:
    """Return the report of a comparison that reads values where it must."""
    from shardckpt.engine.display import show_progress
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
    """Return the tables of differences, the summary, and notes about values that were left out."""
    lines = [*_list_tensors(report, verbose=options.verbose), *_list_objects(report, verbose=options.verbose)]
    lines.append(paint(_summarize(report, options), "good" if report.are_same else "bad"))
    notes = (_describe_left_out, _describe_plain, _describe_unread, advise_names, _advise_rows, _advise_objects)
    return [*lines, *filter(None, (describe(report, options) for describe in notes))]


def _summarize(report: DiffReport, options: Any) -> str:
    """Return the line with the numbers of equal tensors, and of equal and differing values."""
    total = report.equal + sum(difference.kind != "only in second" for difference in report.differences)
    equal = f"{report.equal} of {format_many(total, 'tensor')} {'is' if total == 1 else 'are'} equal"
    if report.by_fingerprint:
        equal += f", {report.by_fingerprint} of them by their stored fingerprints (--read compares the values)"
    if report.of_other_dtype:
        equal += f", {report.of_other_dtype} of them of another dtype"
    tensors = f"{options.first}, {options.second}: {equal}"
    if report.objects is None:
        return tensors
    entries = f"{report.objects.equal:,} {'entry is' if report.objects.equal == 1 else 'entries are'} equal"
    count = report.objects.differing
    differing = f"{format_many(count, 'value')} {'differs' if count == 1 else 'differ'}" if count else "none differs"
    return f"{tensors}; objects and common state: {entries}, {differing}"


def _list_tensors(report: DiffReport, *, verbose: bool) -> list[str]:
    """Return the table of tensors that differ, and how many rows it leaves out."""
    if not report.differences:
        return []
    shown = [*report.differences] if verbose else _shorten_unpaired(report.differences)
    rows = [*map(_list_cells, shown)]
    # where both have the same dtype and shape in every row, one column shows them
    first = "both" if all(each.first == each.second for each in shown) else "first"
    names = ("tensor", "differs in", first, "second", "elements", "max abs", "max rel", "first at")
    styles = [_find_style(difference.kind) for difference in shown]
    lines = fit_table(names, rows, styles, 1, optional=("first at", "max rel", "both", "max abs"))
    hidden = Counter(each.kind for each in report.differences) - Counter(each.kind for each in shown)
    more = [f"... and {count:,} more {kind}: --verbose or --json lists them" for kind, count in sorted(hidden.items())]
    return [*lines, *more]


def _list_objects(report: DiffReport, *, verbose: bool) -> list[str]:
    """Return the table of values in objects and common state that differ."""
    if report.objects is None or not report.objects.differences:
        return []
    rows = [*report.objects.differences] if verbose else _fold_values(report.objects)
    styles = [_find_style(row[1]) for row in rows]
    return fit_table(("object", "differs in", "first", "second"), rows, styles, 1)


def _shorten_unpaired(differences: Sequence[TensorDifference]) -> list[TensorDifference]:
    """Return the differences, but only the first ``_MAX_UNPAIRED`` tensors that each checkpoint alone has."""
    seen: Counter[str] = Counter()
    shown = []
    for each in differences:
        seen[each.kind] += 1
        if seen[each.kind] <= _MAX_UNPAIRED or not each.kind.startswith("only in"):
            shown.append(each)
    return shown


def _fold_values(report: ObjectReport) -> list[tuple[str, ...]]:
    """Return the rows of values, with a single row for each outermost list or dict that differs in many places."""
    # the containers of each key, outermost first: a["b"][0] is in a and a["b"]
    containers_of = {
        key: [key[:at] for at, letter in enumerate(key) if letter == "[" and key[:at] in report.containers]
        for key, *_ in report.differences
    }
    # the places in each container that differ: a["b"][0] makes a["b"] one of a, and itself one of a["b"]
    places: dict[str, set[str]] = {}
    for key, containers in containers_of.items():
        for container, place in pairwise([*containers, key]):
            places.setdefault(container, set()).add(place)
    rows: dict[str, tuple[str, ...]] = {}
    for each in report.differences:
        folded = next((name for name in containers_of[each.key] if len(places[name]) > _MAX_VALUES), "")
        if folded:
            rows[folded] = (folded, f"{len(places[folded])} of {report.containers[folded]} places", "-", "-")
        else:
            rows[each.key] = each
    return [*rows.values()]


def _describe_left_out(report: DiffReport, _: Any) -> str:
    """Say how many tensors of the optimizer's state were skipped: a folder of the Hub has none."""
    count = len(report.left_out)
    return f"not compared: {format_many(count, 'tensor')} of the optimizer's state" if count else ""


def _describe_plain(report: DiffReport, _: Any) -> str:
    """Name the objects that only readers of other libraries look up, that differ or that one checkpoint alone has."""
    if report.objects is None:
        return ""
    return "\n".join(
        f"{what}: {format_many(len(names), 'object')} for readers of other libraries{where}: {listed(names, limit=6)}"
        for what, where, names in (
            ("different", "", report.objects.different_plain),
            ("not compared", ", in one alone", report.objects.unpaired_plain),
        )
        if names
    )


def _describe_unread(report: DiffReport, _: Any) -> str:
    """Name the files of the folders that were not read, and which of them differ."""
    if not report.unread_files:
        return ""
    from shardckpt.maintenance.sources import describe_unread_files  # it imports torch

    text = describe_unread_files(report.unread_files)
    if report.different_files:
        text += f"; those in both whose bytes differ: {listed(report.different_files, limit=6)}"
    return f"{escape_text(text)}: diff each by its path"


def _find_style(kind: str) -> Style:
    return "partial" if kind.startswith("only in") else "bad"


def _advise_rows(report: DiffReport, options: Any) -> str:
    """Name the option for Megatron's padding, which a folder of the Hub lacks, where mapped shapes differ."""
    has_other_shapes = any(difference.kind == "shape" for difference in report.differences)
    if not options.mapping or options.cut_vocabulary or not has_other_shapes:
        return ""
    return "where the first has more rows of the vocabulary, Megatron has padded it: --cut-vocabulary leaves these out"


def _advise_objects(report: DiffReport, options: Any) -> str:
    """Name the options that show more or less of the objects and the common state."""
    if report.objects is None or not report.objects.differences:
        return ""
    is_folded = not options.verbose and len(_fold_values(report.objects)) < len(report.objects.differences)
    advice = ["--verbose lists each value"] if is_folded else []
    return "; ".join([*advice, "--tensors-only leaves out objects and common state"])


def _list_cells(difference: TensorDifference) -> tuple[str, ...]:
    """Return the cells of a tensor's row, in the order of the header in :func:`_list_tensors`."""
    count = "all" if difference.different == difference.elements else f"{difference.different:,} of"
    elements = f"{count} {difference.elements:,}" if difference.elements else "-"
    # "-": as in the first; an empty cell: only one has the tensor
    second = "-" if difference.second == difference.first else difference.second
    index = "-" if difference.index is None else str(list(difference.index))
    largest = (_format(difference.max_absolute), _format(difference.max_relative))
    return (difference.key, difference.kind, difference.first, second, elements, *largest, index)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
