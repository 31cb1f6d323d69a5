"""Print who wrote a checkpoint, its id, parent and step, and a row for each tensor, object and name of common state.

With KEY[0:4, ...] in place of a prefix: statistics and values of that region, of which any part is read at a time.
Files that are missing or too short are named, and the exit code is 1. Bytes of files are not checked: verify does that.
What convert reads can be inspected, too: Hugging Face folders, and files of safetensors and of torch.save.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.header import read_header
from shardckpt.cli.table import columns_table, table
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, KeyMismatchError, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.engine import IncompleteFile, StoredCheckpoint
    from shardckpt.manifest import Record
    from shardckpt.plugins import Outline
    from shardckpt.strategy import StoredColumns


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "inspect", help="list the tensors, objects and common state of a checkpoint", description=__doc__
    )
    parser.add_argument("directory", help="directory or URL of a checkpoint or Hugging Face folder, or a file")
    parser.add_argument(
        "prefix",
        nargs="?",
        default="",
        metavar="PREFIX|KEY[INDEX]",
        help="list only keys that begin with it; or a tensor's key and an index: its values",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tree", action="store_true", help="a row per module, with the sums of its tensors")
    how.add_argument("--files", action="store_true", help="a row per file")
    how.add_argument("--json", action="store_true", help="print all as one JSON object")
    how.add_argument(
        "--html", metavar="FILE", help="write a page with pictures: shards, modules, files, the save's time"
    )
    parser.add_argument("--depth", type=int, metavar="N", help="with --tree, the deepest level to show")
    parser.add_argument("--sort", choices=("key", "size"), default="key", help="order of the tensors (key)")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print what is stored, and what is missing. Return the exit code.

    Raises:
        KeyMismatchError: no key begins with the prefix.
    """
    from shardckpt.cli.pager import page
    from shardckpt.engine import pause_gc
    from shardckpt.storage import retry_if_replaced

    with pause_gc():  # rows of 100,000 tensors all stay
        code, lines = retry_if_replaced(lambda: _inspect(options), options.directory)
        page(lines)
    return code


def _inspect(options: Any) -> tuple[int, list[str]]:
    """Return the exit code and the lines to print."""
    from shardckpt.cli.values import split_region

    found = None if options.html or split_region(options.prefix) is not None else _read_outline(options)
    if found is not None:
        return FINE, _format(found, options)
    return _inspect_open(options)


def _inspect_open(options: Any) -> tuple[int, list[str]]:
    """Do the same by the strategy that reads the checkpoint, which needs torch."""
    from shardckpt.cli.html import write_checkpoint_page
    from shardckpt.cli.values import describe_values, split_region
    from shardckpt.maintenance import open_any

    with open_any(options.directory) as checkpoint:
        region = split_region(options.prefix)
        if region is not None and options.prefix not in checkpoint:
            return FINE, describe_values(checkpoint, *region, as_json=options.json)
        if options.html:
            return write_checkpoint_page(checkpoint, options.directory, options.prefix, options.html)
        found = _collect(checkpoint, options)
        if options.files:
            found.files.extend(_list_files(checkpoint))
    return FOUND if found.incomplete or found.fault else FINE, _format(found, options)


def _read_outline(options: Any) -> _Found | None:
    """Return what a checkpoint has by its outline, without torch; None if it has none, or is not whole."""
    from shardckpt.engine import locate
    from shardckpt.plugins import get_plugin_manager, hold_checkpoint, read_outline
    from shardckpt.storage import file_size, has_local_files

    plugins = get_plugin_manager()
    location = locate(options.directory, plugins)
    if not has_local_files(location) or not location.is_dir():
        return None
    try:
        place, manifest = hold_checkpoint(location, plugins)
        if manifest.record is None or any(
            file_size(place / name) != size for name, size in manifest.record.list_files().items()
        ):
            return None
        outline = read_outline(place, manifest, plugins)
    except CheckpointReplacedError:
        raise
    except (CheckpointingException, OSError):  # the strategy's way says better what it is
        return None
    if outline is None:
        return None
    tensors = _make_tensors(outline, options)
    objects = sorted(key for key in outline.objects if key.startswith(options.prefix))
    if not tensors.keys and not objects and options.prefix:
        return None
    header = read_header(manifest, options.directory)
    common = [] if options.prefix else sorted(outline.common)
    found = _Found(options.directory, options.prefix, header, tensors, objects, common, "", [])
    found.files.extend(_list_recorded_files(manifest.record) if options.files else ())
    return found


def _format(found: _Found, options: Any) -> list[str]:
    if options.json:
        return [json.dumps(_as_json(found))]
    lines = _describe(found, options)
    if options.files:
        lines[2:3] = [table(("file", "bytes", "rank", "items"), sorted(found.files))]
    return lines


@dataclass(frozen=True)
class _Tensors:
    """The listed tensors, in columns, since there may be 100,000."""

    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]

    def __iter__(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        return zip(self.keys, self.dtypes, self.shapes, self.sizes, strict=True)


@dataclass(frozen=True)
class _Found:
    """What is known of a checkpoint; of one prefix, without the common state."""

    directory: str
    prefix: str
    header: dict[str, Any]
    tensors: _Tensors
    objects: list[str]
    common: list[str]
    fault: str
    incomplete: list[IncompleteFile]
    scaled: list[str] = field(default_factory=list)
    #: Rows of a table of the files, if they are asked for.
    files: list[tuple[Any, ...]] = field(default_factory=list)


def _collect(checkpoint: StoredCheckpoint, options: Any) -> _Found:
    prefix = options.prefix
    columns = checkpoint.columns
    tensors = _make_tensors(_outline_columns(columns), options)
    objects = sorted(key for key in columns.objects if key.startswith(prefix))
    if prefix and not tensors.keys and not objects:
        have = listed(sorted([*columns.keys, *columns.objects]), limit=6) or "none"
        raise KeyMismatchError(
            f"{options.directory}: no tensor or object has a key that begins with {prefix!r} (keys: {have})"
        )
    common, fault = ([], "") if prefix else _read_common(checkpoint)
    scaled = [
        f"{key} is scaled by {scales.key}, in blocks of {'x'.join(map(str, scales.block))}"
        for key, scales in sorted(columns.scales.items())
        if key.startswith(prefix)
    ]
    return _Found(
        options.directory,
        prefix,
        read_header(checkpoint, options.directory),
        tensors,
        objects,
        common,
        fault,
        checkpoint.find_incomplete_files(),
        scaled,
    )


def _outline_columns(columns: StoredColumns) -> Outline:
    """Return the columns with the names of dtypes in place of torch's."""
    from shardckpt.plugins import Outline

    names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(columns.dtypes)}
    itemsizes = {name: dtype.itemsize for dtype, name in names.items()}
    dtypes = [names[dtype] for dtype in columns.dtypes]
    return Outline([*columns.keys], dtypes, [*columns.shapes], itemsizes, [*columns.objects], [])


def _make_tensors(outline: Outline, options: Any) -> _Tensors:
    """Return the tensors whose keys begin with the prefix, by key, or the largest first."""
    keys, dtypes, shapes = outline.keys, outline.dtypes, outline.shapes
    # most of many tensors have one of a few shapes and dtypes: each is converted once
    sizes = {kind: math.prod(kind[1]) * outline.itemsizes[kind[0]] for kind in set(zip(dtypes, shapes, strict=True))}
    prefix = options.prefix
    chosen = [n for n, key in enumerate(keys) if key.startswith(prefix)] if prefix else [*range(len(keys))]
    chosen.sort(key=keys.__getitem__)
    if options.sort == "size":
        chosen.sort(key=lambda n: -sizes[dtypes[n], shapes[n]])
    return _Tensors(
        [keys[n] for n in chosen],
        [dtypes[n] for n in chosen],
        [shapes[n] for n in chosen],
        [sizes[dtypes[n], shapes[n]] for n in chosen],
    )


def _describe(found: _Found, options: Any) -> list[str]:
    from shardckpt.cli.tree import make_tree

    header, tensors = found.header, found.tensors
    history = "".join(f", {name} {header[name]}" for name in ("id", "parent", "step") if header[name] is not None)
    title = f"{found.directory}: {header['backend']!r}, version {header['version']}{history}"
    if options.tree:
        listing = make_tree(zip(tensors.keys, tensors.sizes, strict=True), options.depth)
    else:
        shapes = {shape: "x".join(map(str, shape)) for shape in set(tensors.shapes)}
        others = [*found.objects, *found.common]
        blank = [""] * len(others)
        listing = columns_table(
            ("key", "kind", "shape", "bytes"),
            [*tensors.keys, *others],
            [*tensors.dtypes, *["object"] * len(found.objects), *["common"] * len(found.common)],
            [*map(shapes.__getitem__, tensors.shapes), *blank],
            [*map(str, tensors.sizes), *blank],
        )
    total = sum(tensors.sizes)
    summary = f"{len(tensors.keys)} tensors of {total:,} bytes, {len(found.objects)} objects{_sum_dtypes(found)}"
    faults = [f"the common state cannot be read: {found.fault}"] if found.fault else []
    faults += [f"incomplete: {file.name} {file.fault}{_affected(file, found.prefix)}" for file in found.incomplete]
    return [title, _describe_writer(header), listing, *found.scaled, summary, *faults]


def _describe_writer(header: dict[str, Any]) -> str:
    writer = header["writer"]
    by = " and ".join(f"{name} {version}" for name, version in writer.items()) if writer else "another library"
    ranks = "" if header["ranks"] is None else f" on {header['ranks']} rank{'s' * (header['ranks'] != 1)}"
    at = "" if header["saved_at"] is None else time.strftime(", %Y-%m-%d %H:%M:%S", time.localtime(header["saved_at"]))
    return f"written by {by}{ranks}{at}; {header['bytes_on_disk']:,} bytes on disk"


def _sum_dtypes(found: _Found) -> str:
    """Return how many bytes each dtype has, if there are several."""
    sums: dict[str, int] = {}
    for dtype, nbytes in zip(found.tensors.dtypes, found.tensors.sizes, strict=True):
        sums[dtype] = sums.get(dtype, 0) + nbytes
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
    return [(file.name, file.nbytes or "-", "-", len(file.keys)) for file in checkpoint.list_files()]


def _list_recorded_files(record: Record) -> list[tuple[Any, ...]]:
    return [(file.name, file.size, file.rank, file.keys) for file in record.files]


def _as_json(found: _Found) -> dict[str, Any]:
    return {
        "checkpoint": found.directory,
        **found.header,
        "tensors": [dict(zip(("key", "dtype", "shape", "nbytes"), row, strict=True)) for row in found.tensors],
        "objects": found.objects,
        "common": found.common,
        "common_fault": found.fault,
        "incomplete_files": [{"name": f.name, "fault": f.fault, "keys": f.keys} for f in found.incomplete],
    }


def _read_common(checkpoint: StoredCheckpoint) -> tuple[list[str], str]:
    """Return the names in the common state, and why they cannot be read, if so."""
    try:
        return sorted(map(str, checkpoint.common)), ""
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        return [], str(exc)


def _affected(file: IncompleteFile, prefix: str) -> str:
    keys = [key for key in file.keys if key.startswith(prefix)]
    return f"; {len(keys)} tensors and objects cannot be read completely: {listed(keys)}" if keys else ""
