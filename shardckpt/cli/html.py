"""``--html FILE``: the pages of ``inspect`` and ``diff``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.header import read_header
from shardckpt.cli.output import Output
from shardckpt.errors import format_many, prefix_error
from shardckpt.storage.directory import retry_if_replaced

if TYPE_CHECKING:
    from shardckpt.engine.lazy import StoredCheckpoint
    from shardckpt.maintenance.diff_report import DiffReport


def write_checkpoint_page(
    checkpoint: StoredCheckpoint, directory: str, prefix: str, target: str, *, with_values: bool
) -> Output:
    """Write the page of a checkpoint, by the name that the caller gives it; return how large it is."""
    from shardckpt.engine.locations import locate_file
    from shardckpt.pages.render import write_page

    found = _describe(checkpoint, directory, prefix, with_values=with_values)
    if prefix and not found["keys"] and not found["objects"]:
        raise prefix_error(f"{directory}: no tensor or object", prefix, [*checkpoint, *checkpoint.objects])
    nbytes = write_page(locate_file(target, "write a page to"), f"{directory} · shardckpt", found)
    is_fine = not found["incomplete"] and not found["commonFault"]
    count = len(found["keys"])
    return Output(
        lambda: {"checkpoint": directory, "page": target, "nbytes": nbytes, "tensors": count},
        lambda: [f"{target}: {nbytes:,} bytes, {format_many(count, 'tensor')} of {directory}"],
        FINE if is_fine else FOUND,
    )


def write_difference_page(report: DiffReport, options: Any) -> str:
    """Write the page of two checkpoints; return the lines to print."""
    from shardckpt.engine.locations import locate_file
    from shardckpt.maintenance.sources import open_any
    from shardckpt.pages.difference import describe_difference
    from shardckpt.pages.render import write_page

    def read(place: str, prefix: str) -> dict[str, Any]:
        with open_any(place) as checkpoint:
            return _describe(checkpoint, place, prefix)

    first = retry_if_replaced(lambda: read(options.first, options.prefix), options.first)
    second = retry_if_replaced(lambda: read(options.second, ""), options.second)
    given = [f"--{name} {value}" for name in ("rtol", "atol", "mapping", "prefix") if (value := getattr(options, name))]
    data = describe_difference(report, first, second, " ".join(given))
    target = locate_file(options.html, "write a page to")
    nbytes = write_page(target, f"{options.first} and {options.second} · shardckpt diff", data)
    return f"{options.html}: {nbytes:,} bytes"


def _describe(
    checkpoint: StoredCheckpoint, directory: str, prefix: str, *, with_values: bool = False
) -> dict[str, Any]:
    from shardckpt.cli.values import list_statistics
    from shardckpt.engine.locations import locate
    from shardckpt.pages.checkpoint import describe_checkpoint
    from shardckpt.plugins.manager import get_plugin_manager

    known = read_header(checkpoint, locate(directory, get_plugin_manager()))
    header = {"name": directory, "save_id": known.pop("id"), **known}
    compute = partial(list_statistics, checkpoint) if with_values else None
    return describe_checkpoint(checkpoint, header, prefix, compute)
