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
        lines = [json.dumps(_as_json(found))] if options.json else _describe(found, options)
        if options.files:
            lines[2:3] = [_list_files(checkpoint)]
    return FOUND if found.incomplete or found.fault else FINE, lines


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


def _collect(checkpoint: StoredCheckpoint, options: Any) -> _Found:
    prefix = options.prefix
    columns = checkpoint.columns
    tensors = _make_tensors(columns, prefix, by_size=options.sort == "size")
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


def _make_tensors(columns: StoredColumns, prefix: str, *, by_size: bool) -> _Tensors:
    """Return the tensors whose keys begin with the prefix, by key, or the largest first."""
    keys, dtypes, shapes = columns.keys, columns.dtypes, columns.shapes
    # most of many tensors have one of a few shapes and dtypes: each is converted once
    sizes = {kind: math.prod(kind[1]) * kind[0].itemsize for kind in set(zip(dtypes, shapes, strict=True))}
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(dtypes)}
    chosen = [n for n, key in enumerate(keys) if key.startswith(prefix)] if prefix else [*range(len(keys))]
    chosen.sort(key=keys.__getitem__)
    if by_size:
        chosen.sort(key=lambda n: -sizes[dtypes[n], shapes[n]])
    return _Tensors(
        [keys[n] for n in chosen],
        [names[dtypes[n]] for n in chosen],
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


def _list_files(checkpoint: StoredCheckpoint) -> str:
    """Return a table of the files: as recorded, or, of another library's checkpoint, as its index names them."""
    if checkpoint.record is not None:
        rows: list[tuple[Any, ...]] = [(f.name, f.size, f.rank, f.keys) for f in checkpoint.record.files]
    else:
        rows = [(file.name, file.nbytes or "-", "-", len(file.keys)) for file in checkpoint.list_files()]
    return table(("file", "bytes", "rank", "items"), sorted(rows))


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
