"""Write the tensors of a checkpoint as a folder that Hugging Face tools load.

The checkpoint is not changed. For a model of transformers, give --mapping and --assets. A file of torch.save or
safetensors is exported, and the result printed, as by `shardckpt convert --to hf`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardckpt.cli import convert
from shardckpt.cli.convert import add_hub_options, describe_damaged, read_hub_options
from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.folders import named_folders
from shardckpt.cli.output import Output, add_verbose
from shardckpt.cli.table import fit_table
from shardckpt.errors import ConfigurationError, format_many, name_call

if TYPE_CHECKING:
    from shardckpt.huggingface.export import Exported


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("checkpoint", help="the checkpoint's directory or URL, or a file of torch.save or safetensors")
    parser.add_argument("target", help="the folder to write: absent or empty, or see --overwrite")
    parser.add_argument(
        "--format", choices=("safetensors", "bin"), default="safetensors", help="of the weight files (safetensors)"
    )
    add_hub_options(parser, "the checkpoint")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="most bytes in memory, at least 32MiB, 64MiB with URLs (default: enough to be fast)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the weights in the folder and, with --assets, its configuration and tokenizer",
    )
    add_verbose(parser, "print a line for each file")
    parser.set_defaults(reads=("checkpoint",), writes="target")


def run(options: Any) -> Output:
    """Export, and return a row per file."""
    if os.path.isfile(options.checkpoint):  # noqa: PTH113 - or a URL
        return _convert_file(options)
    from shardckpt.engine.display import show_progress
    from shardckpt.huggingface.export import export_to_huggingface

    with show_progress("export", part="verify"), named_folders(options.checkpoint):
        exported = export_to_huggingface(
            options.checkpoint,
            options.target,
            format=options.format,
            memory_budget=options.memory,
            **read_hub_options(options),
        )
    return Output(
        lambda: _name_columns(exported),
        lambda: _describe(exported, options.target, verbose=options.verbose),
        FOUND if exported.damaged else FINE,
    )


def _convert_file(options: Any) -> Output:
    """Export a file, which has no index to plan an export by: conversions read it, and write safetensors alone."""
    if options.format != "safetensors":
        raise ConfigurationError(
            f"--format {options.format} is written of a checkpoint alone: "
            f"{name_call('convert', options.checkpoint, 'NEW')} makes one of the file, and "
            f"{name_call('export', 'NEW', options.target, '--format', options.format)} exports it"
        )
    options.source, options.to, options.memory = options.checkpoint, "hf", options.memory or convert.MEMORY
    return convert.run(options)


def _name_columns(exported: Exported) -> dict[str, Any]:
    rows = [{"name": name, "tensors": count, "nbytes": size} for name, count, size in exported.files]
    left_out = {reason: list(keys) for reason, keys in exported.left_out._asdict().items() if keys}
    tensors = [tensor._asdict() for tensor in exported.tensors]
    return {**exported._asdict(), "files": rows, "left_out": left_out, "cast": dict(exported.cast), "tensors": tensors}


def _describe(exported: Exported, target: str, *, verbose: bool) -> list[str]:
    rows = [(name, count, f"{size:,}") for name, count, size in exported.files]
    tensors, files = sum(count for _, count, _ in exported.files), len(rows)
    many = f"{format_many(files, 'file')} of {format_many(tensors, 'tensor')}"
    summary = f"{target}: {many}, {exported.total_size:,} bytes of tensors"
    changes = [format_many(len(exported.cast), "tensor") + " cast"] if exported.cast else []
    changes += [f"{format_many(len(exported.kept), 'tensor')} not"] if exported.kept else []
    summary += f" ({', '.join(changes)})" if changes else ""
    files_written = fit_table(("file", "tensors", "bytes"), rows) if verbose else []
    return [*files_written, *describe_damaged(exported.damaged), summary]
