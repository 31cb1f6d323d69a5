"""Remove the tensors and objects whose keys begin with a prefix, and free their bytes.

This cannot be undone: look with --dry-run first. If the command is killed, the checkpoint is as before or as after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.cli.folders import named_folders
from shardckpt.cli.output import Output
from shardckpt.errors import format_many, listed, prefix_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.maintenance.remove import RemovalReport


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("directory", help="the checkpoint's directory; not a URL")
    parser.add_argument("prefix", help="the beginning of the keys to remove")
    parser.add_argument("--dry-run", action="store_true", help="change nothing; print what would be removed and freed")
    parser.set_defaults(writes="directory")


def run(options: Any) -> Output:
    """Remove, and return the keys, the files and the freed bytes."""
    from shardckpt.dist_checkpointing import load_sharded_metadata
    from shardckpt.distributed.comm import Comm
    from shardckpt.engine.display import show_progress
    from shardckpt.engine.locations import locate_local
    from shardckpt.maintenance.remove import remove_keys
    from shardckpt.plugins.manager import get_plugin_manager

    directory, plugins = locate_local(options.directory, "take keys out of"), get_plugin_manager()
    with named_folders(options.directory):
        before = load_sharded_metadata(options.directory)
    with show_progress("remove"):
        report = remove_keys(directory, options.prefix, Comm(alone=True), plugins, dry_run=options.dry_run)
    if not report.keys:
        removed = f"0 of {format_many(len(before), 'key')} removed"
        raise prefix_error(f"{options.directory}: {removed}: no tensor or object", options.prefix, before)
    return Output(
        lambda: {"checkpoint": options.directory, "dry_run": options.dry_run, **vars(report)},
        lambda: _describe(report, before, options),
    )


def _describe(report: RemovalReport, before: Collection[str], options: Any) -> list[str]:
    verb, freed = ("would be removed", "would be free") if options.dry_run else ("removed", "are free")
    # keys that only readers of other libraries find are no keys to us, and go with the tensors and objects
    keys = [key for key in report.keys if key in before]
    others = len(report.keys) - len(keys)
    also = f", and {format_many(others, 'object')} for readers of other libraries alone" if others else ""
    named = listed(keys or report.keys, limit=2)
    lines = [f"{options.directory}: {len(keys)} of {format_many(len(before), 'key')} {verb}{also}: {named}"]
    for what, files in (("deleted files", report.dropped), ("rewritten files", report.rewritten)):
        if files:
            lines.append(f"{what}: {listed(files)}")
    sizes = f"{report.bytes_before:,} bytes on disk before, {'about ' * options.dry_run}{report.bytes_after:,} after"
    return [*lines, f"{sizes}: {report.bytes_before - report.bytes_after:,} {freed}"]
