"""Write a checkpoint, a Hugging Face folder or a file of torch.save in another format, and prove that nothing changed.

SRC is recognised by its content: a checkpoint that an installed strategy reads (Megatron's, plain DCP's,
torch_checkpointing's and zarr's among them), a Hugging Face folder of safetensors or .bin files, one safetensors file,
or one file of torch.save. Pickles are read without running code in them.

--to takes a backend of `shardckpt strategies`, or
  dcp    a folder that stock torch.distributed.checkpoint loads: torch_dist, with all plain values under their paths
  hf     a Hugging Face folder, as `shardckpt export` writes it: the model's tensors alone
  torch  one file that torch.load reads with weights_only: plain tensors in builtin containers

DST is complete or absent. Before it gets its name it is read again, and the fingerprints of all tensors are compared
with those of the tensors that were read: --verbose and --json have a line for each. If one differs, nothing is left. A
conversion that was killed leaves nothing at DST; run it again with the same options, on the same host, and it continues
after the files that are written. If SRC or an option has changed, it starts anew, and says so. A DST that is a URL is
written without a copy on the local disk; after a kill, the objects that are complete stay. A SRC that shardckpt wrote
in the same format is refused, unless an option changes it; if SRC or DST is a URL, it is copied, with the same proof.

exit codes:
  0  converted, and DST has the values of SRC
  1  with --skip-damaged: converted without the damaged items
  2  an error, also if the proof finds other values in the output, which is then removed
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output, add_verbose
from shardckpt.cli.renames import add_rename_option, read_renames, set_once
from shardckpt.cli.table import fit_table
from shardckpt.errors import CheckpointingException, format_many, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.maintenance.conversion import ConversionReport


#: The default of --memory.
MEMORY = "256MiB"
#: The most names in a line; --json has all.
_NAMES_SHOWN = 4
#: How many of a fingerprint's 32 digits a terminal shows: a line has no room for more.
_DIGITS = 12
#: The help of --verbose.
PROOF_HELP = "print a line for each tensor, with its fingerprints before and after"
#: Suffixes of files; not .ckpt, which directories of Lightning have, too.
_FILE_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("source", metavar="SRC", help="directory or URL of a checkpoint or folder, or a file")
    parser.add_argument("target", metavar="DST", help="the target, which must be absent or empty, or see --overwrite")
    add_target_options(parser)
    parser.set_defaults(reads=("source",), writes="target")


def add_target_options(parser: Any) -> None:
    """Add the options about the files at DST, for every verb that converts."""
    parser.add_argument(
        "--to",
        type=parse_target,
        default="torch_dist",
        metavar="BACKEND[@VERSION]|hf|dcp|torch",
        help="the format to write (torch_dist)",
    )
    parser.add_argument(
        "--memory", default=MEMORY, metavar="SIZE", help=f"most bytes in memory: tensors and buffers ({MEMORY})"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST when the new one is complete")
    add_hub_options(parser, "SRC")
    add_verbose(parser, PROOF_HELP)


def add_hub_options(parser: Any, source: str) -> None:
    """Add the options of names, casts and files of the Hub; ``source`` is the verb's name for its source."""
    parser.add_argument(
        "--mapping",
        metavar="MODEL_TYPE|FILE",
        help="names of megatron or of a model (qwen3_moe) to the Hub's, or by rules: FILE.json, FILE.py:MAPPING",
    )
    parser.add_argument(
        "--strict", action="store_true", help="tensors that match no rule of --mapping are an error (a warning)"
    )
    parser.add_argument(
        "--cut-vocabulary",
        action="store_true",
        help="leave out rows with which Megatron pads the vocabulary, beyond vocab_size of config.json (an error)",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="[PATTERN=]DTYPE",
        help="cast floating-point tensors to float64, float32, float16 or bfloat16, except those that would lose "
        "more by it than the model's weights (default: as stored); with a PATTERN of names cast these in any case; may "
        "be repeated",
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="names of tensors not to cast; may be repeated"
    )
    parser.add_argument(
        "--prefix",
        help="write only tensors whose keys begin with it, and remove it (to the Hub: by default the model's)",
    )
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="NAME", help="a name not to write; may be repeated"
    )
    add_rename_option(parser, source)
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out missing or damaged items, and name them; all is read once more, exit code 1 if there are any",
    )
    parser.add_argument(
        "--assets",
        metavar="DIR",
        help="copy a model's other files (config, tokenizer) from here into a Hugging Face folder; convert: by default "
        "from SRC, if it is such a folder",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="largest weight file of a Hugging Face folder, such as 5GB (5*10^9 bytes) or 5GiB (5GB)",
    )


def read_hub_options(options: Any) -> dict[str, Any]:
    """Return the options of names, casts and files of the Hub as arguments, which exports and conversions share."""
    names = (
        "overwrite",
        "mapping",
        "strict",
        "cut_vocabulary",
        "keep",
        "prefix",
        "leave_out",
        "assets",
        "max_shard_size",
        "skip_damaged",
    )
    given = {name: getattr(options, name) for name in names}
    return {**given, "dtype": _read_dtypes(options.dtype or ()), "rename": read_renames(options)}


def _read_dtypes(texts: Sequence[str]) -> dict[str, str] | None:
    """Return the dtypes by patterns of names, "*" for the others."""
    from shardckpt.huggingface.dtypes import parse_dtype

    found: dict[str, str] = {}
    for text in texts:
        pattern, _, dtype = text.rpartition("=")
        set_once(found, pattern or "*", dtype, "--dtype", parse_dtype)
    return found or None


def read_target_options(options: Any) -> dict[str, Any]:
    """Return the options of :func:`add_target_options` as arguments of ``shardckpt.maintenance.convert_checkpoint``."""
    from shardckpt.storage.memory_budget import parse_size

    memory = parse_size(options.memory, "--memory")
    return {"to": options.to, "memory_budget": memory, **read_hub_options(options)}


def run(options: Any) -> Output:
    """Convert, and return the report."""
    from shardckpt.engine.display import show_progress
    from shardckpt.maintenance.convert import convert_checkpoint

    with show_progress("convert", part="verify"):
        report = convert_checkpoint(options.source, options.target, **read_target_options(options))
    return Output(
        lambda: report,
        lambda: describe_conversion(report, options.target, verbose=options.verbose),
        FOUND if report.damaged else FINE,
    )


def parse_target(text: str) -> str | tuple[str, int]:
    """Parse ``backend`` or ``backend@version``; raise ValueError for anything else."""
    from shardckpt.plugins.registry import parse_key

    try:
        backend, version = parse_key(text)
    except CheckpointingException as exc:
        raise ValueError from exc
    return backend if version is None else (backend, version)


# argparse names the function in its error
parse_target.__name__ = "BACKEND[@VERSION], hf, dcp or torch"


def _describe_left_out(report: ConversionReport) -> list[str]:
    """Return the lines about items that were not written.

    Objects for readers of other libraries are counted, not named: ``optimizer.param_groups.0.lr`` would read as if the
    learning rate were lost. The conversion's warning has their names.
    """
    from shardckpt.manifest.names import CONTENT

    lost = report.left_out[: len(report.left_out) - report.plain_objects]
    lines = [f"not written: {listed(lost, limit=_NAMES_SHOWN)}"] if lost else []
    if CONTENT in lost:
        is_file = report.old[0] == "torch_save"
        what = "the nesting of the state dict" if is_file else "the step and the metrics of a manager"
        lines.append(f"{CONTENT} has {what}")
    if report.plain_objects:
        lines.append(f"not written: {format_many(report.plain_objects, 'object')} for readers of other libraries alone")
    return lines


def describe_damaged(names: Sequence[str]) -> list[str]:
    """Return the line about damaged items that were not written."""
    many = format_many(len(names), "name")
    return [f"damaged, and left out: {many}: {listed(names, limit=_NAMES_SHOWN)}"] if names else []


def describe_conversion(report: ConversionReport, target: str, how: str = "", *, verbose: bool) -> list[str]:
    """Return the lines about the output, and about the items that are not in it.

    ``target`` is the caller's name for the place of the output, ``how`` the action if it was no plain conversion.
    ``verbose`` makes the proof a line for each tensor, too.
    """
    lines = _make_proof(report) if verbose else []
    if report.resumed:
        lines.append(f"went on with {report.resumed:,} bytes that a killed run had written")
    lines += _describe_left_out(report)
    lines += describe_damaged(report.damaged)
    if report.assets:
        lines.append(f"copied: {listed(report.assets, limit=_NAMES_SHOWN)}")
    if report.rewritten:
        places = [f"{place} ({kind})" for place, kind in report.rewritten.items()]
        lines.append(f"written as builtin types: {listed(places)}")
    old, new = (f"{backend} version {version}" for backend, version in (report.old, report.new))
    tensors, objects = format_many(report.tensors, "tensor"), format_many(report.objects, "object")
    written = f"{new}, {how or f'written from {old}'}: {tensors} of {report.nbytes:,} bytes, {objects}"
    lines.append(f"{target}: {written}; read again, all fingerprints are equal")
    if target.endswith(_FILE_SUFFIXES) and report.new[0] != "torch_save":
        lines.append(f"{target} is a directory, whatever its name: --to torch writes a file, which torch.load reads")
    return lines


def _make_proof(report: ConversionReport) -> list[str]:
    rows = []
    digits = _DIGITS if sys.stdout.isatty() else None
    for key, names, shape, dtype, written, before, after in report.proof:
        renamed = key if names == (key,) else f"{key} -> {listed(list(names))}"
        cast = dtype if dtype == written else f"{dtype} -> {written}"
        rows.append((renamed, cast, list(shape), before[:digits], after[:digits]))
    return fit_table(("tensor", "dtype", "shape", "fingerprint before", "fingerprint after"), rows)
