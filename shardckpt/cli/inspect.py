"""Print who wrote a checkpoint, its id, parent, step and metrics, and a row for each tensor, object and common value.

With KEY[0:4, ...] in place of a prefix: statistics and values of that region, read part by part.
With common, or the name of a part of the common state (args.lr): its value.
Files that are missing or too short are named with the keys that have lost bytes, and the exit code is 1; convert
--skip-damaged writes the rest. Where nothing can be listed, as without the index, it is an error: 2. Bytes of files are
not checked: verify does that.
Other sources of convert can be inspected, too: Hugging Face folders, and files of safetensors and of torch.save.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.cli.colour import paint
from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.header import read_header
from shardckpt.cli.output import Output, add_verbose
from shardckpt.cli.renames import add_rename_option, read_renames
from shardckpt.cli.table import grouped_table, table
from shardckpt.engine.amounts import format_count, format_metric
from shardckpt.errors import (
    CheckpointingException,
    CheckpointReplacedError,
    escape_text,
    format_many,
    listed,
    prefix_error,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.engine.integrity import IncompleteFile
    from shardckpt.engine.lazy import StoredCheckpoint
    from shardckpt.maintenance.statistics import Statistics
    from shardckpt.manifest.models import Record
    from shardckpt.manifest.plain import PlainRecord
    from shardckpt.plugins.outline import Outline
    from shardckpt.strategy import StoredColumns

#: The functions that list the checkpoints of our formats without torch, as the formats' plugins register them.
OUTLINES = {
    ("torch_dist", 1): "shardckpt_torch_dist.outline:read_outline",
    ("safetensors", 1): "shardckpt_safetensors.outline:read_outline",
}
_FILE_COLUMNS = ("file", "bytes", "rank", "items")
#: Keys that are named in the list of lost or left-out keys.
_KEYS_SHOWN = 20


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("directory", help="directory or URL of a checkpoint or Hugging Face folder, or a file")
    parser.add_argument(
        "prefix",
        nargs="?",
        default="",
        metavar="PREFIX|KEY[INDEX]",
        help="list only keys that begin with it; or a tensor's key and an index, or a name in the common state: values",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tree", action="store_true", help="a row per module, with the sums of its tensors")
    how.add_argument("--files", action="store_true", help="a row per file")
    how.add_argument(
        "--stats",
        action="store_true",
        help="norm, mean, least and greatest value of each tensor, NaN and Inf: reads all",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page with pictures: shards, modules, files, the save's time; with --stats norms, too",
    )
    add_rename_option(parser, "the checkpoint")
    parser.add_argument("--depth", type=int, metavar="N", help="with --tree, the deepest level to show")
    add_verbose(parser, f"name every key that is lost or was left out, not only {_KEYS_SHOWN} of them, as in --json")
    parser.add_argument("--sort", choices=("key", "size"), default="key", help="order of the tensors (key)")
    parser.set_defaults(reads=("directory",))


def run(options: Any) -> Output:
    """Return the stored and the missing items."""
    from shardckpt.engine.gc_pause import pause_gc
    from shardckpt.storage.directory import retry_if_replaced

    if options.html and (options.tree or options.files):
        raise CheckpointingException("--html: its page has the modules and files: leave out --tree and --files")

    try:
        with pause_gc():  # rows of 100,000 tensors all stay
            return retry_if_replaced(lambda: _inspect(options), options.directory)
    except CheckpointingException as exc:
        if (error := _name_verdict(exc, options.directory)) is exc:  # no error is its own cause
            raise
        raise error from exc


def _name_verdict(error: CheckpointingException, path: str) -> CheckpointingException:
    """Return an error of a damaged or incomplete checkpoint with the words of verify, any other as it is."""
    from shardckpt.cli.verify import explain_verdict, judge_error
    from shardckpt.distributed.error_report import replace_text

    answer = judge_error(error, path)
    return replace_text(error, f"{path}: {explain_verdict(answer)}") if answer.exit_code == FOUND else error


def _inspect(options: Any) -> Output:
    from shardckpt.cli.values import split_region

    is_read = options.html or options.stats or options.rename or split_region(options.prefix) is not None
    found = None if is_read else _read_outline(options)
    if found is not None:
        return _show(found, options)
    try:
        return _inspect_open(options)
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        from shardckpt.engine.integrity import is_damage

        if not is_damage(exc):
            raise
        try:
            # by its record, where only metadata.json was lost; a Hugging Face folder, as far as it is there
            return _inspect_open(options, lost=str(exc))
        except CheckpointReplacedError:
            raise
        except CheckpointingException:
            raise exc from None


def _inspect_open(options: Any, lost: str = "") -> Output:
    """Return the stored and the missing items as the checkpoint's strategy reads them, which needs torch.

    ``lost`` says that it has lost its ``metadata.json``, and how to repair it; ``""``: it must have it.
    """
    from shardckpt.cli.html import write_checkpoint_page
    from shardckpt.cli.values import find_common, list_statistics, read_values, show_common, split_region
    from shardckpt.maintenance.sources import open_any

    with open_any(options.directory, unmarked=bool(lost), rename=read_renames(options)) as checkpoint:
        region = split_region(options.prefix)
        if region is not None and options.prefix not in checkpoint:
            return _add_faults(read_values(checkpoint, *region), checkpoint, lost)
        in_common = find_common(checkpoint, options.prefix) if options.prefix and not options.html else None
        if in_common is not None:
            return _add_faults(show_common(*in_common), checkpoint, lost)
        if options.html:
            return write_checkpoint_page(
                checkpoint, options.directory, options.prefix, options.html, with_values=options.stats
            )
        found = _collect(checkpoint, options)._replace(incomplete=_find_faults(checkpoint, lost))
        if options.files:
            found = found._replace(files=_list_files(checkpoint))
        if options.stats:
            found = found._replace(statistics=list_statistics(checkpoint, found.tensors.keys))
    return _show(found, options)


def _find_faults(checkpoint: StoredCheckpoint, lost: str) -> list[IncompleteFile]:
    """Return which files are missing or incomplete; ``lost`` says that ``metadata.json`` is."""
    from shardckpt.engine.integrity import IncompleteFile
    from shardckpt.manifest.names import MARKER_NAME

    found = checkpoint.find_incomplete_files()
    if lost and checkpoint.record is not None:
        found.append(IncompleteFile(MARKER_NAME, f"is missing: {lost}", ()))
    return found


def _add_faults(output: Output, checkpoint: StoredCheckpoint, lost: str) -> Output:
    """Return an answer about a part of a checkpoint, with the incomplete files of the whole."""
    faults = _find_faults(checkpoint, lost)
    if not faults:
        return output
    return Output(
        lambda: {**output.data(), "incomplete_files": _list_faults(faults)},
        lambda: [*output.text(), *_describe_faults(faults, None)],
        FOUND,
    )


def _describe_faults(faults: Sequence[IncompleteFile], prefix: str | None, *, verbose: bool = False) -> list[str]:
    """Return a line for each incomplete file, with those of its keys that begin with ``prefix``; None: without keys."""
    lines = []
    for file in faults:
        affected = "" if prefix is None else _affected(file, prefix, verbose=verbose)
        lines.append(paint(escape_text(f"damaged: {file.name} {file.fault}{affected}"), "bad"))
    return lines


def _list_faults(faults: Sequence[IncompleteFile]) -> list[dict[str, Any]]:
    return [file._asdict() for file in faults]


def _read_outline(options: Any) -> _Found | None:
    """Return the content of a checkpoint by its outline, without torch; None if it has none, or is not whole."""
    from shardckpt.engine.outlined import open_by_outline

    try:
        found = open_by_outline(options.directory, OUTLINES)
    except CheckpointReplacedError:
        raise
    except (CheckpointingException, OSError):  # the strategy has the better error
        return None
    if found is None:
        return None
    location, _, record, outline = found
    tensors = _make_tensors(outline, options)
    objects = sorted(key for key in outline.objects if key.startswith(options.prefix))
    if not tensors.keys and not objects and options.prefix:
        return None
    header = read_header(record, location)
    common = [] if options.prefix else sorted(outline.common)
    files = _list_recorded_files(record) if options.files else None
    return _Found(options.directory, options.prefix, header, tensors, objects, common, "", [], files=files)


def _show(found: _Found, options: Any) -> Output:
    code = FOUND if found.incomplete or found.fault or any(found.unread.values()) else FINE
    return Output(partial(_list_all, found), partial(_describe, found, options), code, is_long=True)


class _Form(NamedTuple):
    """The common properties of many tensors."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class _Tensors(NamedTuple):
    """The listed tensors, in columns, since there may be 100,000: their keys, and of each the number of its form."""

    keys: list[str]
    numbers: list[int]
    forms: list[_Form]

    def list_sizes(self) -> list[int]:
        """Return the bytes of each."""
        sizes = [form.nbytes for form in self.forms]
        return list(map(sizes.__getitem__, self.numbers))

    def count_parameters(self) -> int:
        """Return how many elements the tensors have that are parameters and buffers."""
        from shardckpt.engine.optimizer_keys import is_parameter_key

        counts = [math.prod(form.shape) for form in self.forms]
        rows = zip(self.keys, self.numbers, strict=True)
        return sum(counts[number] for key, number in rows if is_parameter_key(key))


class _Found(NamedTuple):
    """The description of a checkpoint; of one prefix, without the common state."""

    directory: str
    prefix: str
    header: dict[str, Any]
    tensors: _Tensors
    objects: list[str]
    common: list[str]
    fault: str
    incomplete: list[IncompleteFile]
    scaled: Sequence[str] = ()
    #: Rows of a table of the files, if they are asked for; None in one is not known.
    files: Sequence[tuple[Any, ...]] | None = None
    #: Of each tensor, if they are asked for.
    statistics: Sequence[Statistics | None] | None = None
    #: Names of files next to it that are read by their paths alone.
    unread: Mapping[str, str] = MappingProxyType({})


def _collect(checkpoint: StoredCheckpoint, options: Any) -> _Found:
    from shardckpt.engine.locations import locate
    from shardckpt.maintenance.sources import list_unread_files
    from shardckpt.plugins.manager import get_plugin_manager

    prefix = options.prefix
    columns = checkpoint.columns
    tensors = _make_tensors(_outline_columns(columns), options)
    objects = sorted(key for key in columns.objects if key.startswith(prefix))
    if prefix and not tensors.keys and not objects:
        keys = [*columns.keys, *columns.objects, *_read_common(checkpoint)[0]]
        raise prefix_error(f"{options.directory}: no tensor or object", prefix, keys)
    common, fault = ([], "") if prefix else _read_common(checkpoint)
    scaled = [
        f"{key} is scaled by {scales.key}, in blocks of {'x'.join(map(str, scales.block))}"
        for key, scales in sorted(columns.scales.items())
        if key.startswith(prefix)
    ]
    place = locate(options.directory, get_plugin_manager())
    return _Found(
        options.directory,
        prefix,
        read_header(checkpoint, place),
        tensors,
        objects,
        common,
        fault,
        [],
        scaled,
        unread=list_unread_files(place, checkpoint),
    )


def _outline_columns(columns: StoredColumns) -> Outline:
    """Return the columns with the names of dtypes in place of torch's."""
    from shardckpt.plugins.outline import Outline

    names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(columns.dtypes)}
    itemsizes = {name: dtype.itemsize for dtype, name in names.items()}
    dtypes = [names[dtype] for dtype in columns.dtypes]
    return Outline([*columns.keys], dtypes, [*columns.shapes], itemsizes, [*columns.objects], [])


def _make_tensors(outline: Outline, options: Any) -> _Tensors:
    """Return the tensors whose keys begin with the prefix, by key, or the largest first."""
    keys, kinds = outline.keys, list(zip(outline.dtypes, outline.shapes, strict=True))
    if prefix := options.prefix:
        chosen = [number for number, key in enumerate(keys) if key.startswith(prefix)]
        keys, kinds = [keys[number] for number in chosen], [kinds[number] for number in chosen]
    # most of many tensors have one of a few shapes and dtypes
    found = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    forms = [_Form(dtype, shape, math.prod(shape) * outline.itemsizes[dtype]) for dtype, shape in found]
    tensors = _Tensors(keys, list(map(found.__getitem__, kinds)), forms)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if options.sort == "size":
        order.sort(key=tensors.list_sizes().__getitem__, reverse=True)
    return _Tensors([*map(keys.__getitem__, order)], [*map(tensors.numbers.__getitem__, order)], forms)


def _describe(found: _Found, options: Any) -> list[str]:
    from shardckpt.cli.tree import make_tree
    from shardckpt.cli.values import make_statistics_table

    header, tensors = found.header, found.tensors
    history = "".join(f", {name} {header[name]}" for name in ("id", "parent", "step") if header[name] is not None)
    metrics = "".join(f", {name} {format_metric(value)}" for name, value in header["metrics"].items())
    title = f"{found.directory}: {header['backend']!r}, version {header['version']}{history}{metrics}"
    if options.tree:
        listing = make_tree(zip(tensors.keys, tensors.list_sizes(), strict=True), options.depth)
    else:
        kinds = ["object"] * bool(found.objects) + ["common"] * bool(found.common)
        first, last = len(tensors.forms), len(tensors.forms) + len(kinds) - 1
        listing = grouped_table(
            ("key", "kind", "shape", "bytes"),
            [*tensors.keys, *found.objects, *found.common],
            [*tensors.numbers, *[first] * len(found.objects), *[last] * len(found.common)],
            [
                *((form.dtype, "x".join(map(str, form.shape)), str(form.nbytes)) for form in tensors.forms),
                *((kind, "", "") for kind in kinds),
            ],
        )
    total = sum(tensors.list_sizes())
    count = format_count(tensors.count_parameters())
    some, objects = format_many(len(tensors.keys), "tensor"), format_many(len(found.objects), "object")
    summary = f"{some} of {total:,} bytes, {count} parameters, {objects}"
    summary += _sum_dtypes(found)
    if tensors.keys == [found.prefix] and not options.tree:
        summary += f"; its values: {found.prefix}[], a region: {found.prefix}[0:4, ...]"
    faults = [f"the common state cannot be read: {found.fault}"] if found.fault else []
    head = map(escape_text, (title, _describe_writer(header), *_describe_rescue(header, verbose=options.verbose)))
    if found.statistics is not None:
        forms = [tensors.forms[number] for number in tensors.numbers]
        rows = [
            (key, form.dtype, "x".join(map(str, form.shape))) for key, form in zip(tensors.keys, forms, strict=True)
        ]
        listing = make_statistics_table(rows, found.statistics)
    if found.files is not None:
        cells = (tuple("-" if cell is None else cell for cell in row) for row in found.files)
        listing = table(_FILE_COLUMNS, sorted(cells))
    return [
        *head,
        listing,
        *map(escape_text, found.scaled),
        summary,
        *_describe_unread(found.unread),
        *map(escape_text, faults),
        *_describe_faults(found.incomplete, found.prefix, verbose=options.verbose),
    ]


def _describe_unread(files: Mapping[str, str]) -> list[str]:
    if not files:
        return []
    from shardckpt.maintenance.sources import describe_unread_files  # it imports torch

    lines = [escape_text(f"{describe_unread_files(files)}: inspect each by its path")]
    return lines + [paint(escape_text(f"damaged: {fault}"), "bad") for fault in files.values() if fault]


def _describe_rescue(header: dict[str, Any], *, verbose: bool) -> list[str]:
    """Return a line about the keys that a rescue left out; of very many it has not stored all names."""
    count, keys = header["rescued"], header["rescued_keys"]
    if not count:
        return []
    unnamed = f" (the names of {count - len(keys):,} are not stored)" if keys and len(keys) < count else ""
    named = f": {_list_keys(keys, verbose=verbose)}{unnamed}" if keys else ""
    return [f"rescued: {format_many(count, 'key')} left out as damaged{named}"]


def _list_keys(keys: Sequence[str], *, verbose: bool) -> str:
    return listed(keys, limit=len(keys) if verbose else _KEYS_SHOWN)


def _describe_writer(header: dict[str, Any]) -> str:
    writer = header["writer"]
    by = " and ".join(f"{name} {version}" for name, version in writer.items()) if writer else header["library"]
    ranks = "" if header["ranks"] is None else f" on {format_many(header['ranks'], 'rank')}"
    at = "" if header["saved_at"] is None else time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(header["saved_at"]))
    return f"written by {by}{ranks}{at}; {header['bytes_on_disk']:,} bytes on disk"


def _sum_dtypes(found: _Found) -> str:
    """Return how many bytes each dtype has, if there are several."""
    sums: dict[str, int] = {}
    for number, count in Counter(found.tensors.numbers).items():
        form = found.tensors.forms[number]
        sums[form.dtype] = sums.get(form.dtype, 0) + count * form.nbytes
    largest_first = sorted(sums.items(), key=lambda item: -item[1])
    return (
        f"; bytes by dtype: {', '.join(f'{dtype} {nbytes:,}' for dtype, nbytes in largest_first)}"
        if len(sums) > 1
        else ""
    )


def _list_files(checkpoint: StoredCheckpoint) -> list[tuple[Any, ...]]:
    """Return a row for each file: as recorded, or, of another library's checkpoint, as its index names them."""
    if checkpoint.record is not None:
        return _list_recorded_files(checkpoint.record)
    return [(file.name, file.nbytes or None, None, len(file.keys)) for file in checkpoint.list_files()]


def _list_recorded_files(record: PlainRecord | Record) -> list[tuple[Any, ...]]:
    return [(file.name, file.size, file.rank, file.keys) for file in record.files]


def _list_all(found: _Found) -> dict[str, Any]:
    from shardckpt.cli.encode import Rows, make_plain

    forms = [form._asdict() for form in found.tensors.forms]
    rows = Rows(
        {"key": key, **forms[number]} for key, number in zip(found.tensors.keys, found.tensors.numbers, strict=True)
    )
    if found.statistics is not None:
        rows = Rows({**row, "statistics": make_plain(each)} for row, each in zip(rows, found.statistics, strict=True))
    document = {
        "checkpoint": found.directory,
        **found.header,
        "parameters": found.tensors.count_parameters(),
        "tensors": rows,
        "objects": found.objects,
        "common": found.common,
        "common_fault": found.fault,
        "unread_files": dict(found.unread),
        "incomplete_files": _list_faults(found.incomplete),
    }
    if found.files is not None:
        document["files"] = [dict(zip(_FILE_COLUMNS, row, strict=True)) for row in found.files]
    return document


def _read_common(checkpoint: StoredCheckpoint) -> tuple[list[str], str]:
    """Return the names in the common state, and why they cannot be read, if so."""
    try:
        return sorted(map(str, checkpoint.common)), ""
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        return [], str(exc)


def _affected(file: IncompleteFile, prefix: str, *, verbose: bool) -> str:
    """Return the keys that have lost bytes in a file, and how many have lost none."""
    lost, kept = ([key for key in keys if key.startswith(prefix)] for keys in (file.keys, file.kept))
    text = ""
    if lost:
        text = f"; {format_many(len(lost), 'key')} cannot be read completely: {_list_keys(lost, verbose=verbose)}"
    return text + (f"; {format_many(len(kept), 'other' if lost else 'key')} before its end" if kept else "")
