"""Write a checkpoint once more: in another format, or in a newer version of its own.

With --to BACKEND or BACKEND@VERSION, the checkpoint is read, checked, and written in the other format, with the
same keys, shapes, dtypes and bits; `shardckpt strategies` lists the formats. Without --to, or with --to VERSION, a
plugin's migration rewrites the files of its own format.
"""

from __future__ import annotations

from typing import Any

from shardckpt.cli.convert import PROOF_HELP, describe_conversion, parse_target
from shardckpt.cli.output import Output, add_verbose


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("old", help="directory or URL of the checkpoint")
    parser.add_argument("new", help="directory or URL of the rewritten checkpoint: absent or empty, or see --overwrite")
    parser.add_argument(
        "--to",
        type=_parse_target,
        metavar="BACKEND[@VERSION]|VERSION",
        help="the format to write, such as ep or torch_dist@1; a version alone: of the same backend, by its migration "
        "(default: the newest for which there is one)",
    )
    parser.add_argument(
        "--memory",
        default="256MiB",
        metavar="SIZE",
        help="most bytes in memory, with --to BACKEND; larger tensors are stored in parts (256MiB)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the checkpoint at NEW, which may be OLD, in one step when the new one is complete and on disk",
    )
    add_verbose(parser, f"with --to BACKEND, {PROOF_HELP}")
    parser.set_defaults(reads=("old",), writes="new")


def run(options: Any) -> Output:
    """Migrate or convert, and return the report."""
    from shardckpt.engine.display import show_progress
    from shardckpt.maintenance.convert import convert_checkpoint
    from shardckpt.maintenance.migrate import migrate_checkpoint
    from shardckpt.storage.memory_budget import parse_size

    is_migration = options.to is None or isinstance(options.to, int)
    if is_migration:
        with show_progress("migrate"):
            backend, old, new = migrate_checkpoint(options.old, options.new, options.to, overwrite=options.overwrite)
        done = f", rewritten from version {old}" if old != new else " already, the newest that is installed"
        return Output(
            lambda: {"old": (backend, old), "new": (backend, new)},
            lambda: [f"{options.new}: {backend} version {new}{done}"],
        )
    budget = parse_size(options.memory, "--memory")
    with show_progress("convert"):
        report = convert_checkpoint(
            options.old, options.new, options.to, memory_budget=budget, overwrite=options.overwrite
        )
    return Output(lambda: report, lambda: describe_conversion(report, options.new, verbose=options.verbose))


def _parse_target(text: str) -> int | str | tuple[str, int]:
    """Parse a version, a backend, or ``backend@version``; raise ValueError for anything else."""
    return int(text) if text.isdecimal() else parse_target(text)


#: The type's name in argparse's error.
_parse_target.__name__ = "BACKEND[@VERSION] or VERSION"
